//! A device that the user trusts: its frames are slices, which do not change and can be kept; its
//! rings are checked like any other's.

use bytes::Bytes;
use netmem_packet::{Handler, Packet, Poll, Queues, RxQueue, SplitFrame, TxBulk, TxQueue, Verdict, XdpFrame};
use netmem_pool::{Memory, PeerMemory, PeerShared, RegionOptions, RegionProvider, TrustedPeer};
use netmem_testing::driver::hostile::{Behaviour, Hostile, OnStop};
use netmem_testing::driver::split::{DeviceMemory, assert_split_closed};
use netmem_testing::driver::*;
use netmem_virtio::device::port::{Echo, Play};
use netmem_virtio::driver::{
    DeviceFault, EitherRx, NetOptions, QueuePair, RxClosed, RxMode, VirtioNet, VirtioRx, VirtioRxQueues, VirtioTx,
};
use std::sync::mpsc;

/// Options for a device of this process.
fn trusted(mode: RxMode) -> NetOptions<TrustedPeer> {
    // SAFETY: the device is one of ours, or a test in its place: neither writes a buffer that it
    // has handed back.
    unsafe { NetOptions::trust_peer(mode) }
}

/// The bytes of a packet, by slices.
fn bytes(packet: &Packet<TrustedPeer>) -> Vec<u8> {
    packet.fragments().flat_map(|frag| frag.iter().copied()).collect()
}

/// Proves POOL-8: what queues deliver, and accept, follows from the options.
#[test]
fn queues_declare_their_memory() {
    fn kind<M: PeerMemory>(_: &NetOptions<M>) -> (&'static str, &'static str) {
        fn of<Q: RxQueue, T: TxQueue>() -> (&'static str, &'static str) {
            (<Q::Mem as Memory>::NAME, <T::Mem as Memory>::NAME)
        }
        of::<VirtioRx<M>, VirtioTx<M>>()
    }
    assert_eq!(kind(&trusted(RxMode::Small)), (TrustedPeer::NAME, TrustedPeer::NAME));
    assert_eq!(kind(&NetOptions::new(RxMode::Small)), (PeerShared::NAME, PeerShared::NAME));
}

/// In every mode, frames are read as slices by the program and by the handler, and as `Bytes`. What
/// is kept of them is as it was after thousands of other frames, after the device has gone, and on
/// another thread.
#[test]
fn frames_are_slices() {
    for (mode, max) in [(RxMode::Small, 1518), (RxMode::Mergeable, 9014), (RxMode::Big, 9014)] {
        let want = frames(2000, max);
        let mut device_thread = DeviceThread::one(pcap(&want, Play::Once));
        let accounting = Accounting::default();
        let (net, mut pairs) = device_thread.probe(accounting.count(trusted(mode).max_frame(max).pages(4096)));
        let QueuePair { mut rx, tx } = pairs.remove(0);
        let (mut seen, mut ran, mut kept) = (0, 0, Vec::new());
        until(|| {
            let mut program = Program::<false, _, _, _> {
                run: |f: &mut XdpFrame<TrustedPeer>| {
                    let head = f.data();
                    assert!(want[ran].starts_with(head), "{mode}: frame {ran}");
                    ran += 1;
                    Verdict::Pass
                },
                pass: |p: Packet<TrustedPeer>| {
                    assert!(bytes(&p) == want[seen], "{mode}: frame {seen}");
                    if seen < 50 {
                        let (head, rest) = p.into_fragments();
                        kept.push(std::iter::once(head).chain(rest).map(Bytes::from).collect::<Vec<_>>());
                    }
                    seen += 1;
                },
                tx: |_| unreachable!(),
            };
            receive(&mut rx, &mut program);
            seen == want.len()
        });
        drop(tx);
        let closed = rx.close().unwrap();
        let pages = kept.iter().map(Vec::len).sum::<usize>();
        // In big-packet mode they are of no pool.
        assert_eq!(closed.outstanding, if mode == RxMode::Big { 0 } else { pages as u64 });
        drop((net, device_thread));
        let want = want[..50].to_vec();
        std::thread::spawn(move || assert!(kept.iter().map(|parts| parts.concat()).eq(want))).join().unwrap();
        if mode != RxMode::Big {
            accounting.assert_balanced();
        }
    }
}

/// Frames go from one trusted device to another that shares its memory and its domain: changed in
/// place as slices, sent without being mapped.
#[test]
fn frames_are_edited_and_forwarded() {
    struct Edit<'t> {
        bulk: TxBulk<&'t mut VirtioTx<TrustedPeer>>,
    }

    impl Handler<TrustedPeer> for Edit<'_> {
        fn run(&mut self, frame: &mut XdpFrame<TrustedPeer>) -> Verdict {
            frame.data_mut()[..6].fill(7);
            Verdict::Redirect
        }

        fn pass(&mut self, _: Packet<TrustedPeer>) {}

        fn redirect(&mut self, packet: Packet<TrustedPeer>) {
            self.bulk.push(packet);
        }

        fn flush(&mut self) {
            self.bulk.flush();
        }
    }

    let want = frames(1000, 1518);
    let region = RegionOptions::new(4096).build::<PeerShared>().unwrap();
    // SAFETY: its file goes to two devices of ours, which write nothing that they have handed back.
    let supply = RegionProvider::new(unsafe { region.trust_peer() });
    let options = || trusted(RxMode::Mergeable).memory(supply.region().clone(), supply.clone());
    let (came, arrived) = mpsc::channel();
    let (mut first, mut second) = (DeviceThread::one(pcap(&want, Play::Once)), DeviceThread::one(Slow(came)));
    let accounting = Accounting::default();
    let (net_a, mut a) = first.probe(accounting.count(options()));
    let (net_b, mut b) = second.probe(accounting.share(options()));
    let (mut a, QueuePair { rx: far, mut tx }) = (a.remove(0), b.remove(0));
    let mut program = Edit { bulk: TxBulk::holding(&mut tx, 128) };
    until(|| {
        let budget = program.bulk.room();
        a.rx.poll(|poll| poll.receive(budget, &mut program));
        program.bulk.stats() == bulk_stats(1000, 0) && program.bulk.target().posted() == 0
    });
    drop(program);
    for want in &want {
        assert_eq!(arrived.try_recv().unwrap(), [&[7; 6], &want[6..]].concat());
    }
    assert_eq!((tx.stats().frames, tx.stats().mapped), (1000, 0));
    drop(tx);
    assert_closed(&far.close().unwrap(), 0);
    close_clean(a);
    drop((net_a, net_b));
    accounting.assert_balanced();
}

/// A driver on the test as its device.
fn on_hostile(
    options: NetOptions<TrustedPeer>,
) -> (Hostile, VirtioNet<TrustedPeer>, QueuePair<TrustedPeer>, Accounting) {
    let ((device, backend), accounting) = (Hostile::new(Behaviour::default()), Accounting::default());
    let (net, mut pairs) = VirtioNet::probe(backend, accounting.count(options)).unwrap();
    (device, net, pairs.remove(0), accounting)
}

/// Proves NET-6: trust is about bytes. Rings and headers of a trusted device are validated, and an
/// invalid value stops the queue.
#[test]
fn rings_are_checked_all_the_same() {
    type Lie = fn(&mut hostile::DeviceRing) -> DeviceFault;
    let lies: [Lie; 4] = [
        |ring| {
            ring.add_used(9999, 100);
            DeviceFault::BadId { id: 9999 }
        },
        |ring| {
            let head = ring.take().unwrap();
            ring.add_used(head.into(), 5000);
            let have = 12 + 1518;
            DeviceFault::BadLength { len: 5000, have }
        },
        |ring| {
            let head = ring.take().unwrap();
            ring.write(head.into(), 100);
            ring.add_used(head.into(), 100);
            DeviceFault::NotPosted { id: head }
        },
        |ring| {
            ring.split().set_used_idx(300);
            DeviceFault::IndexJump { by: 300, posted: 256 }
        },
    ];
    for lie in lies {
        let (device, net, mut pair, accounting) = on_hostile(trusted(RxMode::Small));
        let fault = lie(&mut device.ring(0));
        receive(&mut pair.rx, &mut |_: Packet<TrustedPeer>| {});
        assert_eq!(pair.rx.stats().stopped, Some(fault));
        close_clean(pair);
        drop((net, device));
        accounting.assert_balanced();
    }
    // And of what is sent.
    let (device, net, mut pair, accounting) = on_hostile(trusted(RxMode::Small));
    device.ring(1).add_used(3, 0);
    pair.tx.complete();
    assert_eq!(pair.tx.stats().stopped, Some(DeviceFault::IndexJump { by: 1, posted: 0 }));
    close_clean(pair);
    drop(net);
    accounting.assert_balanced();
}

/// Proves POOL-11: a trusted device that dies breaks no promise. What it had is quarantined, and
/// what was received from it stays as it is.
#[test]
fn a_trusted_device_that_dies() {
    for refuses in [false, true] {
        let (mut device, net, mut pair, accounting) = on_hostile(trusted(RxMode::Small));
        let mut ring = device.ring(0);
        (0..5).for_each(|seed| device.deliver(&mut ring, &frame(seed, 300)));
        let held = take(&mut pair.rx);
        let heads: Vec<_> = std::iter::from_fn(|| ring.take()).collect();
        let addresses: Vec<_> = heads.into_iter().map(|head| ring.chain(head)[0].addr).collect();
        assert_eq!(addresses.len(), 256);
        if refuses {
            device.behave(|b| b.on_stop = OnStop::Refuse);
        } else {
            device.kill();
        }
        drop(pair.tx);
        let closed = pair.rx.close().unwrap();
        assert_eq!((closed.outstanding, closed.stats.quarantined), (5, 256));
        addresses.into_iter().for_each(|addr| device.write(addr, &[0xee; 64]));
        assert!(held.iter().map(bytes).eq((0..5).map(|seed| frame(seed, 300))));
        drop((held, net));
        accounting.assert_balanced();
    }
}

/// Frames with payload in device memory: the heads of a trusted device's are slices. The queue is
/// restarted in place with device memory and back.
#[test]
fn heads_of_split_frames_are_slices() {
    let memory = DeviceMemory::new(300);
    let (device, net, pair, accounting) = on_hostile(memory.add(trusted(RxMode::Small)));
    let mut queues = VirtioRxQueues::new([pair.rx]).header_bytes(100);
    for round in 0..3 {
        queues.attach(0, memory.provider.clone()).unwrap();
        let mut ring = device.ring(0);
        device.deliver(&mut ring, &frame(round, 500));
        let mut seen = 0;
        queues.get(0).unwrap().split().unwrap().poll(|poll| {
            poll.receive(64, &mut |f: SplitFrame<TrustedPeer>| {
                assert_eq!(f.head()[..], frame(round, 500)[..100]);
                assert_eq!(memory.bytes(&f), frame(round, 500));
                seen += 1;
            })
        });
        assert_eq!(seen, 1);
        if round == 2 {
            break;
        }
        queues.detach(0).unwrap();
        let mut ring = device.ring(0);
        device.deliver(&mut ring, &frame(round, 400));
        let packets = take(queues.get(0).unwrap().host().unwrap());
        assert_eq!(packets[0].head()[..], frame(round, 400));
    }
    let Some(RxClosed::Split(closed)) = std::mem::take(&mut *queues.get(0).unwrap()).close() else { panic!() };
    assert_split_closed(&closed, 0);
    assert!(matches!(*queues.get(0).unwrap(), EitherRx::Stopped));
    drop((pair.tx, net));
    accounting.assert_balanced();
}

/// Frames of a trusted device go round an echo, sent as they were received.
#[test]
fn frames_go_round() {
    for mode in MODES {
        let mut device_thread = DeviceThread::one(Echo::new());
        let (net, mut pairs) = device_thread.probe(trusted(mode).tx_pages(64));
        let mut pair = pairs.remove(0);
        let pool = net.tx_pool(netmem_pool::PoolOptions::new("tx")).unwrap();
        let mut page = pool.alloc().unwrap();
        page[64..1064].copy_from_slice(&frame(1, 1000));
        pair.tx.send(Packet::new(page.freeze_range(64..1064))).unwrap();
        pair.tx.flush();
        let mut rounds = 0;
        until(|| {
            let tx = &mut pair.tx;
            pair.rx.poll(|poll| {
                poll.receive(64, &mut |p: Packet<TrustedPeer>| {
                    rounds += 1;
                    // The echo exchanges the addresses.
                    let straight = frame(1, 1000);
                    let swapped = [&straight[6..12], &straight[..6], &straight[12..]].concat();
                    assert_eq!(bytes(&p), if rounds % 2 == 1 { swapped } else { straight });
                    if rounds < 100 {
                        tx.send(p).unwrap();
                    }
                });
                tx.flush();
                tx.complete();
            });
            rounds == 100 && pair.tx.posted() == 0
        });
        assert_closed(&pool.close(), 0);
        close_clean(pair);
        drop(net);
    }
}
