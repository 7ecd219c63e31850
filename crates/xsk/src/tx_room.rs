//! Tests of room in the TX ring, with a simulated kernel whose index is behind its completions.

#![allow(clippy::unwrap_used)]

use crate::fake::Fake;
use crate::options::UmemOptions;
use netmem_packet::{Armed, Checksum, Packet, Sendable, SoftwareTx, TxBulk, TxQueue, Wait};

fn fake() -> Fake {
    Fake::new(256, &UmemOptions::new(), 16, 8)
}

/// The kernel completes descriptors before it publishes that it has consumed them. A packet for
/// which the ring seems to have no room waits: the reason of the refusal stays until the queue is
/// completed, also if the kernel has published meanwhile.
#[test]
fn a_refusal_has_its_reason_until_the_queue_is_completed() {
    let mut fake = fake();
    let mut pool = fake.pool();
    let mut packet = || Packet::new(pool.alloc().unwrap().freeze_range(0..60));
    for _ in 0..3 {
        (0..16).for_each(|_| fake.tx().send(packet()).unwrap());
        fake.tx().flush();
        assert_eq!(fake.sent.available(16), Ok(16));
        (0..16).for_each(|n| fake.complete(fake.sent.peek(n).addr));
        assert_eq!(fake.tx().complete(), 16);
        let refused = fake.tx().send(packet()).unwrap_err();
        assert_eq!(fake.tx().sendable(&refused), Sendable::Later);
        assert_eq!((fake.tx().complete(), fake.tx().arm().unwrap()), (0, Armed::Waits));
        (0..16).for_each(|_| assert!(fake.take_sent().is_some()));
        assert_eq!(fake.tx().sendable(&refused), Sendable::Later, "this is why it was refused");
        // No completion follows that would wake the thread or have it send.
        assert_eq!(fake.tx().arm().unwrap(), Armed::Work);
        assert_eq!((fake.tx().complete(), fake.tx().sendable(&refused)), (1, Sendable::Now));
        assert_eq!((fake.tx().complete(), fake.tx().arm().unwrap()), (0, Armed::Waits));
    }
    let stats = fake.tx().stats();
    assert_eq!((stats.full, stats.completed), (3, 48));
}

/// `sendable`, called before each packet, reports all places that the kernel has made free. The
/// adapter for checksums calls it so.
#[test]
fn room_is_known_before_a_packet_is_sent() {
    let mut fake = fake();
    fake.tx().set_max_descriptors(1);
    let mut pool = fake.pool();
    let mut packet = || Packet::new(pool.alloc().unwrap().freeze_range(0..60));
    (0..15).for_each(|_| fake.tx().send(packet()).unwrap());
    fake.tx().flush();
    while let Some(sent) = fake.take_sent() {
        fake.complete(sent.addr);
    }
    let mut bulk = TxBulk::new(SoftwareTx::new(fake.tx.take().unwrap(), || None));
    for _ in 0..16 {
        let mut packet = packet();
        packet.meta.checksum = Checksum::Partial { start: 34, offset: 6 };
        bulk.push(packet);
    }
    bulk.flush();
    assert_eq!((bulk.stats().dropped, bulk.target().stats().checksummed), (0, 16));
}
