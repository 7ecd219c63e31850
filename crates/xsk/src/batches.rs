//! Tests of received batches with a simulated kernel: each descriptor in each place of a batch,
//! invalid, repeated or of a frame in several chunks; and handlers that drop, exchange pages or
//! panic.

#![allow(clippy::unwrap_used)]

use crate::fake::Fake;
use crate::fault::Fault;
use crate::if_xdp::PKT_CONTD;
use crate::options::UmemOptions;
use netmem_packet::{Handler, Packet, Poll, RxQueue, Verdict, XdpFrame};
use netmem_pool::{KernelShared, Page};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;

type Mem = KernelShared;

/// Chunks that are posted.
const LEVEL: u32 = 20;
const PAGES: usize = 256;

/// A queue whose kernel has taken all chunks, and these chunks.
fn fake() -> (Fake, Vec<u64>) {
    let mut fake = Fake::new(PAGES, &UmemOptions::new(), 32, LEVEL);
    let chunks = (0..LEVEL).map(|_| fake.take_chunk()).collect();
    (fake, chunks)
}

/// Delivers frame `i` in chunk `chunk`: its length is 60 + `i`.
fn deliver(fake: &mut Fake, chunk: u64, i: usize) {
    fake.deliver(chunk + 256, 60 + i as u32, 0);
}

fn lengths(fake: &mut Fake) -> Vec<usize> {
    let mut got = Vec::new();
    fake.rx().poll(|poll| poll.receive(usize::MAX, &mut |packet: Packet<Mem>| got.push(packet.len() - 60)));
    got
}

/// Ends both queues: all pages are in the region again, but those that the kernel has.
#[track_caller]
fn assert_balanced(mut fake: Fake) {
    let posted = fake.rx().posted() as u64;
    let closed = fake.rx.take().unwrap().close().unwrap();
    assert_eq!((closed.outstanding, closed.stats.inflight(), closed.stats.quarantined), (0, 0, posted));
    let free = std::iter::from_fn(|| fake.memory.page()).collect::<Vec<_>>();
    assert_eq!(free.len() as u64, PAGES as u64 - posted);
}

/// In any place of a batch, an invalid descriptor stops the queue. The frames before it were
/// delivered, and those behind it are not.
#[test]
fn an_invalid_descriptor_in_each_place() {
    let end = PAGES as u64 * 4096;
    for at in 0..LEVEL as usize {
        for (addr, len) in [(end, 60), (u64::MAX, 60), (end - 1, 60), (256, u32::MAX), (256, 3841)] {
            let (mut fake, chunks) = fake();
            for (i, chunk) in chunks.iter().enumerate() {
                if i == at {
                    // A chunk that the kernel has.
                    let own = if addr == 256 { chunk + 256 } else { addr };
                    fake.deliver(own, len, 0);
                } else {
                    deliver(&mut fake, *chunk, i);
                }
            }
            assert_eq!(lengths(&mut fake), (0..at).collect::<Vec<_>>(), "{addr:#x} {len}");
            let stats = fake.rx().stats();
            assert!(matches!(stats.stopped, Some(Fault::Address { .. } | Fault::Length { .. })), "{stats:?}");
            assert_eq!((stats.frames, stats.passed), (at as u64, at as u64));
            assert!(lengths(&mut fake).is_empty());
            drop(fake.tx.take());
            let closed = fake.rx.take().unwrap().close().unwrap();
            assert_eq!((closed.outstanding, closed.stats.inflight()), (0, 0));
        }
    }
}

/// The kernel names a chunk twice, with every distance between the two places:
/// the second is refused, and no two values have the page.
#[test]
fn a_chunk_is_delivered_twice() {
    for first in 0..LEVEL as usize - 1 {
        for second in first + 1..LEVEL as usize {
            let (mut fake, chunks) = fake();
            for (i, chunk) in chunks.iter().enumerate().take(second + 1) {
                deliver(&mut fake, if i == second { chunks[first] } else { *chunk }, i);
            }
            let mut held: Vec<Packet<Mem>> = Vec::new();
            fake.rx().poll(|poll| poll.receive(usize::MAX, &mut |packet| held.push(packet)));
            assert_eq!(held.len(), second, "{first} {second}");
            assert_eq!(fake.rx().stats().stopped, Some(Fault::Address { addr: chunks[first] + 256 }));
            drop(held);
            drop(fake.tx.take());
            let closed = fake.rx.take().unwrap().close().unwrap();
            assert_eq!((closed.outstanding, closed.stats.inflight()), (0, 0));
        }
    }
}

/// A frame in two chunks, and one that is too short, in each place: all others are in order.
#[test]
fn other_frames_in_each_place() {
    for at in 0..LEVEL as usize - 1 {
        for short in [false, true] {
            let (mut fake, chunks) = fake();
            let mut want = Vec::new();
            for (i, chunk) in chunks.iter().enumerate() {
                match i.checked_sub(at) {
                    Some(0) if short => fake.deliver(chunk + 256, 13, 0),
                    Some(0) => {
                        fake.deliver(chunk + 256, 1000, PKT_CONTD);
                        want.push(1000 + 61 + i - 60);
                    }
                    Some(1) if !short => deliver(&mut fake, *chunk, i),
                    _ => {
                        deliver(&mut fake, *chunk, i);
                        want.push(i);
                    }
                }
            }
            assert_eq!(lengths(&mut fake), want, "{at} {short}");
            let stats = fake.rx().stats();
            assert_eq!((stats.short, stats.multi_buffer), (u64::from(short), u64::from(!short)));
            assert_eq!((stats.frames, stats.stopped), (want.len() as u64, None));
            assert_balanced(fake);
        }
    }
}

/// A program that fails on one frame, by a panic, after it has dropped or passed those before.
struct Fails {
    at: usize,
    seen: Vec<usize>,
    drops: bool,
}

impl Handler<Mem> for Fails {
    fn run(&mut self, frame: &mut XdpFrame<Mem>) -> Verdict {
        let i = frame.len() - 60;
        self.seen.push(i);
        assert!(i != self.at, "planted");
        if self.drops { Verdict::Drop } else { Verdict::Pass }
    }

    fn pass(&mut self, packet: Packet<Mem>) {
        drop(packet);
    }
}

/// A panic loses the frame of the panic, and no other: those behind it come with the next poll, in
/// order, and each page is accounted for.
#[test]
fn a_handler_panics_in_each_place() {
    for drops in [false, true] {
        for at in 0..LEVEL as usize {
            let (mut fake, chunks) = fake();
            chunks.iter().enumerate().for_each(|(i, chunk)| deliver(&mut fake, *chunk, i));
            let mut handler = Fails { at, seen: Vec::new(), drops };
            let failed = catch_unwind(AssertUnwindSafe(|| {
                fake.rx().poll(|poll| poll.receive(usize::MAX, &mut handler));
            }));
            assert!(failed.is_err());
            assert_eq!(handler.seen, (0..=at).collect::<Vec<_>>());
            fake.rx().poll(|poll| poll.receive(usize::MAX, &mut handler));
            assert_eq!(handler.seen, (0..LEVEL as usize).collect::<Vec<_>>());
            let stats = fake.rx().stats();
            let (frames, others) = (u64::from(LEVEL), u64::from(LEVEL) - 1);
            assert_eq!((stats.frames, stats.passed + stats.dropped, stats.stopped), (frames, others, None));
            assert_eq!(fake.rx().posted(), LEVEL as usize);
            let mut again: Vec<u64> = (0..LEVEL).map(|_| fake.take_chunk()).collect();
            again.sort_unstable();
            again.dedup();
            assert_eq!(again.len(), LEVEL as usize);
            assert_balanced(fake);
        }
    }
}

/// A program that keeps the second half of each page, or exchanges the page.
struct Steals {
    half: bool,
    kept: Vec<Page<Mem>>,
    other: Option<Page<Mem>>,
}

impl Handler<Mem> for Steals {
    fn run(&mut self, frame: &mut XdpFrame<Mem>) -> Verdict {
        let Some(other) = self.other.take() else { return Verdict::Drop };
        let ours = std::mem::replace(frame, XdpFrame::new(other, 0, 60));
        let mut page = ours.into_page();
        if self.half {
            self.kept.push(page.split_off(2048));
            self.other = Some(std::mem::replace(frame, XdpFrame::new(page, 0, 60)).into_page());
        } else {
            self.other = Some(page);
        }
        Verdict::Drop
    }

    fn pass(&mut self, packet: Packet<Mem>) {
        drop(packet);
    }
}

/// A page that is not whole, or not the frame's, is not posted in its place.
#[test]
fn a_handler_that_exchanges_pages() {
    for half in [false, true] {
        let (mut fake, chunks) = fake();
        chunks.iter().enumerate().for_each(|(i, chunk)| deliver(&mut fake, *chunk, i));
        let other = fake.memory.page();
        let mut handler = Steals { half, kept: Vec::new(), other };
        fake.rx().poll(|poll| poll.receive(usize::MAX, &mut handler));
        assert_eq!(fake.rx().posted(), LEVEL as usize);
        let again: Vec<u64> = (0..LEVEL).map(|_| fake.take_chunk()).collect();
        let region = fake.umem.region().clone();
        for page in handler.kept.drain(..).chain(handler.other.take()) {
            let index = region.index_of(&page.freeze()).unwrap();
            assert!(!again.contains(&(u64::from(index) * 4096)), "the kernel has a page that the program has");
        }
        assert_balanced(fake);
    }
}

/// A budget ends within a batch: what is behind it stays in the ring.
#[test]
fn a_budget_within_a_batch() {
    let (mut fake, chunks) = fake();
    chunks.iter().enumerate().for_each(|(i, chunk)| deliver(&mut fake, *chunk, i));
    let mut got = Vec::new();
    for budget in [1, 3, 7, 2, 100] {
        let mut each = |packet: Packet<Mem>| got.push(packet.len() - 60);
        let n = fake.rx().poll(|poll| poll.receive(budget, &mut each));
        assert_eq!(n, budget.min(LEVEL as usize - (got.len() - n)));
        // What was consumed was released to the kernel.
        assert_eq!(fake.indices(2).consumer.load(Ordering::Relaxed) as usize, got.len());
    }
    assert_eq!(got, (0..LEVEL as usize).collect::<Vec<_>>());
    assert_balanced(fake);
}
