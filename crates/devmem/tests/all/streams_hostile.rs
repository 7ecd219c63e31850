//! A peer abuses the window, the options, the order or the checksums. It occupies no more pages of
//! device memory than the budget, and none when its connection has ended. Other connections go on
//! meanwhile.

use crate::stream_wire::{LISTEN, Odd, Peer, Rig};
use netmem_devmem::TokenRange;
use netmem_devmem::stream::{DeviceListener, DeviceStream, StreamError, StreamFragment, StreamSendError};
use netmem_inet::tcp::Config;
use netmem_inet::{ListenOptions, SocketError};
use std::time::Duration;

/// Pages that a connection may occupy, and all connections together.
const BUDGET: u32 = 64;
const ALL: u32 = 160;

fn rig() -> (Rig, DeviceListener) {
    let rig = Rig::new(1024, ALL);
    let connection =
        Config { budget: BUDGET, receive_buffer: 1 << 20, fixed_window: true, timestamps: false, ..Config::default() };
    let options = ListenOptions { connection, ..ListenOptions::default() };
    let listener = rig.streams.as_ref().unwrap().listen(([0, 0, 0, 0], LISTEN).into(), options).unwrap();
    (rig, listener)
}

/// Receives all queued payload, compares it in the memory, and returns the pages. The result is the
/// number of bytes.
fn read(rig: &Rig, stream: &mut DeviceStream, want: impl Fn(u64) -> u8, position: &mut u64) -> usize {
    let (returner, mut total) = (stream.returner(), 0);
    loop {
        let mut places = [const { StreamFragment::Empty }; 8];
        let n = match stream.recv(&mut places) {
            Ok(n) => n,
            Err(StreamError::Socket(SocketError::WouldBlock)) => return total,
            Err(error) => panic!("{error}"),
        };
        if n == 0 {
            return total;
        }
        for place in &places[..n] {
            let StreamFragment::Device { offset, len, tokens, .. } = place else { panic!("not in device memory") };
            let mut bytes = vec![0; *len as usize];
            rig.memory.read_exact_at(&mut bytes, *offset).unwrap();
            for byte in bytes {
                assert_eq!(byte, want(*position), "at {position}");
                *position += 1;
            }
            total += *len as usize;
            let freed = returner.return_tokens(&[*tokens]).unwrap();
            assert_eq!(freed, tokens.count as usize);
        }
    }
}

/// Checks that a well-behaved connection goes on.
fn goes_on(rig: &mut Rig, peer: &mut Peer, stream: &mut DeviceStream, position: &mut u64) {
    for _ in 0..20 {
        peer.give(rig, &[0x5a; 1000]);
        assert_eq!(read(rig, stream, |_| 0x5a, position), 1000);
    }
}

/// Proves INET-4: each byte of a stream comes in a segment, and so in a page, of its own.
#[test]
fn single_bytes() {
    let (mut rig, mut listener) = rig();
    let (mut bad, mut good) = (Peer::connect(&mut rig, 5001), Peer::connect(&mut rig, 5002));
    let (mut stream, mut other) = (listener.accept().unwrap(), listener.accept().unwrap());
    let (start, mut position, mut others) = (bad.seq, 0, 0);
    for n in 0..2000u32 {
        bad.give_at(&mut rig, start + n, &[n as u8], &Odd::default());
        if n % 16 == 0 {
            rig.settle();
            assert!(rig.held() <= BUDGET.into(), "{} pages", rig.held());
        }
    }
    rig.settle();
    goes_on(&mut rig, &mut good, &mut other, &mut others);
    let got = read(&rig, &mut stream, |n| n as u8, &mut position);
    assert_eq!(got, BUDGET as usize, "payload without a page is not acknowledged");
    // The peer sends again what was not acknowledged.
    bad.seq = start + got as u32;
    for n in got as u32..1000 {
        bad.give(&mut rig, &[n as u8]);
        assert_eq!(read(&rig, &mut stream, |n| n as u8, &mut position), 1);
    }
    drop((stream, other, listener));
    rig.settle();
    assert_eq!(rig.held(), 0);
    rig.close();
}

/// Proves INET-4: the peer sends every second byte, but never the first, so that there is a gap
/// before each byte.
#[test]
fn gaps_for_ever() {
    let (mut rig, mut listener) = rig();
    let (mut bad, mut good) = (Peer::connect(&mut rig, 5001), Peer::connect(&mut rig, 5002));
    let (mut stream, mut other) = (listener.accept().unwrap(), listener.accept().unwrap());
    let (start, mut position, mut others) = (bad.seq, 0, 0);
    for n in 0..2000u32 {
        bad.give_at(&mut rig, start + 1 + 2 * n, &[0x11], &Odd::default());
        if n % 16 == 0 {
            rig.settle();
            assert!(rig.held() <= BUDGET.into(), "{} pages", rig.held());
        }
    }
    rig.settle();
    assert!(rig.held() > 0);
    goes_on(&mut rig, &mut good, &mut other, &mut others);
    // The gap closes, and the connection goes on.
    bad.give(&mut rig, &[0x11]);
    assert!(read(&rig, &mut stream, |_| 0x11, &mut position) >= 1);
    // The user drops the stream while there are gaps.
    drop((stream, other, listener));
    rig.settle();
    assert_eq!(rig.held(), 0);
    rig.close();
}

/// Proves MEM-9: repeated payload, and payload outside of the window, holds no page.
#[test]
fn what_comes_again_and_what_is_too_far() {
    let (mut rig, mut listener) = rig();
    let mut peer = Peer::connect(&mut rig, 5001);
    let (mut stream, start, mut position) = (listener.accept().unwrap(), peer.seq, 0);
    peer.give(&mut rig, &[7; 1000]);
    let held = rig.held();
    for n in 0..500u32 {
        peer.give_at(&mut rig, start + n, &[7; 400], &Odd::default());
        peer.give_at(&mut rig, start.wrapping_sub(5000 + n), &[9; 1000], &Odd::default());
        peer.give_at(&mut rig, start + (1 << 21) + n, &[9; 1000], &Odd::default());
        rig.settle();
        assert_eq!(rig.held(), held);
    }
    assert_eq!(read(&rig, &mut stream, |_| 7, &mut position), 1000);
    assert_eq!(rig.held(), 0);
    drop((stream, listener));
    rig.settle();
    rig.close();
}

/// Proves MEM-10: payload that the device has not verified is never acknowledged, holds no page,
/// and is counted. The user is told once; the connection goes on.
#[test]
fn payload_without_a_checksum() {
    let (mut rig, mut listener) = rig();
    let mut peer = Peer::connect(&mut rig, 5001);
    let (mut stream, mut position) = (listener.accept().unwrap(), 0);
    let unverified = Odd { unverified: true, ..Odd::default() };
    let (mut told, mut acknowledged) = (0, false);
    for _ in 0..100 {
        peer.give_at(&mut rig, peer.seq, &[3; 1000], &unverified);
        acknowledged |= rig.settle().iter().any(|segment| segment.ack != peer.seq);
        assert_eq!(rig.held(), 0);
        match stream.recv(&mut [StreamFragment::Empty]) {
            Err(StreamError::Unverified { peer, .. }) => {
                assert_eq!(peer.port(), 5001);
                told += 1;
            }
            other => assert!(matches!(other, Err(StreamError::Socket(SocketError::WouldBlock))), "{other:?}"),
        }
    }
    assert_eq!((told, acknowledged), (1, false));
    assert_eq!(rig.stack.as_ref().unwrap().stats().unverified, 100);
    peer.give(&mut rig, &[3; 1000]);
    assert_eq!(read(&rig, &mut stream, |_| 3, &mut position), 1000);
    drop((stream, listener));
    rig.settle();
    rig.close();
}

/// Proves MEM-10: a host that only knows addresses and ports cannot make the user believe that the
/// device verifies nothing. Its segments are outside of the window, or acknowledge what was not
/// sent.
#[test]
fn forged_payload_without_a_checksum() {
    let (mut rig, mut listener) = rig();
    let mut peer = Peer::connect(&mut rig, 5001);
    let (mut stream, mut position) = (listener.accept().unwrap(), 0);
    let unverified = Odd { unverified: true, ..Odd::default() };
    for n in 0..20u32 {
        let far = Peer { ack: peer.ack.wrapping_add(n << 20 | 1), ..peer.clone() };
        far.give_at(&mut rig, peer.seq, &[3; 5], &unverified);
        for seq in [1 << 30, 1 << 31, (1 << 21) + n, (n + 5).wrapping_neg()] {
            peer.give_at(&mut rig, peer.seq.wrapping_add(seq), &[3; 5], &unverified);
        }
        rig.settle();
        let received = stream.recv(&mut [StreamFragment::Empty]);
        assert!(matches!(received, Err(StreamError::Socket(SocketError::WouldBlock))), "{received:?}");
    }
    assert_eq!((stream.stats().unverified, rig.stack.as_ref().unwrap().stats().unverified), (0, 100));
    // Two segments in the window may be damaged. Forged payload that is verified does not take
    // them back.
    for _ in 0..2 {
        peer.give_at(&mut rig, peer.seq, &[3; 1000], &unverified);
        peer.give_at(&mut rig, peer.seq.wrapping_sub(5000), &[9; 5], &Odd::default());
    }
    rig.settle();
    assert_eq!(stream.stats().unverified, 2);
    peer.give(&mut rig, &[3; 1000]);
    assert_eq!((read(&rig, &mut stream, |_| 3, &mut position), stream.stats().unverified), (1000, 0));
    drop((stream, listener));
    rig.settle();
    rig.close();
}

/// Proves MEM-8 and MEM-9: a peer that receives and never acknowledges, and a peer whose window
/// stays closed, hold the binding until the user's timeout and no longer.
#[test]
fn a_peer_that_never_acknowledges() {
    for closed in [false, true] {
        let (mut rig, mut listener) = rig();
        let peer = Peer::connect(&mut rig, 5001);
        let mut stream = listener.accept().unwrap();
        stream.tcp_mut().set_user_timeout(Some(Duration::from_secs(30)));
        if closed {
            peer.give_at(&mut rig, peer.seq, &[], &Odd { window: Some(0), ..Odd::default() });
            rig.settle();
        }
        let from = rig.binding.as_ref().unwrap().reference();
        let ranges: Vec<u64> =
            (0..5).map(|n| stream.send(&from, 600 * 4096 + n * 3000, 3000, false).unwrap()).collect();
        let left = rig.pass(Duration::from_secs(20));
        assert!(stream.sent().is_none());
        assert!(
            closed || left.iter().filter(|segment| segment.seq == peer.ack && !segment.payload.is_empty()).count() > 1
        );
        // The peer acknowledges bytes that were not sent. Such an acknowledgement is ignored.
        Peer { ack: peer.ack.wrapping_add(1 << 20), ..peer.clone() }.give(&mut rig, &[]);
        rig.pass(Duration::from_secs(60));
        let back: Vec<u64> = std::iter::from_fn(|| stream.sent()).map(|sent| sent.range).collect();
        assert_eq!(back, ranges, "closed {closed}");
        assert!(matches!(stream.recv(&mut [StreamFragment::Empty]), Err(StreamError::Socket(SocketError::Closed(_)))));
        assert!(matches!(stream.send(&from, 0, 1, false), Err(StreamSendError::Socket(SocketError::Closed(_)))));
        drop((stream, listener, from));
        rig.settle();
        rig.close();
    }
}

/// Proves INET-4 and MEM-9: the peer sends segments with random numbers, flags, windows, options
/// and lengths, verified and not. In every case, pages stay within the budget, and all are returned
/// when the stream is dropped.
#[test]
fn whatever_comes() {
    for seed in 0..40 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let (mut rig, mut listener) = rig();
        let mut good = Peer::connect(&mut rig, 5002);
        let (mut other, mut others) = (listener.accept().unwrap(), 0);
        let bad = Peer::connect(&mut rig, 5001);
        let mut stream = listener.accept().unwrap();
        let mut tokens: Vec<TokenRange> = Vec::new();
        for _ in 0..300 {
            let near = |rng: &mut fastrand::Rng, at: u32| match rng.u8(..8) {
                0 => rng.u32(..),
                1..4 => at,
                _ => at.wrapping_add(rng.u32(..3000)).wrapping_sub(500),
            };
            let mut options: Vec<u8> = (0..4 * rng.usize(..=10)).map(|_| rng.u8(..)).collect();
            if rng.bool() && !options.is_empty() {
                // A known kind of option with a random length.
                options[0] = [2, 3, 4, 5, 8][rng.usize(..5)];
            }
            let odd = Odd {
                fin: rng.u8(..20) == 0,
                rst: rng.u8(..200) == 0,
                syn: rng.u8(..50) == 0,
                no_ack: rng.u8(..50) == 0,
                window: Some(rng.u16(..)),
                options,
                unverified: rng.u8(..8) == 0,
            };
            let payload = vec![rng.u8(..); if rng.bool() { rng.usize(..=1400) } else { rng.usize(..3) }];
            let peer = Peer { ack: near(&mut rng, bad.ack), ..bad.clone() };
            peer.give_at(&mut rig, near(&mut rng, bad.seq), &payload, &odd);
            if rng.u8(..4) == 0 {
                rig.settle();
                assert!(rig.held() <= u64::from(BUDGET), "seed {seed}: {} pages", rig.held());
                let mut places = [const { StreamFragment::Empty }; 4];
                let n = stream.recv(&mut places).unwrap_or(0);
                tokens.extend(places[..n].iter().filter_map(|place| match place {
                    StreamFragment::Device { tokens, .. } => Some(*tokens),
                    _ => None,
                }));
                if rng.bool() {
                    // The tokens that the user holds, and others.
                    let mut ranges = std::mem::take(&mut tokens);
                    ranges.truncate(64);
                    ranges.push(TokenRange { start: rng.u32(..), count: rng.u32(..9) });
                    stream.returner().return_tokens(&ranges).unwrap();
                }
            }
        }
        rig.settle();
        goes_on(&mut rig, &mut good, &mut other, &mut others);
        drop((stream, other, listener));
        rig.pass(Duration::from_secs(1));
        assert_eq!(rig.held(), 0, "seed {seed}");
        rig.pass(Duration::from_secs(300));
        rig.close();
    }
}

/// Proves INET-4: handshakes with payload that are not completed hold no page.
#[test]
fn handshakes_with_payload() {
    let (mut rig, listener) = rig();
    for port in 6000..6500 {
        let peer = Peer { port, to: LISTEN, seq: 5, ack: 0 };
        peer.give_at(&mut rig, 5, &[1; 1000], &Odd { syn: true, no_ack: true, ..Odd::default() });
        assert!(rig.settle().iter().any(|segment| segment.syn && segment.ack == 6), "SYN alone is answered");
        assert_eq!(rig.held(), 0);
    }
    drop(listener);
    rig.pass(Duration::from_secs(300));
    rig.close();
}
