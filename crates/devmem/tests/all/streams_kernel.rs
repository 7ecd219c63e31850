//! Streams in device memory with the Linux kernel's TCP as the peer, behind a tap. The device is in
//! another process, which has the only mappings of device memory; it compares the bytes there, and
//! the kernel's side compares what it receives.

use crate::device_end::pattern;
use crate::kernel_common::in_a_network;
use crate::stream_common::{Echo, Ours, ReceivedFragment, Receiver, exchange, our, send_to_the_kernel};
use netmem_inet::{ListenOptions, SocketError};
use std::net::{SocketAddr, TcpStream};
use std::thread;

const BAD: &str = "loss=1%,delay=1ms,jitter=500us,reorder=2%,duplicate=1%,corrupt=0.5%,seed=3";

/// The kernel makes a connection for each of `lens`, all at the same time, and the payload of each
/// connection is sent back.
fn echo(v6: bool, link: Option<&str>, lens: &[usize]) {
    in_a_network(|| {
        let mut ours = Ours::new(link)?;
        let mut listener = ours.streams.listen(([0, 0, 0, 0], 7).into(), ListenOptions::default()).unwrap();
        let lens = lens.to_vec();
        let all: usize = lens.iter().sum();
        let peers = thread::spawn(move || {
            let to = SocketAddr::new(our(v6), 7);
            let each: Vec<_> = lens.into_iter().map(|len| thread::spawn(move || exchange(to, len))).collect();
            each.into_iter().for_each(|thread| thread.join().unwrap());
        });
        let (mut echoes, mut in_device, mut in_host): (Vec<Echo>, _, _) = (Vec::new(), 0, 0);
        while !peers.is_finished() || !echoes.is_empty() {
            ours.turn();
            while let Ok(stream) = listener.accept() {
                echoes.push(Echo::new(stream));
            }
            let Ours { from, end, .. } = &mut ours;
            echoes.retain_mut(|echo| {
                let goes_on = echo.turn(from, end);
                if !goes_on {
                    in_device += echo.receiver.in_device;
                    in_host += echo.receiver.in_host;
                }
                goes_on
            });
        }
        peers.join().unwrap();
        assert_eq!(in_device + in_host, all as u64);
        // Our device finds the end of the headers.
        assert_eq!(in_host, 0);
        drop((listener, echoes));
        ours.close();
        Ok(())
    });
}

/// Proves MEM-9 and INET-3: payload from the kernel lands in device memory in order, and is sent
/// back from there.
#[test]
fn the_kernels_stream_over_ipv4() {
    echo(false, None, &[4_000_000]);
}

/// Proves the same over IPv6.
#[test]
fn the_kernels_stream_over_ipv6() {
    echo(true, None, &[4_000_000]);
}

/// Proves MEM-9 and INET-4: a hundred streams at once share the pages of a binding.
#[test]
fn a_hundred_streams() {
    let lens: Vec<usize> = (0..100).map(|n| 1 + 771 * n).collect();
    for v6 in [false, true] {
        echo(v6, None, &lens);
    }
}

/// Proves MEM-9 and MEM-10: over a link that loses, reorders, duplicates and damages packets, each
/// byte arrives unchanged, in both directions. Retransmissions come from device memory, and damaged
/// segments are not acknowledged.
#[test]
fn streams_over_a_bad_link() {
    for v6 in [false, true] {
        echo(v6, Some(BAD), &[300_000, 100_000, 50_000, 1]);
    }
}

/// Our side connects, and sends from device memory; the kernel compares.
fn send(v6: bool, link: Option<&str>, len: u64) {
    in_a_network(|| {
        let mut ours = Ours::new(link)?;
        send_to_the_kernel(&mut ours, v6, len);
        ours.close();
        Ok(())
    });
}

/// Proves MEM-8 and MEM-9: bytes that the device has written are sent by address, over IPv4 and
/// IPv6, and the kernel receives each byte.
#[test]
fn sent_from_device_memory() {
    send(false, None, 8_000_000);
    send(true, None, 2_000_000);
}

/// Proves the same with retransmissions.
#[test]
fn sent_again_from_device_memory() {
    for v6 in [false, true] {
        send(v6, Some(BAD), 500_000);
    }
}

/// Proves MEM-6 and MEM-9: another thread returns tokens in random order. This opens the window, so
/// more is received than the binding has pages.
#[test]
fn tokens_that_another_thread_returns() {
    const LEN: usize = 40_000_000;
    in_a_network(|| {
        let mut ours = Ours::new(None)?;
        let mut listener = ours.streams.listen(([0, 0, 0, 0], 7).into(), ListenOptions::default()).unwrap();
        let peer = thread::spawn(|| {
            use std::io::Write;
            let mut stream = TcpStream::connect(SocketAddr::new(our(false), 7)).unwrap();
            let (seed, mut bytes) = (stream.local_addr().unwrap().port().into(), vec![0; LEN]);
            pattern(seed, 0, &mut bytes);
            stream.write_all(&bytes).unwrap();
        });
        let mut stream = loop {
            ours.turn();
            match listener.accept() {
                Ok(stream) => break stream,
                Err(error) => assert_eq!(error, SocketError::WouldBlock),
            }
        };
        let mut receiver = Receiver::new(stream.tcp().peer_addr().port().into());
        let (returner, (tokens, returned)) = (stream.returner(), std::sync::mpsc::channel());
        let returning = thread::spawn(move || {
            let (mut rng, mut held) = (fastrand::Rng::with_seed(5), Vec::new());
            for range in returned {
                held.push(range);
                if held.len() > 100 {
                    let range = held.swap_remove(rng.usize(..held.len()));
                    assert_eq!(returner.return_tokens(&[range]), Ok(range.count as usize));
                }
            }
            // The remaining tokens are given back with the end of the stream.
        });
        while let Some(parts) = receiver.receive(&mut stream, &mut ours.end) {
            for part in parts {
                let ReceivedFragment::Device { tokens: range, .. } = part else { panic!("in host memory") };
                tokens.send(range).unwrap();
            }
            ours.turn();
        }
        assert_eq!(receiver.in_device, LEN as u64);
        drop(tokens);
        returning.join().unwrap();
        peer.join().unwrap();
        drop((stream, listener));
        ours.close();
        Ok(())
    });
}
