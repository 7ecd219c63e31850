//! Device memory that tests read and write as the device does, and frames that are made by hand.
#![allow(dead_code, unreachable_pub, missing_docs, reason = "not every test does everything")]

use etherparse::PacketBuilder;
use netmem_devmem::{Address, Binding, BindingCount, FlowQueue, Fragment, Interface, Mac, Received, Socket, Token};
use netmem_packet::{Checksum, DevicePayload, Meta, SplitFrame, SplitHandler};
use netmem_pool::{Device, PAGE_SIZE, PagePool, PeerShared, PoolOptions, RegionOptions, RegionProvider};
use netmem_refs::Worker;
use netmem_testing::device_memory;
use netmem_testing::device_memory::MemoryKind;
use std::fs::File;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub const VERIFIED: Meta = Meta { checksum: Checksum::Verified, gso: None };

/// Waits until a condition is true. The limit only makes a failing test end.
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

/// A device's memory: a memfd that stands in for it, or a dma-buf (`NETMEM_TEST_MEMORY`).
pub struct Memory {
    pub file: File,
    kind: MemoryKind,
}

impl Memory {
    pub fn bytes(bytes: u64) -> Self {
        let kind = MemoryKind::of_this_run();
        Self { file: File::from(kind.allocate(bytes)), kind }
    }

    pub fn pages(pages: usize) -> Self {
        Self::bytes((pages * PAGE_SIZE) as u64)
    }

    pub fn fd(&self) -> OwnedFd {
        self.file.as_fd().try_clone_to_owned().expect("a descriptor")
    }

    /// Reads as the device does.
    pub fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        device_memory::read_exact_at(&self.file, self.kind, bytes, offset)
    }

    /// Writes as the device does.
    pub fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        device_memory::write_all_at(&self.file, self.kind, bytes, offset)
    }

    pub fn inode(&self) -> u64 {
        self.file.metadata().expect("a file").ino()
    }

    /// The number of mappings of the memory, or of parts of it, in this process. They are found by
    /// device and inode, because an inode number of a dma-buf can be equal to that of another file.
    pub fn mappings(&self) -> usize {
        let maps = std::fs::read_to_string("/proc/self/maps").expect("it is there");
        let meta = self.file.metadata().expect("a file");
        let device = format!("{:02x}:{:02x}", rustix::fs::major(meta.dev()), rustix::fs::minor(meta.dev()));
        let inode = meta.ino().to_string();
        maps.lines().filter(|line| line.split_whitespace().skip(3).take(2).eq([&*device, &*inode])).count()
    }

    /// The number of descriptors of this process on the file, except the test's own.
    pub fn descriptors(&self) -> usize {
        let dir = std::fs::read_dir("/proc/self/fd").expect("it is there");
        // A descriptor that was closed meanwhile does not count.
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

/// A queue that receives into a binding, simulated by hand.
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

    /// `bytes` as they arrive on a queue whose host parts have `head` bytes; the bytes of the
    /// payload are not written.
    pub fn split(&mut self, bytes: &[u8], head: usize, meta: Meta) -> SplitFrame {
        let rest = bytes.len() - head.min(bytes.len());
        self.in_pages(bytes, head, &[rest][..usize::from(rest > 0)], meta)
    }

    /// The same, with so many bytes of the payload in each page.
    pub fn in_pages(&mut self, bytes: &[u8], head: usize, pages: &[usize], meta: Meta) -> SplitFrame {
        let head = head.min(bytes.len());
        assert_eq!(pages.iter().sum::<usize>(), bytes.len() - head, "the pages have the rest");
        let mut page = self.host.alloc().expect("a host page");
        page.copy_from(64, &bytes[..head]).expect("room");
        let mut payload = DevicePayload::default();
        for &len in pages {
            payload.push(self.pool.alloc().expect("a page").freeze_range(0..len)).expect("room");
        }
        SplitFrame::new(page.freeze_range(64..64 + head), payload, meta)
    }

    /// A datagram of `len` bytes to `port` whose payload is all in device memory.
    pub fn datagram(&mut self, port: u16, len: usize) -> SplitFrame {
        self.split(&udp4(port, len), 42, VERIFIED)
    }

    pub fn deliver<C: BindingCount>(&mut self, queue: &mut FlowQueue<C>, port: u16, count: usize) {
        for _ in 0..count {
            let frame = self.datagram(port, 1000);
            queue.frame(frame);
        }
    }
}

/// An interface with addresses whose networks are of 24 and of 64 bits.
pub fn interface(mac: [u8; 6], addresses: &[&str]) -> Interface {
    let addresses = addresses.iter().map(|addr| {
        let addr: IpAddr = addr.parse().expect("an address");
        Address { addr, prefix_len: if addr.is_ipv4() { 24 } else { 64 } }
    });
    Interface { mac: Mac(mac), mtu: 1500, addresses: addresses.collect() }
}

/// The interface to which [`udp4`] and [`udp6`] make datagrams.
pub fn ours() -> Interface {
    interface([4; 6], &["10.0.0.2", "202:202:202:202:202:202:202:202"])
}

/// The interface to which an echo sends what was sent to 10.0.0.2 from the Ethernet address 2: it
/// exchanges the Ethernet addresses and no others.
pub fn echoed() -> Interface {
    interface([2; 6], &["10.0.0.2"])
}

/// A port on all addresses of an interface.
pub fn all(port: u16) -> SocketAddr {
    SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), port)
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

/// The token of a datagram that is only in device memory.
#[track_caller]
pub fn token<C: BindingCount>(socket: &mut Socket<C>) -> Token {
    match recv(socket) {
        (Received { fragments: 1, .. }, [Fragment::Device { token, .. }, _]) => token,
        (received, _) => panic!("not one fragment in device memory: {received:?}"),
    }
}
