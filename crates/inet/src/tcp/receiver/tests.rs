//! The receiver on its own: what it stores, acknowledges and announces.

use super::*;
use crate::tcp::testing::SharedBytes;
use std::time::Duration;

mod duplicates;

const START: Seq = Seq(u32::MAX - 999);

fn receiver(most: u32, mss: u32, budget: LocalBudget) -> Receiver<SharedBytes> {
    let mut receiver = Receiver::new(most, true, mss, budget);
    receiver.open(START - 1, true, None);
    receiver
}

fn accept(receiver: &mut Receiver<SharedBytes>, from: u32, len: u32, fin: bool) -> Arrival {
    let seq = START + from;
    receiver.accept(seq, len, std::iter::once(SharedBytes::numbered(seq.0, len)), fin)
}

/// The buffers of a joined segment are counted as those of its chunks one by one, also if the
/// window ends within it, or if not all of them are free.
#[test]
fn buffers_of_a_joined_segment_are_counted_together_and_each_for_itself() {
    let joined = |receiver: &mut Receiver<SharedBytes>, chunks: u32| {
        let payload: Vec<_> = (0..chunks).map(|n| SharedBytes::numbered((receiver.nxt + n * 100).0, 100)).collect();
        receiver.accept(receiver.nxt, chunks * 100, payload.into_iter(), false)
    };
    for (limit, window, stored) in [(64, 4096, 10), (64, 450, 5), (6, 4096, 6)] {
        let budget = LocalBudget::within(limit, None);
        let mut receiver = receiver(window, 100, budget.clone());
        joined(&mut receiver, 10);
        assert_eq!((receiver.queue.len(), budget.used()), (stored, stored as u32), "{limit} buffers, {window} bytes");
        let mut held: Vec<_> = std::iter::from_fn(|| receiver.read(Time::ZERO, 0)).collect();
        held.truncate(3);
        assert_eq!(budget.used(), 3, "each chunk is returned by its own drop");
        drop(held);
        assert_eq!(budget.used(), 0);
    }
}

/// Sends an acknowledgement, and returns the number of bytes that the peer may send from `nxt`
/// on.
fn advertise(receiver: &mut Receiver<SharedBytes>) -> u32 {
    let (units, edge) = receiver.window(false);
    receiver.note_promised(edge);
    u32::from(units) << receiver.scale
}

fn read(receiver: &mut Receiver<SharedBytes>) -> Option<Held<SharedBytes>> {
    receiver.read(Time::ZERO, 1_000_000)
}

#[test]
fn payload_beyond_the_window_is_trimmed() {
    let mut receiver = receiver(1000, 100, LocalBudget::within(100, None));
    let arrival = accept(&mut receiver, 0, 1500, true);
    assert_eq!((arrival.readable, arrival.dropped, arrival.finished), (1000, 500, false));
    assert_eq!(advertise(&mut receiver), 0);
    assert_eq!(accept(&mut receiver, 1000, 1, false).readable, 0);
}

#[test]
fn fin_waits_for_the_payload_before_it() {
    let mut receiver = receiver(1000, 100, LocalBudget::within(100, None));
    assert!(!accept(&mut receiver, 100, 50, true).finished);
    assert!(!accept(&mut receiver, 150, 50, false).finished, "there is nothing behind FIN");
    let arrival = accept(&mut receiver, 0, 100, false);
    assert_eq!((arrival.readable, arrival.finished, receiver.nxt()), (150, true, START + 151));
    assert!(!accept(&mut receiver, 150, 0, true).finished, "FIN counts once");
    assert_eq!(receiver.read_position(), START);
}

/// The window that the peer sees never withdraws promised bytes, and never admits more than
/// the buffer.
#[test]
fn the_right_edge_never_moves_back() {
    for seed in 0..200 {
        let mut random = fastrand::Rng::with_seed(seed);
        let most = random.u32(2000..400_000);
        let mut receiver = receiver(most, 1000, LocalBudget::within(1_000_000, None));
        let (mut edge, mut sent, mut taken) = (0, 0, 0);
        for _ in 0..500 {
            match random.u8(0..3) {
                0 if sent < edge => {
                    let len = random.u32(1..=(edge - sent).min(3000));
                    assert_eq!(accept(&mut receiver, sent, len, false).readable, len, "seed {seed}");
                    sent += len;
                }
                1 => taken += read(&mut receiver).map_or(0, |chunk| chunk.len() as u32),
                _ => {
                    let window = advertise(&mut receiver);
                    let unit = 1 << receiver.scale;
                    assert!(sent + window + unit > edge, "seed {seed}: {sent} {window} {edge}");
                    edge = edge.max(sent + window);
                    assert!(edge <= taken + most + unit, "seed {seed}: {edge} {taken} {most}");
                }
            }
        }
    }
}

#[test]
fn rounding_takes_nothing_back() {
    let mut receiver = receiver(400_000, 1000, LocalBudget::within(1_000_000, None));
    let edge = advertise(&mut receiver);
    accept(&mut receiver, 0, 1, false);
    assert!(receiver.scale > 0 && 1 + advertise(&mut receiver) >= edge);
}

#[test]
fn the_window_opens_by_a_segment_at_least() {
    let mut receiver = receiver(10_000, 1000, LocalBudget::within(100, None));
    for n in 0..100 {
        accept(&mut receiver, n * 100, 100, false);
    }
    assert_eq!(advertise(&mut receiver), 0);
    for n in 1..10 {
        read(&mut receiver);
        assert_eq!((advertise(&mut receiver), receiver.update_is_due()), (0, false), "{n}00 bytes are a silly window");
    }
    read(&mut receiver);
    assert!(receiver.update_is_due());
    assert_eq!(advertise(&mut receiver), 1000);
}

#[test]
fn the_window_follows_what_is_read_in_a_round_trip() {
    let mut receiver: Receiver<SharedBytes> = Receiver::new(1 << 18, false, 1000, LocalBudget::within(10_000, None));
    receiver.open(START - 1, true, None);
    let (mut now, mut sent, mut first) = (Time::ZERO, 0, None);
    for _ in 0..8 {
        let window = advertise(&mut receiver);
        first.get_or_insert(window);
        accept(&mut receiver, sent, window, false);
        sent += window;
        now += Duration::from_millis(10);
        while receiver.read(now, 10_000).is_some() {}
    }
    let wide = advertise(&mut receiver);
    assert!(first <= Some(FIRST_WINDOW) && wide > 260_000, "{first:?} {wide}");
    // If the user reads slowly, the window admits no more than the user reads.
    let mut receiver: Receiver<SharedBytes> = Receiver::new(1 << 18, false, 1000, LocalBudget::within(10_000, None));
    receiver.open(START - 1, true, None);
    for n in 0..30 {
        accept(&mut receiver, n * 1000, 1000, false);
        now += Duration::from_millis(10);
        receiver.read(now, 10_000);
    }
    assert!(advertise(&mut receiver) <= FIRST_WINDOW);
}

/// Where what the user has read is too little for a step, the room makes none, whatever is free.
#[test]
fn a_step_that_is_too_small_is_known_without_the_room() {
    let mut random = fastrand::Rng::with_seed(3);
    let mut known = [0; 2];
    for _ in 0..100_000 {
        let most = *random.choice(&[8, 50, 3000]).unwrap();
        let budget = LocalBudget::within(random.u32(1..8), None);
        let _others = budget.charge_many(random.u32(0..8));
        let mut receiver = receiver(most, random.u32(1..20), budget);
        receiver.capacity = random.u32(0..=most);
        (receiver.queued, receiver.per_buffer) = (random.u32(0..=most), random.u32(1..20));
        let remaining = random.u32(0..=most);
        let cannot = receiver.cannot_advance(remaining);
        let step = receiver.advance_of_room(remaining);
        assert!(
            !cannot || step == 0,
            "{step} of {remaining}, {} {} {}",
            receiver.capacity,
            receiver.queued,
            receiver.mss
        );
        known[usize::from(cannot)] += 1;
    }
    assert!(known.iter().all(|times| *times > 1000), "{known:?}");
}

#[test]
fn duplicates_are_reported_once_and_first() {
    let mut receiver = receiver(10_000, 1000, LocalBudget::within(100, None));
    accept(&mut receiver, 0, 300, false);
    accept(&mut receiver, 500, 100, false);
    accept(&mut receiver, 700, 200, false);
    let blocks = |receiver: &Receiver<SharedBytes>| -> Vec<_> {
        receiver.sack().iter().map(|(from, to)| (*from - START, *to - START)).collect()
    };
    assert_eq!(blocks(&receiver), [(700, 900), (500, 600)]);
    assert!(accept(&mut receiver, 100, 100, false).acknowledge);
    assert_eq!(blocks(&receiver), [(100, 200), (700, 900), (500, 600)]);
    receiver.note_reported();
    assert_eq!(blocks(&receiver), [(700, 900), (500, 600)]);
    accept(&mut receiver, 720, 50, false);
    assert_eq!(blocks(&receiver), [(720, 770), (700, 900), (500, 600)], "the block around it comes second");
    receiver.note_reported();
    accept(&mut receiver, 250, 100, false);
    assert_eq!(blocks(&receiver)[0], (250, 300), "only what is known is a duplicate");
}

#[test]
fn buffers_are_counted_with_those_of_the_user() {
    let mut receiver = receiver(1 << 20, 1000, LocalBudget::within(10, None));
    let held: Vec<_> = (0..10)
        .map(|n| {
            assert_eq!(accept(&mut receiver, n, 1, false).readable, 1);
            read(&mut receiver)
        })
        .collect();
    let arrival = accept(&mut receiver, 10, 1, false);
    assert_eq!((arrival.readable, arrival.dropped, receiver.nxt()), (0, 1, START + 10), "not acknowledged");
    drop(held);
    assert_eq!(accept(&mut receiver, 10, 1, false).readable, 1);
}

#[test]
fn out_of_order_payload_goes_first() {
    let mut receiver = receiver(1 << 20, 1000, LocalBudget::within(10, None));
    for n in 0..20 {
        accept(&mut receiver, 100 + n * 10, 5, false);
    }
    assert_eq!((receiver.buffers(), receiver.assembler.ranges().len()), (10, 10));
    for n in 0..10 {
        assert_eq!(accept(&mut receiver, n, 1, false).readable, 1, "{n}");
    }
    assert_eq!((receiver.buffers(), receiver.assembler.is_empty()), (10, true));
    assert_eq!(accept(&mut receiver, 10, 1, false).readable, 0);
}

#[test]
fn one_segment_in_order_is_always_admitted() {
    let queue = Budget::new(16);
    let others: Vec<_> = (0..15).map(|_| queue.charge()).collect();
    let mut receiver = receiver(1 << 20, 1000, LocalBudget::within(10, Some(&queue)));
    for n in 0..5 {
        assert_eq!(accept(&mut receiver, n * 2 + 1, 1, false).readable, 0, "out of order");
        assert_eq!(accept(&mut receiver, n, 1, false).readable, 1);
        assert_eq!(accept(&mut receiver, n + 1, 1, false).readable, 0);
        read(&mut receiver);
    }
    drop(others);
    assert_eq!(queue.used(), 0);
}

/// The window promises bytes for which there are buffers, if segments are full. Small segments
/// need more buffers.
#[test]
fn a_drop_for_the_budget_closes_the_window_and_buffers_open_it() {
    let budget = LocalBudget::within(10, None);
    let mut receiver = receiver(1 << 20, 1000, budget.clone());
    let promised = advertise(&mut receiver);
    let mut held: Vec<_> = (0..10)
        .map(|n| {
            accept(&mut receiver, n * 100, 100, false);
            read(&mut receiver)
        })
        .collect();
    let left = advertise(&mut receiver);
    assert!((10_000..10_100).contains(&promised) && left + 1000 >= promised, "nothing was dropped: {promised} {left}");
    assert_eq!(accept(&mut receiver, 1000, 100, false).dropped, 100);
    assert_eq!((advertise(&mut receiver), receiver.out_of_buffers()), (0, 100));
    assert!(receiver.waits_for_buffers() && !receiver.update_is_due());
    assert!(receiver.is_acceptable(START + 9500, 100), "what was promised is accepted");
    held.truncate(7);
    assert!(receiver.update_is_due() && !receiver.waits_for_buffers());
    assert!((900..=3000).contains(&advertise(&mut receiver)), "as much as there are buffers for");
    assert_eq!(accept(&mut receiver, 1000, 1000, false).readable, 1000);
    drop(held);
    while read(&mut receiver).is_some() {}
    assert!(receiver.update_is_due() && advertise(&mut receiver) > 1000);
    // The stream continues, and the window promises what there are buffers for.
    for n in 2..70 {
        assert_eq!(accept(&mut receiver, n * 1000, 1000, false).readable, 1000);
        read(&mut receiver);
        advertise(&mut receiver);
    }
    assert_eq!((receiver.reduced_edge, budget.used()), (None, 0));
}

/// The first window follows the share of the queue's buffers, and a cookie's window is kept.
#[test]
fn the_first_window_follows_the_free_buffers() {
    let window = |free: u32, promised: Option<u16>| {
        let queue = Budget::new(1000);
        let others: Vec<_> = (0..1000 - free).map(|_| queue.charge()).collect();
        let mut receiver: Receiver<SharedBytes> =
            Receiver::new(1 << 20, false, 1000, LocalBudget::within(1000, Some(&queue)));
        receiver.open(START - 1, true, promised);
        let edge = receiver.edge - START;
        drop(others);
        edge
    };
    assert_eq!((window(1000, None), window(300, None), window(0, None)), (65_535, 14_000, 1000));
    assert_eq!(window(0, Some(14_600)), 14_600);
}

/// Segments that overlap, repeat and overtake each other result in the stream, and no more
/// buffers are used than the budget allows.
#[test]
fn any_segments_give_the_stream() {
    for seed in 0..300 {
        let mut random = fastrand::Rng::with_seed(seed);
        let budget = LocalBudget::within(random.u32(3..40), None);
        let limit = budget.free();
        let mut receiver = receiver(5000, 100, budget.clone());
        let (mut stream, mut edge, mut finished) = (Vec::new(), 0, false);
        while !finished {
            edge = edge.max((receiver.nxt() - START) + advertise(&mut receiver));
            let from = random.u32(stream.len().saturating_sub(200) as u32..=edge.min(9999));
            // The sender repeats the first missing byte from time to time.
            let from = if random.u8(0..4) == 0 { (receiver.nxt() - START).min(9999) } else { from };
            let len = random.u32(0..200).min(10_000 - from);
            let arrival = accept(&mut receiver, from, len, from + len == 10_000);
            finished = arrival.finished;
            assert!(budget.used() <= limit, "seed {seed}");
            if random.bool() {
                stream.extend(read(&mut receiver).iter().flat_map(|chunk| chunk.bytes().to_vec()));
            }
        }
        while let Some(chunk) = read(&mut receiver) {
            stream.extend_from_slice(chunk.bytes());
        }
        assert_eq!(stream, SharedBytes::numbered(START.0, 10_000).bytes(), "seed {seed}");
        assert_eq!(budget.used(), 0);
    }
}
