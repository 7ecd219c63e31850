//! The device against the table of messages in `docs/design/vhost-user.md`, and against front ends
//! that are slow.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use netmem_testing::device::*;
use netmem_testing::tree::page;
use netmem_testing::vhost_user::front::{REPLY_ACK, VERSION, message, request, u32s, u64s};
use netmem_virtio::device::port::Sink;
use netmem_virtio::device::{DeviceError, NetDevice};
use netmem_virtio::{MessageError, Request};

/// A front end that stops in the middle of a message is dropped after its three seconds; an idle
/// one is not.
#[test]
fn stopping_within_a_message() {
    let stops =
        [message(2, VERSION, 8, &[])[..7].to_vec(), message(2, VERSION, 8, &[]), message(2, VERSION, 8, &[0; 3])];
    let serve = || {
        let device = NetDevice::new(one_pair(), |_| Ok(Sink)).unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        (device.control().serve(theirs).unwrap(), Front::new(ours))
    };
    let stopped: Vec<_> = std::iter::repeat_with(serve).take(stops.len()).collect();
    let (connection, idle) = serve();
    idle.sync().unwrap();
    // One that does not read its answers, either.
    let (deaf_connection, deaf) = serve();
    deaf.stream.set_nonblocking(true).unwrap();
    for ((_, front), stop) in stopped.iter().zip(&stops) {
        front.send_raw(stop, &[]).unwrap();
    }
    until(|| {
        let _ = deaf.send(request::GET_FEATURES, 0, &[], &[]);
        deaf_connection.is_finished()
    });
    for (connection, _front) in stopped.into_iter().chain([(deaf_connection, deaf)]) {
        let e = connection.wait().unwrap_err();
        assert!(matches!(e, DeviceError::Connection(MessageError::TimedOut(_))), "{e:?}");
    }
    idle.sync().unwrap();
    drop(idle);
    connection.wait().unwrap();
}

/// A good payload for `request`, and how many descriptors go with it.
fn payload(asked: u32) -> (Vec<u8>, usize) {
    match asked {
        request::SET_FEATURES => (u64s([PLAIN]), 0),
        request::SET_PROTOCOL_FEATURES => (u64s([REPLY_ACK]), 0),
        request::SET_VRING_NUM => (u32s([0, 256]), 0),
        request::SET_VRING_BASE | request::GET_VRING_BASE | request::SET_VRING_ENABLE => (u32s([0, 0]), 0),
        request::SET_VRING_ADDR => ([u32s([0, 0]), u64s([0; 4])].concat(), 0),
        request::SET_VRING_CALL | request::SET_VRING_ERR => (u64s([1 << 8]), 0),
        request::SET_MEM_TABLE => ([u32s([1, 0]), u64s([0, 4096, 0, 0])].concat(), 1),
        request::SET_LOG_BASE => (u64s([4096, 0]), 1),
        request::SET_LOG_FD => (Vec::new(), 1),
        request::SEND_RARP => (u64s([0x5634_1200_5452]), 0),
        request::NET_SET_MTU => (u64s([1500]), 0),
        request::SET_STATUS => (u64s([1]), 0),
        request::GET_CONFIG => (u32s([0, 4, 0, 0]), 0),
        // The MAC address that is there: none.
        request::SET_CONFIG => ([&u32s([0, 6, 0])[..], &[0; 6]].concat(), 0),
        request::GET_INFLIGHT_FD => ([&u64s([0; 2])[..], &[2, 0, 0, 1], &[0; 4]].concat(), 0),
        request::SET_INFLIGHT_FD => ([&u64s([4096, 0])[..], &[1, 0, 4, 0], &[0; 4]].concat(), 1),
        request::ADD_MEM_REG => (u64s([0, 0, 4096, 1 << 40, 0]), 1),
        request::REM_MEM_REG => (u64s([0, 0, 4096, 1 << 40, 0]), 0),
        _ => (Vec::new(), 0),
    }
}

/// Each message of the specification does what the table in docs/design/vhost-user.md has: it is
/// followed, or refused by name.
#[test]
fn every_message_by_number() {
    let page = page("design/vhost-user.md");
    let rows = page.lines().filter_map(|line| line.strip_prefix("| ")?.split_once(" | "));
    for number in 1..=44 {
        let name = Request(number).name().unwrap();
        let (_, row) =
            rows.clone().find(|(message, _)| *message == name).unwrap_or_else(|| panic!("{name} has no row"));
        let device = NetDevice::new(one_pair(), |_| Ok(Sink)).unwrap();
        let driver = Driver::connect(&device, PLAIN);
        let refused = row.starts_with("refused");
        if number == request::REM_MEM_REG {
            // What is to be removed.
            let (body, _) = payload(request::ADD_MEM_REG);
            driver.front.set(request::ADD_MEM_REG, &body, &[memfd(1 << 20).as_fd()]).unwrap();
        }
        // A kick starts a ring: alone, it is refused.
        if number == request::SET_VRING_KICK {
            driver.front.set_vring_kick(0, &EventFd::new()).unwrap_err();
            continue;
        }
        let (body, fds) = payload(number);
        let files: Vec<_> = (0..fds).map(|_| memfd(1 << 20)).collect();
        let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        // Either way of refusing: an acknowledgement that is not zero, or the end of the
        // connection.
        let own = ["GET_", "SET_LOG_BASE", "CREATE_", "POSTCOPY_ADVISE", "POSTCOPY_END", "SET_DEVICE_", "CHECK_"];
        if own.iter().any(|prefix| name.starts_with(prefix)) {
            assert_eq!(driver.front.query(number, &body, &fds).is_err(), refused, "{name}");
        } else {
            assert_eq!(driver.front.set(number, &body, &fds).is_err(), refused, "{name}");
            driver.front.sync().unwrap();
        }
        if refused {
            let mut driver = driver;
            driver.reconnect(&device.control(), PLAIN);
            driver.front.acknowledged = false;
            driver.front.set(number, &body, &fds).unwrap();
            let e = driver.connection.take().unwrap().wait().unwrap_err();
            assert!(e.to_string().contains(name), "{e}");
        }
    }
}
