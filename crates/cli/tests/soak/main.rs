//! Hostile peers, as programs, beside well-behaved ones. This program is all of them: the soak
//! starts itself again, as the peer that [`PEER`] names.
//!
//! A device is attacked by every hostile front end in turn, and serves a well-behaved one after
//! each. Another device has a front end whose traffic must not stop meanwhile. What the attacked
//! device holds must stay flat: descriptors, threads, memory. Drivers are attacked by every hostile
//! back end, and must end with an error.
//!
//! Seconds by default; `NETMEM_SOAK_SECS` sets how long, and `--nocapture` shows what was measured.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../all/command/mod.rs"]
mod command;

use command::*;
use fastrand::Rng;
use netmem_testing::vhost_user::back::{Message, Peer};
use netmem_testing::vhost_user::front;
use netmem_testing::vhost_user::front::{Addresses, EventFd, Front, Region};
use rustix::fs::{MemfdFlags, OFlags, fcntl_getfl, fcntl_setfl, ftruncate, memfd_create};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Which hostile peer this process is, and the socket that it works on: `NAME:SEED:PATH`.
const PEER: &str = "NETMEM_HOSTILE_PEER";

const GUEST: u64 = 0x1_0000_0000;
const USER: u64 = 0x7000_0000_0000;
const MEMORY: u64 = 4 << 20;
const ROOM: u64 = 64 << 10;
const BUFFERS: u64 = 1 << 20;
const SIZE: u16 = 256;
/// VIRTIO_F_VERSION_1 and VHOST_USER_F_PROTOCOL_FEATURES.
const FEATURES: u64 = 1 << 32 | 1 << 30;

/// A front end's memory and its two rings. Nothing is mapped here: what is shared is written
/// through the file.
struct Rings {
    memory: File,
    events: Vec<EventFd>,
}

impl Rings {
    fn set_up(front: &Front) -> std::io::Result<Self> {
        let memory = File::from(memfd_create(c"netmem-soak", MemfdFlags::CLOEXEC)?);
        ftruncate(&memory, MEMORY)?;
        let events: Vec<_> = (0..6).map(|_| EventFd::new()).collect();
        front.send(front::request::SET_OWNER, 0, &[], &[])?;
        front.set_features(FEATURES)?;
        let region = Region { guest: GUEST, size: MEMORY, user: USER, offset: 0, file: memory.as_fd() };
        front.set_mem_table(&[region])?;
        let rings = Self { memory, events };
        for ring in 0..2 {
            let at = USER + ring as u64 * ROOM;
            front.set_vring_num(ring, SIZE)?;
            front.set_vring_base(ring, 0)?;
            front.set_vring_addr(ring, Addresses { desc: at, avail: at + 4096, used: at + 8192, log: None })?;
            front.set_vring_call(ring, &rings.events[ring])?;
            front.set_vring_err(ring, &rings.events[2 + ring])?;
            front.set_vring_kick(ring, &rings.events[4 + ring])?;
            front.set_vring_enable(ring, true)?;
        }
        Ok(rings)
    }

    fn write(&self, at: u64, bytes: &[u8]) {
        self.memory.write_all_at(bytes, at).unwrap();
    }

    /// Posts `count` receive buffers from number `from` on.
    fn post(&self, from: u16, count: u16) {
        for n in from..from.wrapping_add(count) {
            let id = n % SIZE;
            let mut descriptor = (GUEST + BUFFERS + u64::from(id) * 2048).to_le_bytes().to_vec();
            descriptor.extend(2048u32.to_le_bytes());
            descriptor.extend([2u16, 0].map(u16::to_le_bytes).concat());
            self.write(u64::from(id) * 16, &descriptor);
            self.write(4096 + 4 + u64::from(id) * 2, &id.to_le_bytes());
        }
        self.write(4096 + 2, &from.wrapping_add(count).to_le_bytes());
        let _ = self.events[4].write(1);
    }

    /// The device's index of used buffers.
    fn used(&self, ring: u64) -> u16 {
        let mut index = [0; 2];
        self.memory.read_exact_at(&mut index, ring * ROOM + 8192 + 2).unwrap();
        u16::from_le_bytes(index)
    }

    /// Anything in the rings, mostly plausible enough to get somewhere.
    fn lie(&self, rng: &mut Rng) {
        let ring = rng.u64(..2);
        let base = ring * ROOM;
        for _ in 0..16 {
            let addr = if rng.u8(..8) == 0 { rng.u64(..) } else { GUEST + BUFFERS + rng.u64(..1 << 20) };
            let len = if rng.u8(..10) == 0 { rng.u32(..) } else { rng.u32(..3000) };
            let mut descriptor = addr.to_le_bytes().to_vec();
            descriptor.extend(len.to_le_bytes());
            let flags = if rng.u8(..20) == 0 { rng.u16(..8) } else { 2 * (1 - ring as u16) + rng.u16(..2) };
            let next = if rng.u8(..20) == 0 { rng.u16(..) } else { rng.u16(..SIZE) };
            descriptor.extend([flags, next].map(u16::to_le_bytes).concat());
            self.write(base + rng.u64(..256) * 16, &descriptor);
            let head = if rng.u8(..50) == 0 { rng.u16(..) } else { rng.u16(..SIZE) };
            self.write(base + 4096 + 4 + rng.u64(..256) * 2, &head.to_le_bytes());
        }
        let index = if rng.u8(..20) == 0 { rng.u16(..) } else { self.used(ring).wrapping_add(rng.u16(..16)) };
        self.write(base + 4096 + 2, &index.to_le_bytes());
        self.events[4..].iter().for_each(|kick| drop(kick.write(1)));
    }
}

/// A hostile front end: what it does. Some go on until they are killed.
type FrontEnd = fn(&Path, &mut Rng) -> std::io::Result<()>;

const FRONT_ENDS: [(&str, FrontEnd); 11] = [
    ("flood", |path, _| (0..500).try_for_each(|_| UnixStream::connect(path).map(drop))),
    ("backlog", |path, rng| {
        let address = SocketAddrUnix::new(path)?;
        let mut held = Vec::new();
        for _ in 0..800 {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
            if rustix::net::connect(&socket, &address).is_ok() {
                held.push(socket);
            }
        }
        rng.shuffle(&mut held);
        Ok(())
    }),
    ("half", |path, rng| {
        for len in 1..40 {
            let message = front::message(front::request::SET_MEM_TABLE, 1, 40, &[rng.u8(..); 40]);
            let _ = UnixStream::connect(path)?.write_all(&message[..len]);
        }
        Ok(())
    }),
    ("dribble", |path, _| {
        let mut stream = UnixStream::connect(path)?;
        let message = front::message(front::request::SET_MEM_TABLE, 1, 40, &[0; 40]);
        for byte in message {
            stream.write_all(&[byte])?;
            std::thread::sleep(Duration::from_millis(100));
        }
        stream.read(&mut [0]).map(drop)
    }),
    ("deaf", |path, _| {
        let mut stream = UnixStream::connect(path)?;
        loop {
            stream.write_all(&front::message(front::request::GET_FEATURES, 1, 0, &[]))?;
        }
    }),
    ("surplus", |path, _| {
        let fd = memfd_create(c"surplus", MemfdFlags::CLOEXEC)?;
        for count in [1, 8, 32, 33, 40] {
            let fds: Vec<BorrowedFd<'_>> = (0..count).map(|_| fd.as_fd()).collect();
            for request in 0..45 {
                let front = Front::new(UnixStream::connect(path)?);
                let _ = front.send(request, 0, &[0; 8], &fds);
                let _ = front.sync();
            }
        }
        Ok(())
    }),
    ("eventfds", |path, _| {
        let front = Front::new(UnixStream::connect(path)?);
        let rings = Rings::set_up(&front)?;
        rings.post(0, SIZE);
        loop {
            for event in &rings.events {
                set_blocking(event, false);
                let _ = event.read();
                let _ = event.write(u64::MAX - 1);
                set_blocking(event, true);
            }
            front.set_vring_call(0, &rings.events[0])?;
            rings.post(rings.used(0), SIZE);
        }
    }),
    ("truncate", |path, rng| {
        loop {
            let front = Front::new(UnixStream::connect(path)?);
            let rings = Rings::set_up(&front)?;
            rings.post(0, SIZE);
            std::thread::sleep(Duration::from_millis(rng.u64(..5)));
            ftruncate(&rings.memory, rng.u64(..MEMORY))?;
            let _ = rings.events[4].write(1);
            let _ = front.sync();
        }
    }),
    ("lies", |path, rng| {
        loop {
            let front = Front::new(UnixStream::connect(path)?);
            let rings = Rings::set_up(&front)?;
            (0..40).for_each(|_| rings.lie(rng));
        }
    }),
    ("noise", |path, rng| {
        loop {
            let mut stream = UnixStream::connect(path)?;
            let size = rng.u32(..64);
            let body: Vec<u8> = (0..size).map(|_| rng.u8(..)).collect();
            for _ in 0..rng.u8(1..5) {
                let _ = stream.write_all(&front::message(rng.u32(..48), rng.u32(..16), size, &body));
            }
        }
    }),
    ("storm", |path, rng| {
        loop {
            let front = Front::new(UnixStream::connect(path)?);
            let rings = Rings::set_up(&front)?;
            rings.post(0, rng.u16(1..SIZE));
            if rng.bool() {
                front.sync()?;
            }
        }
    }),
];

fn set_blocking(fd: &impl AsFd, blocking: bool) {
    let flags = fcntl_getfl(fd).unwrap();
    fcntl_setfl(fd, if blocking { flags - OFlags::NONBLOCK } else { flags | OFlags::NONBLOCK }).unwrap();
}

/// A hostile back end, for one front end that has connected.
type BackEnd = fn(UnixStream, &mut Rng) -> Option<()>;

const BACK_ENDS: [(&str, BackEnd); 8] = [
    ("silent", |mut stream, _| stream.read_to_end(&mut Vec::new()).ok().map(drop)),
    ("leaves", |stream, rng| {
        let (peer, messages) = (Peer::new(stream), rng.u8(..20));
        (0..messages).try_for_each(|_| answer(&peer, &peer.receive()?))
    }),
    ("half", |mut stream, _| {
        stream.read_exact(&mut [0; 12]).ok()?;
        stream.write_all(&front::message(1, 5, 8, &[0; 3])).ok()
    }),
    ("dribble", |mut stream, _| {
        for byte in front::message(1, 5, 8, &[0; 8]).repeat(100) {
            stream.write_all(&[byte]).ok()?;
            std::thread::sleep(Duration::from_millis(200));
        }
        Some(())
    }),
    ("surplus", |stream, _| {
        let front = Front::new(stream);
        let fd = memfd_create(c"surplus", MemfdFlags::CLOEXEC).ok()?;
        front.send_raw(&front::message(1, 5, 8, &FEATURES.to_le_bytes()), &[fd.as_fd(); 40]).ok()?;
        (&front.stream).read_to_end(&mut Vec::new()).ok().map(drop)
    }),
    ("wrong", |mut stream, rng| {
        for _ in 0..100 {
            let size = rng.u32(..64);
            let body: Vec<u8> = (0..size).map(|_| rng.u8(..)).collect();
            stream.write_all(&front::message(rng.u32(..48), rng.u32(..16), size, &body)).ok()?;
        }
        stream.read_to_end(&mut Vec::new()).ok().map(drop)
    }),
    ("lies", |stream, rng| lies(&Peer::new(stream), rng, 2000)),
    ("dies", |stream, rng| {
        lies(&Peer::new(stream), rng, 50)?;
        std::process::abort()
    }),
];

/// Answers as a back end should.
fn answer(peer: &Peer, message: &Message) -> Option<()> {
    match message.number {
        1 => peer.answer(message, &FEATURES.to_le_bytes()),
        11 => peer.answer(message, &message.payload),
        15 | 17 => peer.answer(message, &[0; 8]),
        _ if message.confirm => peer.answer(message, &[0; 8]),
        _ => Some(()),
    }
}

/// Negotiates as it should, and then writes anything into the used rings. Reports so often that
/// frames have come.
fn lies(peer: &Peer, rng: &mut Rng, lies: u32) -> Option<()> {
    let (mut memory, mut used, mut calls) = (Vec::new(), Vec::new(), Vec::<OwnedFd>::new());
    loop {
        let mut message = peer.receive()?;
        answer(peer, &message)?;
        match message.number {
            5 => {
                let files: Vec<File> = message.fds.drain(..).map(File::from).collect();
                let region = |(i, file)| {
                    (message.u64(8 + i * 32 + 8), message.u64(16 + i * 32 + 8), message.u64(24 + i * 32 + 8), file)
                };
                memory = files.into_iter().enumerate().map(region).collect::<Vec<_>>();
            }
            9 => used.push(message.u64(16)),
            12 | 13 => calls.append(&mut message.fds),
            // The last ring is enabled.
            18 if message.u32(0) == 1 => break,
            _ => {}
        }
    }
    for _ in 0..lies {
        // The index, or any entry.
        let at = used[rng.usize(..used.len())] + if rng.bool() { 2 } else { rng.u64(..2 * 256 * 4) / 2 * 2 };
        let place = memory.iter().find(|(size, user, ..)| at.checked_sub(*user).is_some_and(|offset| offset < *size));
        if let Some((_, user, offset, file)) = place {
            let index = at - user + offset;
            let _ = file.write_all_at(&rng.u16(..300).to_le_bytes(), index);
        }
        for call in &calls {
            let _ = rustix::io::write(call, &1u64.to_ne_bytes());
        }
    }
    while let Some(message) = peer.receive() {
        answer(peer, &message)?;
    }
    Some(())
}

/// Not a test: the program that a hostile peer is.
#[test]
#[ignore = "a program of the soak"]
fn hostile_peer() {
    let Ok(peer) = std::env::var(PEER) else { return };
    let [name, seed, path] = peer.splitn(3, ':').collect::<Vec<_>>().try_into().unwrap();
    let (mut rng, path) = (Rng::with_seed(seed.parse().unwrap()), Path::new(path));
    if let Some((_, attack)) = FRONT_ENDS.iter().find(|(known, _)| *known == name) {
        // Hung up on, most likely.
        let _ = attack(path, &mut rng);
        return;
    }
    let listener = UnixListener::bind(path).unwrap();
    if name == "back-full" {
        rustix::net::listen(&listener, 0).unwrap();
        let _queued = UnixStream::connect(path).unwrap();
        std::thread::sleep(Duration::from_secs(600));
    }
    let (_, attack) = BACK_ENDS.iter().find(|(known, _)| name.strip_prefix("back-") == Some(*known)).unwrap();
    while let Ok((stream, _)) = listener.accept() {
        attack(stream, &mut rng);
    }
}

/// Starts this program as a hostile peer.
fn hostile(name: &str, seed: u64, path: &Path) -> Background {
    let mut peer = Command::new(std::env::current_exe().unwrap());
    peer.args(["--exact", "hostile_peer", "--ignored"]);
    peer.env(PEER, format!("{name}:{seed}:{}", path.display()));
    Background(peer.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
}

/// What a process holds.
#[derive(Clone, Copy, Debug)]
struct Holds {
    descriptors: usize,
    threads: usize,
    kib: u64,
}

impl Holds {
    fn of(device: &Device) -> Self {
        // The end of the last front end is noticed, and its rings are gone, when none is connected.
        await_that(|| device.stats()["front_ends"]["connected"] == false);
        let process = Path::new("/proc").join(device.process.0.id().to_string());
        let count = |what| process.join(what).read_dir().unwrap().count();
        let status = std::fs::read_to_string(process.join("status")).unwrap();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        let kib = resident.trim().trim_end_matches(" kB").parse().unwrap();
        Self { descriptors: count("fd"), threads: count("task"), kib }
    }
}

/// Moves frames at a modest pace until `stop` is set, and counts them. A front end that is not hung
/// up on.
fn steady(socket: &Path, stop: &AtomicBool, frames: &AtomicU64) {
    let front = Front::new(UnixStream::connect(socket).unwrap());
    let rings = Rings::set_up(&front).unwrap();
    let mut posted = 0u16;
    while !stop.load(Relaxed) {
        rings.post(posted, 32);
        posted = posted.wrapping_add(32);
        await_that(|| rings.used(0) == posted);
        frames.fetch_add(32, Relaxed);
        std::thread::sleep(Duration::from_millis(5));
    }
    front.sync().unwrap();
}

fn one_frame(dir: &Path) -> String {
    let mut file = 0xa1b2_c3d4u32.to_le_bytes().to_vec();
    file.extend([2u16, 4].map(u16::to_le_bytes).concat());
    file.extend([0u32, 0, 1 << 20, 1, 0, 0, 60, 60].map(u32::to_le_bytes).concat());
    file.extend([0x5a; 60]);
    std::fs::write(dir.join("one.pcap"), file).unwrap();
    format!("pcap:{}", dir.join("one.pcap").display())
}

/// Hostile front ends that end when the device has given up on them, which takes seconds.
const SLOW: [&str; 2] = ["dribble", "deaf"];

/// One hostile front end, then a well-behaved one: how long that one took, from the end of the
/// hostile one. A slow one is killed in the middle unless this is a `patient` round, as are all
/// others that do not end.
fn attack(device: &Device, name: &str, seed: u64, patient: bool) -> Duration {
    let mut peer = hostile(name, seed, &device.socket);
    let most = Duration::from_millis(if patient && SLOW.contains(&name) { 20_000 } else { 250 });
    let begin = Instant::now();
    while peer.0.try_wait().unwrap().is_none() && begin.elapsed() < most {
        std::thread::sleep(Duration::from_millis(5));
    }
    // SIGKILL, wherever it is.
    drop(peer);
    let begin = Instant::now();
    device.serves_perf();
    begin.elapsed()
}

/// Proves NET-10.
#[test]
fn hostile_front_ends_leave_the_device_as_it_was() {
    let soak = std::env::var("NETMEM_SOAK_SECS").ok().map(|secs| Duration::from_secs(secs.parse().unwrap()));
    let dir = tempfile::tempdir().unwrap();
    let (attacked, beside) = (Device::start(&["--port", "gen"]), Device::start(&["--port", &one_frame(dir.path())]));
    let (stop, frames) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|s| {
        let calm = s.spawn(|| steady(&beside.socket, &stop, &frames));
        let ends = Ends(&stop);
        let (begin, mut rounds, mut warm, mut slowest) = (Instant::now(), 0, None, (Duration::ZERO, ""));
        loop {
            // In the last round, peers that make the device wait are waited for.
            let last = rounds > 0 && soak.is_none_or(|soak| begin.elapsed() > soak);
            for (n, (name, _)) in FRONT_ENDS.into_iter().enumerate() {
                let before = frames.load(Relaxed);
                let took = attack(&attacked, name, rounds * 100 + n as u64, last);
                slowest = slowest.max((took, name));
                await_that(|| frames.load(Relaxed) > before || calm.is_finished());
                assert!(!calm.is_finished(), "after {name}, the traffic beside it has stopped");
            }
            let now = Holds::of(&attacked);
            println!("round {rounds}: {now:?}, {} frames beside it", frames.load(Relaxed));
            let flat = *warm.get_or_insert(now);
            assert_eq!((now.descriptors, now.threads), (flat.descriptors, flat.threads), "in round {rounds}");
            assert!(now.kib < flat.kib + 8192, "it grows: {flat:?}, {now:?}");
            if last {
                break;
            }
            rounds += 1;
        }
        println!("the next front end was served after {:?} at most ({})", slowest.0, slowest.1);
        // On a busy machine, a peer may have been killed before it got somewhere. One that lies
        // goes on until then.
        let broken = || attacked.stats()["queue_errors"].clone();
        let kinds = || broken().as_object().unwrap().values().filter(|n| n.as_u64() > Some(0)).count();
        let liar = hostile("lies", rounds * 100 + FRONT_ENDS.len() as u64, &attacked.socket);
        await_that(|| kinds() >= 2);
        drop(liar);
        println!("rings stopped: {}", broken());
        drop(ends);
        calm.join().unwrap();
    });
    attacked.ends_at(Signal::TERM);
    beside.ends_at(Signal::TERM);
}

/// Sets the flag when it goes, also by a panic: the thread that checks it is waited for.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Proves NET-10 for the driver: whatever the back end does, a run ends, with an error that names
/// it.
#[test]
fn hostile_back_ends_end_a_run_and_no_more() {
    let dir = tempfile::tempdir().unwrap();
    let names = BACK_ENDS.iter().map(|(name, _)| *name).chain(["full"]);
    std::thread::scope(|s| {
        for (n, name) in names.enumerate() {
            let path = dir.path().join(name);
            s.spawn(move || {
                let mut peer = hostile(&format!("back-{name}"), n as u64, &path);
                await_that(|| path.exists());
                let device = format!("vhost-user:{}", path.display());
                let args =
                    ["--device", &device, "--mode", "small", "--alloc", "pool", "--duration", "0.3", "--runs", "1"];
                let (status, _, err) = background(&args).end();
                println!("{name}: {}", err.trim().lines().last().unwrap_or_default());
                assert!(status == Some(1) && err.contains("error: "), "{name}: {status:?} {err}");
                assert!(!err.contains("panicked"), "{name}: {err}");
                let _ = peer.0.kill();
            });
        }
    });
}
