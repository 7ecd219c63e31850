//! Ranges that arrived twice (D-SACK, RFC 2883, section 4).

use super::*;
use crate::tcp::testing::Pair;
use crate::tcp::{Config, Flags, Header};

/// Segments (first byte, bytes, FIN) arrive, and the last one is in order. Returns the range
/// that is reported.
fn duplicate_after(segments: &[(u32, u32, bool)]) -> Option<(u32, u32)> {
    let mut receiver = receiver(10_000, 1000, LocalBudget::within(100, None));
    for (n, (from, len, fin)) in segments.iter().enumerate() {
        assert_eq!(receiver.duplicate, None, "segment {n}");
        accept(&mut receiver, *from, *len, *fin);
    }
    let reported = receiver.sack().first().map(|(from, to)| (*from - START, *to - START));
    let duplicate = receiver.duplicate.map(|(from, to)| (from - START, to - START));
    assert!(duplicate.is_none() || duplicate == reported);
    duplicate
}

/// RFC 2883, section 4.
#[test]
fn payload_that_fills_a_gap_and_was_stored_in_part_is_a_duplicate() {
    assert_eq!(duplicate_after(&[(1000, 1000, false), (0, 1460, false)]), Some((1000, 1460)));
    assert_eq!(duplicate_after(&[(1000, 1000, false), (0, 1000, false)]), None);
    assert_eq!(duplicate_after(&[(1000, 1000, false), (0, 3000, false)]), Some((1000, 2000)));
    let gaps = [(500, 100, false), (1000, 500, false), (2000, 500, false)];
    let with = |last: (u32, u32, bool)| duplicate_after(&[&gaps[..], &[last]].concat());
    assert_eq!(with((0, 3000, false)), Some((500, 600)), "the first of several");
    assert_eq!(with((0, 550, false)), Some((500, 550)));
    assert_eq!(with((1000, 600, false)), Some((1000, 1500)), "out of order");
    assert_eq!(duplicate_after(&[(0, 500, false), (1000, 500, false), (400, 700, false)]), Some((400, 500)));
    // FIN has a number, too.
    assert_eq!(duplicate_after(&[(1000, 500, true), (0, 1500, true)]), Some((1000, 1501)));
    assert_eq!(duplicate_after(&[(1000, 0, true), (0, 1000, true)]), Some((1000, 1001)));
    assert_eq!(duplicate_after(&[(1000, 500, false), (0, 1500, true)]), Some((1000, 1500)), "FIN is new");
    assert_eq!(duplicate_after(&[(500, 100, true), (0, 600, true)]), Some((500, 601)));
}

#[test]
fn duplicates_of_merged_segments_are_one_range() {
    let mut receiver = receiver(10_000, 1000, LocalBudget::within(100, None));
    accept(&mut receiver, 1000, 800, false);
    let merged = [(0, 1200), (1200, 1200)].map(|(from, len)| SharedBytes::numbered((START + from).0, len));
    receiver.accept(START, 2400, merged.into_iter(), false);
    assert_eq!((receiver.duplicate, receiver.nxt()), (Some((START + 1000, START + 1800)), START + 2400));
}

#[test]
fn a_segment_that_ends_behind_a_closed_window_reports_what_is_known() {
    let mut receiver = receiver(1000, 1000, LocalBudget::within(100, None));
    accept(&mut receiver, 0, 1000, false);
    assert!(!receiver.is_acceptable(START + 900, 101));
    receiver.note_repeated(START + 900, START + 1001);
    assert_eq!(receiver.duplicate, Some((START + 900, START + 1000)));
}

/// The reported range is the first one of the segment's numbers that had arrived before.
#[test]
fn any_duplicate_is_reported() {
    for seed in 0..2000 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut receiver = receiver(10_000, 100, LocalBudget::within(1000, None));
        let mut known = [false; 1001];
        for _ in 0..40 {
            let from = random.u32(0..1000);
            let len = if random.u8(0..4) == 0 { 1000 - from } else { random.u32(1..=(1000 - from).min(200)) };
            let fin = from + len == 1000;
            let in_order = receiver.nxt() - START;
            if in_order > 1000 {
                break;
            }
            accept(&mut receiver, from, len, fin);
            let (from, end) = (from as usize, (from + len) as usize);
            let first = (from..end).find(|n| known[*n]);
            let run = first.map(|first| (first, (first..end).find(|n| !known[*n]).unwrap_or(end)));
            known[from..end].fill(true);
            // FIN is reported if it comes in order, and was known.
            let again = fin && known[1000] && receiver.finished();
            known[1000] |= fin;
            let expected = match run {
                Some((first, 1000)) if again => Some((first, 1001)),
                None if again => Some((1000, 1001)),
                run => run,
            };
            let reported = receiver.duplicate.map(|(from, to)| ((from - START) as usize, (to - START) as usize));
            assert_eq!(reported, expected, "seed {seed}");
            receiver.note_reported();
        }
    }
}

#[test]
fn a_gap_that_is_filled_twice_is_reported_behind_the_acknowledgement() {
    let config = Config { timestamps: false, ..Config::default() };
    let mut pair = Pair::connected(&config, &config);
    let first = pair.header_of_a(Flags::ACK);
    pair.b.answer_text(Header { seq: first.seq + 1000, ..first }, 1000, pair.now);
    let answer = pair.b.answer_text(first, 1460, pair.now).remove(0).header;
    assert_eq!(answer.ack, first.seq + 2000);
    assert_eq!(*answer.options.sack, [(first.seq + 1000, first.seq + 1460)]);
}
