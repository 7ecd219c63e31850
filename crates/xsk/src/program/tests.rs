//! Tests of the program in the kernel: over single frames, and on interfaces. All of them need
//! root.

#![allow(clippy::unwrap_used)]

use super::filter::program;
use super::*;
use crate::netlink::Attached;
use crate::testing::{command, in_namespace, ip, with_capabilities};
use etherparse::PacketBuilder;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use rustix::thread::CapabilitySet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

fn socket() -> OwnedFd {
    socket_with(AddressFamily::XDP, SocketType::RAW, SocketFlags::CLOEXEC, None).unwrap()
}

/// A program that is not attached, with a socket for the queue of test runs.
struct Loaded {
    program: OwnedFd,
    _map: OwnedFd,
    _socket: OwnedFd,
}

impl Loaded {
    fn new(filter: &Filter) -> Self {
        let (map, socket) = (bpf::create_xskmap(1).unwrap(), socket());
        bpf::update(map.as_fd(), 0, socket.as_raw_fd() as u32).unwrap();
        Self { program: load(filter, map.as_fd(), true).unwrap(), _map: map, _socket: socket }
    }

    fn redirects(&self, frame: &[u8]) -> bool {
        match bpf::test_run(self.program.as_fd(), frame).unwrap() {
            4 => true,
            verdict => {
                assert_eq!(verdict, 2, "neither redirected nor passed");
                false
            }
        }
    }
}

/// A second implementation of the filter, by its documentation. It works on slices, where a read
/// beyond the end is `None`.
fn expected(rules: &[Rule], frame: &[u8]) -> bool {
    let half = |at: usize| Some(u16::from_be_bytes(frame.get(at..at + 2)?.try_into().ok()?));
    let inner = || {
        let (mut kind, mut at) = (half(12)?, 14);
        for _ in 0..2 {
            if kind == 0x8100 || kind == 0x88a8 {
                (kind, at) = (half(at + 2)?, at + 4);
            }
        }
        Some((kind, at))
    };
    let ported = |protocol| [6, 17, 33, 132, 136].contains(&protocol);
    let parse = || -> Option<(Option<u8>, Option<u16>, IpAddr, bool)> {
        let (kind, at) = inner()?;
        let header = &frame[at..];
        match kind {
            0x0800 => {
                let header: &[u8; 20] = header.first_chunk()?;
                let length = usize::from(header[0] & 15) * 4;
                if header[0] >> 4 != 4 || length < 20 {
                    return None;
                }
                let fragment = u16::from_be_bytes([header[6], header[7]]) & 0x3fff != 0;
                let port = if !fragment && ported(header[9]) { half(at + length + 2) } else { None };
                let address: [u8; 4] = header[16..].try_into().unwrap();
                Some((Some(header[9]), port, address.into(), false))
            }
            0x86dd => {
                let header: &[u8; 40] = header.first_chunk()?;
                if header[0] >> 4 != 6 {
                    return None;
                }
                let port = if ported(header[6]) { half(at + 42) } else { None };
                let address: [u8; 16] = header[24..].try_into().unwrap();
                Some((Some(header[6]), port, address.into(), false))
            }
            0x0806 => {
                let body: &[u8; 28] = header.first_chunk()?;
                let address: [u8; 4] = body[24..].try_into().unwrap();
                (body[..6] == [0, 1, 8, 0, 6, 4]).then_some((None, None, address.into(), true))
            }
            _ => None,
        }
    };
    if rules.is_empty() || rules.contains(&Rule::default()) {
        return true;
    }
    let Some((protocol, port, address, arp)) = parse() else { return false };
    rules.iter().any(|rule| {
        let host = rule.address.is_some() && rule.protocol.is_none() && rule.port.is_none();
        if arp {
            return host && rule.address == Some(address);
        }
        let asked_for = |own: IpAddr| match (own, address) {
            (IpAddr::V6(own), IpAddr::V6(to)) => {
                let mut group = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00, 0).octets();
                group[13..].copy_from_slice(&own.octets()[13..]);
                host && protocol == Some(58) && to.octets() == group
            }
            _ => false,
        };
        rule.protocol.is_none_or(|wanted| protocol == Some(wanted))
            && rule.port.is_none_or(|wanted| port == Some(wanted))
            && rule.address.is_none_or(|own| own == address || asked_for(own))
    })
}

const HOSTS: [[u8; 4]; 3] = [[10, 0, 0, 1], [10, 0, 0, 2], [255, 255, 255, 255]];
const PORTS: [u16; 3] = [7, 80, 0xffff];
const PROTOCOLS: [u8; 4] = [6, 17, 58, 200];

fn address(rng: &mut fastrand::Rng) -> IpAddr {
    let host = HOSTS[rng.usize(..3)];
    if rng.bool() {
        return host.into();
    }
    let mut address = if rng.bool() { [0xfd; 16] } else { Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00, 0).octets() };
    address[13..].copy_from_slice(&host[1..]);
    address.into()
}

fn rule(rng: &mut fastrand::Rng) -> Rule {
    Rule {
        protocol: rng.bool().then(|| PROTOCOLS[rng.usize(..4)]),
        port: rng.bool().then(|| PORTS[rng.usize(..3)]),
        address: rng.bool().then(|| address(rng)),
    }
}

/// A random frame that is mostly valid. It has few addresses and ports, so that rules match.
fn frame(rng: &mut fastrand::Rng) -> Vec<u8> {
    let mut frame = vec![0; 12];
    for _ in 0..[0, 0, 0, 1, 2, 3][rng.usize(..6)] {
        frame.extend([[0x81, 0x00], [0x88, 0xa8]][rng.usize(..2)]);
        frame.extend([0, 5]);
    }
    let transport = |rng: &mut fastrand::Rng, frame: &mut Vec<u8>| {
        frame.extend([0x12, 0x34]);
        frame.extend(PORTS[rng.usize(..3)].to_be_bytes());
        frame.extend(std::iter::repeat_n(0, rng.usize(..40)));
    };
    match (rng.u8(..8), address(rng)) {
        (0, _) => {
            frame.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
            frame.extend([0; 16]);
            frame.extend(HOSTS[rng.usize(..3)]);
        }
        (1, _) => frame.extend((0..rng.usize(2..60)).map(|_| rng.u8(..))),
        (_, IpAddr::V4(to)) => {
            let options = [0, 0, 4, 40][rng.usize(..4)];
            let fragment: u16 = [0, 0, 0, 0x4000, 0x2000, 1, 0x8000][rng.usize(..7)];
            frame.extend([8, 0, 0x45 + options as u8 / 4, 0, 0, 40, 0, 0]);
            frame.extend(fragment.to_be_bytes());
            frame.extend([64, PROTOCOLS[rng.usize(..4)], 0, 0, 1, 2, 3, 4]);
            frame.extend(to.octets());
            frame.extend(std::iter::repeat_n(1, options));
            transport(rng, &mut frame);
        }
        (_, IpAddr::V6(to)) => {
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 40, PROTOCOLS[rng.usize(..4)], 64]);
            frame.extend([9; 16]);
            frame.extend(to.octets());
            transport(rng, &mut frame);
        }
    }
    if rng.u8(..4) == 0 {
        let at = rng.usize(12..frame.len());
        frame[at] ^= 1 << rng.u8(..8);
    }
    if rng.u8(..4) == 0 {
        frame.truncate(rng.usize(14..=frame.len().max(14)));
    }
    // The kernel runs programs only over frames with a whole Ethernet header.
    frame.resize(frame.len().max(14), 0);
    frame
}

/// Proves XSK-3 for filters: over random frames and rules, the program in the kernel decides as
/// documented.
#[test]
fn the_program_decides_as_documented() {
    in_namespace(|| {
        let mut rng = fastrand::Rng::with_seed(16);
        let (mut taken, mut left) = (0, 0);
        for _ in 0..100 {
            let rules: Vec<_> = (0..rng.usize(..5)).map(|_| rule(&mut rng)).collect();
            let loaded = Loaded::new(&Filter::new(rules.clone()).unwrap());
            for _ in 0..200 {
                let frame = frame(&mut rng);
                let verdict = loaded.redirects(&frame);
                assert_eq!(verdict, expected(&rules, &frame), "{rules:?} of {frame:02x?}");
                *if verdict { &mut taken } else { &mut left } += 1;
            }
        }
        assert!(taken > 2000 && left > 2000, "{taken} {left}");
    });
}

/// Frames of all kinds, truncated after each byte.
#[test]
fn frames_that_are_cut_off_go_to_the_kernel() {
    in_namespace(|| {
        let v4 = |protocol| Rule {
            protocol: Some(protocol),
            port: Some(7),
            address: Some(Ipv4Addr::new(10, 0, 0, 1).into()),
        };
        let v6 = Rule { protocol: Some(6), port: Some(7), address: Some(Ipv6Addr::LOCALHOST.into()) };
        let host = Rule { address: Some(Ipv4Addr::new(10, 0, 0, 9).into()), ..Rule::default() };
        let rules = [v4(17), v6, host];
        let loaded = Loaded::new(&Filter::new(rules).unwrap());
        let ethernet = || PacketBuilder::ethernet2([2; 6], [4; 6]);
        let (mut udp, mut tcp) = (Vec::new(), Vec::new());
        ethernet()
            .double_vlan(1.try_into().unwrap(), 2.try_into().unwrap())
            .ipv4([10, 0, 0, 2], [10, 0, 0, 1], 9)
            .udp(5, 7)
            .write(&mut udp, b"1")
            .unwrap();
        let mut to = [0; 16];
        to[15] = 1;
        ethernet().ipv6(to, to, 9).tcp(5, 7, 0, 0).write(&mut tcp, b"payload").unwrap();
        let mut arp = [&[0; 12][..], &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1], &[0; 16], &[10, 0, 0, 9]].concat();
        arp.extend([0; 18]);
        for (frame, least) in [(udp, 14 + 8 + 20 + 4), (tcp, 14 + 40 + 4), (arp, 14 + 28)] {
            for len in 14..=frame.len() {
                assert_eq!(loaded.redirects(&frame[..len]), len >= least, "{len} bytes of {frame:02x?}");
                assert_eq!(expected(&rules, &frame[..len]), len >= least);
            }
        }
    });
}

/// The largest filter is accepted by the verifier, and its last rule works.
#[test]
fn a_filter_has_up_to_64_rules() {
    in_namespace(|| {
        let rule = |n: u16| Rule {
            protocol: Some(6),
            port: Some(n),
            address: Some(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, n).into()),
        };
        let host = Rule { address: Some(Ipv6Addr::LOCALHOST.into()), ..Rule::default() };
        let rules = (1..64).map(rule).chain([host]);
        let loaded = Loaded::new(&Filter::new(rules).unwrap());
        let mut frame = Vec::new();
        PacketBuilder::ethernet2([2; 6], [4; 6])
            .ipv6([7; 16], Ipv6Addr::LOCALHOST.octets(), 9)
            .udp(5, 6)
            .write(&mut frame, &[])
            .unwrap();
        assert!(loaded.redirects(&frame));
        frame[53] ^= 1;
        assert!(!loaded.redirects(&frame));
    });
    assert_eq!(Filter::new([Rule::default(); 65]), Err(TooManyRules { asked: 65 }));
}

#[test]
fn without_a_filter_all_frames_are_redirected() {
    in_namespace(|| {
        for filter in
            [Filter::default(), Filter::new([Rule { port: Some(1), ..Rule::default() }, Rule::default()]).unwrap()]
        {
            let loaded = Loaded::new(&filter);
            assert!(loaded.redirects(&[0; 14]) && loaded.redirects(&[0xff; 9000]));
            // A queue without a socket: the kernel gets the frame.
            let map = bpf::create_xskmap(1).unwrap();
            let empty = load(&filter, map.as_fd(), true).unwrap();
            assert_eq!(bpf::test_run(empty.as_fd(), &[0; 64]).unwrap(), 2);
        }
    });
}

/// A program that reads beyond the bytes that it has checked does not run. The error has the
/// verifier's log.
#[test]
fn the_verifiers_log_is_in_the_error() {
    in_namespace(|| {
        let map = bpf::create_xskmap(1).unwrap();
        let rule = Rule { port: Some(7), ..Rule::default() };
        let mut code = program(&Filter::new([rule]).unwrap(), map.as_raw_fd(), None).unwrap();
        // The first check is for 14 bytes of the frame.
        let check = code.iter_mut().find(|word| **word as u8 == 0x07 && **word >> 32 == 14).unwrap();
        *check = *check & 0xffff_ffff | 13 << 32;
        let bpf::NotLoaded { source, log } = bpf::load(&code, true, None).unwrap_err();
        assert_eq!(source.raw_os_error(), Some(libc::EACCES));
        assert!(log.contains("invalid access to packet"), "{log}");
    });
}

fn programs(interface: &str) -> Vec<Attached> {
    Interface::by_name(interface).unwrap().programs
}

fn index(interface: &str) -> u32 {
    Interface::by_name(interface).unwrap().index
}

/// The program is attached in either mode, replaced, and detached when it is dropped.
#[test]
fn a_program_comes_and_goes() {
    in_namespace(|| {
        ip("link add v0 type veth peer name v1");
        for (asked, mode) in [
            (None, AttachMode::Driver),
            (Some(AttachMode::Driver), AttachMode::Driver),
            (Some(AttachMode::Generic), AttachMode::Generic),
        ] {
            let program =
                Program::attach(index("v0"), &ProgramOptions { mode: asked, ..ProgramOptions::default() }).unwrap();
            assert_eq!((program.mode(), program.attached_to()), (Some(mode), Some(index("v0"))));
            let before = programs("v0");
            assert_eq!(before.iter().map(|attached| attached.mode).collect::<Vec<_>>(), [mode]);
            program.set_filter(&Filter::new([Rule { port: Some(7), ..Rule::default() }]).unwrap()).unwrap();
            let after = programs("v0");
            assert!(after.len() == 1 && after[0].mode == mode && after[0].program != before[0].program);
            let socket = socket();
            program.insert(0, socket.as_fd()).unwrap();
            program.remove(0).unwrap();
            program.remove(0).unwrap();
            let entries = program.queues();
            assert!(matches!(program.insert(entries, socket.as_fd()), Err(AttachError::Queue { .. })));
            let pipe = std::io::pipe().unwrap();
            assert!(matches!(program.insert(0, pipe.0.as_fd()), Err(AttachError::System { .. })));
            drop(program);
            assert_eq!(programs("v0"), []);
        }
        assert_eq!(programs("v1"), []);
    });
}

/// Not every driver has driver mode: the loopback gets generic mode, unless driver mode was
/// requested.
#[test]
fn generic_mode_is_for_drivers_without() {
    in_namespace(|| {
        let program = Program::attach(index("lo"), &ProgramOptions::default()).unwrap();
        assert_eq!(program.mode(), Some(AttachMode::Generic));
        drop(program);
        let driver = ProgramOptions { mode: Some(AttachMode::Driver), ..ProgramOptions::default() };
        let error = Program::attach(index("lo"), &driver).unwrap_err();
        assert!(matches!(error, AttachError::Refused { mode: AttachMode::Driver, .. }), "{error}");
        let hardware = ProgramOptions { mode: Some(AttachMode::Hardware), ..ProgramOptions::default() };
        assert!(matches!(Program::attach(index("lo"), &hardware), Err(AttachError::Mode(_))));
        assert!(matches!(Program::attach(9999, &driver), Err(AttachError::NoInterface(_))));
    });
}

/// Because programs accept frames of several buffers, a large MTU is possible in driver mode.
#[test]
fn a_large_mtu_needs_frags() {
    in_namespace(|| {
        ip("link add v0 type veth peer name v1");
        ip("link set v0 mtu 9000");
        ip("link set v1 mtu 9000");
        let driver = ProgramOptions { mode: Some(AttachMode::Driver), ..ProgramOptions::default() };
        drop(Program::attach(index("v0"), &driver).unwrap());
        let error = Program::attach(index("v0"), &ProgramOptions { frags: false, ..driver }).unwrap_err();
        assert!(matches!(error, AttachError::Refused { mtu: 9000, .. }), "{error}");
        assert_eq!(programs("v0"), []);
    });
}

/// A program of another process is named in the error and left as it is, whether or not it has a
/// link, in all modes.
#[test]
fn another_program_is_left_alone() {
    in_namespace(|| {
        ip("link add v0 type veth peer name v1");
        let in_mode = |mode| ProgramOptions { mode: Some(mode), ..ProgramOptions::default() };
        let modes = [AttachMode::Driver, AttachMode::Generic];
        for (theirs, ours) in modes.into_iter().flat_map(|theirs| modes.map(|ours| (theirs, ours))) {
            let other = Program::attach(index("v0"), &in_mode(theirs)).unwrap();
            let before = programs("v0");
            let error = Program::attach(index("v0"), &in_mode(ours)).unwrap_err();
            let AttachError::Occupied { attached, name, interface } = &error else { panic!("{error}") };
            assert_eq!((&[*attached][..], name.as_deref(), &**interface), (&before[..], Some("netmem_xsk"), "v0"));
            assert!(error.to_string().contains(&format!("number {}, named netmem_xsk, in {theirs}", attached.program)));
            assert_eq!(programs("v0"), before);
            drop(other);
        }
    });
}

/// If the interface is deleted, the program notices it, and dropping the program is no error. If an
/// interface is moved to another namespace, the program stays on it, and is detached when it is
/// dropped.
#[test]
fn an_interface_goes_away() {
    in_namespace(|| {
        ip("link add v0 type veth peer name v1");
        ip("link add v2 type veth peer name v3");
        let deleted = Program::attach(index("v0"), &ProgramOptions::default()).unwrap();
        let moved = Program::attach(index("v2"), &ProgramOptions::default()).unwrap();
        ip("link del v0");
        assert_eq!(deleted.attached_to(), None);
        ip("link add v0 type veth peer name v1");
        drop(deleted);

        let (to_there, from_here) = std::sync::mpsc::channel();
        let (to_here, from_there) = std::sync::mpsc::channel();
        let there = std::thread::spawn(move || {
            in_namespace(move || {
                to_here.send(rustix::thread::gettid()).unwrap();
                while let Ok(expected) = from_here.recv() {
                    assert_eq!(programs("v2").len(), expected);
                    to_here.send(rustix::thread::gettid()).unwrap();
                }
            });
        });
        let thread = from_there.recv().unwrap();
        ip(&format!("link set v2 netns {thread}"));
        assert!(moved.attached_to().is_some());
        to_there.send(1).unwrap();
        from_there.recv().unwrap();
        drop(moved);
        to_there.send(0).unwrap();
        from_there.recv().unwrap();
        drop(to_there);
        there.join().unwrap();
    });
}

/// The user's own program and map, which are pinned. Either this crate or the user attaches the
/// program.
#[test]
fn pinned_programs_are_used() {
    in_namespace(|| {
        ip("link add v0 type veth peer name v1");
        let place = tempfile::tempdir().unwrap();
        let dir = place.path().to_owned();
        command(&format!("mount -t bpf bpf {}", dir.display()));
        let map = bpf::create_xskmap(4).unwrap();
        let own = load(&Filter::default(), map.as_fd(), true).unwrap();
        let (program_path, map_path) = (dir.join("program"), dir.join("map"));
        bpf::pin(own.as_fd(), &program_path).unwrap();
        bpf::pin(map.as_fd(), &map_path).unwrap();

        let program = Program::attach_pinned(index("v0"), None, &program_path, &map_path).unwrap();
        let id = bpf::program_id(own.as_fd()).unwrap();
        assert_eq!(programs("v0"), [Attached { program: id, mode: AttachMode::Driver }]);
        assert_eq!(program.queues(), 4);
        program.insert(3, socket().as_fd()).unwrap();
        drop(program);
        assert_eq!(programs("v0"), []);

        let shared = Program::pinned_map(&map_path).unwrap();
        assert_eq!((shared.mode(), shared.attached_to(), shared.queues()), (None, None, 4));
        shared.insert(0, socket().as_fd()).unwrap();
        assert!(shared.set_filter(&Filter::default()).is_err());

        for wrong in [program_path, dir.join("nothing"), "/etc/hostname".into()] {
            assert!(matches!(Program::pinned_map(&wrong), Err(AttachError::Pinned { .. })), "{}", wrong.display());
        }
        command(&format!("umount {}", dir.display()));
    });
}

/// Two values have the same map of the kernel's. The second puts a socket into the place of one
/// that the first has put there. When the first socket's receive queue ends, the second stays.
#[test]
fn a_socket_stays_that_another_value_has_put_into_the_map() {
    in_namespace(|| {
        let map = bpf::create_xskmap(1).unwrap();
        let program = load(&Filter::default(), map.as_fd(), true).unwrap();
        let redirects = || bpf::test_run(program.as_fd(), &[0; 64]).unwrap() == 4;
        let [first, second] = [socket(), socket()];
        let value = |own: bool| {
            let (fd, id) = (map.try_clone().unwrap(), look_at(map.as_fd()).unwrap().0);
            let map = if own { SocketMap::own(fd, id) } else { SocketMap::foreign(fd, id) };
            Program { link: None, map, entries: 1, mode: None, frags: false, metadata: None }
        };
        for own in [false, true] {
            let (one, other) = (value(own), value(own));
            one.insert(0, first.as_fd()).unwrap();
            other.insert(0, second.as_fd()).unwrap();
            leave(first.as_fd(), false);
            assert!(redirects(), "own: {own}");
            // The socket that was put there last leaves, by whichever value it came.
            one.insert(0, first.as_fd()).unwrap();
            leave(second.as_fd(), false);
            assert!(redirects(), "own: {own}");
            leave(first.as_fd(), false);
            assert!(!redirects(), "own: {own}");
            // What one value removes is not removed again for the other.
            one.insert(0, first.as_fd()).unwrap();
            other.remove(0).unwrap();
            assert!(!redirects(), "own: {own}");
            bpf::update(map.as_fd(), 0, second.as_raw_fd() as u32).unwrap();
            leave(first.as_fd(), false);
            assert!(redirects(), "own: {own}");
            other.remove(0).unwrap();
        }
        // The map is the user's for one of the values. The other, which puts a socket there last,
        // is dropped before that socket leaves.
        let (foreign, own) = (value(false), value(true));
        foreign.insert(0, first.as_fd()).unwrap();
        own.insert(0, second.as_fd()).unwrap();
        drop(own);
        leave(second.as_fd(), false);
        assert!(!redirects());
    });
}

/// The capabilities that a program needs, checked with the kernel: sets that are documented as
/// sufficient are sufficient, and capabilities that are reported as missing are needed.
#[test]
fn a_program_needs_these_capabilities() {
    in_namespace(|| {
        ip("link add v0 type veth peer name v1");
        let (raw, admin, bpf) = (CapabilitySet::NET_RAW, CapabilitySet::NET_ADMIN, CapabilitySet::BPF);
        for (capabilities, missing) in [
            (admin | bpf, None),
            (CapabilitySet::SYS_ADMIN, None),
            (admin, Some("CAP_BPF,")),
            (bpf | raw, Some("CAP_NET_ADMIN,")),
            (raw, Some("CAP_BPF and CAP_NET_ADMIN,")),
        ] {
            check(capabilities, &Filter::default(), missing);
        }
        // A filter adds the length of a header to an address. The verifier allows this only with
        // one more capability.
        let host = Rule { address: Some(Ipv4Addr::LOCALHOST.into()), ..Rule::default() };
        let port = Rule { protocol: Some(17), port: Some(7), ..Rule::default() };
        for rule in [host, port] {
            let filter = Filter::new([rule]).unwrap();
            check(admin | bpf, &filter, Some("CAP_PERFMON,"));
            check(admin | bpf | CapabilitySet::PERFMON, &filter, None);
            check(CapabilitySet::SYS_ADMIN, &filter, None);
        }
    });
}

#[track_caller]
fn check(capabilities: CapabilitySet, filter: &Filter, missing: Option<&str>) {
    let attach =
        || Program::attach(index("v0"), &ProgramOptions { filter: filter.clone(), ..ProgramOptions::default() });
    with_capabilities(capabilities, || match (attach(), missing) {
        (Ok(_), None) => {}
        (Err(AttachError::Privilege(e)), Some(missing)) => {
            assert!(e.to_string().contains(&format!("needs {missing}")), "{e}");
            let refused = |e: io::Error| matches!(e.raw_os_error(), Some(libc::EPERM | libc::EACCES));
            let asked = bpf::create_xskmap(1).map(|map| load(filter, map.as_fd(), true));
            match asked {
                Err(e) => assert!(refused(e)),
                Ok(Err(AttachError::System { source, .. } | AttachError::Rejected { source, .. })) => {
                    assert!(refused(source));
                }
                Ok(other) => panic!("{capabilities:?}: {other:?}"),
            }
        }
        (other, _) => panic!("{capabilities:?}: {other:?}"),
    });
}
