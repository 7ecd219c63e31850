//! Connections from SYN to TIME-WAIT, and which segments they accept.

use super::*;
use crate::tcp::testing::{Pair, SharedBytes, stream};
use crate::tcp::{Event, Flags, ReadOutcome};

#[test]
fn a_stream_goes_both_ways_and_closes() {
    let mut pair = Pair::connected(&Config::default(), &Config::default());
    for n in 0..50 {
        pair.a.tcp.send(stream(n * 3000, 3000), false).unwrap();
        pair.b.tcp.send(stream(n * 10, 10), false).unwrap();
    }
    pair.a.tcp.shutdown();
    for _ in 0..200 {
        pair.pass(Duration::from_millis(5));
        pair.a.read(pair.now);
        pair.b.read(pair.now);
    }
    assert_eq!(pair.b.read, SharedBytes::numbered(0, 150_000).bytes());
    assert_eq!(pair.a.read, SharedBytes::numbered(0, 500).bytes());
    assert_eq!((pair.a.tcp.state(), pair.b.tcp.state()), (State::FinWait2, State::CloseWait));
    assert!(matches!(pair.b.tcp.recv(pair.now), Ok(ReadOutcome::End)));
    assert_eq!(pair.b.tcp.info(pair.now).buffers, 0);
    // The sending half of the other end still works.
    pair.b.tcp.send(stream(500, 20), false).unwrap();
    pair.pass(Duration::from_millis(100));
    pair.a.read(pair.now);
    assert_eq!(pair.a.read, SharedBytes::numbered(0, 520).bytes());
    pair.b.tcp.close(pair.now);
    pair.settle();
    assert_eq!((pair.a.tcp.state(), pair.b.tcp.state()), (State::TimeWait, State::Closed));
    assert!(pair.b.tcp.is_gone() && pair.b.events.last() == Some(&Event::Closed(None)));
    pair.pass(Duration::from_secs(61));
    assert!(pair.a.tcp.is_gone() && pair.a.tcp.poll_timeout().is_none());
}

#[test]
fn a_segment_is_accepted_by_number_acknowledgement_and_timestamp() {
    let pair = Pair::connected(&Config::default(), &Config::default());
    let header = pair.header_of_a(Flags::ACK);
    let stamps = header.options.timestamps.unwrap();
    let accepts = |change: &dyn Fn(&mut Header)| {
        let mut header = header;
        change(&mut header);
        pair.b.tcp.accepts(&header, 10, pair.now)
    };
    assert!(accepts(&|_| ()) && accepts(&|header| header.seq += 20) && accepts(&|header| header.seq = header.seq - 5));
    assert!(!accepts(&|header| header.seq = header.seq - 10), "before the window");
    assert!(!accepts(&|header| header.seq += 1 << 24), "behind the window");
    assert!(!accepts(&|header| header.ack += 1), "not sent");
    assert!(!accepts(&|header| header.ack = header.ack - (1 << 24)), "too old");
    assert!(!accepts(&|header| header.flags = Flags::PSH), "no acknowledgement");
    assert!(!accepts(&|header| header.options.timestamps = None));
    let old = Timestamps { value: stamps.value.wrapping_sub(1), ..stamps };
    assert!(!accepts(&|header| header.options.timestamps = Some(old)));
    let plain = Config { timestamps: false, ..Config::default() };
    let pair = Pair::new(&plain, &plain);
    let mut syn_ack = Header { ack: pair.a.tcp.una() + 1, ..pair.header_of_a(Flags::SYN.with(Flags::ACK)) };
    assert!(pair.a.tcp.accepts(&syn_ack, 0, pair.now));
    syn_ack.ack += 1;
    assert!(!pair.a.tcp.accepts(&syn_ack, 0, pair.now));
}
