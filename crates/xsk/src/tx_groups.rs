//! Tests of groups that are sent, with a simulated kernel: packets of each kind in each place, and
//! rings with each number of free places.

#![allow(clippy::unwrap_used)]

use crate::fake::Fake;
use crate::fault::Fault;
use crate::if_xdp::{Desc, PKT_CONTD};
use crate::options::UmemOptions;
use netmem_packet::{Checksum, Packet, TxQueue};
use netmem_pool::{KernelShared, PagePool, PoolOptions, RegionOptions, RegionProvider};
use std::sync::atomic::Ordering;

type Mem = KernelShared;
type Place = Option<Packet<Mem>>;

/// Places of the TX ring.
const RING: u32 = 16;
const GROUP: usize = 9;

/// A queue, and a pool of its memory.
fn fake() -> (Fake, PagePool<Mem>) {
    let fake = Fake::new(256, &UmemOptions::new(), RING, 8);
    let pool = fake.pool();
    (fake, pool)
}

/// A packet of `60 + n` bytes.
fn plain(pool: &mut PagePool<Mem>, n: usize) -> Packet<Mem> {
    Packet::new(pool.alloc().unwrap().freeze_range(64..124 + n))
}

fn plain_group(pool: &mut PagePool<Mem>, n: usize) -> Vec<Place> {
    (0..n).map(|n| Some(plain(pool, n))).collect()
}

/// The places that have a packet.
fn filled(group: &[Place]) -> Vec<bool> {
    group.iter().map(Option::is_some).collect()
}

/// What the kernel finds in the ring after a flush.
fn sent(fake: &mut Fake) -> Vec<Desc> {
    fake.tx().flush();
    std::iter::from_fn(|| fake.take_sent()).collect()
}

/// Completes these descriptors. All pages are then in their pool again.
#[track_caller]
fn assert_returned(fake: &mut Fake, pool: &mut PagePool<Mem>, descs: &[Desc]) {
    assert_eq!(fake.tx().outstanding(), descs.len());
    descs.iter().for_each(|desc| fake.complete(desc.addr));
    assert_eq!(fake.tx().complete(), descs.len());
    assert_eq!((fake.tx().outstanding(), pool.stats().inflight()), (0, 0));
    let stats = fake.tx().stats();
    assert_eq!((stats.descriptors, stats.stopped), (stats.completed, None));
}

/// Groups of each size, at each position of the ring, with places without a packet: the kernel
/// finds the frames in their order, and not before the flush.
#[test]
fn groups_of_each_size() {
    let (mut fake, mut pool) = fake();
    let (mut frames, mut bytes) = (0, 0);
    for n in (0..=GROUP).cycle().take(60) {
        let mut group = plain_group(&mut pool, n);
        if n > 3 {
            group[n / 2] = None;
            group[n - 1] = None;
        }
        let want: Vec<_> = group
            .iter()
            .flatten()
            .map(|packet| Desc {
                addr: u64::from(packet.head().index()) * 4096 + 64,
                len: packet.len() as u32,
                options: 0,
            })
            .collect();
        assert_eq!(fake.tx().send_group(&mut group), n);
        assert!(group.iter().all(Option::is_none) && fake.take_sent().is_none());
        let got = sent(&mut fake);
        assert_eq!(got, want);
        (frames, bytes) = (frames + want.len() as u64, bytes + want.iter().map(|d| u64::from(d.len)).sum::<u64>());
        let stats = fake.tx().stats();
        assert_eq!((stats.frames, stats.bytes, stats.descriptors, stats.full), (frames, bytes, frames, 0));
        assert_returned(&mut fake, &mut pool, &got);
    }
}

/// With each number of free places, a group is sent up to the place that is refused. What is
/// refused is as it was, and is sent when there is room.
#[test]
fn a_group_that_fills_the_ring() {
    for free in 0..=GROUP {
        let (mut fake, mut pool) = fake();
        let before = RING as usize - free;
        let mut first = plain_group(&mut pool, before);
        assert_eq!(fake.tx().send_group(&mut first), before);
        let mut group = plain_group(&mut pool, GROUP);
        group[0] = None;
        let most = GROUP.min(free + 1);
        assert_eq!(fake.tx().send_group(&mut group), most);
        assert_eq!(filled(&group), (0..GROUP).map(|n| n >= most).collect::<Vec<_>>());
        assert_eq!(fake.tx().stats().full, u64::from(most < GROUP));
        assert_eq!(fake.tx().stats().frames as usize, before + most - 1);
        let mut got = sent(&mut fake);
        // The kernel has read the ring, and nothing is completed: the completion ring has no room.
        assert_eq!(fake.tx().send_group(&mut group[most..]), 0);
        got.iter().for_each(|desc| fake.complete(desc.addr));
        assert_eq!(fake.tx().complete(), got.len());
        assert_eq!(fake.tx().send_group(&mut group), GROUP);
        got = sent(&mut fake);
        assert_eq!(
            got.iter().map(|desc| desc.len as usize).collect::<Vec<_>>(),
            (60 + most..60 + GROUP).collect::<Vec<_>>()
        );
        assert_returned(&mut fake, &mut pool, &got);
    }
}

/// Packets that are not plain, in each place of a group: of several fragments, over the border of a
/// chunk, without bytes, with a checksum to be computed, and in memory of another region.
#[test]
fn a_packet_of_another_kind_in_each_place() {
    let other = RegionProvider::new(RegionOptions::new(8).huge_pages(false).build::<Mem>().unwrap());
    for at in 0..GROUP {
        for kind in 0..5 {
            let mut fake = Fake::new(256, &UmemOptions::new().chunk(2048), RING, 8);
            let mut pool = fake.pool();
            let mut others = PoolOptions::new("other").build(other.clone(), None).unwrap();
            let mut group = plain_group(&mut pool, GROUP);
            let (special, descriptors) = match kind {
                0 => {
                    let mut packet = plain(&mut pool, 0);
                    packet.push(pool.alloc().unwrap().freeze_range(0..40)).unwrap();
                    (packet, 2)
                }
                1 => (Packet::new(pool.alloc().unwrap().freeze_range(2000..2100)), 2),
                2 => (Packet::new(pool.alloc().unwrap().freeze_range(64..64)), 0),
                3 => {
                    let mut packet = plain(&mut pool, 0);
                    packet.meta.checksum = Checksum::Partial { start: 14, offset: 6 };
                    (packet, 0)
                }
                _ => (Packet::new(others.alloc().unwrap().freeze_range(64..124)), 0),
            };
            let len = special.len();
            group[at] = Some(special);
            let done = fake.tx().send_group(&mut group);
            assert_eq!(done, if descriptors > 0 { GROUP } else { at }, "{kind} {at}");
            assert_eq!(filled(&group), (0..GROUP).map(|n| n >= done).collect::<Vec<_>>());
            let stats = fake.tx().stats();
            let refused = [0, 0, stats.bad_shape, stats.no_offload, stats.unreachable][kind];
            assert_eq!((stats.frames, refused), (done as u64, u64::from(descriptors == 0)), "{kind} {at}");
            // The frames behind it leave without it.
            assert_eq!(group[at].as_ref().map_or(len, Packet::len), len);
            group[at] = None;
            assert_eq!(fake.tx().send_group(&mut group), GROUP);
            let got = sent(&mut fake);
            let last = |desc: &&Desc| desc.options & PKT_CONTD == 0;
            let ends: Vec<_> = got.iter().enumerate().filter(|(_, desc)| last(desc)).map(|(n, _)| n).collect();
            assert_eq!((got.len(), ends.len()), (GROUP - 1 + descriptors, GROUP - 1 + descriptors / 2));
            assert!(descriptors == 0 || got[at].options & PKT_CONTD != 0);
            assert_returned(&mut fake, &mut pool, &got);
            assert_eq!(others.stats().inflight(), 0);
        }
    }
}

/// A stopped queue refuses a group, and the pages stay with the caller.
#[test]
fn a_queue_that_has_stopped() {
    let (mut fake, mut pool) = fake();
    fake.indices(1).producer.store(17, Ordering::Relaxed);
    assert_eq!(fake.tx().complete(), 0);
    assert_eq!(fake.tx().stats().stopped, Some(Fault::Index { producer: 17, consumer: 0 }));
    let mut group = plain_group(&mut pool, GROUP);
    assert_eq!(fake.tx().send_group(&mut group), 0);
    assert_eq!((filled(&group), fake.tx().stats().frames), (vec![true; GROUP], 0));
    drop(group);
    assert_eq!((fake.tx().outstanding(), pool.stats().inflight()), (0, 0));
}

/// The kernel completes frames that it has not read from the ring. Their places are not written
/// again before it has.
#[test]
fn frames_that_are_completed_before_they_are_read() {
    let (mut fake, mut pool) = fake();
    let mut group = plain_group(&mut pool, RING as usize);
    let addrs: Vec<_> = group.iter().flatten().map(|packet| u64::from(packet.head().index()) * 4096 + 64).collect();
    assert_eq!(fake.tx().send_group(&mut group), RING as usize);
    fake.tx().flush();
    addrs.iter().for_each(|&addr| fake.complete(addr));
    assert_eq!((fake.tx().complete(), fake.tx().outstanding()), (RING as usize, 0));
    let mut group = plain_group(&mut pool, GROUP);
    assert_eq!((fake.tx().send_group(&mut group), fake.tx().stats().full), (0, 1));
    let got = sent(&mut fake);
    assert_eq!(got.iter().map(|desc| desc.addr).collect::<Vec<_>>(), addrs);
    assert_eq!(fake.tx().send_group(&mut group), GROUP);
    let got = sent(&mut fake);
    assert_returned(&mut fake, &mut pool, &got);
}

/// The kernel has read the ring, and the queue knows it, but nothing is completed: no more frames
/// are sent than the completion ring has places.
#[test]
fn frames_that_are_read_and_not_completed() {
    let (mut fake, mut pool) = fake();
    let mut group = plain_group(&mut pool, RING as usize - 1);
    assert_eq!(fake.tx().send_group(&mut group), RING as usize - 1);
    let mut got = sent(&mut fake);
    fake.complete(got.remove(0).addr);
    assert_eq!(fake.tx().complete(), 1);
    let mut group = plain_group(&mut pool, 4);
    group[0] = None;
    // The kernel's index is read, because one place is known to be free, and this needs two.
    let mut first = plain(&mut pool, 0);
    first.push(pool.alloc().unwrap().freeze_range(0..40)).unwrap();
    assert_eq!(fake.tx().send_group(&mut [Some(first)]), 1);
    assert_eq!((fake.tx().send_group(&mut group), filled(&group)), (1, vec![false, true, true, true]));
    got.extend(sent(&mut fake));
    assert_eq!(got.len(), RING as usize);
    drop(group);
    assert_returned(&mut fake, &mut pool, &got);
}
