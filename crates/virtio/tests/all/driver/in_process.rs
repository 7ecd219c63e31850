//! A driver and a device in one process: received bytes are slices, and the file of the pages goes
//! to no other process.

use netmem_packet::{Packet, Poll, RxQueue};
use netmem_pool::{PeerShared, RegionOptions, RegionProvider, TrustedPeer};
use netmem_testing::driver::hostile::{Behaviour, Hostile};
use netmem_testing::driver::*;
use netmem_virtio::VhostUserError;
use netmem_virtio::device::port::{Gen, Pcap, Play};
use netmem_virtio::device::{ConnectError, DeviceError, InProcess, NetDevice, Options};
use netmem_virtio::driver::{NetError, NetOptions, Offload, RxMode};
use std::sync::{Arc, Mutex};

/// In each mode, the frames of a capture are slices and `Bytes`, and every mapping is accounted
/// for.
#[test]
fn received_frames_are_slices() {
    for mode in MODES {
        let want = frames(500, 1514);
        let mut port = Some(pcap(&want, Play::Once));
        let mut device = NetDevice::<Pcap>::new(Options::default(), |_| Ok(port.take().unwrap())).unwrap();
        let InProcess { mut pairs, net, connection } = device.control().connect(NetOptions::new(mode)).unwrap();
        assert_eq!(net.active_pairs(), 1);
        let (mut got, mut pair) = (Vec::new(), pairs.remove(0));
        until(|| {
            device.poll();
            pair.rx.poll(|poll| {
                poll.receive(64, &mut |packet: Packet<TrustedPeer>| {
                    got.push(packet.fragments().flat_map(|frag| frag.to_vec()).collect::<Vec<u8>>());
                })
            });
            got.len() == want.len()
        });
        assert!(got == want, "{mode}");
        let closed = pair.rx.close().unwrap();
        assert_eq!((closed.outstanding, closed.stats.mapped), (0, closed.stats.unmapped));
        drop((pair.tx, net, connection));
    }
}

/// No safe function of the driver has the file, and no other back end gets it: a reconnect to one
/// fails, and changes nothing.
#[test]
fn the_memory_stays_in_the_process() {
    let mut device = NetDevice::new(Options::default(), |_| Gen::new(60, None)).unwrap();
    let tables = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&tables);
    // Without offloads, which the other back end does not have.
    let options = NetOptions::new(RxMode::Small).offloads(Offload::None).domain(move |table| {
        seen.lock().unwrap().extend(table.regions().to_vec());
        Arc::new(table)
    });
    let InProcess { mut pairs, mut net, connection } = device.control().connect(options).unwrap();
    assert!(net.region().fd().is_none());
    assert!(tables.lock().unwrap()[0].fd().is_none(), "the entry of the pages");
    let (_foreign, backend) = Hostile::new(Behaviour::default());
    let error = net.reconnect(backend).unwrap_err();
    assert!(matches!(error, NetError::Backend(VhostUserError::InProcess)), "{error}");
    let mut frames = 0;
    until(|| {
        device.poll();
        frames += pairs[0].rx.poll(|poll| poll.receive(64, &mut |_: Packet<TrustedPeer>| ()));
        frames > 1000
    });
    drop((pairs, net, connection));
}

/// Memory of the user may be elsewhere; a device has one driver at a time.
#[test]
fn what_cannot_be_connected() {
    let device = NetDevice::new(Options::default(), |_| Gen::new(60, None)).unwrap();
    let memory = RegionProvider::new(RegionOptions::new(4096).huge_pages(false).build::<PeerShared>().unwrap());
    let options = NetOptions::new(RxMode::Small).memory(memory.region().clone(), memory);
    let error = device.control().connect(options).unwrap_err();
    assert!(matches!(error, ConnectError::Driver(NetError::InProcessMemory)), "{error}");
    let first = device.control().connect(NetOptions::new(RxMode::Small)).unwrap();
    let error = device.control().connect(NetOptions::new(RxMode::Small)).unwrap_err();
    assert!(matches!(error, ConnectError::Device(DeviceError::Busy)), "{error}");
    drop(first);
    device.control().connect(NetOptions::new(RxMode::Small)).unwrap();
}
