//! Back ends that end and are replaced: queues, pools and packets stay as they are, and lost frames
//! are counted.
//!
//! `crates/cli/tests/all/reconnect.rs` has the same with processes that are killed.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};

use netmem_packet::{Checksum, DeviceFrag, Meta, Packet, Poll, RxQueue, SplitTxQueue, TxQueue};
use netmem_pool::PeerShared;
use netmem_testing::driver::hostile::{Behaviour, FEATURES, Harness, Hostile, OnStop};
use netmem_testing::driver::split::{DeviceMemory, assert_split_closed, bind};
use netmem_testing::driver::*;
use netmem_testing::on_event;
use netmem_virtio::VhostUserError;
use netmem_virtio::device::port::{Echo, Gen};
use netmem_virtio::device::{DropReason, NetDevice, Options, Stats};
use netmem_virtio::driver::{DeviceFault, NetError, NetOptions, Offload, QueuePair, RestartError, RxMode, VirtioNet};
use netmem_virtio::net::feature;

fn echo(pairs: usize) -> DeviceThread<Echo> {
    let options = Options { max_pairs: pairs, serve_control: pairs > 1, ..Options::default() };
    DeviceThread::new(NetDevice::new(options, |_| Ok(Echo::new())).unwrap())
}

/// Frames that the device has popped from the driver's ring. What it dropped on the way to the
/// driver is counted separately.
fn taken_by(stats: &Stats) -> u64 {
    stats.tx_frames.load(Relaxed) + stats.dropped(DropReason::PortRefused)
}

/// A packet of these bytes, in a page of the queue's pool.
fn packet(pair: &mut QueuePair, bytes: &[u8]) -> Option<Packet<PeerShared>> {
    let mut page = pair.rx.poll(|poll| poll.with_napi(|napi| napi.alloc()))?;
    page.copy_from(64, bytes).unwrap();
    Some(Packet::new(page.freeze_range(64..64 + bytes.len())))
}

/// Proves NET-11: ten back ends after another under traffic, in every mode. The queues poll on
/// their thread while another thread reconnects. Every frame that a device delivered is received or
/// counted as unread; every frame that was sent is confirmed or counted as unconfirmed; packets
/// that were held all the time are as they were.
#[test]
fn queues_live_through_ten_back_ends() {
    // Some from each of several back ends.
    const HELD: usize = 500;
    for mode in MODES {
        let accounting = Accounting::default();
        let mut device_thread = echo(1);
        let (mut net, mut pairs) = device_thread.probe(accounting.count(NetOptions::new(mode).pages(4096)));
        let mut pair = pairs.remove(0);
        let (stop, restarts) = (AtomicBool::new(false), 10);
        let (mut given, mut taken) = (0, 0);
        let (pair, held, sent) = std::thread::scope(|s| {
            let polls = s.spawn(|| {
                let (mut held, mut sent) = (Vec::new(), 0_u64);
                // If this thread gets little time, it has not held enough when the last back end
                // has delivered its frames. That one stays.
                while !stop.load(Relaxed) || held.len() < HELD {
                    for _ in 0..32 {
                        let bytes = frame(sent, 60 + (sent as usize % 1400));
                        let Some(packet) = packet(&mut pair, &bytes) else { break };
                        if pair.tx.send(packet).is_err() {
                            break;
                        }
                        sent += 1;
                    }
                    pair.tx.flush();
                    receive(&mut pair.rx, &mut |p: Packet<PeerShared>| {
                        if held.len() < (100 * (1 + sent as usize / 1000)).min(HELD) {
                            held.push((p.to_vec(), p));
                        }
                    });
                    pair.tx.complete();
                }
                (pair, held, sent)
            });
            for _ in 0..restarts {
                let before = device_thread.stats.rx_frames.load(Relaxed);
                until(|| device_thread.stats.rx_frames.load(Relaxed) > before + 300);
                let stats = Arc::clone(&device_thread.stats);
                drop(device_thread.connection.take());
                assert!(!net.is_connected());
                // The old device's thread has ended, and has counted all it did.
                device_thread = echo(1);
                given += stats.rx_frames.load(Relaxed);
                taken += taken_by(&stats);
                net.reconnect(device_thread.connect()).unwrap();
            }
            until(|| device_thread.stats.rx_frames.load(Relaxed) > 300);
            stop.store(true, Relaxed);
            polls.join().unwrap()
        });
        let mut pair = pair;
        until(|| {
            pair.tx.complete();
            receive(&mut pair.rx, &mut |_: Packet<PeerShared>| {});
            pair.tx.posted() == 0
        });
        drop(device_thread.connection.take());
        receive(&mut pair.rx, &mut |_: Packet<PeerShared>| {});
        let stats = Arc::clone(&device_thread.stats);
        drop(device_thread);
        given += stats.rx_frames.load(Relaxed);
        taken += taken_by(&stats);
        let (rx, tx) = (pair.rx.stats(), pair.tx.stats());
        assert_eq!((rx.restarts, tx.restarts), (restarts, restarts));
        assert_eq!(rx.frames + rx.unread, given, "{rx:?}");
        assert_eq!((tx.frames, tx.completed + tx.unconfirmed), (sent, sent), "{tx:?}");
        assert!(taken >= tx.completed && taken <= sent, "{taken} taken, {tx:?}");
        assert!(tx.unconfirmed <= restarts * 256 && held.len() == HELD, "{tx:?}");
        for (bytes, p) in &held {
            assert_eq!(p.to_vec(), *bytes);
        }
        drop(held);
        // The connection is gone: what is posted is quarantined, and nothing else.
        let posted = pair.rx.posted() as u64;
        drop(pair.tx);
        assert_closed(&pair.rx.close().unwrap(), posted);
        drop(net);
        accounting.assert_balanced();
    }
}

/// A back end that lacks what the queues use is refused by name, and one that fails at a message as
/// well. The queues stay as they were, and the next back end is taken.
#[test]
fn back_ends_that_do_not_fit() {
    let mut harness = Harness::new(NetOptions::new(RxMode::Mergeable));
    harness.deliver(&frame(0, 60));
    harness.device.kill();
    let mut refused = |behaviour: Behaviour| {
        let (device, backend) = Hostile::new(behaviour);
        (harness.net.reconnect(backend).unwrap_err(), device)
    };
    let without = |bit: u64| Behaviour { features: FEATURES & !bit, ..Behaviour::default() };
    let (error, _) = refused(without(feature::MRG_RXBUF));
    let name = "VIRTIO_NET_F_MRG_RXBUF";
    assert!(matches!(error, NetError::Backend(VhostUserError::MissingFeature { name: n, .. }) if n == name), "{error}");
    let (error, _) = refused(Behaviour { pairs: 0, ..Behaviour::default() });
    assert!(matches!(error, NetError::Backend(VhostUserError::TooFewQueues { .. })), "{error}");
    let messages =
        ["SET_FEATURES", "SET_MEM_TABLE", "SET_VRING_NUM", "SET_VRING_ADDR", "SET_VRING_KICK", "SET_VRING_ENABLE"];
    for message in messages {
        let (error, _) = refused(Behaviour { fail_at: Some(message), ..Behaviour::default() });
        assert!(error.to_string().contains(message), "{error}");
    }
    assert!(!harness.net.is_connected());
    // The old ring is still there.
    assert_eq!((take(&mut harness.pair.rx).len(), harness.pair.rx.stats().restarts), (1, 0));
    harness.deliver(&frame(1, 60));
    let (device, backend) = Hostile::new(Behaviour::default());
    harness.net.reconnect(backend).unwrap();
    harness.device = device;
    harness.ring = harness.device.ring(0);
    // The frame that was not polled is lost.
    assert_eq!(take(&mut harness.pair.rx).len(), 0);
    assert_eq!((harness.pair.rx.stats().unread, harness.pair.rx.posted()), (1, 256));
    harness.deliver(&frame(2, 60));
    assert_eq!(take(&mut harness.pair.rx)[0].to_vec(), frame(2, 60));
    harness.close();
}

/// The old back end still runs: it marks all its buffers as used, and writes to its ring. Its
/// successor is not disturbed.
#[test]
fn an_old_back_end_that_goes_on() {
    for mode in MODES {
        let mut harness = Harness::new(NetOptions::new(mode));
        let (mut old, mut old_tx) = (harness.device.ring(0), harness.device.ring(1));
        let (device, backend) = Hostile::new(Behaviour::default());
        let mut first = std::mem::replace(&mut harness.device, device);
        first.kill();
        harness.net.reconnect(backend).unwrap();
        harness.ring = harness.device.ring(0);
        for i in 0..300 {
            old.add_used(u32::MAX - i, u32::MAX);
            old_tx.add_used(i, 1);
            old.split().set_used_idx(i as u16);
            old.split().set_desc(i as u16, netmem_virtio::virtqueue::Desc::default());
            if i == 0 {
                receive(&mut harness.pair.rx, &mut DropAll::default());
            }
            harness.deliver(&frame(u64::from(i), 60));
            let got = take(&mut harness.pair.rx);
            assert_eq!((got.len(), got[0].to_vec()), (1, frame(u64::from(i), 60)));
            harness.pair.tx.complete();
        }
        assert_eq!((harness.pair.rx.stats().stopped, harness.pair.tx.stats().stopped), (None, None));
        drop(first);
        harness.close();
    }
}

/// A back end that is still connected stops its rings, but not for a successor that is refused.
#[test]
fn from_a_live_back_end_to_another() {
    let mut harness = Harness::new(NetOptions::new(RxMode::Small));
    let (_device, backend) = Hostile::new(Behaviour { fail_at: Some("SET_VRING_ENABLE"), ..Behaviour::default() });
    assert!(harness.net.reconnect(backend).is_err());
    assert_eq!((harness.device.stops(), harness.net.is_connected()), (vec![], true));
    harness.deliver(&frame(9, 60));
    assert_eq!(take(&mut harness.pair.rx)[0].to_vec(), frame(9, 60));
    let (device, backend) = Hostile::new(Behaviour::default());
    harness.net.reconnect(backend).unwrap();
    assert_eq!((harness.device.stops(), device.stops()), (vec![0, 1], vec![]));
    let packets = [0, 1].map(|i| packet(&mut harness.pair, &frame(i, 60)).unwrap());
    harness.device = device;
    harness.ring = harness.device.ring(0);
    harness.pair.tx.complete();
    packets.into_iter().for_each(|p| harness.pair.tx.send(p).unwrap());
    assert_eq!(harness.pair.tx.stats().unconfirmed, 0);
    harness.close();
}

/// Frames that were copied into slots have no packet. They are lost as others are, and counted.
#[test]
fn copied_frames_that_were_not_confirmed() {
    let mut harness = Harness::new(NetOptions::new(RxMode::Small));
    let slots = [0, 1].map(|i| harness.pair.tx.send_copied(&frame(i, 60), Meta::default()).unwrap());
    let sent = packet(&mut harness.pair, &frame(2, 60)).unwrap();
    harness.pair.tx.send(sent).unwrap();
    harness.pair.tx.flush();
    let completions = harness.pair.tx.header_slots().unwrap().completions();
    harness.device.kill();
    let (device, backend) = Hostile::new(Behaviour::default());
    harness.net.reconnect(backend).unwrap();
    assert!(slots.iter().all(|&slot| !completions.is_completed(slot)));
    harness.pair.tx.complete();
    let stats = harness.pair.tx.stats();
    assert_eq!((stats.completed, stats.unconfirmed, harness.pair.tx.posted()), (0, 3, 0));
    assert!(slots.iter().all(|&slot| completions.is_completed(slot)));
    harness.device = device;
    (harness.ring, harness.tx) = (harness.device.ring(0), harness.device.ring(1));
    receive(&mut harness.pair.rx, &mut DropAll::default());
    harness.close();
}

/// The end of a connection is reported when nothing is locked: a subscriber can ask for it.
#[test]
fn a_subscriber_asks_for_the_connection() {
    let mut device_thread = echo(1);
    let (net, pairs) = device_thread.probe(NetOptions::new(RxMode::Small));
    // A subscriber may be of any thread, and the device may not.
    thread_local!(static NET: RefCell<Option<Rc<VirtioNet>>> = const { RefCell::new(None) });
    let (net, events) = (Rc::new(net), Arc::new(AtomicU64::new(0)));
    NET.set(Some(net.clone()));
    drop(device_thread.connection.take());
    let seen = events.clone();
    let subscriber = on_event(tracing::Level::DEBUG, move |event| {
        if event.metadata().target().starts_with("netmem_virtio::driver::disconnect") {
            assert!(!NET.with_borrow(Clone::clone).unwrap().is_connected());
            seen.fetch_add(1, Relaxed);
        }
    });
    tracing::subscriber::with_default(subscriber, || assert!(!net.is_connected()));
    assert_eq!(events.load(Relaxed), 1);
    drop((pairs, NET.take()));
}

/// A back end that hangs up instead of stopping its rings does not keep the driver from its
/// successor. A back end that has sent an unexpected message and ended does not count as connected.
#[test]
fn an_old_back_end_that_does_not_stop() {
    let mut harness = Harness::new(NetOptions::new(RxMode::Small));
    harness.device.behave(|b| b.on_stop = OnStop::Refuse);
    let (device, backend) = Hostile::new(Behaviour::default());
    harness.net.reconnect(backend).unwrap();
    assert_eq!(harness.device.stops(), [0]);
    harness.device = device;
    harness.ring = harness.device.ring(0);
    assert_eq!(take(&mut harness.pair.rx).len(), 0);
    harness.deliver(&frame(1, 60));
    assert_eq!(take(&mut harness.pair.rx)[0].to_vec(), frame(1, 60));
    harness.device.send(&[1; 20]);
    harness.device.kill();
    assert!(!harness.net.is_connected());
    let (device, backend) = Hostile::new(Behaviour::default());
    harness.net.reconnect(backend).unwrap();
    harness.device = device;
    harness.close();
}

/// A back end that refuses the number of pairs in use is not used, and the driver remembers the
/// number.
#[test]
fn a_back_end_that_refuses_the_pairs_in_use() {
    let mut device_thread = echo(3);
    // Without offloads, which the next back end does not have.
    let (mut net, pairs) = device_thread.probe(NetOptions::new(RxMode::Small).pairs(3).offloads(Offload::None));
    drop(device_thread.connection.take());
    let (device, backend) = Hostile::new(Behaviour { pairs: 3, ..Behaviour::default() });
    let error = std::thread::scope(|s| {
        let refuses = s.spawn(|| device.answer_command(&mut device.ring(6), 1));
        let error = net.reconnect(backend).unwrap_err();
        refuses.join().unwrap();
        error
    });
    assert!(matches!(error, NetError::ControlRefused { pairs: 3 }), "{error}");
    assert_eq!((net.active_pairs(), net.is_connected()), (3, false));
    device_thread = echo(3);
    net.reconnect(device_thread.connect()).unwrap();
    assert_eq!(net.active_pairs(), 3);
    // The device counts at the end of a pass, after the driver has its answer.
    until(|| device_thread.stats.commands.load(Relaxed) == 1);
    drop(pairs);
}

/// A queue that its device's invalid values stopped runs again with the next device.
#[test]
fn a_stopped_queue_runs_again() {
    for mode in MODES {
        let mut harness = Harness::new(NetOptions::new(mode));
        let sent = packet(&mut harness.pair, &frame(7, 60));
        sent.into_iter().for_each(|p| harness.pair.tx.send(p).unwrap());
        harness.pair.tx.flush();
        harness.ring.add_used(u32::MAX, 0);
        harness.tx.add_used(u32::MAX, 0);
        receive(&mut harness.pair.rx, &mut DropAll::default());
        harness.pair.tx.complete();
        assert_eq!(harness.pair.rx.stats().stopped, Some(DeviceFault::BadId { id: u32::MAX }));
        harness.device.kill();
        let (device, backend) = Hostile::new(Behaviour::default());
        harness.net.reconnect(backend).unwrap();
        harness.device = device;
        (harness.ring, harness.tx) = (harness.device.ring(0), harness.device.ring(1));
        receive(&mut harness.pair.rx, &mut DropAll::default());
        assert_eq!(harness.pair.tx.complete(), 0);
        harness.deliver(&frame(1, 60));
        assert_eq!(take(&mut harness.pair.rx)[0].to_vec(), frame(1, 60));
        assert_eq!((harness.pair.tx.stats().unconfirmed, harness.pair.tx.posted()), (1, 0));
        let sent = packet(&mut harness.pair, &frame(8, 60)).unwrap();
        harness.pair.tx.send(sent).unwrap();
        harness.pair.tx.flush();
        let head = harness.tx.take().unwrap();
        harness.tx.add_used(u32::from(head), 0);
        assert_eq!((harness.pair.tx.complete(), harness.pair.tx.stats().stopped), (1, None));
        harness.close();
    }
}

/// Several pairs and the control queue: the pairs in use stay in use.
#[test]
fn pairs_in_use() {
    let mut device_thread = echo(3);
    let (mut net, mut pairs) = device_thread.probe(NetOptions::new(RxMode::Small).pairs(3));
    for round in 0..3 {
        drop(device_thread.connection.take());
        device_thread = echo(3);
        net.reconnect(device_thread.connect()).unwrap();
        assert_eq!(net.active_pairs(), 3);
        for (i, pair) in pairs.iter_mut().enumerate() {
            let mut bytes = frame(100 * round + i as u64, 80);
            pair.tx.complete();
            let packet = packet(pair, &bytes).unwrap();
            pair.tx.send(packet).unwrap();
            pair.tx.flush();
            let mut got = Vec::new();
            until(|| {
                receive(&mut pair.rx, &mut |p: Packet<PeerShared>| got.push(p.to_vec()));
                !got.is_empty()
            });
            bytes[..12].rotate_left(6);
            assert_eq!(got, [bytes]);
        }
    }
    until(|| device_thread.stats.commands.load(Relaxed) == 1);
    until(|| {
        pairs.iter_mut().all(|pair| {
            pair.tx.complete();
            pair.tx.posted() == 0
        })
    });
    pairs.into_iter().for_each(close_clean);
}

/// Queues of device memory, both ways: holders are dropped, pages are posted again.
#[test]
fn device_memory() {
    let (memory, accounting) = (DeviceMemory::new(1024), Accounting::default());
    let harness =
        Harness::over(Behaviour::default(), accounting.count(memory.options().pages(2048)), accounting.clone());
    let Harness { mut device, mut net, pair, .. } = harness;
    let (mut rx, mut tx) = (bind(pair.rx, &memory.split()), pair.tx.into_split::<Arc<()>>());
    let base = rx.poll(|poll| poll.with_napi(|_, device| device.alloc().map(|p| p.dma_addr() - p.file_offset())));
    let holder = Arc::new(());
    let mut page = rx.poll(|poll| poll.with_napi(|host, _| host.alloc())).unwrap();
    page.copy_from(64, &frame(1, 42)).unwrap();
    let mut head = Packet::new(page.freeze_range(64..106));
    head.meta = Meta { checksum: Checksum::Partial { start: 14, offset: 6 }, gso: None };
    let mut payload = vec![DeviceFrag { dma: base.unwrap(), len: 1000, holder: holder.clone() }];
    tx.send_split(head, &mut payload).unwrap();
    tx.flush();
    assert_eq!((tx.posted(), Arc::strong_count(&holder)), (1, 2));
    for round in 0..5 {
        device.kill();
        let (next, backend) = Hostile::new(Behaviour::default());
        net.reconnect(backend).unwrap();
        device = next;
        assert_eq!((tx.complete(), tx.posted(), tx.held()), (0, 0, 0));
        assert_eq!((tx.stats().unconfirmed, Arc::strong_count(&holder)), (1, 1));
        let mut ring = device.ring(0);
        assert_eq!(split::take(&mut rx).len(), 0);
        let want = frame(round, 1000);
        device.deliver(&mut ring, &want);
        let got = split::take(&mut rx);
        assert_eq!((got.len(), memory.bytes(&got[0])), (1, want));
        assert_eq!(rx.stats().restarts, round + 1);
    }
    drop(tx);
    assert_split_closed(&rx.close().unwrap(), 0);
    drop(net);
    assert_eq!(memory.free_pages(), 1024);
    accounting.assert_balanced();
}

/// A queue that is restarted before its first poll after a reconnect: its old ring needs no
/// message, and its new one is not stopped.
#[test]
fn a_restart_before_the_first_poll() {
    let mut harness = Harness::new(NetOptions::new(RxMode::Small));
    harness.device.kill();
    let (device, backend) = Hostile::new(Behaviour::default());
    harness.net.reconnect(backend).unwrap();
    harness.device = device;
    let again = harness.pair.rx.restart(None).unwrap();
    assert_closed(&again.closed, 0);
    harness.pair.rx = again.queue;
    assert_eq!(harness.device.stops(), [0; 0]);
    harness.ring = harness.device.ring(0);
    receive(&mut harness.pair.rx, &mut DropAll::default());
    harness.deliver(&frame(1, 60));
    assert_eq!(take(&mut harness.pair.rx)[0].to_vec(), frame(1, 60));
    harness.close();
}

/// Queues are restarted by one thread while another reconnects: whichever comes first, the queue
/// runs in the end.
#[test]
fn restarts_of_a_queue_meanwhile() {
    let mut device_thread = DeviceThread::one(Gen::new(100, None).unwrap());
    let (mut net, mut pairs) = device_thread.probe(NetOptions::new(RxMode::Small).ring_size(16).pages(512));
    let pair = pairs.remove(0);
    let (stop, restarted) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|s| {
        let restarts = s.spawn(|| {
            let mut rx = Some(pair.rx);
            while !stop.load(Relaxed) {
                match rx.take().unwrap().restart(None) {
                    Ok(again) => {
                        assert_closed(&again.closed, 0);
                        restarted.fetch_add(1, Relaxed);
                        rx = Some(again.queue);
                    }
                    // Between the end of one connection and the next: nothing can be stopped or
                    // started.
                    Err(RestartError::Stopped { .. }) => break,
                    Err(e) => panic!("{e}"),
                }
                receive(rx.as_mut().unwrap(), &mut DropAll::default());
            }
            rx
        });
        // From one live device to another: then every restart succeeds. The thread may begin late,
        // so its first one is waited for.
        until(|| restarted.load(Relaxed) > 0 || restarts.is_finished());
        let mut device_threads = vec![device_thread];
        for _ in 0..30 {
            let mut next = DeviceThread::one(Gen::new(100, None).unwrap());
            net.reconnect(next.connect()).unwrap();
            device_threads.push(next);
        }
        stop.store(true, Relaxed);
        let mut rx = restarts.join().unwrap().unwrap();
        let before = rx.stats().frames;
        until(|| receive(&mut rx, &mut DropAll::default()) > 0 && rx.stats().frames > before + 100);
        drop(pair.tx);
        assert_closed(&rx.close().unwrap(), 0);
        drop(net);
    });
}
