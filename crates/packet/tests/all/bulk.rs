//! A bulk in front of a queue that panics, or returns a wrong number.

use netmem_packet::{Packet, Reach, Sendable, TxBulk, TxQueue};
use netmem_pool::{Frag, PagePool, PoolOptions, Private, RegionOptions, RegionProvider};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

fn pool() -> PagePool<Private> {
    let region = RegionOptions::new(128).huge_pages(false).build::<Private>().unwrap();
    PoolOptions::new("bulk").build(RegionProvider::new(region), None).unwrap()
}

/// Keeps the lengths of the packets that it was given, and panics over the one of this length.
struct Panics {
    got: Vec<usize>,
    at: usize,
    /// Added to the number of packets of each group.
    more: usize,
}

impl TxQueue for Panics {
    type Mem = Private;

    fn send(&mut self, packet: Packet<Private>) -> Result<(), Packet<Private>> {
        if packet.len() == self.at {
            resume_unwind(Box::new("as the test wants it"));
        }
        self.got.push(packet.len());
        Ok(())
    }

    fn send_group(&mut self, packets: &mut [Option<Packet<Private>>]) -> usize {
        packets.iter_mut().filter_map(Option::take).for_each(|packet| assert!(self.send(packet).is_ok()));
        packets.len() + self.more
    }

    fn sendable(&self, _: &Packet<Private>) -> Sendable {
        Sendable::Now
    }

    fn flush(&mut self) {}

    fn complete(&mut self) -> usize {
        0
    }

    fn reach(&self, frag: &Frag<Private>) -> Reach {
        Reach::Mapped(frag.as_ptr().addr() as u64)
    }
}

/// At each place of a group: each packet is counted once, or held, and the next flush sends those
/// behind the panic.
#[test]
fn a_panic_of_the_queue_loses_no_count() {
    const PACKETS: usize = 40;
    for at in 1..=PACKETS {
        let mut pool = pool();
        let mut bulk = TxBulk::holding(Panics { got: Vec::new(), at, more: 0 }, 64);
        (1..=PACKETS).for_each(|len| bulk.push(Packet::new(pool.alloc().unwrap().freeze_range(..len))));
        assert!(catch_unwind(AssertUnwindSafe(|| bulk.flush())).is_err());
        assert_eq!((bulk.stats().sent as usize, bulk.held()), (at, PACKETS - at));
        bulk.flush();
        assert_eq!((bulk.stats().sent as usize, bulk.stats().dropped, bulk.held()), (PACKETS, 0, 0));
        assert_eq!(bulk.target().got, (1..=PACKETS).filter(|len| *len != at).collect::<Vec<_>>());
        assert_eq!(pool.stats().inflight(), 0);
    }
}

/// A queue that learns of room when it completes packets, and whose device makes room at any time.
struct Races {
    known: usize,
    free: usize,
    /// Longer packets cannot be mapped.
    most: usize,
    attempts: usize,
}

impl TxQueue for Races {
    type Mem = Private;

    fn send(&mut self, packet: Packet<Private>) -> Result<(), Packet<Private>> {
        self.attempts += 1;
        if self.known == 0 || packet.len() > self.most {
            // The device makes room for one more.
            self.free += 1;
            return Err(packet);
        }
        self.known -= 1;
        self.free -= 1;
        Ok(())
    }

    fn sendable(&self, _: &Packet<Private>) -> Sendable {
        if self.known > 0 { Sendable::Now } else { Sendable::Later }
    }

    fn flush(&mut self) {}

    fn complete(&mut self) -> usize {
        self.known = self.free;
        0
    }

    fn reach(&self, _: &Frag<Private>) -> Reach {
        Reach::Map
    }
}

/// A packet for which the device makes room after the refusal is held, and sent by the next flush.
/// A packet that cannot be mapped is dropped, and does not block the others. Each is tried once in
/// a flush.
#[test]
fn a_queue_with_room_after_a_refusal() {
    let mut pool = pool();
    for (most, outcomes) in [(10, [(7, 0, 3, 8), (8, 0, 2, 10), (9, 0, 1, 12)]), (1, [(1, 9, 0, 10); 3])] {
        let mut bulk = TxBulk::holding(Races { known: 0, free: 7, most, attempts: 0 }, 64);
        (1..=10).for_each(|len| bulk.push(Packet::new(pool.alloc().unwrap().freeze_range(..len))));
        for outcome in outcomes {
            bulk.flush();
            let (stats, held, attempts) = (bulk.stats(), bulk.held(), bulk.target().attempts);
            assert_eq!((stats.sent, stats.dropped, held, attempts), outcome, "{most}");
        }
    }
}

#[test]
fn a_queue_that_counts_too_many() {
    let mut pool = pool();
    let mut bulk = TxBulk::new(Panics { got: Vec::new(), at: usize::MAX, more: 3 });
    (1..=10).for_each(|len| bulk.push(Packet::new(pool.alloc().unwrap().freeze_range(..len))));
    bulk.flush();
    assert_eq!((bulk.stats().sent, bulk.held(), bulk.room()), (10, 0, TxBulk::<Panics>::CAPACITY));
}
