//! Frames that one device of ours receives and another transmits, by the thousand, on the
//! receiver's thread and on another.

use std::sync::mpsc;
use std::thread;

use netmem_packet::{Handler, Packet, Poll, RxQueue, TxBulk, Verdict, XdpFrame};
use netmem_pool::PeerShared;
use netmem_testing::driver::*;
use netmem_virtio::device::port::{Echo, Play};
use netmem_virtio::driver::{QueuePair, RxMode, VirtioRx, VirtioTx};

/// What an echo makes of a frame.
fn echoed(bytes: &[u8]) -> Vec<u8> {
    [&bytes[6..12], &bytes[..6], &bytes[12..]].concat()
}

/// Proves POOL-9 and POOL-5 on devices of our own: thousands of frames of mixed sizes go from one
/// device to another, by the receiver's thread or by another one, in which the target's completions
/// then are; each comes back from the second device's far end as it was sent, and every page is
/// returned.
#[test]
fn thousands_of_frames() {
    for domains in DOMAINS {
        for elsewhere in [false, true] {
            let n = if cfg!(debug_assertions) { 1_500 } else { 15_000 };
            let mut want = frames(n, 9014);
            want.iter_mut().for_each(|f| f[0] = 2);
            let memory = common_memory(4096);
            let options = || memory(RxMode::Mergeable).max_frame(9014);
            let (mut first, mut second) = (DeviceThread::one(pcap(&want, Play::Once)), DeviceThread::one(Echo::new()));
            let accounting = [Accounting::default(), Accounting::default()];
            let (net_a, mut a) = first.probe(accounting[0].count(options()));
            let (net_b, mut b) = second.probe(match domains {
                Domains::One => accounting[0].share(options()),
                Domains::Two => accounting[1].count(options()),
                Domains::Plain => options().premapped(false),
            });
            let (mut a, QueuePair { rx: mut far, tx }) = (a.remove(0), b.remove(0));
            let tx = if elsewhere {
                by_another_thread(&mut a.rx, &mut far, tx, &want)
            } else {
                by_the_same_thread(&mut a.rx, &mut far, tx, &want)
            };
            let s = tx.stats();
            assert_eq!((s.frames, s.completed, s.stopped), (n as u64, n as u64, None));
            assert_eq!(s.mapped, if domains == Domains::Two { n as u64 } else { 0 });
            assert_eq!(a.rx.stats().redirected, n as u64);
            drop(tx);
            close_clean(a);
            assert_closed(&far.close().unwrap(), 0);
            drop((net_a, net_b));
            accounting[0].assert_balanced();
            if domains == Domains::Two {
                accounting[1].assert_balanced();
            }
            assert_eq!(second.stats.queue_errors().map(|e| e.1).sum::<u64>(), 0);
        }
    }
}

/// Frames on their way at a time: what the echo can hold.
const WINDOW: usize = 64;

fn by_the_same_thread(rx: &mut VirtioRx, far: &mut VirtioRx, tx: VirtioTx, want: &[Vec<u8>]) -> VirtioTx {
    let mut tx = tx;
    let (mut seen, mut program) = (0, Forward::to(&mut tx));
    until(|| {
        let sent = program.bulk.stats().sent as usize;
        rx.poll(|poll| poll.receive(WINDOW - (sent - seen), &mut program));
        assert_eq!(program.bulk.stats().dropped, 0);
        receive(far, &mut |p: Packet<PeerShared>| {
            assert!(p.to_vec() == echoed(&want[seen]), "frame {seen}");
            seen += 1;
        });
        seen == want.len() && program.bulk.target().posted() == 0
    });
    tx
}

fn by_another_thread(rx: &mut VirtioRx, far: &mut VirtioRx, tx: VirtioTx, want: &[Vec<u8>]) -> VirtioTx {
    /// Passes its frames to another thread.
    struct Hand(mpsc::SyncSender<Packet<PeerShared>>);

    impl Handler<PeerShared> for Hand {
        fn run(&mut self, _: &mut XdpFrame<PeerShared>) -> Verdict {
            Verdict::Redirect
        }

        fn pass(&mut self, _: Packet<PeerShared>) {}

        fn redirect(&mut self, packet: Packet<PeerShared>) {
            self.0.send(packet).unwrap();
        }
    }

    let (hand, frames) = mpsc::sync_channel(WINDOW);
    thread::scope(|s| {
        let target = s.spawn(move || {
            let (mut seen, mut bulk) = (0, TxBulk::new(tx));
            until(|| {
                while bulk.held() + (bulk.stats().sent as usize - seen) < WINDOW
                    && let Ok(packet) = frames.try_recv()
                {
                    bulk.push(packet);
                }
                bulk.flush();
                assert_eq!(bulk.stats().dropped, 0);
                receive(far, &mut |p: Packet<PeerShared>| {
                    assert!(p.to_vec() == echoed(&want[seen]), "frame {seen}");
                    seen += 1;
                });
                seen == want.len() && bulk.target().posted() == 0
            });
            bulk.into_target()
        });
        let mut hand = Hand(hand);
        until(|| {
            rx.poll(|poll| poll.receive(64, &mut hand));
            target.is_finished()
        });
        target.join().unwrap()
    })
}
