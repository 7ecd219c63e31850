//! The device behind the front end of Cloud Hypervisor: the crate `vhost`, with the calls in Cloud
//! Hypervisor's order.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, IntoRawFd};
use std::os::unix::net::UnixStream;

use netmem_testing::device::*;
use netmem_virtio::device::port::Echo;
use netmem_virtio::device::{DeviceError, NetDevice, Options};
use netmem_virtio::net::feature;
use vhost::vhost_user::message::VhostUserHeaderFlag;
use vhost::vhost_user::{Frontend, VhostUserFrontend, VhostUserProtocolFeatures as Protocol, VhostUserVirtioFeatures};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd as Event;

/// The features that Cloud Hypervisor asks a back end of a network device for.
const WANTED: u64 = MERGEABLE
    | feature::CSUM
    | feature::GUEST_CSUM
    | feature::GUEST_TSO4
    | feature::GUEST_TSO6
    | feature::HOST_TSO4
    | feature::HOST_TSO6
    | feature::MTU
    | feature::EVENT_IDX
    | feature::CTRL_VQ
    | feature::MQ;

/// Negotiates as Cloud Hypervisor does before its guest runs. Returns the front end, the features,
/// and how many rings the back end may have.
fn negotiate(stream: UnixStream) -> (Frontend, u64, u64) {
    let mut front = Frontend::from_stream(stream, 1);
    front.set_owner().unwrap();
    let features = front.get_features().unwrap() & WANTED;
    assert_ne!(features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits(), 0);
    let wanted = Protocol::MQ
        | Protocol::CONFIGURE_MEM_SLOTS
        | Protocol::REPLY_ACK
        | Protocol::INFLIGHT_SHMFD
        | Protocol::LOG_SHMFD;
    let protocol = front.get_protocol_features().unwrap() & wanted;
    front.set_protocol_features(protocol).unwrap();
    assert!(protocol.contains(Protocol::MQ | Protocol::REPLY_ACK));
    front.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    let rings = front.get_queue_num().unwrap();
    (front, features, rings)
}

fn event(fd: &EventFd) -> Event {
    let fd = fd.as_fd().try_clone_to_owned().unwrap().into_raw_fd();
    // SAFETY: a descriptor of its own, of an eventfd.
    unsafe { Event::from_raw_fd(fd) }
}

/// A device of `pairs` pairs has the rings of as many pairs, and CTRL_VQ where MQ needs it; a frame
/// goes each way on each pair.
#[test]
fn as_many_pairs_as_there_are() {
    for pairs in [1, 3] {
        let options = Options { max_pairs: pairs, ..Options::default() };
        let mut device = NetDevice::new(options, |_| Ok(Echo::new())).unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let connection = device.control().serve(theirs).unwrap();
        let (mut front, features, rings) = negotiate(ours);
        assert!(rings >= 2 * pairs as u64, "{rings} rings, {} are wanted: the start is refused", 2 * pairs);
        let multi = if pairs > 1 { feature::MQ | feature::CTRL_VQ } else { 0 };
        assert_eq!(features & (feature::MQ | feature::CTRL_VQ), multi);
        let mut driver = Driver { connection: Some(connection), stats: device.stats(), ..Driver::unconnected() };
        front.set_features(features & !feature::EVENT_IDX).unwrap();
        front
            .set_mem_table(&[VhostUserMemoryRegionInfo {
                guest_phys_addr: GUEST,
                memory_size: MEMORY as u64,
                userspace_addr: USER,
                mmap_offset: 0,
                mmap_handle: driver.memory.file.as_raw_fd(),
            }])
            .unwrap();
        for index in 0..2 * pairs {
            driver.lay_out_ring(SIZE);
            let (ring, at) = (&driver.rings[index], Driver::addresses(index, SIZE));
            front.set_vring_num(index, SIZE).unwrap();
            let addresses = VringConfigData {
                queue_max_size: SIZE,
                queue_size: SIZE,
                flags: 0,
                desc_table_addr: at.desc,
                used_ring_addr: at.used,
                avail_ring_addr: at.avail,
                log_addr: None,
            };
            front.set_vring_addr(index, &addresses).unwrap();
            front.set_vring_base(index, 0).unwrap();
            front.set_vring_call(index, &event(&ring.call)).unwrap();
            front.set_vring_kick(index, &event(&ring.kick)).unwrap();
        }
        (0..2 * pairs).for_each(|index| front.set_vring_enable(index, true).unwrap());
        for pair in 0..pairs {
            driver.post_rx(2 * pair, 0, 1, 2048);
            let (addr, at) = driver.buffer(2 * pair + 1, 0, 2048);
            let payload = [pair as u8; 60];
            driver.memory.write(at, &[&[0; 12], &payload[..]].concat());
            driver.rings[2 * pair + 1].chain(0, &[(addr, 72, 0)]);
            poll_until(&mut device, || driver.rings[2 * pair].take() == Some((0, 72)));
            poll_until(&mut device, || driver.rings[2 * pair + 1].take().is_some());
            let (_, at) = driver.buffer(2 * pair, 0, 2048);
            assert_eq!(driver.memory.read(at + 12, 60), payload);
        }
        for index in 0..2 * pairs {
            assert_eq!(front.get_vring_base(index).unwrap(), 1);
        }
        assert_eq!(driver.queue_errors(), []);
        drop(front);
        driver.connection.take().unwrap().wait().unwrap();
    }
}

/// With more rings than the back end has, Cloud Hypervisor ends by the answer to GET_QUEUE_NUM. If
/// it did not, the device would.
#[test]
fn more_pairs_than_there_are() {
    let device = NetDevice::new(Options { max_pairs: 2, ..Options::default() }, |_| Ok(Echo::new())).unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let connection = device.control().serve(theirs).unwrap();
    let (_front, _, rings) = negotiate(ours.try_clone().unwrap());
    assert_eq!(rings, 4);
    let front = Front::new(ours);
    front.set_vring_num(5, SIZE).unwrap();
    let DeviceError::Refused { why, .. } = connection.wait().unwrap_err() else { panic!() };
    assert!(why.to_string().contains("at least 3 queue pairs, and the device has 2"), "{why}");
}
