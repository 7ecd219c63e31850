//! Tests with a simulated kernel, which writes invalid values, is late, and returns frames in any
//! order. In all cases every page is accounted for.

#![allow(clippy::unwrap_used)]

use crate::fake::Fake;
use crate::fault::{Fault, QueueStopped};
use crate::held;
use crate::if_xdp::{Desc, PKT_CONTD, TX_METADATA};
use crate::options::UmemOptions;
use netmem_packet::{Armed, Checksum, Handler, Packet, Poll, RxQueue, Sendable, TxQueue, Verdict, Wait, XdpFrame};
use netmem_pool::KernelShared;
use std::io::ErrorKind;
use std::sync::atomic::Ordering;

fn fake() -> Fake {
    Fake::new(256, &UmemOptions::new(), 16, 8)
}

/// Receives all frames, and returns them.
fn receive(fake: &mut Fake) -> Vec<Packet<KernelShared>> {
    let mut got = Vec::new();
    fake.rx().poll(|poll| poll.receive(usize::MAX, &mut |packet| got.push(packet)));
    got
}

/// Closes the receive queue, and checks that only quarantined pages are still out.
fn closed(fake: &mut Fake, quarantined: u64) {
    let closed = fake.rx.take().unwrap().close().unwrap();
    assert_eq!((closed.outstanding, closed.stats.inflight(), closed.stats.quarantined), (0, 0, quarantined));
}

/// The queue has stopped by this fault, and reports it to a loop that sleeps and to one that polls.
#[track_caller]
fn assert_stopped(queue: &mut impl Wait, fault: Fault) {
    for error in [queue.arm().unwrap_err(), queue.arm().unwrap_err(), queue.check().unwrap_err()] {
        let stopped = error.get_ref().and_then(|error| error.downcast_ref::<QueueStopped>()).unwrap();
        assert_eq!((error.kind(), stopped.fault), (ErrorKind::InvalidData, fault));
    }
}

/// The description of a received frame is invalid: the queue stops, delivers nothing more, and
/// quarantines the chunks that the kernel has.
#[test]
fn descriptors_that_cannot_be_stop_the_queue() {
    let end = 256 * 4096;
    for (addr, len, fault) in [
        (end, 60, Fault::Address { addr: end }),
        (u64::MAX, 60, Fault::Address { addr: u64::MAX }),
        (1 << 63, u32::MAX, Fault::Address { addr: 1 << 63 }),
        (end - 1, 60, Fault::Length { addr: end - 1, len: 60 }),
        (4096, u32::MAX, Fault::Length { addr: 4096, len: u32::MAX }),
        (256, 3841, Fault::Length { addr: 256, len: 3841 }),
        // The address is in the UMEM, but its chunk is not posted.
        (255 * 4096, 60, Fault::Address { addr: 255 * 4096 }),
    ] {
        let mut fake = fake();
        let (good, unread) = (fake.take_chunk(), fake.take_chunk());
        fake.deliver(good + 256, 60, 0);
        fake.deliver(addr, len, 0);
        fake.deliver(unread + 256, 60, 0);
        assert_eq!(receive(&mut fake).len(), 1);
        assert_eq!(fake.rx().stats().stopped, Some(fault));
        assert!(receive(&mut fake).is_empty());
        assert_eq!(fake.rx().stats().frames, 1);
        assert_stopped(fake.rx(), fault);
        assert_eq!(fake.rx().stats().errors().count(), 1);
        closed(&mut fake, 6);
    }
}

/// A frame is delivered once: afterwards the kernel does not have the chunk any more.
#[test]
fn a_chunk_that_is_delivered_twice_stops_the_queue() {
    let mut fake = fake();
    let addr = fake.take_chunk();
    fake.deliver(addr + 256, 60, 0);
    fake.deliver(addr + 300, 60, 0);
    let held = receive(&mut fake);
    assert_eq!((held.len(), fake.rx().stats().stopped), (1, Some(Fault::Address { addr: addr + 300 })));
    assert_stopped(fake.rx(), Fault::Address { addr: addr + 300 });
    drop(held);
    closed(&mut fake, 7);
}

/// Indices with more entries between them than the ring has, and indices that go back.
#[test]
fn indices_that_cannot_be_stop_the_queues() {
    for (producer, consumer) in [(17, 0), (u32::MAX, 0), (1 << 31, 0)] {
        let mut fake = fake();
        fake.indices(2).producer.store(producer, Ordering::Relaxed);
        assert!(receive(&mut fake).is_empty());
        assert_eq!(fake.rx().stats().stopped, Some(Fault::Index { producer, consumer }));
        closed(&mut fake, 8);

        let mut fake = self::fake();
        fake.indices(1).producer.store(producer, Ordering::Relaxed);
        assert_eq!(fake.tx().complete(), 0);
        assert_eq!(fake.tx().stats().stopped, Some(Fault::Index { producer, consumer }));
    }
    // The producer of the RX ring goes back.
    let mut fake = fake();
    let addr = fake.take_chunk();
    fake.deliver(addr, 60, 0);
    assert_eq!(receive(&mut fake).len(), 1);
    fake.indices(2).producer.store(0, Ordering::Relaxed);
    assert!(receive(&mut fake).is_empty());
    assert_eq!(fake.rx().stats().stopped, Some(Fault::Index { producer: 0, consumer: 1 }));
    // The consumer of the TX ring goes back.
    let mut fake = self::fake();
    let mut pool = fake.pool();
    fake.indices(3).consumer.store(5, Ordering::Relaxed);
    fake.request_kicks(true);
    assert!(fake.tx().send(Packet::new(pool.alloc().unwrap().freeze_range(0..60))).is_ok());
    fake.tx().flush();
    assert_eq!(fake.tx().stats().stopped, Some(Fault::Index { producer: 1, consumer: 5 }));
    let refused = fake.tx().send(Packet::new(pool.alloc().unwrap().freeze_range(0..60))).unwrap_err();
    assert_eq!(fake.tx().sendable(&refused), Sendable::Never);
    drop(refused);
    let key = fake.tx().socket().key();
    drop((fake.tx.take(), fake.rx.take()));
    assert_eq!((pool.stats().inflight(), fake.umem.held()), (1, 1));
    drop(fake);
    assert_eq!(pool.stats().inflight(), 1, "kept, for the kernel may still read it");
    held::released(key);
    assert_eq!(pool.stats().inflight(), 0);
}

/// The pages of the chunks that the kernel has when a receive queue ends return to the provider
/// when the kernel lets the queue be bound again, and can be used as before; a page of which a user
/// holds another part does not.
#[test]
fn posted_pages_return_when_the_queue_is_bound_again() {
    for chunk in [4096, 2048] {
        let per_page = 4096 / chunk;
        let mut fake = Fake::new(64, &UmemOptions::new().chunk(chunk), 16, 8);
        let held = (chunk == 2048).then(|| {
            let addr = fake.take_chunk();
            fake.deliver(addr, 60, 0);
            receive(&mut fake).remove(0)
        });
        let (posted, key) = (fake.rx().posted() as u64, fake.rx().socket().key());
        let closed = fake.rx.take().unwrap().close().unwrap();
        // A page that has a part with the user is in quarantine when the user has dropped it.
        let pages = (posted * chunk as u64).div_ceil(4096) + u64::from(held.is_some() && posted % per_page as u64 == 0);
        assert_eq!(closed.stats.quarantined + closed.outstanding, pages, "{closed:?}");
        let all = |fake: &Fake| std::iter::from_fn(|| fake.memory.page()).collect::<Vec<_>>();
        assert_eq!(all(&fake).len() as u64, 64 - pages);
        held::released(key);
        let returned = all(&fake);
        assert_eq!(returned.len() as u64, 64 - u64::from(held.is_some()));
        for mut page in returned {
            let mut tail = page.split_off(100);
            assert!(!tail.prepend(b"shared"));
            drop(page);
            assert!(tail.prepend(b"alone"), "it is in quarantine no more");
        }
        drop(held);
        assert_eq!(all(&fake).len() as u64, 64 - u64::from(chunk == 2048));
    }
}

/// The kernel completes a frame that was not sent, or completes a frame once too often: the queue
/// stops.
#[test]
fn completions_that_cannot_be_stop_the_queue() {
    for wrong in [255 * 4096, 256 * 4096, u64::MAX, 0] {
        let mut fake = fake();
        let mut pool = fake.pool();
        let frag = pool.alloc().unwrap().freeze_range(64..124);
        let addr = u64::from(frag.index()) * 4096 + 64;
        fake.tx().send(Packet::new(frag.clone())).unwrap();
        fake.tx().send(Packet::new(frag)).unwrap();
        fake.tx().flush();
        assert_eq!((fake.take_sent().unwrap().addr, fake.take_sent().unwrap().addr), (addr, addr));
        fake.complete(addr);
        assert_eq!((fake.tx().complete(), fake.tx().outstanding()), (1, 1));
        // 0 stands for the correct address, completed once too often. What was in front of the
        // fault is counted.
        let (wrong, right) = if wrong == 0 { (addr, 1) } else { (wrong, 0) };
        (0..right).for_each(|_| fake.complete(addr));
        fake.complete(wrong);
        assert_eq!((fake.tx().complete(), fake.tx().outstanding()), (right, 1 - right));
        assert_eq!(fake.tx().stats().completed, 1 + right as u64);
        assert_eq!(fake.tx().stats().stopped, Some(Fault::Address { addr: wrong }));
        let key = fake.tx().socket().key();
        drop(fake);
        held::released(key);
        assert_eq!(pool.stats().inflight(), 0);
    }
}

/// Completions arrive in any order, and each returns its page.
#[test]
fn completions_in_any_order_give_pages_back() {
    let mut fake = fake();
    let mut pool = fake.pool();
    for round in 0..20 {
        let n = 1 + round % 16;
        for _ in 0..n {
            fake.tx().send(Packet::new(pool.alloc().unwrap().freeze_range(100..200))).unwrap();
        }
        assert_eq!(n < 16, fake.tx().send(Packet::new(pool.alloc().unwrap().freeze_range(0..60))).is_ok());
        fake.tx().flush();
        let mut sent: Vec<_> = std::iter::from_fn(|| fake.take_sent()).collect();
        fastrand::Rng::with_seed(round).shuffle(&mut sent);
        let out = sent.len();
        for (i, desc) in sent.into_iter().enumerate() {
            fake.complete(desc.addr);
            assert_eq!((fake.tx().complete(), fake.tx().outstanding()), (1, out - i - 1));
        }
        assert_eq!(pool.stats().inflight(), 0);
    }
    let stats = fake.tx().stats();
    assert_eq!((stats.descriptors, stats.stopped), (stats.completed, None));
}

/// A packet in more parts than the driver sends is copied into as few pages as hold it, and its own
/// pages return at once. A packet that does not fit as a copy is refused, and a packet for whose
/// copy there is no page comes back as it was.
#[test]
fn packets_in_more_parts_than_the_driver_sends_are_copied() {
    for metadata in [false, true] {
        let mut fake = Fake::new(256, &UmemOptions::new().tx_metadata(metadata), 16, 8);
        fake.tx().set_max_descriptors(3);
        let mut pool = fake.pool();
        let packet = |pool: &mut netmem_pool::PagePool<_>, parts: usize, len: usize| {
            let mut frags = (0..parts).map(|part| {
                let mut page = pool.alloc().unwrap();
                page.copy_from(64, &vec![part as u8 + 1; len]).unwrap();
                page.freeze_range(64..64 + len)
            });
            let mut packet = Packet::new(frags.next().unwrap());
            frags.for_each(|frag| packet.push(frag).unwrap());
            packet
        };
        // The parts, the bytes of each, and the bytes of the descriptors.
        let start = if metadata { 64 } else { 0 };
        for (parts, len, descriptors) in [
            (3, 100, vec![100, 100, 100]),
            (4, 100, vec![400]),
            (17, 256, vec![4096 - start, 256 + start]),
            (4, 3056, vec![4096 - start, 4096, 4032 + start]),
        ] {
            let mut sent = packet(&mut pool, parts, len);
            if metadata {
                sent.meta.checksum = Checksum::Partial { start: 14, offset: 6 };
            }
            let bytes = sent.to_vec();
            assert_eq!(fake.tx().sendable(&sent), Sendable::Now);
            fake.tx().send(sent).unwrap();
            fake.tx().flush();
            let copied = descriptors.len() < parts;
            assert_eq!(pool.stats().inflight(), if copied { 0 } else { parts as u64 });
            let descs: Vec<_> = std::iter::from_fn(|| fake.take_sent()).collect();
            assert_eq!(descs.iter().map(|desc| desc.len as usize).collect::<Vec<_>>(), descriptors);
            let region = fake.umem.region();
            let read = |desc: &Desc| {
                // SAFETY: the test's own memory, which no other thread writes.
                unsafe { std::slice::from_raw_parts(region.as_ptr().add(desc.addr as usize), desc.len as usize) }
                    .to_vec()
            };
            assert_eq!(descs.iter().flat_map(read).collect::<Vec<_>>(), bytes);
            for (i, desc) in descs.iter().enumerate() {
                let goes_on = if i + 1 < descs.len() { PKT_CONTD } else { 0 };
                let asked = if metadata && i == 0 { TX_METADATA } else { 0 };
                assert_eq!(desc.options, goes_on | asked);
                fake.complete(desc.addr);
            }
            assert_eq!(fake.tx().complete(), descs.len());
            assert_eq!(pool.stats().inflight(), 0);
        }
        assert_eq!((fake.tx().stats().linearised, fake.tx().stats().bad_shape), (3, 0));
        // One byte too many.
        let mut long = packet(&mut pool, 4, 3056);
        let more = 3 * 4096 - start - long.len() + 1;
        long.push(pool.alloc().unwrap().freeze_range(0..more)).unwrap();
        assert_eq!(fake.tx().sendable(&long), Sendable::Never);
        drop(fake.tx().send(long).unwrap_err());
        assert_eq!((fake.tx().stats().bad_shape, fake.tx().outstanding(), pool.stats().inflight()), (1, 0, 0));
        // All pages are held.
        let sent = packet(&mut pool, 4, 100);
        let held: Vec<_> = std::iter::from_fn(|| pool.alloc()).collect();
        let holder = fake.pool().alloc();
        while let Ok(()) = fake.tx().send(sent.clone()) {
            fake.tx().flush();
            while fake.take_sent().is_some() {}
        }
        assert_eq!(fake.tx().stats().full, 1);
        assert_eq!(sent.fragments().count(), 4);
        drop((held, holder, sent));
    }
}

/// Descriptors that do not complete are counted as late, once. They are counted again when they
/// complete.
#[test]
fn late_completions_are_counted_and_come_back() {
    let mut fake = fake();
    let mut pool = fake.pool();
    for _ in 0..3 {
        fake.tx().send(Packet::new(pool.alloc().unwrap().freeze_range(0..60))).unwrap();
    }
    fake.tx().flush();
    let sent: Vec<_> = std::iter::from_fn(|| fake.take_sent()).collect();
    // In unit tests, a descriptor is late at once.
    for _ in 0..3 {
        assert_eq!(fake.tx().complete(), 0);
        assert_eq!((fake.tx().stats().late, fake.tx().stats().late_completed), (3, 0));
    }
    for (i, desc) in (1..).zip(sent) {
        fake.complete(desc.addr);
        fake.tx().complete();
        assert_eq!((fake.tx().stats().late, fake.tx().stats().late_completed), (3, i));
    }
    assert_eq!(pool.stats().inflight(), 0);
}

/// The queue notifies the kernel of frames if the kernel asks for it, and again while the kernel
/// sends none.
#[test]
fn a_kick_that_did_nothing_is_repeated() {
    let mut fake = fake();
    let mut pool = fake.pool();
    let packet = |pool: &mut netmem_pool::PagePool<_>| Packet::new(pool.alloc().unwrap().freeze_range(0..60));
    fake.tx().send(packet(&mut pool)).unwrap();
    fake.tx().flush();
    assert_eq!(fake.tx().stats().kicks, 0, "the kernel is at work");
    fake.request_kicks(true);
    fake.tx().send(packet(&mut pool)).unwrap();
    fake.tx().flush();
    // The fake's descriptor is no socket, so each kick fails.
    assert_eq!((fake.tx().stats().kicks, fake.tx().stats().down), (1, 1));
    fake.tx().flush();
    fake.tx().complete();
    assert_eq!(fake.tx().stats().kicks, 3);
    assert_eq!(fake.tx().arm().unwrap(), Armed::Work, "nothing would wake the thread");
    fake.request_kicks(false);
    let kicks = fake.tx().stats().kicks;
    fake.tx().flush();
    assert_eq!(fake.tx().stats().kicks, kicks, "the kernel is at work again");
}

/// The kernel has as many chunks as configured, and the chunk that was returned last is posted
/// first.
#[test]
fn the_fill_level_is_kept_with_what_came_back_last() {
    let mut fake = fake();
    assert_eq!((fake.rx().posted(), fake.fill.available(9)), (8, Ok(8)));
    for round in 0..100 {
        let addr = fake.take_chunk();
        assert_eq!(fake.rx().arm().unwrap(), Armed::Waits);
        fake.deliver(addr + 256, 60 + round, 0);
        assert_eq!(fake.rx().arm().unwrap(), Armed::Work);
        drop(receive(&mut fake));
        let posted = fake.fill.available(9).unwrap();
        assert_eq!((fake.rx().posted(), posted), (8, 8));
    }
    // The packet is dropped inside of the poll, so its page is posted again at once.
    for _ in 0..20 {
        let addr = fake.take_chunk();
        fake.deliver(addr + 256, 60, 0);
        fake.rx().poll(|poll| poll.receive(1, &mut |packet: Packet<_>| drop(packet)));
        let posted = fake.fill.available(9).unwrap();
        assert_eq!(fake.fill.peek(posted - 1), addr);
    }
    closed(&mut fake, 8);
}

/// A frame that the program drops is posted again without passing through the pool. A page that the
/// handler has exchanged is not.
#[test]
fn a_dropped_frame_is_posted_again_at_once() {
    struct Exchange(Option<XdpFrame<KernelShared>>);
    impl Handler<KernelShared> for Exchange {
        fn run(&mut self, frame: &mut XdpFrame<KernelShared>) -> Verdict {
            if let Some(other) = &mut self.0 {
                std::mem::swap(frame, other);
            }
            Verdict::Drop
        }
        fn pass(&mut self, _: Packet<KernelShared>) {}
    }
    let mut fake = fake();
    let allocated = fake.rx().pool_stats().allocated();
    let addrs = [(); 5].map(|()| fake.take_chunk());
    addrs.into_iter().for_each(|addr| fake.deliver(addr + 256, 60, 0));
    fake.deliver(fake.fill.peek(0), 13, 0);
    assert_eq!(fake.rx().poll(|poll| poll.receive(64, &mut Exchange(None))), 6);
    assert_eq!(fake.rx().pool_stats().allocated(), allocated, "no page went by the pool");
    fake.fill.consume();
    fake.fill.release();
    assert_eq!(fake.fill.available(8), Ok(8));
    let posted = [3, 4, 5, 6].map(|at| fake.fill.peek(at - 1));
    assert_eq!(posted, [addrs[0], addrs[1], addrs[2], addrs[3]]);

    let addr = fake.take_chunk();
    let page = fake.pool().alloc().unwrap();
    let other = page.index();
    let mut exchange = Exchange(Some(XdpFrame::new(page, 0, 60)));
    fake.deliver(addr, 60, 0);
    assert_eq!(fake.rx().poll(|poll| poll.receive(64, &mut exchange)), 1);
    assert_eq!((fake.rx().posted(), fake.fill.available(8)), (8, Ok(8)));
    for at in 0..8 {
        assert!(![addr, u64::from(other) * 4096].contains(&fake.fill.peek(at)), "it is held, or another pool's");
    }
    // The kernel does not have the chunk any more.
    fake.deliver(addr, 60, 0);
    assert!(receive(&mut fake).is_empty());
    assert_eq!(fake.rx().stats().stopped, Some(Fault::Address { addr }));
    drop(exchange);
    closed(&mut fake, 8);
}

/// Users hold all pages: the kernel has no chunks, which is counted. The level is restored when
/// pages are returned, from any thread.
#[test]
fn a_starved_queue_recovers() {
    let mut fake = Fake::new(16, &UmemOptions::new(), 16, 8);
    let mut held = Vec::new();
    while fake.rx().posted() > 0 {
        let addr = fake.take_chunk();
        fake.deliver(addr, 60, 0);
        held.extend(receive(&mut fake));
        let (posted, short) = (fake.rx().posted(), fake.rx().poll(|poll| poll.is_short()));
        assert_eq!(short, posted < 2, "{posted} of 8");
    }
    assert_eq!(held.len(), 16);
    assert!(fake.rx().stats().out_of_buffers > 0);
    assert_eq!(fake.rx().arm().unwrap(), Armed::Work, "nothing would wake the thread");
    std::thread::spawn(move || drop(held)).join().unwrap();
    // If a refill of the pool failed just before, the pool checks other CPUs only after a while.
    while fake.rx().posted() < 8 {
        assert!(receive(&mut fake).is_empty());
    }
    closed(&mut fake, 8);
}

/// A frame in several buffers, delivered one by one, and a frame in too many buffers.
#[test]
fn frames_of_several_buffers() {
    let mut fake = Fake::new(256, &UmemOptions::new().chunk(2048), 64, 40);
    for parts in [2u32, 18, 19, 30, 1] {
        let mut got = Vec::new();
        for part in 1..=parts {
            let addr = fake.take_chunk();
            let more = if part < parts { PKT_CONTD } else { 0 };
            fake.deliver(addr + 256, 100, more);
            got.extend(receive(&mut fake));
            assert_eq!(got.len(), usize::from(part == parts && parts <= 18), "{part} of {parts}");
        }
        if let Some(packet) = got.pop() {
            assert_eq!((packet.len(), packet.fragments().count()), (100 * parts as usize, parts as usize));
        }
    }
    let stats = fake.rx().stats();
    assert_eq!((stats.frames, stats.multi_buffer, stats.too_many, stats.stopped), (3, 2, 2, None));
    // The first descriptor of a frame whose last descriptor never arrives.
    let addr = fake.take_chunk();
    fake.deliver(addr + 256, 100, PKT_CONTD);
    assert!(receive(&mut fake).is_empty());
    let closed = fake.rx.take().unwrap().close().unwrap();
    assert_eq!((closed.outstanding, closed.stats.inflight()), (0, 0));
}

/// If a handler panics, no page is lost, and the queue continues.
#[test]
fn a_panic_in_the_handler_loses_nothing() {
    struct Panics(u32);
    impl Handler<KernelShared> for Panics {
        fn run(&mut self, _: &mut XdpFrame<KernelShared>) -> Verdict {
            self.0 += 1;
            assert!(self.0.is_multiple_of(2), "as asked");
            Verdict::Drop
        }
        fn pass(&mut self, _: Packet<KernelShared>) {}
    }
    let mut fake = fake();
    let mut handler = Panics(0);
    for round in 1..=40 {
        let addr = fake.take_chunk();
        fake.deliver(addr, 60, 0);
        let rx = fake.rx.as_mut().unwrap();
        let polled =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| rx.poll(|poll| poll.receive(64, &mut handler))));
        assert_eq!(polled.is_err(), round % 2 == 1);
    }
    assert_eq!(fake.rx().stats().frames, 40);
    closed(&mut fake, 8);
}

/// The kernel writes random values to random places in its rings: there is no panic, and the
/// accounts agree with what the kernel was given.
#[test]
fn anything_in_the_rings_is_survived() {
    for seed in 0..200 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut fake = Fake::new(160, &UmemOptions::new().chunk(2048), 16, 8);
        let mut pool = fake.pool();
        let mut held = Vec::new();
        for _ in 0..60 {
            let near = |random: &mut fastrand::Rng| random.u64(0..161 * 4096);
            match random.u8(0..12) {
                0..4 => {
                    if fake.fill.available(1).is_ok_and(|n| n > 0) && fake.received.free(1).is_ok_and(|n| n > 0) {
                        let addr = fake.fill.consume() + random.u64(0..300);
                        fake.fill.release();
                        fake.deliver(addr, random.u32(0..1900), random.u32(0..2));
                    }
                }
                4 if random.u8(..) < 20 && fake.received.free(1).is_ok_and(|n| n > 0) => {
                    let (addr, len) = (near(&mut random), random.u32(0..5000));
                    fake.deliver(addr, len, random.u32(..));
                }
                5 if random.u8(..) < 10 => {
                    fake.indices(random.usize(0..4)).producer.store(random.u32(..), Ordering::Relaxed)
                }
                6 if random.u8(..) < 10 => {
                    fake.indices(random.usize(0..4)).consumer.store(random.u32(..), Ordering::Relaxed)
                }
                7..9 => {
                    if let Some(page) = pool.alloc() {
                        let len = random.usize(0..4096);
                        let _ = fake.tx().send(Packet::new(page.freeze_range(0..len)));
                        fake.tx().flush();
                    }
                }
                9 => {
                    if fake.sent.available(1).is_ok_and(|n| n > 0) && fake.done.free(1).is_ok_and(|n| n > 0) {
                        let addr = fake.sent.consume().addr;
                        fake.sent.release();
                        fake.complete(if random.u8(..) < 10 { near(&mut random) } else { addr });
                    }
                }
                10 => _ = fake.tx().complete(),
                _ => held.extend(receive(&mut fake)),
            }
            held.truncate(4);
        }
        let Fake { rx, tx, umem, memory, .. } = fake;
        let (rx, key) = (rx.unwrap(), tx.as_ref().unwrap().socket().key());
        let closed = rx.close().unwrap();
        drop((tx, umem));
        held::released(key);
        drop(memory);
        let parts = |packet: &Packet<_>| packet.fragments().map(netmem_pool::Frag::index).collect::<Vec<_>>();
        let mut pages: Vec<_> = held.iter().flat_map(parts).collect();
        pages.sort_unstable();
        pages.dedup();
        // If one part of a page is held and another part is quarantined, the page is counted when
        // the last part is gone.
        assert!(closed.outstanding <= pages.len() as u64 + 8, "{seed}: {closed:?}");
        drop(held);
        assert_eq!(pool.stats().inflight(), 0, "{seed}");
        assert!(pool.close().outstanding == 0);
    }
}
