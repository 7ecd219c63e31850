//! Device memory that tests write by system calls and never map, and frames made by hand.
#![allow(dead_code, unreachable_pub, missing_docs, reason = "not every test does everything")]

use etherparse::PacketBuilder;
use netmem_devmem::{Binding, BindingCount, FlowQueue, Fragment, Received, Socket, Token};
use netmem_packet::{Checksum, Meta, SplitFrame, SplitHandler};
use netmem_pool::{Device, PAGE_SIZE, PagePool, PeerShared, PoolOptions, RegionOptions, RegionProvider};
use netmem_refs::Worker;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::fs::File;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub const VOUCHED: Meta = Meta { checksum: Checksum::Vouched, gso: None };

/// Waits for what must happen; the time is only there so that a failure ends.
#[track_caller]
pub fn until(mut done: impl FnMut() -> bool) {
    let patience = Instant::now() + Duration::from_secs(120);
    while !done() {
        assert!(Instant::now() < patience, "it never happened");
        std::thread::yield_now();
    }
}

pub fn worker() -> Arc<Worker> {
    Arc::new(Worker::new("cleanup").expect("a thread"))
}

/// A file that stands in for a device's memory.
pub struct Memory {
    pub file: File,
}

impl Memory {
    pub fn bytes(bytes: u64) -> Self {
        let fd = memfd_create("device-memory", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("a memfd");
        ftruncate(&fd, bytes).expect("of that size");
        Self { file: File::from(fd) }
    }

    pub fn pages(pages: usize) -> Self {
        Self::bytes((pages * PAGE_SIZE) as u64)
    }

    pub fn fd(&self) -> OwnedFd {
        self.file.as_fd().try_clone_to_owned().expect("a descriptor")
    }

    pub fn inode(&self) -> u64 {
        self.file.metadata().expect("a file").ino()
    }

    /// Descriptors of this process on the file, but the test's own.
    pub fn descriptors(&self) -> usize {
        let dir = std::fs::read_dir("/proc/self/fd").expect("it is there");
        // One that was closed meanwhile is no longer one.
        let all = dir.flatten().filter_map(|fd| std::fs::metadata(fd.path()).ok());
        all.filter(|m| m.ino() == self.inode() && m.dev() == self.file.metadata().expect("a file").dev()).count() - 1
    }

    /// Waits until nothing is left of bindings of this memory.
    #[track_caller]
    pub fn assert_gone(&self) {
        until(|| self.descriptors() == 0);
        assert_eq!(netmem_devmem::lost_pages(), 0);
    }
}

pub fn bind(pages: usize, worker: &Arc<Worker>) -> (Memory, Binding) {
    let memory = Memory::pages(pages);
    let binding = Binding::new(memory.fd(), 0, worker).expect("it can be bound");
    (memory, binding)
}

/// A queue that receives into a binding, by hand.
pub struct Feed {
    pub pool: PagePool<Device>,
    host: PagePool<PeerShared>,
}

impl Feed {
    pub fn new<C: BindingCount>(binding: &Binding<C>) -> Self {
        let pool = PoolOptions::new("device").cache(64).build(binding.provider(), None).expect("a pool");
        let region = RegionOptions::new(64).huge_pages(false).build::<PeerShared>().expect("host memory");
        let host = PoolOptions::new("host").build(RegionProvider::new(region), None).expect("a pool");
        Self { pool, host }
    }

    /// `bytes` as they arrive on a queue whose host parts have `head` bytes; what the payload is nobody looks at.
    pub fn split(&mut self, bytes: &[u8], head: usize, meta: Meta) -> SplitFrame {
        let head = head.min(bytes.len());
        let mut page = self.host.alloc().expect("a host page");
        page.copy_from(64, &bytes[..head]).expect("room");
        let rest = bytes.len() - head;
        let payload = (rest > 0).then(|| self.pool.alloc().expect("a page").freeze_range(0..rest));
        SplitFrame::new(page.freeze_range(64..64 + head), payload, meta)
    }

    /// A datagram of `len` bytes to `port`, all of it in device memory.
    pub fn datagram(&mut self, port: u16, len: usize) -> SplitFrame {
        self.split(&udp4(port, len), 42, VOUCHED)
    }

    pub fn deliver<C: BindingCount>(&mut self, queue: &mut FlowQueue<C>, port: u16, count: usize) {
        for _ in 0..count {
            let frame = self.datagram(port, 1000);
            queue.frame(frame);
        }
    }
}

pub fn peer4() -> SocketAddr {
    "10.0.0.1:7".parse().expect("an address")
}

pub fn udp4(port: u16, len: usize) -> Vec<u8> {
    let builder = PacketBuilder::ethernet2([2; 6], [4; 6]).ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64).udp(7, port);
    let mut bytes = Vec::new();
    builder.write(&mut bytes, &vec![0x5a; len]).expect("it fits");
    bytes
}

pub fn udp6(port: u16, len: usize) -> Vec<u8> {
    let builder = PacketBuilder::ethernet2([2; 6], [4; 6]).ipv6([1; 16], [2; 16], 64).udp(7, port);
    let mut bytes = Vec::new();
    builder.write(&mut bytes, &vec![0x5a; len]).expect("it fits");
    bytes
}

/// Receives one datagram that must be there, in one call.
#[track_caller]
pub fn recv<C: BindingCount>(socket: &mut Socket<C>) -> (Received, [Fragment; 2]) {
    let mut out = [Fragment::Empty, Fragment::Empty];
    let received = socket.recv(&mut out).expect("a datagram");
    assert!(received.end);
    (received, out)
}

/// The token of a datagram that lies in device memory alone.
#[track_caller]
pub fn token<C: BindingCount>(socket: &mut Socket<C>) -> Token {
    match recv(socket) {
        (Received { fragments: 1, .. }, [Fragment::Device { token, .. }, _]) => token,
        (received, _) => panic!("not one fragment in device memory: {received:?}"),
    }
}
