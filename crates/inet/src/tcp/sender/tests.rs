//! Traces of a sender: the acknowledgements of the peer, and the segments that the sender sends
//! then. Times are in milliseconds, and segments have 1000 bytes.

use std::time::Duration;

use super::recovery_state::RecoveryState;
use super::*;
use crate::tcp::congestion::Window;
use crate::tcp::testing::{Done, SharedBytes, TestCarrier};
use crate::tcp::{Chunk, Seq};
use crate::time::Time;

mod losses;

/// A sender whose first sequence number of data is 1. The test plays its peer.
struct Trace {
    sender: Sender<TestCarrier>,
    now: u64,
    /// Whether tickets stay pending. Otherwise they are done at once.
    pending: bool,
    tickets: Vec<Done>,
    offload: usize,
}

/// A segment that was sent: its first number, the number after the last, and its flags.
type Left = (u32, u32, &'static str);

impl Trace {
    /// A sender that is not paced.
    fn with(options: SendOptions, sack: bool, rtt: u64) -> Self {
        Self::negotiate(
            SendOptions { pacing: false, ..options },
            Negotiated { mss: 1000, sack, timestamps: false, ecn: false, window: 100_000, seq: Seq(0) },
            rtt,
        )
    }

    fn negotiate(options: SendOptions, negotiated: Negotiated, rtt: u64) -> Self {
        let sender = Sender::new(Seq(0), 1460, options);
        let mut trace = Self { sender, now: 1000, pending: false, tickets: Vec::new(), offload: 0 };
        assert_eq!(trace.run(), [(0, 1, "S")]);
        trace.now += rtt;
        trace.sender.establish(&negotiated, trace.time());
        let acked = trace.sender.handle_ack(&Trace::plain(1, negotiated.window), trace.time());
        assert!(acked.syn && acked.bytes == 0);
        trace
    }

    /// A sender with a round trip of 100 ms, selective acknowledgements, and an initial window of
    /// 10 segments.
    fn new() -> Self {
        Self::with(SendOptions::default(), true, 100)
    }

    fn time(&self) -> Time {
        Time::from_micros(self.now * 1000)
    }

    fn plain(ack: u32, window: u32) -> Ack<'static> {
        Ack { seq: Seq(0), ack: Seq(ack), window, sack: &[], echo: None, ece: false, data: false }
    }

    /// Sends all segments that may be sent.
    fn run(&mut self) -> Vec<Left> {
        let mut left = Vec::new();
        while let Some(transmission) = self.sender.poll_transmit(self.time(), self.offload) {
            assert_eq!(
                self.sender.poll_transmit(self.time(), self.offload),
                Some(transmission),
                "the answer does not change"
            );
            let payload = self.sender.payload(&transmission);
            assert_eq!(payload.iter().map(Chunk::len).sum::<usize>(), transmission.len as usize);
            let ticket = if self.pending { Done::pending() } else { Done::at_once() };
            self.tickets.push(ticket.clone());
            self.sender.handle_sent(&transmission, ticket, self.time());
            let Transmission { seq, len, syn, fin, push, cwr, .. } = transmission;
            let flags = match (syn, fin, push, cwr) {
                (true, ..) => "S",
                (_, true, true, _) => "FP",
                (_, true, ..) => "F",
                (_, _, true, true) => "PW",
                (_, _, true, _) => "P",
                (_, _, _, true) => "W",
                _ => "",
            };
            left.push((seq.0, (seq + len + u32::from(syn) + u32::from(fin)).0, flags));
        }
        left
    }

    fn write(&mut self, bytes: u32) -> Vec<Left> {
        self.sender.send(SharedBytes::numbered(self.sender.end().0, bytes), false).unwrap();
        self.run()
    }

    fn ack(&mut self, ack: u32, sack: &[(u32, u32)]) -> Vec<Left> {
        let blocks: Vec<_> = sack.iter().map(|(from, to)| (Seq(*from), Seq(*to))).collect();
        self.sender.handle_ack(&Ack { sack: &blocks, ..Self::plain(ack, 100_000) }, self.time());
        self.run()
    }

    fn give(&mut self, ack: Ack<'_>) -> Vec<Left> {
        self.sender.handle_ack(&ack, self.time());
        self.run()
    }

    /// Advances the time to the deadline. Returns how many milliseconds that took, rounded up.
    fn expire(&mut self) -> (u64, Vec<Left>) {
        let deadline = self.sender.poll_timeout().expect("a timer").micros().div_ceil(1000);
        let passed = deadline - self.now;
        self.now = deadline;
        self.sender.handle_timeout(self.time()).unwrap();
        (passed, self.run())
    }

    fn info(&self) -> SendInfo {
        self.sender.info(self.time())
    }
}

fn segments(from: u32, to: u32) -> Vec<Left> {
    (from..to).step_by(1000).map(|at| (at, at + 1000, "")).collect()
}

// The window

#[test]
fn ten_segments_leave_first_and_each_acknowledged_segment_lets_two_leave() {
    let mut trace = Trace::new();
    assert_eq!(trace.write(30_000), segments(1, 10_001));
    trace.now += 100;
    assert_eq!(trace.ack(1001, &[]), segments(10_001, 12_001));
    assert_eq!(trace.ack(5001, &[]), segments(12_001, 20_001));
    assert_eq!(trace.info().cwnd, 15);
}

/// Twice the window leaves in a round trip: of 20 segments in 100 ms, two in 5 ms.
#[test]
fn new_data_is_paced_after_the_first_window() {
    let negotiated = Negotiated { mss: 1000, sack: true, timestamps: false, ecn: false, window: 100_000, seq: Seq(0) };
    let mut trace = Trace::negotiate(SendOptions::default(), negotiated, 100);
    trace.offload = 64_000;
    assert_eq!(
        trace.write(40_000),
        segments(1, 10_001).chunks(2).map(|two| (two[0].0, two[1].1, "P")).collect::<Vec<_>>()
    );
    trace.now += 100;
    // The window is 15 now. The first unit is late, and half of its time is saved.
    assert_eq!(trace.ack(5001, &[]), [(10_001, 12_001, "P")]);
    assert_eq!(trace.run(), [], "the next one waits");
    // 30 segments in 100 ms: two take 6.7 ms.
    let left: Vec<_> = (0..4).map(|_| trace.expire()).collect();
    let unit = |from| vec![(from, from + 2000, "P")];
    assert_eq!(left, [(4, unit(12_001)), (6, unit(14_001)), (7, unit(16_001)), (7, unit(18_001))]);
    // When nothing is in flight, an initial window leaves at once, and the unit that is due.
    trace.now += 100;
    assert_eq!(trace.ack(20_001, &[]).len(), 6);
}

#[test]
fn the_window_does_not_grow_if_it_is_not_used() {
    let mut trace = Trace::new();
    trace.write(5000);
    trace.now += 100;
    trace.ack(5001, &[]);
    assert_eq!(trace.info().cwnd, 10);
    trace.write(6000);
    trace.now += 100;
    trace.ack(7001, &[]);
    assert_eq!(trace.info().cwnd, 12);
}

#[test]
fn after_an_idle_time_the_window_is_the_first_one_again() {
    for (restart_idle, cwnd) in [(true, 10), (false, 20)] {
        let mut trace = Trace::with(SendOptions { restart_idle, ..SendOptions::default() }, true, 100);
        trace.write(10_000);
        trace.now += 100;
        trace.ack(10_001, &[]);
        assert_eq!(trace.info().cwnd, 20);
        trace.now += 2000;
        assert_eq!(trace.write(30_000).len(), cwnd);
    }
}

#[test]
fn a_window_that_was_closed_for_long_restarts_when_data_leaves_and_not_before() {
    let mut trace = Trace::new();
    trace.write(10_000);
    trace.now += 100;
    trace.give(Trace::plain(10_001, 0));
    assert_eq!((trace.write(30_000), trace.info().cwnd), (vec![], 20));
    for _ in 0..3 {
        trace.expire();
    }
    assert_eq!(trace.info().cwnd, 20);
    assert_eq!(trace.give(Trace::plain(10_001, 100_000)).len(), 10);
}

#[test]
fn with_offload_half_of_the_window_leaves_at_once_in_whole_segments() {
    let mut trace = Trace::new();
    trace.offload = 65_000;
    assert_eq!(trace.write(30_500), [(1, 5001, "P"), (5001, 10_001, "P")]);
    trace.now += 100;
    assert_eq!(trace.ack(10_001, &[]), [(10_001, 20_001, "P"), (20_001, 30_001, "P")]);
    trace.now += 100;
    assert_eq!(trace.ack(30_001, &[]), [(30_001, 30_501, "P")]);
}

#[test]
fn a_part_of_a_large_transmission_is_acknowledged_and_repeated_in_segments() {
    let mut trace = Trace::new();
    trace.offload = 65_000;
    trace.write(10_000);
    trace.now += 100;
    assert_eq!(trace.ack(1001, &[(2001, 5001)]), [(1001, 2001, "")]);
    let info = trace.info();
    assert_eq!((info.unacked, info.sacked, info.lost, info.retrans), (9, 3, 1, 1));
}

/// What is missing of a large transmission leaves as one again, as far as the congestion window
/// admits. It leaves in segments where the device still has some of its copy.
#[test]
fn what_is_missing_leaves_in_units() {
    let lost = |pending| {
        let mut trace = Trace::new();
        (trace.offload, trace.pending) = (65_000, pending);
        trace.write(30_000);
        for ticket in &trace.tickets {
            ticket.finish_first(1);
        }
        trace.now += 100;
        trace.ack(1, &[(5001, 10_001)])
    };
    assert_eq!(lost(false), [(1, 5001, "P")]);
    assert_eq!(lost(true)[0], (1, 1001, ""));
}

// Small segments

#[test]
fn a_small_segment_waits_while_another_is_on_the_way() {
    let mut trace = Trace::new();
    assert_eq!(trace.write(10), [(1, 11, "P")]);
    assert_eq!(trace.write(20), []);
    assert_eq!(trace.write(1000), [(11, 1011, "")], "a whole segment does not wait");
    trace.now += 100;
    assert_eq!(trace.ack(11, &[]), [(1011, 1031, "P")]);
    trace.sender.set_nodelay(true);
    assert_eq!(trace.write(5), [(1031, 1036, "P")]);
}

#[test]
fn fin_does_not_wait() {
    let mut trace = Trace::new();
    trace.write(10);
    trace.write(20);
    trace.sender.finish();
    assert_eq!(trace.run(), [(11, 32, "FP")]);
    assert!(trace.sender.is_fin_sent() && !trace.sender.is_idle());
    trace.now += 100;
    let acked = trace.sender.handle_ack(&Trace::plain(32, 1000), trace.time());
    assert_eq!(acked, Acked { bytes: 30, fin: true, syn: false, writable: false });
    assert!(trace.sender.is_idle() && trace.sender.is_fin_acked());
}

#[test]
fn fin_does_not_wait_for_the_congestion_window_and_is_the_tail_that_is_probed() {
    let mut trace = Trace::new();
    trace.write(10_000);
    trace.now += 10;
    trace.sender.finish();
    assert_eq!(trace.run(), [(10_001, 10_002, "F")]);
    assert_eq!(trace.expire().1, [(10_001, 10_002, "F")]);
    let mut trace = Trace::new();
    trace.write(10_001);
    trace.sender.finish();
    assert_eq!(trace.run(), [], "there is data before it");
}

#[test]
fn a_cork_holds_a_small_segment_until_it_is_out_or_the_timer_expires() {
    let mut trace = Trace::new();
    trace.sender.set_cork(true);
    assert_eq!(trace.write(40), []);
    trace.sender.set_cork(false);
    assert_eq!(trace.run(), [(1, 41, "P")]);
    trace.now += 100;
    trace.ack(41, &[]);
    trace.sender.send(SharedBytes::numbered(41, 40), true).unwrap();
    assert_eq!(trace.run(), []);
    assert_eq!(trace.expire(), (300, vec![(41, 81, "P")]));
    trace.ack(81, &[]);
    trace.sender.set_cork(true);
    assert_eq!(trace.write(40), []);
    trace.sender.set_nodelay(true);
    assert_eq!(trace.run(), [(81, 121, "P")]);
}

// The peer's window

#[test]
fn the_peer_is_asked_for_its_window_in_growing_intervals() {
    let mut trace = Trace::new();
    trace.write(1000);
    trace.now += 100;
    trace.give(Trace::plain(1001, 0));
    assert_eq!(trace.write(2000), []);
    assert_eq!(trace.expire(), (300, vec![(1000, 1000, "")]));
    assert_eq!(trace.expire(), (600, vec![(1000, 1000, "")]));
    assert_eq!(trace.expire(), (1200, vec![(1000, 1000, "")]));
    assert_eq!(trace.info().probes, 3);
    trace.give(Trace::plain(1001, 0));
    assert_eq!(trace.info().probes, 0, "the peer lives");
    assert_eq!(trace.expire(), (2400, vec![(1000, 1000, "")]), "and is asked less often nevertheless");
    assert_eq!(trace.give(Trace::plain(1001, 1500)), [(1001, 2001, "")]);
    assert_eq!(trace.ack(2001, &[]), [(2001, 3001, "P")]);
}

/// The peer had no memory for payload that it had promised to accept.
#[test]
fn a_window_that_is_taken_back_is_asked_for_in_growing_intervals_as_long_as_the_peer_answers() {
    let mut trace = Trace::new();
    trace.write(1000);
    let mut last = 0;
    for n in 0..40 {
        let (after, sent) = trace.expire();
        assert_eq!(sent.last().map(|sent| sent.0), Some(1), "{n}");
        // The first transmission can be a tail loss probe.
        assert!(n < 2 || after > last || after == 120_000, "{n}: {after} after {last}");
        last = after;
        trace.give(Trace::plain(1, 0));
    }
    trace.give(Trace::plain(1, 5000));
    let mut silent = 0;
    while let Some(deadline) = trace.sender.poll_timeout().filter(|_| silent < 100) {
        trace.now = deadline.micros().div_ceil(1000);
        if trace.sender.handle_timeout(trace.time()).is_err() {
            break;
        }
        trace.run();
        silent += 1;
    }
    assert_eq!(silent, 15, "then it is silent");
}

#[test]
fn a_small_window_is_used_only_when_it_stays_small() {
    let mut trace = Trace::new();
    trace.write(1000);
    trace.now += 100;
    trace.give(Trace::plain(1001, 10));
    assert_eq!(trace.write(1000), []);
    assert_eq!(trace.expire(), (300, vec![(1001, 1011, "P")]));
}

#[test]
fn an_old_segment_does_not_set_the_window() {
    let mut trace = Trace::new();
    trace.write(5000);
    trace.give(Ack { seq: Seq(50), ..Trace::plain(1001, 7000) });
    assert_eq!(trace.sender.window(), 7000);
    trace.give(Ack { seq: Seq(40), ..Trace::plain(1001, 9000) });
    assert_eq!(trace.sender.window(), 7000);
    trace.give(Ack { seq: Seq(50), ..Trace::plain(1001, 8000) });
    assert_eq!(trace.sender.window(), 8000);
}

#[test]
fn segments_are_half_of_a_window_that_is_smaller_than_two() {
    let negotiated = Negotiated { mss: 1000, sack: true, timestamps: false, ecn: false, window: 1200, seq: Seq(0) };
    let mut trace = Trace::negotiate(SendOptions::default(), negotiated, 100);
    assert_eq!(trace.write(1800), [(1, 601, ""), (601, 1201, "")]);
}

// SYN and the ends

#[test]
fn syn_is_repeated_and_the_first_window_is_one_segment_then() {
    let options = SendOptions { syn_retries: 2, ..SendOptions::default() };
    let mut trace =
        Trace { sender: Sender::new(Seq(0), 1460, options), now: 0, pending: false, tickets: vec![], offload: 0 };
    assert_eq!(trace.run(), [(0, 1, "S")]);
    assert_eq!(trace.expire(), (1000, vec![(0, 1, "S")]));
    assert_eq!(trace.expire(), (2000, vec![(0, 1, "S")]));
    let negotiated = Negotiated { mss: 1000, sack: true, timestamps: false, ecn: false, window: 100_000, seq: Seq(0) };
    trace.sender.handle_ack(&Trace::plain(1, 100_000), trace.time());
    trace.sender.establish(&negotiated, trace.time());
    assert_eq!((trace.write(5000), trace.info().rto), (segments(1, 1001), Duration::from_secs(3)));
    let mut trace =
        Trace { sender: Sender::new(Seq(0), 1460, options), now: 0, pending: false, tickets: vec![], offload: 0 };
    trace.run();
    trace.expire();
    trace.expire();
    trace.now += 4000;
    assert_eq!(trace.sender.handle_timeout(trace.time()), Err(TimedOut(Duration::from_secs(7))));
}

#[test]
fn data_that_is_never_acknowledged_ends_the_connection() {
    let mut trace = Trace::with(SendOptions { retries: 3, tail_probes: false, ..SendOptions::default() }, true, 100);
    trace.write(1000);
    for _ in 0..3 {
        trace.expire();
    }
    trace.now += 10_000;
    assert!(trace.sender.handle_timeout(trace.time()).is_err());
}

#[test]
fn the_user_timeout_ends_it_exactly() {
    let user_timeout = Some(Duration::from_secs(3));
    for window in [0, 100_000] {
        let mut trace = Trace::with(SendOptions { user_timeout, ..SendOptions::default() }, true, 100);
        trace.give(Trace::plain(1, window));
        trace.write(1000);
        let start = trace.now;
        let error = loop {
            trace.now = trace.sender.poll_timeout().unwrap().micros().div_ceil(1000);
            if let Err(error) = trace.sender.handle_timeout(trace.time()) {
                break error;
            }
            trace.run();
        };
        assert_eq!((trace.now - start, error.0), (3000, Duration::from_secs(3)), "window {window}");
    }
}

// The ring and the buffer

#[test]
fn a_range_is_not_repeated_while_its_copy_is_in_the_ring() {
    let mut trace = Trace::new();
    trace.pending = true;
    trace.write(10_000);
    trace.now += 100;
    assert_eq!(trace.ack(1, &[(1001, 4001)]), []);
    assert!(trace.sender.waits_for_ring());
    trace.tickets[1].finish();
    assert_eq!(trace.run(), [(1, 1001, "")]);
    assert!(!trace.sender.waits_for_ring());
}

#[test]
fn the_user_timeout_runs_while_the_device_takes_nothing() {
    let user_timeout = Some(Duration::from_secs(3));
    let mut trace = Trace::with(SendOptions { user_timeout, ..SendOptions::default() }, true, 100);
    trace.sender.send(SharedBytes::numbered(1, 1000), false).unwrap();
    assert!(trace.sender.poll_transmit(trace.time(), 0).is_some());
    assert_eq!(trace.sender.poll_timeout(), Some(trace.time() + Duration::from_secs(3)));
    trace.now += 3000;
    assert!(trace.sender.handle_timeout(trace.time()).is_err());
}

#[test]
fn one_connection_does_not_fill_the_ring() {
    let mut trace = Trace::with(SendOptions { ring_bytes: 3000, ..SendOptions::default() }, true, 100);
    trace.pending = true;
    assert_eq!(trace.write(10_000), segments(1, 3001));
    assert!(trace.sender.waits_for_ring());
    trace.tickets.iter().for_each(Done::finish);
    assert_eq!(trace.run(), segments(3001, 6001));
}

#[test]
fn the_send_buffer_has_a_limit_and_says_when_there_is_room() {
    let mut trace =
        Trace::with(SendOptions { send_buffer: 20_000, low_water: 12_000, ..SendOptions::default() }, true, 100);
    trace.write(15_000);
    assert!(!trace.sender.is_writable());
    trace.write(10_000);
    assert_eq!(trace.sender.room(), 0);
    assert!(trace.sender.send(SharedBytes::numbered(0, 1), false).is_err());
    trace.now += 100;
    assert!(!trace.sender.handle_ack(&Trace::plain(5001, 100_000), trace.time()).writable, "fifteen of twenty");
    trace.run();
    assert!(trace.sender.handle_ack(&Trace::plain(12_001, 100_000), trace.time()).writable);
}

// The size of segments

#[test]
fn a_path_that_takes_less_gets_smaller_segments_and_the_window_stays() {
    let mut trace = Trace::new();
    trace.write(4000);
    assert!(!trace.sender.handle_too_big(Seq(9000), 600, trace.time()), "not in flight");
    assert!(!trace.sender.handle_too_big(Seq(1), 1460, trace.time()), "not smaller");
    assert!(trace.sender.handle_too_big(Seq(1), 100, trace.time()));
    assert_eq!((trace.info().segment_size, trace.info().cwnd), (512, 10), "the floor");
    let left = trace.run();
    assert_eq!((left[0], left[1], left.len()), ((1, 513, ""), (513, 1001, ""), 8));
    trace.now += 100;
    trace.ack(4001, &[]);
    assert_eq!((trace.info().state, trace.info().unacked), (RecoveryState::Open, 0));
}

#[test]
fn a_larger_segment_is_tried_and_used_if_it_arrives() {
    for arrives in [true, false] {
        let options = SendOptions { mtu_probing: true, initial_window: 11, ..SendOptions::default() };
        let mut sender = Sender::new(Seq(0), 600, options);
        sender.set_max_payload(600);
        let mut trace = Trace { sender, now: 0, pending: false, tickets: vec![], offload: 0 };
        trace.run();
        trace.now = 100;
        let negotiated =
            Negotiated { mss: 1460, sack: true, timestamps: false, ecn: false, window: 50_000, seq: Seq(0) };
        trace.sender.establish(&negotiated, trace.time());
        trace.ack(1, &[]);
        trace.sender.set_max_payload(1460);
        let left = trace.write(4000);
        assert_eq!((left[0], left[1], left.len()), ((1, 987, ""), (987, 1587, ""), 7));
        trace.now += 100;
        if arrives {
            trace.ack(4001, &[]);
            assert_eq!(trace.info().segment_size, 986);
        } else {
            assert_eq!(trace.ack(1, &[(987, 4001)]), [(1, 601, ""), (601, 987, "")]);
            let info = trace.info();
            assert_eq!((info.segment_size, info.cwnd, info.ssthresh), (600, 11, 11));
        }
    }
}

// A sender is a value

#[test]
fn a_sender_goes_on_from_saved_numbers() {
    let mut trace = Trace::new();
    trace.write(15_000);
    trace.now += 100;
    trace.ack(2501, &[]);
    trace.sender.finish();
    let saved = trace.sender.save().expect("it is established");
    let chunks: Vec<_> = trace.sender.chunks().cloned().collect();
    assert_eq!(chunks, [SharedBytes::numbered(2501, 12_500)]);
    trace.sender = Sender::restore(&saved, chunks, SendOptions::default(), trace.time());
    assert_eq!((trace.run(), trace.info().unacked, trace.info().rto), (vec![], 12, Duration::from_millis(300)));
    assert_eq!(trace.sender.save().map(|again| (again.una, again.nxt)), Some((saved.una, saved.nxt)));
    trace.now += 500;
    assert_eq!(trace.ack(9501, &[]).first(), Some(&(14_001, 15_002, "FP")));
    assert_eq!(trace.info().rtt, Duration::from_millis(100), "what was sent before gives no sample");
    assert_eq!(trace.expire().1, [(15_001, 15_002, "F")]);
    assert_eq!(trace.expire().1, [(9501, 10_501, "")]);
    trace.ack(15_002, &[]);
    assert!(trace.sender.is_idle() && trace.sender.is_fin_acked());
}

/// A connection that has sent 2^31 bytes or more goes on: the first number no longer has an order
/// with the present ones.
#[test]
fn the_first_number_is_forgotten() {
    for sent in [1 << 30, 1 << 31, 3 << 30, u32::MAX] {
        let mut trace = Trace::new();
        trace.sender.iss = Seq(0) - sent;
        assert_eq!(trace.write(1000), [(1, 1001, "P")], "after {sent} bytes");
    }
}
