//! Frames between a queue of ours and the kernel, byte for byte.
#![allow(clippy::unwrap_used)]

use netmem_packet::{Packet, Poll, RxQueue, TxQueue};
use netmem_pool::Page;
use netmem_testing::namespace::in_namespace;
use netmem_testing::xsk;
use netmem_testing::xsk::{Bench, frame, longest, until};
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
        let mut bench = Bench::new(4096, 9000, &umem, QueueOptions::new());
        let mut pool = bench.pool(256);
        let longest = longest();
        let sizes = sizes.filter(|len| *len <= longest);
        for len in sizes.clone() {
            let sent = frame(len, len as u64);
            bench.peer.send(&sent);
            let packet = bench.receive();
            assert_eq!(packet.to_vec(), sent, "{len} bytes to us");
            assert_eq!(packet.fragments().count(), len.div_ceil(bench.umem.frame_capacity()), "{len}");
        }
        let (room, n) = (bench.umem.chunk_size() - 64, sizes.clone().count() as u64);
        for len in sizes {
            let sent = frame(len, !len as u64);
            bench.send(packet(&sent, room, || pool.alloc().unwrap()));
            assert_eq!(bench.peer.receive(), sent, "{len} bytes from us");
        }
        let (rx, tx) = (bench.rx.stats(), bench.tx.stats());
        assert_eq!((rx.frames, rx.passed, tx.frames, rx.stopped, tx.stopped), (n, n, n, None, None));
        assert_eq!(tx.descriptors, tx.completed);
        assert_eq!(pool.stats().inflight(), 0);
        // The last page of the posted chunks may be in part with the queue.
        let pages = bench.rx.posted().div_ceil(4096 / bench.umem.chunk_size()) as u64;
        assert!((pages..=pages + 1).contains(&bench.rx.pool_stats().inflight()), "{pages} {:?}", bench.rx.pool_stats());
        let kernel = bench.rx.socket().kernel_stats().unwrap();
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
        let mut bench = Bench::new(4096, 9000, &UmemOptions::new().chunk(2048), QueueOptions::new());
        let mut pool = bench.pool(256);
        let sent = frame(3500, 1);
        let mut page = pool.alloc().unwrap();
        page.copy_from(100, &sent).unwrap();
        let page = page.freeze_range(100..3600);
        // Other holders of the same page, which are sent too: the completions of one chunk are
        // alike.
        bench.tx.send(Packet::new(page.clone())).unwrap();
        bench.tx.send(Packet::new(page.slice(0..60))).unwrap();
        bench.send(Packet::new(page));
        assert_eq!(bench.tx.stats().descriptors, 5);
        for len in [3500, 60, 3500] {
            assert_eq!(bench.peer.receive(), sent[..len]);
        }
        assert_eq!(pool.stats().inflight(), 0);
    });
}

/// What the queue cannot send comes back as it was.
#[test]
fn what_cannot_be_sent_is_refused() {
    use netmem_packet::{Checksum, Reach, Sendable};
    in_namespace(|| {
        let mut bench = Bench::new(4096, 1500, &UmemOptions::new(), QueueOptions::new().multi_buffer(false));
        let mut pool = bench.pool(256);
        let two = packet(&frame(4200, 1), 2100, || pool.alloc().unwrap());
        assert_eq!(bench.tx.sendable(&two), Sendable::Never);
        let two = bench.tx.send(two).unwrap_err();
        assert_eq!(two.to_vec(), frame(4200, 1));
        let mut partial = packet(&frame(60, 1), 2100, || pool.alloc().unwrap());
        partial.meta.checksum = Checksum::Partial { start: 14, offset: 6 };
        let partial = bench.tx.send(partial).unwrap_err();
        let empty = Packet::new(pool.alloc().unwrap().freeze_range(0..0));
        let empty = bench.tx.send(empty).unwrap_err();
        let (other, _) = xsk::memory(64, &UmemOptions::new());
        let elsewhere = Packet::new(other.page().unwrap().freeze_range(0..60));
        assert_eq!(bench.tx.reach(elsewhere.head()), Reach::Never);
        drop((bench.tx.send(elsewhere).unwrap_err(), two, partial, empty));
        let stats = bench.tx.stats();
        assert_eq!((stats.bad_shape, stats.no_offload, stats.unreachable, stats.frames), (2, 1, 1, 0));
        assert_eq!(pool.stats().inflight(), 0);
    });
}

/// More frames than the kernel sends in one call: the rest is kicked again, and all arrive.
#[test]
fn a_full_ring_is_sent_whole_by_one_flush() {
    in_namespace(|| {
        let mut bench = Bench::new(4096, 1500, &UmemOptions::new(), QueueOptions::new());
        let mut pool = bench.pool(2048);
        let n = 1000;
        for i in 0..n {
            bench.tx.send(packet(&frame(60 + i % 700, i as u64), 4032, || pool.alloc().unwrap())).unwrap();
        }
        bench.tx.flush();
        for i in 0..n {
            assert_eq!(bench.peer.receive(), frame(60 + i % 700, i as u64), "{i}");
        }
        until("completions", || {
            bench.tx.complete();
            (bench.tx.outstanding() == 0).then_some(())
        });
        let copies = bench.tx.socket().mode() == Mode::Copy;
        assert!(!copies || bench.tx.stats().kicks_again > 0, "the kernel sends fewer than that in one call");
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
        let mut bench = Bench::new(8192, 9000, &UmemOptions::new(), QueueOptions::new());
        let n = 2000;
        let len = |i: u64| 60 + i as usize % (longest() - 60).min(5000);
        let mut back = 0;
        {
            let mut echo = Echo(TxBulk::holding(&mut bench.tx, 256));
            for i in 0..n {
                bench.peer.send(&frame(len(i), i));
                bench.rx.poll(|poll| poll.receive(256, &mut echo));
                while let Some(got) = bench.peer.try_receive() {
                    let mut sent = frame(len(back), back);
                    sent[..6].copy_from_slice(&[2; 6]);
                    assert_eq!(got, sent);
                    back += 1;
                }
            }
            until("all frames back", || {
                bench.rx.poll(|poll| poll.receive(256, &mut echo));
                while bench.peer.try_receive().is_some() {
                    back += 1;
                }
                (back == n).then_some(())
            });
        }
        until("completions", || {
            bench.rx.poll(|_| bench.tx.complete());
            (bench.tx.outstanding() == 0).then_some(())
        });
        let posted = bench.rx.posted() as u64;
        assert_eq!(bench.rx.pool_stats().inflight(), posted);
        assert_eq!((bench.rx.stats().transmitted, bench.tx.stats().frames), (n, n));
    });
}

/// What the kernel delivered is a slice, and turns into `Bytes` without a copy.
#[test]
fn delivered_bytes_are_the_page() {
    in_namespace(|| {
        let mut bench = Bench::new(4096, 1500, &UmemOptions::new(), QueueOptions::new());
        bench.peer.send(&frame(500, 7));
        let (head, _) = bench.receive().into_fragments();
        let at = head.as_ptr();
        let bytes = bytes::Bytes::from(head);
        assert_eq!((&bytes[..], bytes.as_ptr()), (&frame(500, 7)[..], at));
        let region = bench.umem.region().as_ptr().addr();
        assert!((region..region + bench.umem.region().len()).contains(&at.addr()));
        std::thread::spawn(move || drop(bytes)).join().unwrap();
        assert_eq!(bench.rx.pool_stats().inflight(), bench.rx.posted() as u64);
    });
}
