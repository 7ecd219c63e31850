//! Devices that end, refuse, or stop answering; and the end of all parts in every order.

use std::thread;

use netmem_packet::{Packet, TxQueue};
use netmem_pool::{PeerShared, lingering};
use netmem_testing::driver::hostile::{
    Behaviour, DeviceRing, FEATURES, FORMATS, Harness, Hostile, OnStop, WITHOUT_CONTROL,
};
use netmem_testing::driver::*;
use netmem_testing::permutations;
use netmem_virtio::VhostUser;
use netmem_virtio::device::Connection;
use netmem_virtio::device::port::{Gen, Play};
use netmem_virtio::driver::{NetError, NetOptions, QueuePair, RxMode, VirtioNet, VirtioRx, VirtioTx};

/// Pages that the device has: two buffers may share one.
fn pages(harness: &mut Harness, mode: RxMode) -> u64 {
    if mode == RxMode::Big { harness.pair.rx.posted() as u64 } else { harness.pair.rx.pool_stats().inflight() }
}

/// Every mode, in every format of rings.
fn options() -> impl Iterator<Item = (RxMode, NetOptions, u64)> {
    let modes = |format: u64| {
        [
            (RxMode::Small, NetOptions::new(RxMode::Small), format),
            (RxMode::Small, NetOptions::new(RxMode::Small).headroom(0), format),
            (RxMode::Mergeable, NetOptions::new(RxMode::Mergeable), format),
            (RxMode::Big, NetOptions::new(RxMode::Big), format),
        ]
    };
    FORMATS.into_iter().flat_map(modes)
}

/// Proves NET-6: the backend dies. What it has is quarantined, counted, and unmapped; what users
/// hold is theirs.
#[test]
fn a_backend_that_dies() {
    for (mode, options, format) in options() {
        let mut harness = Harness::in_format(format, options);
        let before = pages(&mut harness, mode);
        for i in 0..10 {
            harness.deliver(&frame(i, 200));
        }
        // Received in part, held in part, sent in part.
        let mut held = take(&mut harness.pair.rx);
        harness.pair.tx.send(held.pop().unwrap()).unwrap();
        harness.pair.tx.flush();
        for i in 0..5 {
            harness.deliver(&frame(100 + i, 200));
        }
        assert!(harness.net.is_connected());
        harness.device.kill();
        assert!(!harness.net.is_connected());
        // What arrived before is received still.
        assert_eq!(take(&mut harness.pair.rx).len(), 5);
        for (i, p) in held.iter().enumerate() {
            assert_eq!(p.to_vec(), frame(i as u64, 200));
        }
        let lost = if mode == RxMode::Big { before } else { harness.pair.rx.posted() as u64 };
        drop(harness.pair.tx);
        let closed = harness.pair.rx.close().unwrap();
        let s = closed.stats;
        // With two buffers to a page, some share theirs with packets that are held, which are
        // outstanding.
        let parts = mode == RxMode::Small && before == 128;
        assert!(if parts { s.quarantined >= 110 && s.quarantined < 140 } else { s.quarantined == lost }, "{s:?}");
        assert_eq!(s.allocated(), s.returned() + s.quarantined + closed.outstanding);
        // Also what users hold: it is unmapped at once, and stays readable.
        harness.accounting.assert_balanced();
        for (i, p) in held.iter().enumerate() {
            assert_eq!(p.to_vec(), frame(i as u64, 200));
        }
        drop(harness.net);
        thread::spawn(move || drop(held)).join().unwrap();
        harness.accounting.assert_balanced();
    }
    until(|| lingering().is_empty());
}

/// Proves NET-6: a backend that does not report where a ring stopped keeps its pages; so does one
/// that ends the connection.
#[test]
fn a_backend_that_refuses_to_stop() {
    for (mode, options, format) in options() {
        let behaviour = Behaviour { on_stop: OnStop::Refuse, features: FEATURES | format, ..Behaviour::default() };
        let mut harness = Harness::with(behaviour, options.ring_features(format));
        let lost = pages(&mut harness, mode);
        assert!(lost > 0);
        let closed = harness.pair.rx.close().unwrap();
        assert_closed(&closed, lost);
        drop((harness.pair.tx, harness.net));
        harness.accounting.assert_balanced();
        assert_eq!(harness.device.stops(), [0]);
    }
}

/// Proves NET-6: a backend that no longer answers is waited for once, not once for each ring, and
/// its answer, when it comes late, is no answer to another question.
#[test]
fn a_backend_that_falls_silent() {
    let behaviour = Behaviour { on_stop: OnStop::Hang, pairs: 4, features: WITHOUT_CONTROL, ..Behaviour::default() };
    let (device, backend) = Hostile::new(behaviour);
    let accounting = Accounting::default();
    let (net, pairs) = VirtioNet::probe(backend, accounting.count(NetOptions::new(RxMode::Small).pairs(4))).unwrap();
    for pair in pairs {
        let lost = pair.rx.posted() as u64;
        assert_closed(&pair.rx.close().unwrap(), lost);
        device.release();
        drop(pair.tx);
    }
    assert!(!net.is_connected());
    drop(net);
    accounting.assert_balanced();
    assert_eq!(device.stops(), [0], "one question, and none to a stranger");
}

/// The ring of a queue whose device lied is stopped like any other.
#[test]
fn lies_and_death() {
    for (mode, format) in MODES.into_iter().flat_map(|mode| FORMATS.map(|format| (mode, format))) {
        let mut harness = Harness::in_format(format, NetOptions::new(mode));
        harness.ring.add_used(u32::MAX, 0);
        receive(&mut harness.pair.rx, &mut DropAll::default());
        harness.device.kill();
        let lost = harness.pair.rx.posted() as u64;
        drop(harness.pair.tx);
        assert_closed(&harness.pair.rx.close().unwrap(), lost);
        harness.accounting.assert_balanced();
    }
}

type Probed = Result<(VirtioNet, Vec<QueuePair>), NetError>;

/// Probes a device for `pairs` queue pairs. It answers the command about them so. Returns its
/// control ring, too.
fn probe_answered(device: &Hostile, backend: VhostUser, pairs: u16, verdict: u8) -> (Probed, DeviceRing) {
    thread::scope(|s| {
        let probed = s.spawn(|| VirtioNet::probe(backend, NetOptions::new(RxMode::Small).pairs(pairs)));
        let mut ring = device.ring(2 * usize::from(pairs));
        assert_eq!(device.answer_command(&mut ring, verdict), [4, 0, pairs as u8, 0]);
        (probed.join().unwrap(), ring)
    })
}

/// All pairs are in use after a probe, or there is no driver.
#[test]
fn a_probe_without_the_answer_done_fails() {
    for answer in [1, 2, 0x55, 0xff] {
        let (device, backend) = Hostile::new(Behaviour { pairs: 2, ..Behaviour::default() });
        let (probed, _) = probe_answered(&device, backend, 2, answer);
        assert!(matches!(probed, Err(NetError::ControlRefused { pairs: 2 })), "{probed:?}");
    }
    let (_device, backend) = Hostile::new(Behaviour { pairs: 2, ..Behaviour::default() });
    let probed = VirtioNet::probe(backend, NetOptions::new(RxMode::Small).pairs(2));
    assert!(matches!(probed, Err(NetError::ControlTimeout { .. })), "{probed:?}");
    until(|| lingering().is_empty());
}

fn control(lie: impl FnOnce(&mut Hostile, &mut DeviceRing) + Send) -> NetError {
    let (mut device, backend) = Hostile::new(Behaviour { pairs: 2, ..Behaviour::default() });
    let (probed, mut ring) = probe_answered(&device, backend, 2, 0);
    let (mut net, pairs) = probed.unwrap();
    assert_eq!(net.active_pairs(), 2);
    let error = thread::scope(|s| {
        let asked = s.spawn(|| net.set_active_pairs(1).unwrap_err());
        until(|| ring.available() > 0);
        lie(&mut device, &mut ring);
        asked.join().unwrap()
    });
    assert_eq!(net.active_pairs(), 2);
    // The queues go on.
    let mut pair = pairs.into_iter().next().unwrap();
    let mut rx = device.ring(0);
    device.deliver(&mut rx, &frame(1, 60));
    assert_eq!(take(&mut pair.rx).len(), 1);
    close_clean(pair);
    error
}

/// Wrong answers on the control queue. Only the answer "done" counts as success.
#[test]
fn control_commands_that_fail() {
    for answer in [1, 2, 0x55, 0xff] {
        let error = control(|device, ring| {
            let head = ring.take().unwrap();
            let chain = ring.chain(head);
            assert_eq!(device.read(chain[0].addr, 2), [4, 0]);
            assert_eq!(device.read(chain[1].addr, 2), [1, 0]);
            device.write(chain[2].addr, &[answer]);
            ring.add_used(u32::from(head), 1);
        });
        assert!(matches!(error, NetError::ControlRefused { pairs: 1 }), "{error}");
    }
    // Used, and not answered.
    let error = control(|_, ring| ring.add_used(u32::MAX, u32::MAX));
    assert!(matches!(error, NetError::ControlRefused { .. }), "{error}");
    let error = control(|_, ring| ring.split().set_used_idx(3));
    assert!(matches!(error, NetError::ControlRefused { .. }), "{error}");
    let error = control(|_, _| {});
    assert!(matches!(error, NetError::ControlTimeout { .. }), "{error}");
}

/// An answer that comes too late is not mistaken for that to a later command.
#[test]
fn late_control_answers() {
    let (device, backend) = Hostile::new(Behaviour { pairs: 3, ..Behaviour::default() });
    let (probed, mut ring) = probe_answered(&device, backend, 3, 0);
    let (mut net, pairs) = probed.unwrap();
    assert!(matches!(net.set_active_pairs(2), Err(NetError::ControlTimeout { .. })));
    assert!(matches!(net.set_active_pairs(1), Err(NetError::ControlTimeout { .. })));
    assert_eq!(ring.available(), 1, "nothing is asked while an answer is owed");
    let mut answer = |verdict: u8| {
        let head = ring.take().unwrap();
        device.write(ring.chain(head)[2].addr, &[verdict]);
        ring.add_used(u32::from(head), 1);
    };
    answer(0);
    assert_eq!(net.active_pairs(), 3);
    thread::scope(|s| {
        let asked = s.spawn(|| net.set_active_pairs(2));
        let ring = device.ring(6);
        until(|| ring.split().avail_idx() == 3);
        answer(0);
        asked.join().unwrap().unwrap();
    });
    assert_eq!(net.active_pairs(), 2);
    pairs.into_iter().for_each(close_clean);
}

enum Owner {
    Rx(VirtioRx),
    Tx(VirtioTx),
    Net(VirtioNet),
    Connection(Connection),
    Packets(Vec<Packet<PeerShared>>),
    DeviceThread(DeviceThread<Gen>),
}

/// Proves POOL-11 and POOL-5: queues, device, connection and packets go in every order, packets on
/// another thread; always every page is returned or quarantined, everything is unmapped, and
/// nothing lingers.
#[test]
fn every_order_of_teardown() {
    let orders = permutations(6);
    assert_eq!(orders.len(), 720);
    for (i, order) in orders.into_iter().enumerate() {
        let (mode, format) = (MODES[i % 3], FORMATS[i / 3 % 4]);
        let mut device_thread = DeviceThread::one(Gen::new(100, None).unwrap());
        let accounting = Accounting::default();
        let options = NetOptions::new(mode).ring_size(64).pages(256).cache(64).ring_features(format);
        let (net, mut pairs) = device_thread.probe(accounting.count(options));
        let mut pair = pairs.remove(0);
        let mut packets = Vec::new();
        until(|| {
            receive(&mut pair.rx, &mut |p: Packet<PeerShared>| packets.push(p));
            packets.len() >= 20
        });
        for p in packets.split_off(packets.len() - 3) {
            // Out of big-packet mode, too, whose pages are unmapped: they are mapped to be sent.
            pair.tx.send(p).unwrap();
        }
        pair.tx.flush();
        let connection = device_thread.connection.take().unwrap();
        let parts = [
            Owner::Rx(pair.rx),
            Owner::Tx(pair.tx),
            Owner::Net(net),
            Owner::Connection(connection),
            Owner::Packets(packets),
            Owner::DeviceThread(device_thread),
        ];
        let mut parts = parts.map(Some);
        for at in order {
            match parts[at].take().unwrap() {
                Owner::Rx(rx) => drop(rx.close()),
                Owner::Tx(tx) => drop(tx),
                Owner::Net(net) => drop(net),
                Owner::Connection(c) => drop(c),
                Owner::Packets(p) => thread::spawn(move || drop(p)).join().unwrap(),
                Owner::DeviceThread(device_thread) => drop(device_thread),
            }
        }
        accounting.assert_balanced();
    }
    until(|| lingering().is_empty());
}

/// A device that ends under traffic, and a second one after it: the first one does not disturb the
/// second one.
#[test]
fn one_device_after_another() {
    let mut device_thread = DeviceThread::one(pcap(&frames(200, 1518), Play::Loop));
    for round in 0..20 {
        let (mode, format) = (MODES[round % 3], FORMATS[round % 4]);
        let (net, mut pairs) = device_thread.probe(NetOptions::new(mode).ring_features(format));
        let mut pair = pairs.remove(0);
        until(|| {
            receive(&mut pair.rx, &mut DropAll::default());
            pair.rx.stats().frames > 500
        });
        close_clean(pair);
        drop(net);
        device_thread.connection.take().unwrap().wait().unwrap();
    }
}
