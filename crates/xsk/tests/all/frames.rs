//! Frames between a queue of ours and the kernel, byte for byte.
#![allow(clippy::unwrap_used)]

use netmem_packet::{Packet, Poll, RxQueue, TxQueue};
use netmem_pool::Page;
use netmem_testing::namespace::in_namespace;
use netmem_testing::xsk;
use netmem_testing::xsk::{Harness, frame, longest, until};
use netmem_xsk::{Mode, QueueOptions, UmemMemory, UmemOptions};

/// A packet of these bytes, each page holding at most `room` of them.
fn packet<M: UmemMemory>(bytes: &[u8], room: usize, mut page: impl FnMut() -> Page<M>) -> Packet<M> {
    let mut frags = bytes.chunks(room).map(|part| {
        let mut page = page();
        page.copy_from(64, part).unwrap();
        page.freeze_range(64..64 + part.len())
    });
    let mut packet = Packet::new(frags.next().unwrap());
    frags.for_each(|frag| packet.push(frag).unwrap());
    packet
}

/// Frames of every size arrive byte for byte, in both directions: in one buffer, and in several
/// where a chunk is too small.
fn every_size(umem: UmemOptions, sizes: impl Iterator<Item = usize> + Clone + Send) {
    in_namespace(|| {
        let mut harness = Harness::new(4096, 9000, &umem, QueueOptions::new());
        let mut pool = harness.pool(256);
        let longest = longest();
        let sizes = sizes.filter(|len| *len <= longest);
        for len in sizes.clone() {
            let sent = frame(len, len as u64);
            harness.peer.send(&sent);
            let packet = harness.receive();
            assert_eq!(packet.to_vec(), sent, "{len} bytes to us");
            assert_eq!(packet.fragments().count(), len.div_ceil(harness.umem.frame_capacity()), "{len}");
        }
        let (room, n) = (harness.umem.chunk_size() - 64, sizes.clone().count() as u64);
        for len in sizes {
            let sent = frame(len, !len as u64);
            harness.send(packet(&sent, room, || pool.alloc().unwrap()));
            assert_eq!(harness.peer.receive(), sent, "{len} bytes from us");
        }
        let (rx, tx) = (harness.rx.stats(), harness.tx.stats());
        assert_eq!((rx.frames, rx.passed, tx.frames, rx.stopped, tx.stopped), (n, n, n, None, None));
        assert_eq!(tx.descriptors, tx.completed);
        assert_eq!(pool.stats().inflight(), 0);
        // The last page of the posted chunks may be in part with the queue.
        let pages = harness.rx.posted().div_ceil(4096 / harness.umem.chunk_size()) as u64;
        assert!(
            (pages..=pages + 1).contains(&harness.rx.pool_stats().inflight()),
            "{pages} {:?}",
            harness.rx.pool_stats()
        );
        let kernel = harness.rx.socket().kernel_stats().unwrap();
        assert_eq!((kernel.rx_dropped, kernel.rx_ring_full, kernel.rx_invalid, kernel.tx_invalid), (0, 0, 0, 0));
    });
}

#[test]
fn frames_of_every_size_in_chunks_of_a_page() {
    every_size(UmemOptions::new(), 60..9015);
}

#[test]
fn frames_of_every_size_in_half_pages_with_headroom() {
    every_size(UmemOptions::new().chunk(2048).headroom(128), (60..2100).chain((2101..9015).step_by(97)));
}

/// A fragment that lies across chunks is sent in several descriptors.
#[test]
fn a_fragment_across_chunks_is_sent_whole() {
    in_namespace(|| {
        let mut harness = Harness::new(4096, 9000, &UmemOptions::new().chunk(2048), QueueOptions::new());
        let mut pool = harness.pool(256);
        let sent = frame(3500, 1);
        let mut page = pool.alloc().unwrap();
        page.copy_from(100, &sent).unwrap();
        let page = page.freeze_range(100..3600);
        // Other holders of the same page, which are sent too: the completions of one chunk are
        // alike.
        harness.tx.send(Packet::new(page.clone())).unwrap();
        harness.tx.send(Packet::new(page.slice(0..60))).unwrap();
        harness.send(Packet::new(page));
        assert_eq!(harness.tx.stats().descriptors, 5);
        for len in [3500, 60, 3500] {
            assert_eq!(harness.peer.receive(), sent[..len]);
        }
        assert_eq!(pool.stats().inflight(), 0);
    });
}

/// What the queue cannot send comes back as it was.
#[test]
fn what_cannot_be_sent_is_refused() {
    use netmem_packet::{Checksum, Reach, Sendable};
    in_namespace(|| {
        let mut harness = Harness::new(4096, 1500, &UmemOptions::new(), QueueOptions::new().multi_buffer(false));
        let mut pool = harness.pool(256);
        let two = packet(&frame(4200, 1), 2100, || pool.alloc().unwrap());
        assert_eq!(harness.tx.sendable(&two), Sendable::Never);
        let two = harness.tx.send(two).unwrap_err();
        assert_eq!(two.to_vec(), frame(4200, 1));
        let mut partial = packet(&frame(60, 1), 2100, || pool.alloc().unwrap());
        partial.meta.checksum = Checksum::Partial { start: 14, offset: 6 };
        let partial = harness.tx.send(partial).unwrap_err();
        let empty = Packet::new(pool.alloc().unwrap().freeze_range(0..0));
        let empty = harness.tx.send(empty).unwrap_err();
        let (other, _) = xsk::memory(64, &UmemOptions::new());
        let elsewhere = Packet::new(other.page().unwrap().freeze_range(0..60));
        assert_eq!(harness.tx.reach(elsewhere.head()), Reach::Never);
        drop((harness.tx.send(elsewhere).unwrap_err(), two, partial, empty));
        let stats = harness.tx.stats();
        assert_eq!((stats.bad_shape, stats.no_offload, stats.unreachable, stats.frames), (2, 1, 1, 0));
        assert_eq!(pool.stats().inflight(), 0);
    });
}

/// More frames than the kernel sends in one call: the rest is kicked again, and all arrive.
#[test]
fn a_full_ring_is_sent_whole_by_one_flush() {
    in_namespace(|| {
        let mut harness = Harness::new(4096, 1500, &UmemOptions::new(), QueueOptions::new());
        let mut pool = harness.pool(2048);
        let n = 1000;
        for i in 0..n {
            harness.tx.send(packet(&frame(60 + i % 700, i as u64), 4032, || pool.alloc().unwrap())).unwrap();
        }
        harness.tx.flush();
        for i in 0..n {
            assert_eq!(harness.peer.receive(), frame(60 + i % 700, i as u64), "{i}");
        }
        until("completions", || {
            harness.tx.complete();
            (harness.tx.outstanding() == 0).then_some(())
        });
        let copies = harness.tx.socket().mode() == Mode::Copy;
        assert!(!copies || harness.tx.stats().kicks_again > 0, "the kernel sends fewer than that in one call");
        assert_eq!(pool.stats().inflight(), 0);
    });
}

/// Every frame that comes in goes out again: the pages go from one ring to the other without a
/// copy.
#[test]
fn frames_are_echoed() {
    use netmem_packet::{Handler, TxBulk, Verdict, XdpFrame};
    use netmem_pool::KernelShared;
    struct Echo<'t>(TxBulk<&'t mut netmem_xsk::XskTx>);
    impl Handler<KernelShared> for Echo<'_> {
        fn run(&mut self, frame: &mut XdpFrame<KernelShared>) -> Verdict {
            frame.data_mut()[..6].copy_from_slice(&[2; 6]);
            Verdict::Tx
        }
        fn pass(&mut self, _: Packet<KernelShared>) {}
        fn tx(&mut self, packet: Packet<KernelShared>) {
            self.0.push(packet);
        }
        fn flush(&mut self) {
            self.0.flush();
        }
    }
    in_namespace(|| {
        let mut harness = Harness::new(8192, 9000, &UmemOptions::new(), QueueOptions::new());
        let n = 2000;
        let len = |i: u64| 60 + i as usize % (longest() - 60).min(5000);
        let mut back = 0;
        {
            let mut echo = Echo(TxBulk::holding(&mut harness.tx, 256));
            for i in 0..n {
                harness.peer.send(&frame(len(i), i));
                harness.rx.poll(|poll| poll.receive(256, &mut echo));
                while let Some(got) = harness.peer.try_receive() {
                    let mut sent = frame(len(back), back);
                    sent[..6].copy_from_slice(&[2; 6]);
                    assert_eq!(got, sent);
                    back += 1;
                }
            }
            until("all frames back", || {
                harness.rx.poll(|poll| poll.receive(256, &mut echo));
                while harness.peer.try_receive().is_some() {
                    back += 1;
                }
                (back == n).then_some(())
            });
        }
        until("completions", || {
            harness.rx.poll(|_| harness.tx.complete());
            (harness.tx.outstanding() == 0).then_some(())
        });
        let posted = harness.rx.posted() as u64;
        assert_eq!(harness.rx.pool_stats().inflight(), posted);
        assert_eq!((harness.rx.stats().transmitted, harness.tx.stats().frames), (n, n));
    });
}

/// What the kernel delivered is a slice, and turns into `Bytes` without a copy.
#[test]
fn delivered_bytes_are_the_page() {
    in_namespace(|| {
        let mut harness = Harness::new(4096, 1500, &UmemOptions::new(), QueueOptions::new());
        harness.peer.send(&frame(500, 7));
        let (head, _) = harness.receive().into_fragments();
        let at = head.as_ptr();
        let bytes = bytes::Bytes::from(head);
        assert_eq!((&bytes[..], bytes.as_ptr()), (&frame(500, 7)[..], at));
        let region = harness.umem.region().as_ptr().addr();
        assert!((region..region + harness.umem.region().len()).contains(&at.addr()));
        std::thread::spawn(move || drop(bytes)).join().unwrap();
        assert_eq!(harness.rx.pool_stats().inflight(), harness.rx.posted() as u64);
    });
}
