//! Descriptors of a peer whose `close` waits for that peer. The test counts the threads that close
//! them.

use netmem_testing::device::*;
use netmem_testing::vhost_user::front::{self, request, u64s};
use netmem_virtio::device::NetDevice;
use netmem_virtio::device::port::Sink;
use std::os::fd::{AsFd, OwnedFd};

const MIB: u64 = 1 << 20;
/// Where the region that comes with a message lies for the guest.
const EXTRA: u64 = GUEST + (1 << 36);

/// A TCP socket whose last `close` waits until its peer has acknowledged what was sent: for an
/// hour, unless the peer closes it.
fn lingering() -> (OwnedFd, std::net::TcpStream) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let socket = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (peer, _) = listener.accept().unwrap();
    rustix::net::sockopt::set_socket_linger(&socket, Some(std::time::Duration::from_secs(3600))).unwrap();
    socket.set_nonblocking(true).unwrap();
    while std::io::Write::write(&mut &socket, &[0; 65536]).is_ok() {}
    socket.set_nonblocking(false).unwrap();
    (socket.into(), peer)
}

/// Threads of this process that close a peer's descriptor.
fn closers() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|name| name.trim() == "netmem-close").count()
}

/// Proves NET-10: descriptors whose `close` waits for the peer keep no thread of the device
/// waiting, in whichever message they come: as memory, as a log, as an event, in a message that
/// needs none, and in a message that is malformed.
#[test]
fn closing_a_descriptor_waits_for_no_peer() {
    let _alone = crate::alone();
    let device = NetDevice::new(one_pair(), |_| Ok(Sink)).unwrap();
    let mut peers = Vec::new();
    let bodies: [(u32, Vec<u8>); 6] = [
        (request::ADD_MEM_REG, u64s([0, EXTRA, MIB, EXTRA, 0])),
        (request::SET_LOG_BASE, u64s([4096, 0])),
        (request::SET_LOG_FD, vec![]),
        (request::SET_INFLIGHT_FD, [u64s([4096, 0]), vec![1, 0, 0, 1, 0, 0, 0, 0]].concat()),
        (request::SET_VRING_CALL, u64s([0])),
        (request::SET_FEATURES, u64s([PLAIN])),
    ];
    for (n, (number, body)) in bodies.into_iter().enumerate() {
        let driver = Driver::connect(&device, PLAIN);
        let (socket, peer) = lingering();
        let (answered, seen) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            // The descriptor goes with the first bytes, and is closed here before the others: the
            // device's copy is the last.
            let bytes = front::message(number, front::VERSION | front::NEED_REPLY, body.len() as u32, &body);
            driver.front.send_raw(&bytes[..4], &[socket.as_fd()]).unwrap();
            drop(socket);
            driver.front.send_raw(&bytes[4..], &[]).unwrap();
            // Refused, or the end of the connection.
            let _ = driver.front.answer(number);
            let _ = driver.front.sync();
            let Driver { front, connection, .. } = driver;
            drop(front);
            let _ = answered.send(connection.map(|connection| connection.wait().is_ok()));
        });
        seen.recv_timeout(std::time::Duration::from_secs(60)).expect("the device waits for a peer of its peer");
        peers.push(peer);
        // The message was handled, and the descriptor is still being closed. A thread has its name
        // only when it runs.
        until(|| closers() == n + 1);
    }
    // The peers' ends: their sockets are reset, and the threads end.
    drop(peers);
    until(|| closers() == 0);
    Driver::connect(&device, PLAIN).hang_up();
}
