//! The end of connections, and their timers.

use std::time::Duration;

use super::*;
use crate::tcp::testing::{End, Pair, SharedBytes, start, stream};
use crate::tcp::{Config, DeliveryError, Event, ReadOutcome, Refused, Timestamps, Unreachable};

fn pair() -> Pair {
    Pair::connected(&Config::default(), &Config::default())
}

fn resets(sent: &[(bool, crate::tcp::testing::Sent)]) -> usize {
    sent.iter().filter(|(_, sent)| sent.has(Flags::RST)).count()
}

#[test]
fn both_sides_close_at_the_same_time() {
    let mut pair = pair();
    pair.a.tcp.close(pair.now);
    pair.b.tcp.close(pair.now);
    let (one, two) = (pair.a.output(pair.now).remove(0), pair.b.output(pair.now).remove(0));
    assert!(one.has(Flags::FIN) && two.has(Flags::FIN));
    pair.a.input(&two, pair.now);
    pair.b.input(&one, pair.now);
    assert_eq!((pair.a.tcp.state(), pair.b.tcp.state()), (State::Closing, State::Closing));
    pair.settle();
    assert_eq!((pair.a.tcp.state(), pair.b.tcp.state()), (State::TimeWait, State::TimeWait));
}

#[test]
fn what_is_queued_leaves_before_fin() {
    let mut pair = pair();
    for n in 0..100 {
        pair.a.tcp.send(stream(n * 1000, 1000), false).unwrap();
    }
    pair.a.tcp.close(pair.now);
    assert_eq!(pair.a.tcp.send(stream(0, 1), false).unwrap_err().why, Refused::Shutdown);
    for _ in 0..100 {
        pair.pass(Duration::from_millis(50));
        pair.b.read(pair.now);
    }
    assert_eq!(pair.b.read, SharedBytes::numbered(0, 100_000).bytes());
    assert!(matches!(pair.b.tcp.recv(pair.now), Ok(ReadOutcome::End)));
    assert_eq!((pair.a.tcp.state(), pair.b.tcp.state()), (State::FinWait2, State::CloseWait));
}

#[test]
fn close_with_unread_payload_resets() {
    let mut pair = pair();
    pair.a.tcp.send(stream(0, 100), false).unwrap();
    pair.settle();
    pair.b.tcp.close(pair.now);
    let sent = pair.settle();
    let reset = &sent[0].1.header;
    assert_eq!((sent.len(), reset.flags), (1, Flags::RST.with(Flags::ACK)));
    assert!(reset.options.timestamps.is_some());
    assert_eq!(pair.a.events.last(), Some(&Event::Closed(Some(Error::Reset))));
    assert!(pair.a.tcp.is_gone() && pair.b.tcp.is_gone());
    assert_eq!(pair.b.tcp.info(pair.now).buffers, 0);
}

#[test]
fn payload_after_close_resets() {
    let mut pair = pair();
    pair.b.tcp.close(pair.now);
    pair.settle();
    pair.a.tcp.send(stream(0, 100), false).unwrap();
    assert_eq!(resets(&pair.settle()), 1);
    assert_eq!(pair.a.tcp.failure(), Some(Error::Reset));
}

#[test]
fn payload_after_shutdown_read_is_taken() {
    let mut pair = pair();
    pair.b.tcp.shutdown_read();
    assert!(matches!(pair.b.tcp.recv(pair.now), Ok(ReadOutcome::End)));
    pair.a.tcp.send(stream(0, 100), false).unwrap();
    assert_eq!(resets(&pair.settle()), 0);
    pair.b.read(pair.now);
    assert_eq!(pair.b.read.len(), 100);
}

/// Proves INET-6.
#[test]
fn a_closed_connection_does_not_wait_for_ever_for_fin() {
    let mut pair = pair();
    pair.a.tcp.shutdown();
    pair.settle();
    pair.pass(Duration::from_secs(3600));
    assert_eq!(pair.a.tcp.state(), State::FinWait2, "the user still reads");
    pair.a.tcp.close(pair.now);
    pair.pass(Duration::from_secs(59));
    assert_eq!(pair.a.tcp.state(), State::FinWait2);
    pair.pass(Duration::from_secs(1));
    assert!(pair.a.tcp.is_gone());
}

/// Two ends, where `b` has a window of 1,000 bytes and does not read. `a` has sent 5,000 bytes.
fn closed_window() -> Pair {
    let mut pair =
        Pair::connected(&Config::default(), &Config { receive_buffer: 1000, fixed_window: true, ..Config::default() });
    pair.a.tcp.send(stream(0, 5000), false).unwrap();
    pair.settle();
    pair
}

/// Proves INET-6.
#[test]
fn an_orphan_whose_peer_keeps_its_window_closed_is_reset() {
    let mut pair = closed_window();
    pair.pass(Duration::from_secs(3600));
    pair.a.tcp.shutdown();
    pair.pass(Duration::from_secs(3600));
    assert_eq!(pair.a.tcp.state(), State::FinWait1, "the user may wait as long as it wants");
    pair.a.tcp.close(pair.now);
    let probes = pair.pass(Duration::from_secs(179));
    assert!(probes.iter().any(|(from_a, _)| !from_a), "the peer answers");
    assert_eq!(pair.a.tcp.state(), State::FinWait1);
    assert_eq!(resets(&pair.pass(Duration::from_secs(1))), 1);
    assert_eq!((pair.a.tcp.is_gone(), pair.a.tcp.failure()), (true, Some(Error::TimedOut)));
    assert_eq!((pair.a.tcp.poll_timeout(), pair.a.tcp.unacknowledged().count()), (None, 0));
    pair.b.read(pair.now);
    assert_eq!((pair.b.read.len(), pair.b.tcp.recv(pair.now).err()), (1000, Some(Error::Reset)));
}

#[test]
fn an_orphan_lives_while_its_peer_reads() {
    let mut pair = closed_window();
    pair.a.tcp.close(pair.now);
    for _ in 0..20 {
        pair.pass(Duration::from_secs(150));
        pair.b.read(pair.now);
    }
    assert_eq!(pair.b.read, SharedBytes::numbered(0, 5000).bytes());
    assert!(matches!(pair.b.tcp.recv(pair.now), Ok(ReadOutcome::End)));
}

/// The peer acknowledges a byte from time to time. Without an end, it could keep an orphan for
/// months.
#[test]
fn an_orphan_is_not_kept_by_single_bytes() {
    let mut pair = pair();
    pair.a.tcp.send(stream(0, 8000), false).unwrap();
    pair.a.output(pair.now);
    pair.a.tcp.close(pair.now);
    let mut header = pair.b.tcp.header(pair.b.tcp.una(), Flags::ACK, pair.now).0;
    let mut seconds = 0;
    while !pair.a.tcp.is_gone() && seconds < 10_000 {
        seconds += 100;
        pair.now += Duration::from_secs(100);
        header.ack = pair.a.tcp.una() + 1;
        header.options.timestamps = pair.b.tcp.timestamps(false, pair.now);
        pair.a.answer(header, pair.now);
        pair.a.tcp.handle_timeout(pair.now);
        pair.a.output(pair.now);
    }
    assert_eq!(seconds, 200);
}

/// A window that opens and closes again is no progress.
#[test]
fn an_orphan_is_not_kept_by_windows_in_which_nothing_fits() {
    let mut pair = closed_window();
    pair.a.tcp.close(pair.now);
    let mut header = pair.b.tcp.header(pair.b.tcp.una(), Flags::ACK, pair.now).0;
    let mut seconds = 0;
    while !pair.a.tcp.is_gone() && seconds < 1000 {
        seconds += 1;
        pair.now += Duration::from_secs(1);
        for window in [1, 0] {
            header.window = window;
            header.options.timestamps = pair.b.tcp.timestamps(false, pair.now);
            pair.a.answer(header, pair.now);
        }
        pair.a.tcp.handle_timeout(pair.now);
        pair.a.output(pair.now);
    }
    assert_eq!(seconds, 180);
}

#[test]
fn close_before_the_answer_to_syn_is_silent() {
    let mut pair = Pair::new(&Config::default(), &Config::default());
    pair.a.tcp.close(pair.now);
    assert!(pair.a.output(pair.now).is_empty() && pair.a.tcp.is_gone());
}

#[test]
fn close_before_the_handshake_is_complete_follows_it() {
    let mut pair = Pair::new(&Config::default(), &Config::default());
    pair.b.tcp.close(pair.now);
    pair.settle();
    assert_eq!((pair.a.tcp.state(), pair.b.tcp.state()), (State::CloseWait, State::FinWait2));
}

/// After both ends, this side was shut down, and was not reset.
#[test]
fn a_connection_that_ended_in_order_is_shut_down() {
    let mut pair = pair();
    pair.b.tcp.close(pair.now);
    pair.settle();
    pair.a.tcp.shutdown();
    pair.settle();
    assert_eq!(pair.a.tcp.state(), State::Closed);
    assert_eq!(pair.a.tcp.send(stream(0, 1), false).unwrap_err().why, Refused::Shutdown);
}

#[test]
fn abort_resets_and_drops_what_is_queued() {
    let mut pair = pair();
    pair.a.tcp.send(stream(0, 100_000), false).unwrap();
    pair.a.tcp.abort(pair.now);
    let sent = pair.settle();
    assert_eq!((sent.len(), resets(&sent)), (1, 1));
    assert_eq!(pair.b.tcp.failure(), Some(Error::Reset));
    assert_eq!(pair.a.tcp.send(stream(0, 1), false).unwrap_err().why, Refused::Over(Error::Aborted));
}

#[test]
fn a_repeated_fin_is_answered_and_time_wait_begins_again() {
    let mut pair = pair();
    pair.b.tcp.close(pair.now);
    pair.settle();
    pair.a.tcp.close(pair.now);
    let fin = pair.a.output(pair.now).remove(0);
    pair.b.input(&fin, pair.now);
    assert_eq!(pair.b.output(pair.now).len(), 1);
    let until = pair.b.tcp.poll_timeout().unwrap();
    pair.now += Duration::from_secs(30);
    pair.b.input(&fin, pair.now);
    assert_eq!(pair.b.output(pair.now)[0].header.ack, fin.header.seq + 1);
    assert_eq!(pair.b.tcp.poll_timeout(), Some(until + Duration::from_secs(30)));
}

/// Only the peer's own FIN is the last segment before `RCV.NXT`. All others are answered at
/// most. Proves INET-6.
#[test]
fn another_fin_does_not_begin_time_wait_again() {
    for timestamps in [true, false] {
        let config = Config { timestamps, ..Config::default() };
        let mut pair = Pair::connected(&config, &config);
        pair.a.tcp.send(stream(0, 5000), false).unwrap();
        pair.settle();
        pair.b.read(pair.now);
        pair.b.tcp.close(pair.now);
        pair.settle();
        pair.a.tcp.close(pair.now);
        let fin = pair.a.output(pair.now).remove(0);
        pair.b.input(&fin, pair.now);
        pair.b.output(pair.now);
        let until = pair.b.tcp.poll_timeout().unwrap();
        assert_eq!(pair.b.tcp.state(), State::TimeWait);
        pair.now += Duration::from_secs(30);
        let nxt = fin.header.seq + 1;
        for (seq, len) in [(nxt - 5000, 0), (nxt - 2, 0), (nxt - 1000, 500), (nxt + (1 << 24), 0), (nxt - 10, 10)] {
            let other = Header { seq, ..fin.header };
            pair.b.answer_text(other, len, pair.now);
            assert_eq!(pair.b.tcp.poll_timeout(), Some(until), "{seq:?} {len}");
        }
        if let Some(stamps) = fin.header.options.timestamps {
            let mut old = fin.header;
            old.options.timestamps = Some(Timestamps { value: stamps.value.wrapping_sub(1), ..stamps });
            pair.b.answer(old, pair.now);
            assert_eq!(pair.b.tcp.poll_timeout(), Some(until), "an old timestamp");
        }
        // The FIN may come with payload that was received before.
        pair.b.answer_text(Header { seq: nxt - 11, ..fin.header }, 10, pair.now);
        assert_eq!(pair.b.tcp.poll_timeout(), Some(until + Duration::from_secs(30)));
    }
}

#[test]
fn a_later_syn_reuses_time_wait() {
    let mut pair = pair();
    pair.a.tcp.close(pair.now);
    pair.settle();
    let mut syn = Header { seq: pair.a.tcp.receiver.nxt() + 100, flags: Flags::SYN, ..Header::default() };
    assert_eq!(pair.a.tcp.reused_by(&syn), None, "not in TIME-WAIT");
    pair.b.tcp.close(pair.now);
    pair.settle();
    assert_eq!(pair.a.tcp.state(), State::TimeWait);
    let recent = pair.a.tcp.peer_clock.unwrap().recent();
    let least = pair.a.tcp.reused_by(&syn).unwrap();
    assert!(pair.a.tcp.sender.next_seq() < least);
    let mut with = |value: u32, seq: Seq| {
        syn.seq = seq;
        syn.options.timestamps = Some(Timestamps { value, echo: 0 });
        pair.a.tcp.reused_by(&syn).is_some()
    };
    let nxt = pair.b.tcp.sender.next_seq();
    assert!(with(recent.wrapping_add(1), nxt - 5), "by timestamp");
    assert!(!with(recent.wrapping_sub(1), nxt + 5), "an old SYN");
    assert!(with(recent, nxt + 5) && !with(recent, nxt - 5), "by number");
    syn.options.timestamps = None;
    syn.seq = nxt - 5;
    assert_eq!(pair.a.tcp.reused_by(&syn), None);
}

#[test]
fn icmp_errors_are_believed_for_segments_in_flight() {
    let port = DeliveryError::Unreachable(Unreachable::Port);
    let mut end = End::new(crate::tcp::Connection::connect(&Config::default(), start(100), None, Time::ZERO));
    assert!(!end.tcp.handle_delivery_error(port, Some(Seq(100)), Time::ZERO), "nothing is in flight");
    end.output(Time::ZERO);
    for seq in [99, 101, 5_000_000] {
        assert!(!end.tcp.handle_delivery_error(port, Some(Seq(seq)), Time::ZERO));
    }
    assert!(end.tcp.handle_delivery_error(
        DeliveryError::Unreachable(Unreachable::Network),
        Some(Seq(100)),
        Time::ZERO
    ));
    assert_eq!(end.tcp.state(), State::SynSent, "a soft error");
    assert!(end.tcp.handle_delivery_error(port, Some(Seq(100)), Time::ZERO));
    assert_eq!(end.tcp.failure(), Some(Error::Unreachable(Unreachable::Port)));
}

#[test]
fn a_next_hop_that_does_not_answer_ends_the_handshake() {
    let mut end = End::new(crate::tcp::Connection::connect(&Config::default(), start(100), None, Time::ZERO));
    assert!(end.tcp.handle_delivery_error(DeliveryError::Unreachable(Unreachable::Host), None, Time::ZERO));
    assert_eq!(end.tcp.failure(), Some(Error::Unreachable(Unreachable::Host)));
}

#[test]
fn an_icmp_error_does_not_end_an_established_connection_but_names_the_cause() {
    let mut pair = pair();
    pair.a.tcp.send(stream(0, 100), false).unwrap();
    pair.a.output(pair.now);
    let una = pair.a.tcp.una();
    assert!(pair.a.tcp.handle_delivery_error(DeliveryError::Unreachable(Unreachable::Port), Some(una), pair.now));
    assert_eq!(pair.a.tcp.state(), State::Established);
    while let Some(next) = pair.a.tcp.poll_timeout() {
        pair.a.tcp.handle_timeout(next);
        pair.a.output(next);
    }
    assert_eq!(pair.a.tcp.failure(), Some(Error::Unreachable(Unreachable::Port)));
}

#[test]
fn a_peer_that_does_not_answer_times_out() {
    let mut end = End::new(crate::tcp::Connection::connect(&Config::default(), start(100), None, Time::ZERO));
    let (mut now, mut syns) = (Time::ZERO, end.output(Time::ZERO).len());
    while let Some(next) = end.tcp.poll_timeout() {
        now = next;
        end.tcp.handle_timeout(now);
        syns += end.output(now).len();
    }
    assert_eq!((syns, end.tcp.failure()), (8, Some(Error::TimedOut)));
    assert!(now.since(Time::ZERO) > Duration::from_secs(180));
    assert!(matches!(end.tcp.recv(now), Err(Error::TimedOut)));
}

#[test]
fn a_device_that_is_gone_ends_the_connection() {
    let mut pair = pair();
    pair.a.tcp.handle_device_gone();
    assert!(pair.a.output(pair.now).is_empty() && pair.a.tcp.is_gone());
    assert_eq!(pair.a.events, [Event::Closed(Some(Error::DeviceGone))]);
}
