//! Streams in device memory behind a foreign device: DPDK's vhost, which fills buffers in order and
//! knows nothing of headers. testpmd forwards between its vhost port and a tap, behind which is the
//! kernel's TCP.
//!
//! ```text
//!   kernel's TCP ◄──► tap ◄── testpmd ──► vhost port ◄── vhost-user ──► driver, stack, tokens
//!                                                                       this process
//! ```
//!
//! The tap is the kernel's, or a [`LossyLink`] is between the kernel's tap and that of testpmd.
//!
//! testpmd's engine `csum` leaves checksums to the receiver's side of the host (`Partial`), so its
//! frames are verified. Its engine `io` forwards frames and reports nothing of their checksums. The
//! bytes in device memory are checked and written by a third process. Needs root, `/dev/net/tun`,
//! `ip`, `dpdk-testpmd` and two CPUs.

use crate::device_end::{DeviceEnd, pattern};
use crate::kernel_common::{addresses, in_a_network};
use crate::lossy_link::LossyLink;
use crate::memory_common::Memory;
use crate::stream_common::{Echo, Ours, PAGES, ReceivedFragment, Receiver, exchange, our, send_to_the_kernel};
use netmem_devmem::stream::{DeviceStream, StreamError, StreamFragment};
use netmem_inet::{ListenOptions, SocketError};
use netmem_testing::driver::testpmd::{Dpdk, Testpmd};
use netmem_virtio::VhostUser;
use netmem_virtio::driver::SplitOptions;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread;

/// What is between our stack and the kernel.
#[derive(Clone, Copy, Default, PartialEq)]
struct Path {
    /// testpmd's engine `io`, in place of `csum`: nothing verifies checksums.
    io: bool,
    /// The back end accepts large segments, and testpmd cuts them.
    large: bool,
    /// A link that loses segments.
    lossy: bool,
}

/// Runs `work` with a stack behind testpmd. Each frame has up to `header_bytes` in host memory.
fn behind_dpdk(
    path: Path,
    header_bytes: u16,
    work: impl FnOnce(Ours, &mut Testpmd, Option<LossyLink>) -> Result<(), String> + Send,
) {
    let Path { io, large, lossy } = path;
    in_a_network(|| {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("vhost.sock");
        let vhost = format!("net_vhost0,iface={},queues=1,tso={}", socket.display(), u8::from(large));
        let tap = if lossy { "nm1" } else { "nm0" };
        // Port 0 is vhost, and port 1 is the tap. The engine `csum` leaves the checksum of TCP to
        // the receiver, and addresses as they are.
        let cuts = if large { "csum set ip hw 1\ncsum set tcp hw 1\ntso set 1400 1\n" } else { "" };
        let engine = if io { "io" } else { "csum" };
        let commands = format!(
            "port stop all\ncsum set tcp hw 0\n{cuts}port start all\ncsum mac-swap off 0\ncsum mac-swap off 1\n\
             set burst tx delay 10 retry 1000\nset fwd {engine} retry"
        );
        let ports = [&*vhost, &format!("net_tap0,iface={tap}")];
        let Some(mut testpmd) = Testpmd::of_ports(Dpdk::System, &ports, "", &commands) else { return Ok(()) };
        let link = lossy.then(|| LossyLink::new("nm0", tap));
        addresses("nm0")?;
        let memory = Memory::pages(PAGES);
        let end = DeviceEnd::beside(&[&memory]);
        let backend = VhostUser::connect(&socket).unwrap();
        work(Ours::on(backend, header_bytes, memory, end, false), &mut testpmd, link)
    });
}

/// Proves INET-3, MEM-9 and MEM-11 on a foreign back end with a fixed split: the kernel's bytes
/// land in device memory, and go back from there. The first bytes of payload are in host memory, as
/// many as the headers are shorter than the host part, and are delivered as linear.
fn echo(v6: bool, timestamps: bool, lossy: bool) {
    const LEN: usize = 1_500_000;
    let header_bytes = if v6 { SplitOptions::TCP_V6 } else { SplitOptions::TCP_V4 };
    behind_dpdk(Path { lossy, ..Path::default() }, header_bytes, |mut ours, _, link| {
        let setting = if timestamps { "1" } else { "0" };
        std::fs::write("/proc/sys/net/ipv4/tcp_timestamps", setting).unwrap();
        let mut listener = ours.streams.listen(([0, 0, 0, 0], 7).into(), ListenOptions::default()).unwrap();
        let peer = thread::spawn(move || exchange(SocketAddr::new(our(v6), 7), LEN));
        let (mut echo, mut seen): (Option<Echo>, _) = (None, None);
        while !peer.is_finished() || seen.is_none() {
            ours.turn();
            if let Ok(stream) = listener.accept() {
                echo = Some(Echo::new(stream));
            }
            let Ours { from, end, .. } = &mut ours;
            if let Some(now) = &mut echo
                && !now.turn(from, end)
            {
                let Receiver { in_host, in_device, host_parts, longest_in_host, .. } = now.receiver;
                seen = Some((in_host, in_device, host_parts, longest_in_host));
                echo = None;
            }
        }
        peer.join().unwrap();
        // The last segments may be lost, too. They are sent again while there is a link.
        ours.end_connections();
        let (in_host, in_device, host_parts, longest) = seen.unwrap();
        let headers = 14 + if v6 { 40 } else { 20 } + 20 + if timestamps { 12 } else { 0 };
        let linear = usize::from(header_bytes) - headers;
        assert_eq!(in_host + in_device, LEN as u64);
        assert_eq!(longest, linear);
        assert!(in_device > LEN as u64 * 9 / 10, "{in_device} in device memory");
        match link.map(LossyLink::end) {
            // Each segment has its first bytes in host memory, and the rest of its 1500 bytes in
            // device memory.
            None => {
                let most = (1514 - usize::from(header_bytes)) as u64;
                assert!(in_device <= host_parts * most, "{in_device} in {host_parts} segments");
            }
            // Our stack's segments with payload report no gaps.
            Some(both) => {
                let [from, to] = both;
                assert!(from.lost > 20 && to.lost > 20, "{both:?}");
                assert!(from.full_options > 0 && to.full_options_alone > 0, "{both:?}");
            }
        }
        let stats = ours.stack.stats();
        assert_eq!((stats.unverified, stats.wrong_checksum, stats.unreadable), (0, 0, 0));
        drop(listener);
        ours.close();
        Ok(())
    });
}

#[test]
fn a_fixed_split_over_ipv4() {
    echo(false, true, false);
}

#[test]
fn a_fixed_split_over_ipv6() {
    echo(true, true, false);
}

/// Without timestamps, headers are 12 bytes shorter, and so many more bytes are linear.
#[test]
fn a_fixed_split_and_short_options() {
    echo(false, false, false);
    echo(true, false, false);
}

/// Proves INET-3, MEM-9 and MEM-11 on a foreign back end that loses frames: lost segments are sent
/// again, in both directions, and each byte arrives once. Both sides report what has arrived behind
/// the gaps. The kernel also does so in segments with payload, which then have 40 bytes of options.
/// So their headers fill the host part, and all of their payload is in device memory.
#[test]
fn a_fixed_split_and_loss() {
    echo(false, true, true);
    echo(true, true, true);
}

/// Proves INET-3 and MEM-8 on a foreign back end that accepts large segments: each of them is one
/// frame for the back end, from device memory. testpmd cuts it, and the kernel receives each byte.
/// testpmd cuts segments over IPv4 only.
#[test]
fn large_segments_to_a_foreign_back_end() {
    const LEN: u64 = 8_000_000;
    let path = Path { large: true, ..Path::default() };
    behind_dpdk(path, SplitOptions::TCP_V4, |mut ours, _, _| {
        send_to_the_kernel(&mut ours, false, LEN);
        let sent = ours.stack.queues().1.queue().stats();
        // Segments of 1448 bytes would be six times as many frames.
        assert!(sent.frames < LEN / 1448 / 6, "{sent:?}");
        ours.close();
        Ok(())
    });
}

/// Proves MEM-10 on a foreign back end: payload in device memory whose checksum DPDK has not
/// verified is not acknowledged. It is counted, and the user gets an error with the peer's address
/// once. The stack computes the checksum of payload that is linear, and delivers it. When the back
/// end begins to verify frames, the connection goes on with the byte after the last that was
/// acknowledged.
#[test]
fn a_peer_whose_payload_is_unverified() {
    const FIRST: usize = 20;
    const LEN: usize = 300_000;
    let path = Path { io: true, ..Path::default() };
    behind_dpdk(path, SplitOptions::TCP_V4, |mut ours, testpmd, _| {
        let mut listener = ours.streams.listen(([0, 0, 0, 0], 7).into(), ListenOptions::default()).unwrap();
        let connecting = thread::spawn(|| TcpStream::connect(SocketAddr::new(our(false), 7)).unwrap());
        while !connecting.is_finished() {
            ours.turn();
        }
        let mut peer = connecting.join().unwrap();
        let here = peer.local_addr().unwrap();
        let mut bytes = vec![0; LEN];
        pattern(here.port().into(), 0, &mut bytes);
        let mut stream: DeviceStream = loop {
            ours.turn();
            match listener.accept() {
                Ok(stream) => break stream,
                Err(error) => assert_eq!(error, SocketError::WouldBlock),
            }
        };
        let mut receiver = Receiver::new(here.port().into());
        peer.write_all(&bytes[..FIRST]).unwrap();
        while receiver.position < FIRST as u64 {
            ours.turn();
            let parts = receiver.receive(&mut stream, &mut ours.end).unwrap();
            assert!(parts.iter().all(|part| matches!(part, ReceivedFragment::Host(_))));
        }
        assert_eq!(ours.stack.stats().unverified, 0);
        let writer = thread::spawn(move || {
            peer.write_all(&bytes[FIRST..]).unwrap();
            peer.shutdown(std::net::Shutdown::Write).unwrap();
            // Until our side closes.
            assert_eq!(peer.read(&mut [0]).unwrap(), 0);
        });
        let mut places = [StreamFragment::Empty];
        let told = loop {
            ours.turn();
            match stream.recv(&mut places) {
                Err(StreamError::Socket(SocketError::WouldBlock)) => {}
                other => break other,
            }
        };
        let Err(StreamError::Unverified { peer, frames }) = told else { panic!("{told:?}") };
        assert_eq!(peer, here);
        assert!(frames >= 3 && ours.stack.stats().unverified >= frames, "{:?}", ours.stack.stats());
        assert_eq!(ours.stack.pages(), 0, "payload is kept");
        // The user is told once, and nothing is received.
        for _ in 0..50 {
            ours.turn();
            let got = receiver.receive(&mut stream, &mut ours.end).unwrap();
            assert!(got.is_empty());
        }
        testpmd.command("stop\nset fwd csum retry\nstart");
        let returner = stream.returner();
        while let Some(parts) = receiver.receive(&mut stream, &mut ours.end) {
            for part in parts {
                if let ReceivedFragment::Device { tokens, .. } = part {
                    returner.return_tokens(&[tokens]).unwrap();
                }
            }
            ours.turn();
        }
        assert_eq!(receiver.position, LEN as u64);
        assert!(receiver.in_device > LEN as u64 * 9 / 10);
        drop((stream, returner, listener));
        while !writer.is_finished() {
            ours.turn();
        }
        writer.join().unwrap();
        ours.close();
        Ok(())
    });
}
