//! A driver just big enough to test the device: one memfd, split rings at its start, buffers behind
//! them.

pub mod rings;

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};

pub use crate::vhost_user::front::{Addresses, EventFd, Front, Region};
use netmem_virtio::device::port::Port;
use netmem_virtio::device::{Connection, Control, NetDevice, Options, Stats};
use netmem_virtio::net::feature;
use netmem_virtio::virtqueue::{AVAIL_NO_INTERRUPT, DESC_NEXT, DESC_WRITE, Desc, SplitLayout, SplitRing};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

pub const SIZE: u16 = 256;
/// Guest and user addresses differ from each other and from the host's, so that mixing them up
/// shows.
pub const GUEST: u64 = 0x1_0000_0000;
pub const USER: u64 = 0x7000_0000_0000;
pub const MEMORY: usize = 16 << 20;
/// Where ring `i` lies; buffers begin after eight of them.
pub const RING_ROOM: usize = 64 << 10;
pub const BUFFERS: usize = 8 * RING_ROOM;

pub fn memfd(len: usize) -> File {
    let fd = memfd_create(c"netmem-test", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, len as u64).unwrap();
    File::from(fd)
}

pub struct Memory {
    pub file: File,
    pub base: *mut u8,
}

impl Memory {
    pub fn new() -> Self {
        let file = memfd(MEMORY);
        // SAFETY: a new mapping of the whole file.
        let base = unsafe {
            let prot = ProtFlags::READ | ProtFlags::WRITE;
            mmap(std::ptr::null_mut(), MEMORY, prot, MapFlags::SHARED, &file, 0).unwrap()
        };
        Self { file, base: base.cast() }
    }

    pub fn read(&self, at: usize, len: usize) -> Vec<u8> {
        assert!(at + len <= MEMORY);
        let mut out = vec![0; len];
        // SAFETY: inside the mapping; tests read what the device has marked as used.
        unsafe { std::ptr::copy_nonoverlapping(self.base.add(at), out.as_mut_ptr(), len) };
        out
    }

    /// The 16 bytes at `at`, on a hot path.
    pub fn peek(&self, at: usize) -> u128 {
        assert!(at + 16 <= MEMORY);
        // SAFETY: inside the mapping.
        unsafe { self.base.add(at).cast::<u128>().read_unaligned() }
    }

    pub fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= MEMORY);
        // SAFETY: inside the mapping.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.base.add(at), bytes.len()) };
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: our own mapping, and the rings of the driver are not used after it.
        unsafe { munmap(self.base.cast(), MEMORY).unwrap() };
    }
}

pub struct Ring {
    pub ring: SplitRing,
    pub index: usize,
    pub avail: u16,
    pub used: u16,
    pub kick: EventFd,
    pub call: EventFd,
    pub err: EventFd,
}

impl Ring {
    pub fn post(&mut self, head: u16) {
        self.ring.set_avail_entry(self.avail, head);
        self.avail = self.avail.wrapping_add(1);
        self.ring.set_avail_idx(self.avail);
    }

    /// One chain of the given (guest address, length, flags), in descriptors from `first` on.
    pub fn chain(&mut self, first: u16, parts: &[(u64, u32, u16)]) {
        for (i, &(addr, len, flags)) in parts.iter().enumerate() {
            let id = first + i as u16;
            let more = if i + 1 < parts.len() { DESC_NEXT } else { 0 };
            self.ring.set_desc(id, Desc { addr, len, flags: flags | more, next: id + 1 });
        }
        self.post(first);
    }

    pub fn take(&mut self) -> Option<(u32, u32)> {
        (self.used != self.ring.used_idx()).then(|| {
            let entry = self.ring.used_entry(self.used);
            self.used = self.used.wrapping_add(1);
            entry
        })
    }
}

pub struct Driver {
    pub memory: Memory,
    pub rings: Vec<Ring>,
    pub front: Front,
    pub connection: Option<Connection>,
    pub stats: Arc<Stats>,
}

/// Every feature of a modern driver but mergeable buffers.
pub const PLAIN: u64 = feature::VERSION_1 | feature::VHOST_USER_PROTOCOL;
pub const MERGEABLE: u64 = PLAIN | feature::MRG_RXBUF;

pub fn region(file: &impl AsFd, guest: u64, user: u64, size: u64, offset: u64) -> Region<'_> {
    Region { guest, size, user, offset, file: file.as_fd() }
}

impl Driver {
    /// Connects and negotiates, but starts no ring.
    pub fn connect<P: Port>(device: &NetDevice<P>, features: u64) -> Self {
        Self::over(&device.control(), device.stats(), features)
    }

    /// The same to a device that is on another thread.
    pub fn over(control: &Control, stats: Arc<Stats>, features: u64) -> Self {
        let mut driver = Self { stats, ..Self::unconnected() };
        driver.reconnect(control, features);
        driver
    }

    /// Memory, and a connection to nowhere.
    pub fn unconnected() -> Self {
        let front = Front::new(UnixStream::pair().unwrap().0);
        Self { memory: Memory::new(), rings: Vec::new(), front, connection: None, stats: Arc::default() }
    }

    /// Leaves the device, and connects to one of the same features; the rings stay as they are in
    /// memory.
    pub fn reconnect(&mut self, control: &Control, features: u64) {
        self.connection = None;
        let (ours, theirs) = UnixStream::pair().unwrap();
        self.connection = Some(control.serve(theirs).unwrap());
        self.front = Front::negotiated(ours, features);
    }

    pub fn share_memory(&self) {
        self.front.set_mem_table(&[region(&self.memory.file, GUEST, USER, MEMORY as u64, 0)]).unwrap();
    }

    pub fn set_memory(&self, regions: &[Region<'_>]) {
        self.front.set_mem_table(regions).unwrap();
    }

    pub fn add_memory(&self, region: &Region<'_>) {
        self.front.add_memory(region).unwrap();
    }

    pub fn remove_memory(&self, region: &Region<'_>) {
        self.front.remove_memory(region).unwrap();
    }

    pub fn enable(&self, ring: usize) {
        self.front.set_vring_enable(ring, true).unwrap();
    }

    /// Stops a ring. Returns its position.
    pub fn front_base(&self, ring: usize) -> u16 {
        self.front.get_vring_base(ring).unwrap() as u16
    }

    /// Makes the next ring known and starts it, disabled.
    pub fn start_ring(&mut self, size: u16) {
        self.lay_out_ring(size);
        self.describe(self.rings.len() - 1, size, 0);
    }

    /// The next ring, of which the device knows nothing.
    pub fn lay_out_ring(&mut self, size: u16) {
        let index = self.rings.len();
        // SAFETY: inside the mapping, aligned; `RING_ROOM` is enough for the sizes used here.
        let ring = unsafe { SplitRing::from_layout(self.memory.base.add(index * RING_ROOM), size) };
        assert!(SplitLayout::new(size).total <= RING_ROOM);
        ring.set_avail_flags(AVAIL_NO_INTERRUPT);
        let fd = EventFd::new;
        self.rings.push(Ring { ring, index, avail: 0, used: 0, kick: fd(), call: fd(), err: fd() });
    }

    /// Where ring `index` of `size` entries lies, in the front end's addresses.
    pub fn addresses(index: usize, size: u16) -> Addresses {
        let (desc, layout) = (USER + (index * RING_ROOM) as u64, SplitLayout::new(size));
        Addresses { desc, used: desc + layout.used as u64, avail: desc + layout.avail as u64, log: None }
    }

    pub fn describe(&mut self, index: usize, size: u16, base: u16) {
        let at = Self::addresses(index, size);
        let r = &self.rings[index];
        self.front.set_vring_num(index, size).unwrap();
        self.front.set_vring_base(index, base).unwrap();
        self.front.set_vring_addr(index, at).unwrap();
        self.front.set_vring_call(index, &r.call).unwrap();
        self.front.set_vring_err(index, &r.err).unwrap();
        self.front.set_vring_kick(index, &r.kick).unwrap();
    }

    /// A connected driver with `rings` rings, all running and enabled.
    pub fn start<P: Port>(device: &NetDevice<P>, features: u64, rings: usize) -> Self {
        let mut driver = Self::connect(device, features);
        driver.share_memory();
        for index in 0..rings {
            driver.start_ring(SIZE);
            driver.front.set_vring_enable(index, true).unwrap();
        }
        driver
    }

    /// The guest address and file offset of buffer `n` of `len` bytes each, for `ring`.
    pub fn buffer(&self, ring: usize, n: u16, len: usize) -> (u64, usize) {
        let at = BUFFERS + ring * (2 << 20) + usize::from(n) * len;
        (GUEST + at as u64, at)
    }

    /// Posts writable buffers `first..first + count` of `len` bytes on `ring`, one descriptor each.
    pub fn post_rx(&mut self, ring: usize, first: u16, count: u16, len: usize) {
        for n in first..first + count {
            let (addr, _) = self.buffer(ring, n, len);
            self.rings[ring].chain(n, &[(addr, len as u32, DESC_WRITE)]);
        }
    }

    pub fn queue_errors(&self) -> Vec<(&'static str, u64)> {
        self.stats.queue_errors().filter(|e| e.1 > 0).collect()
    }

    pub fn drops(&self) -> Vec<(&'static str, u64)> {
        self.stats.drops().filter(|e| e.1 > 0).collect()
    }

    /// Hangs up and waits for the device to notice.
    pub fn hang_up(self) -> Arc<Stats> {
        let Self { front, connection, stats, memory, .. } = self;
        drop(front);
        if let Some(c) = connection {
            c.wait().unwrap();
        }
        drop(memory);
        stats
    }
}

/// Polls `device` until `done`, or panics: something that must happen has not.
pub fn poll_until<P: Port>(device: &mut NetDevice<P>, mut done: impl FnMut() -> bool) {
    until(|| {
        device.poll();
        done()
    });
}

/// Ends a device that runs when it goes, also by a panic: its thread is waited for.
pub struct Ends<'a> {
    pub stop: &'a std::sync::atomic::AtomicBool,
    pub control: &'a Control,
}

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        self.control.wake();
    }
}

/// Waits for what must happen.
pub fn until(mut done: impl FnMut() -> bool) {
    let patience = Instant::now() + Duration::from_secs(60);
    while !done() {
        assert!(Instant::now() < patience, "it never happened");
        std::thread::yield_now();
    }
}

/// How many threads of the device sleep.
pub fn asleep(stats: &Stats) -> u64 {
    loop {
        let sleeps = stats.sleeps.load(SeqCst);
        let wakes = stats.wakes.load(SeqCst);
        if stats.sleeps.load(SeqCst) == sleeps {
            return sleeps - wakes;
        }
    }
}

pub fn one_pair() -> Options {
    Options::default()
}

pub fn frames(stats: &Stats) -> (u64, u64) {
    (stats.rx_frames.load(Relaxed), stats.tx_frames.load(Relaxed))
}

/// Something to keep descriptors alive with.
pub type Fds = Vec<OwnedFd>;
