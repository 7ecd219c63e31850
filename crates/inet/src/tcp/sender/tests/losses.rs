//! Losses and congestion marks: how they are found, repaired, and undone when nothing was lost.

use super::*;

#[test]
fn three_segments_behind_a_hole_begin_a_recovery() {
    let mut trace = Trace::new();
    trace.write(10_000);
    trace.now += 100;
    assert_eq!(trace.ack(1, &[(1001, 2001)]), []);
    assert_eq!(trace.info().state, RecoveryState::Disorder);
    assert_eq!(trace.ack(1, &[(1001, 3001)]), []);
    assert_eq!(trace.ack(1, &[(1001, 4001)]), [(1, 1001, "")]);
    let info = trace.info();
    assert_eq!((info.state, info.cwnd, info.ssthresh, info.lost, info.retrans), (RecoveryState::Recovery, 7, 7, 1, 1));
    trace.write(7000);
    for n in 0..6 {
        assert_eq!(
            trace.ack(1, &[(1001, 5001 + n * 1000)]),
            segments(10_001 + n * 1000, 11_001 + n * 1000),
            "one for one"
        );
    }
    assert_eq!(trace.ack(10_001, &[]), [(16_001, 17_001, "P")]);
    let info = trace.info();
    assert_eq!((info.state, info.cwnd, info.ssthresh), (RecoveryState::Open, 7, 7));
}

#[test]
fn the_first_two_duplicates_let_new_segments_leave() {
    for sack in [true, false] {
        let mut trace = Trace::with(SendOptions::default(), sack, 100);
        trace.write(15_000);
        trace.now += 110;
        let blocks: &[_] = if sack { &[(1001, 2001)] } else { &[] };
        assert_eq!(trace.ack(1, blocks), segments(10_001, 11_001));
        let blocks: &[_] = if sack { &[(1001, 3001)] } else { &[] };
        assert_eq!(trace.ack(1, blocks), segments(11_001, 12_001));
        // The segment was reordered. One segment arrived now, and the window grows by it.
        assert_eq!(trace.ack(3001, &[]), segments(12_001, 14_001));
        assert_eq!((trace.info().state, trace.info().cwnd), (RecoveryState::Open, 11));
    }
}

#[test]
fn without_selective_acknowledgements_each_hole_is_found_by_the_next_acknowledgement() {
    let mut trace = Trace::with(SendOptions::default(), false, 100);
    trace.write(10_000);
    trace.now += 100;
    // The first and the fourth segment are lost.
    assert_eq!((trace.ack(1, &[]), trace.ack(1, &[])), (vec![], vec![]));
    assert_eq!(trace.ack(1, &[]), [(1, 1001, "")]);
    for _ in 0..5 {
        trace.ack(1, &[]);
    }
    trace.now += 100;
    assert_eq!(trace.ack(3001, &[]), [(3001, 4001, "")]);
    assert_eq!(trace.info().state, RecoveryState::Recovery);
    trace.now += 100;
    trace.ack(10_001, &[]);
    trace.write(1000);
    trace.ack(11_001, &[]);
    assert_eq!((trace.info().state, trace.info().cwnd), (RecoveryState::Open, 7));
}

#[test]
fn a_segment_behind_the_last_is_waited_for_by_a_quarter_of_the_round_trip() {
    let mut trace = Trace::new();
    trace.write(4000);
    trace.now += 100;
    assert_eq!(trace.ack(1, &[(3001, 4001)]), []);
    assert_eq!(trace.expire(), (25, vec![(1, 1001, "")]));
    let info = trace.info();
    assert_eq!((info.state, info.lost), (RecoveryState::Recovery, 3));
}

#[test]
fn a_lost_retransmission_is_sent_again_before_the_timer() {
    let mut trace = Trace::new();
    trace.write(20_000);
    trace.now += 100;
    assert_eq!(trace.ack(1, &[(1001, 4001)]), [(1, 1001, "")]);
    trace.now += 10;
    let left = trace.ack(1, &[(1001, 10_001)]);
    assert!(!left.is_empty() && left[0].0 == 10_001);
    trace.now += 100;
    // Segments that were sent after the retransmission arrived, and the retransmission did not.
    assert_eq!(trace.ack(1, &[(1001, 11_001)])[0], (1, 1001, ""));
}

#[test]
fn the_last_segment_is_repeated_after_two_round_trips_and_then_the_timer_runs() {
    let mut trace = Trace::new();
    trace.write(4000);
    assert_eq!(trace.expire(), (202, vec![(3001, 4001, "P")]));
    assert_eq!(trace.expire(), (300, vec![(1, 1001, "")]));
    let info = trace.info();
    assert_eq!((info.state, info.cwnd, info.ssthresh), (RecoveryState::Loss, 1, 7));
    assert_eq!(trace.expire(), (600, vec![(1, 1001, "")]));
    assert_eq!(trace.expire(), (1200, vec![(1, 1001, "")]));
}

#[test]
fn a_probe_is_new_data_if_there_is_some() {
    let mut trace = Trace::new();
    trace.write(20_000);
    assert_eq!(trace.expire().1, segments(10_001, 11_001), "beyond the congestion window");
}

#[test]
fn a_probe_that_repaired_a_loss_costs_a_part_of_the_window() {
    let (repaired, both): (&[_], &[_]) = (&[], &[(3001, 4001)]);
    for (blocks, cwnd) in [(repaired, 7), (both, 10)] {
        let mut trace = Trace::new();
        trace.write(4000);
        trace.now += 100;
        trace.ack(3001, &[]);
        assert_eq!(trace.expire().1, [(3001, 4001, "P")]);
        trace.now += 100;
        trace.ack(4001, blocks);
        trace.write(1000);
        trace.now += 100;
        trace.ack(5001, &[]);
        assert_eq!((trace.info().cwnd, trace.info().state), (cwnd, RecoveryState::Open));
    }
}

#[test]
fn after_a_timeout_everything_is_sent_again_in_slow_start() {
    let mut trace = Trace::with(SendOptions { tail_probes: false, ..SendOptions::default() }, true, 100);
    trace.write(4000);
    assert_eq!(trace.expire(), (300, vec![(1, 1001, "")]));
    trace.now += 100;
    assert_eq!(trace.ack(1001, &[]), segments(1001, 3001));
    trace.now += 100;
    assert_eq!(trace.ack(3001, &[]), [(3001, 4001, "P")]);
    assert_eq!(trace.info().cwnd, 4);
}

#[test]
fn what_was_sent_twice_gives_no_round_trip_time() {
    let mut trace = Trace::with(SendOptions { tail_probes: false, ..SendOptions::default() }, true, 100);
    trace.write(3000);
    trace.expire();
    trace.now += 10;
    trace.ack(3001, &[]);
    assert_eq!(trace.info().rtt, Duration::from_millis(100));
    trace.write(3000);
    trace.now += 180;
    trace.ack(6001, &[]);
    assert_eq!(trace.info().rtt, Duration::from_millis(110));
}

#[test]
fn a_timeout_is_taken_back_if_what_was_never_repeated_arrives() {
    let mut trace = Trace::with(SendOptions { tail_probes: false, ..SendOptions::default() }, true, 100);
    trace.write(14_000);
    assert_eq!(trace.expire().1, [(1, 1001, "")]);
    // F-RTO: the first acknowledgement lets new data leave instead of retransmissions.
    assert_eq!(trace.ack(1001, &[]), segments(10_001, 12_001));
    // The next acknowledgement is of a segment that was sent once.
    trace.ack(2001, &[]);
    let info = trace.info();
    assert_eq!((info.state, info.lost, info.ssthresh), (RecoveryState::Open, 0, Window::UNKNOWN));
    assert!(info.cwnd >= 10);
}

#[test]
fn a_recovery_is_taken_back_if_the_peer_has_everything_twice() {
    let mut trace = Trace::new();
    trace.write(10_000);
    trace.now += 100;
    assert_eq!(trace.ack(1, &[(1001, 4001)]), [(1, 1001, "")]);
    trace.now += 10;
    trace.ack(10_001, &[]);
    assert_eq!(trace.info().cwnd, 7);
    let mut trace = Trace::new();
    trace.write(20_000);
    trace.now += 100;
    assert_eq!(trace.ack(1, &[(1001, 4001)]), [(1, 1001, "")]);
    trace.now += 10;
    trace.ack(5001, &[]);
    assert_eq!(trace.info().state, RecoveryState::Recovery);
    trace.ack(5001, &[(1, 1001)]);
    let info = trace.info();
    assert_eq!((info.state, info.ssthresh, info.duplicates), (RecoveryState::Open, Window::UNKNOWN, 1));
    assert!(info.cwnd >= 10);
}

#[test]
fn a_recovery_is_taken_back_by_an_older_timestamp() {
    let negotiated = Negotiated { mss: 1012, sack: true, timestamps: true, ecn: false, window: 100_000, seq: Seq(0) };
    for (echo, taken_back) in [(1150, true), (1201, false)] {
        let mut trace = Trace::negotiate(SendOptions::default(), negotiated, 100);
        trace.write(10_000);
        trace.now += 100;
        assert_eq!(trace.ack(1, &[(1001, 4001)]), [(1, 1001, "")]);
        trace.now += 10;
        trace.give(Ack { echo: Some(echo), ..Trace::plain(10_001, 100_000) });
        assert_eq!(trace.info().ssthresh == Window::UNKNOWN, taken_back);
    }
}

#[test]
fn reordering_is_measured_and_makes_the_sender_wait() {
    let mut trace = Trace::new();
    trace.write(10_000);
    trace.now += 100;
    trace.ack(1, &[(9001, 10_001)]);
    trace.ack(1, &[(3001, 4001), (9001, 10_001)]);
    trace.ack(10_001, &[]);
    let info = trace.info();
    assert_eq!((info.reordering, info.reordered), (10, 2));
    trace.write(10_000);
    trace.now += 100;
    assert_eq!(trace.ack(10_001, &[(11_001, 16_001)]), [], "five segments are not enough now");
    assert_eq!(trace.expire(), (25, vec![(10_001, 11_001, "")]));
}

#[test]
fn selective_acknowledgements_of_an_old_segment_count() {
    let mut trace = Trace::new();
    trace.write(20_000);
    trace.now += 100;
    trace.ack(4001, &[(8001, 9001)]);
    let before = trace.info().sacked;
    trace.ack(3001, &[(5001, 7001)]);
    assert_eq!(trace.info().sacked, before + 2);
}

#[test]
fn blocks_that_make_no_sense_are_ignored() {
    let mut trace = Trace::new();
    trace.write(10_000);
    trace.now += 100;
    trace.ack(1, &[(20_001, 30_001), (5001, 4001), (9001, 10_002), (1, 1)]);
    assert_eq!((trace.info().sacked, trace.info().unacked), (0, 10));
    trace.give(Trace::plain(20_001, 1));
    assert_eq!(trace.sender.una(), Seq(1), "an acknowledgement of what was not sent");
}

#[test]
fn a_peer_that_forgets_what_it_had_gets_it_again() {
    let mut trace = Trace::with(SendOptions { tail_probes: false, ..SendOptions::default() }, true, 100);
    trace.write(3000);
    trace.now += 100;
    trace.ack(1, &[(1001, 3001)]);
    trace.expire();
    trace.ack(1001, &[]);
    assert_eq!(trace.info().sacked, 2);
    let (_, left) = trace.expire();
    assert_eq!((left, trace.info().sacked), (segments(1001, 2001), 0));
}

// Congestion marks

#[test]
fn a_congestion_mark_shrinks_the_window_once_in_a_round_trip() {
    let negotiated = Negotiated { mss: 1000, sack: true, timestamps: false, ecn: true, window: 100_000, seq: Seq(0) };
    let mut trace = Trace::negotiate(SendOptions::default(), negotiated, 100);
    trace.write(30_000);
    trace.now += 100;
    let mut left = trace.give(Ack { ece: true, ..Trace::plain(1001, 100_000) });
    assert_eq!((trace.info().state, trace.info().ssthresh), (RecoveryState::Cwr, 7));
    for n in 2..=10 {
        left.extend(trace.give(Ack { ece: true, ..Trace::plain(n * 1000 + 1, 100_000) }));
    }
    assert_eq!(trace.info().ssthresh, 7, "the same congestion");
    assert_eq!(left.iter().filter(|(.., flags)| *flags == "W").count(), 1, "CWR is said once: {left:?}");
    assert!(trace.info().cwnd <= 8);
}

#[test]
fn a_congestion_mark_that_was_not_agreed_on_is_ignored() {
    let mut trace = Trace::new();
    trace.write(10_000);
    trace.now += 100;
    trace.give(Ack { ece: true, ..Trace::plain(1001, 100_000) });
    assert_eq!((trace.info().state, trace.info().cwnd), (RecoveryState::Open, 11));
}

#[test]
fn four_segments_and_a_mark() {
    let negotiated = Negotiated { mss: 1000, sack: true, timestamps: false, ecn: true, window: 100_000, seq: Seq(0) };
    let mut trace = Trace::negotiate(SendOptions::default(), negotiated, 100);
    trace.write(4000);
    trace.now += 100;
    trace.give(Ack { ece: true, ..Trace::plain(1001, 100_000) });
    assert_eq!((trace.info().state, trace.info().cwnd), (RecoveryState::Cwr, 4));
}
