//! Memory of a device: pages with a number, an offset and a device address, but without bytes in
//! this process.

use crate::common::{Flat, counting};
use netmem_pool::{
    CountingDomain, Device, Direction, DmaDomain, MapError, Memory, PAGE_SIZE, PagePool, PeerShared, PoolOptions,
    Region, RegionError, RegionOptions, RegionProvider, VhostDomain, VhostRegion,
};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

const GB_80: u64 = 80 << 30;

fn memfd(bytes: u64) -> OwnedFd {
    let file = memfd_create("device", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, bytes).unwrap();
    file
}

/// The same file, opened so that the system refuses every mapping: a mapping needs read access.
fn unmappable(file: &OwnedFd) -> OwnedFd {
    OpenOptions::new().write(true).open(format!("/proc/self/fd/{}", file.as_fd().as_raw_fd())).unwrap().into()
}

/// A domain that knows files, like a vhost memory table for a device process that maps them.
#[derive(Debug)]
struct Files(Vec<(Arc<Region<Device>>, u64)>);

impl DmaDomain for Files {
    fn map(&self, addr: *mut u8, _len: usize, _: Direction) -> Result<u64, MapError> {
        panic!("nothing is mapped here, not at {addr:?} either");
    }

    fn map_file(&self, file: BorrowedFd<'_>, offset: u64, len: usize, _: Direction) -> Result<u64, MapError> {
        let number = |file: BorrowedFd<'_>| -> RawFd { file.as_raw_fd() };
        let mut known = self.0.iter().filter(|(region, _)| region.fd().map(number) == Some(number(file)));
        match known.next() {
            Some((region, bus)) if offset + len as u64 <= region.len() as u64 => Ok(bus + offset),
            _ => Err(MapError::File { offset, len }),
        }
    }

    fn unmap(&self, _dma: u64, _len: usize) {}
}

fn device(bytes: u64, order: u8) -> Arc<RegionProvider<Device>> {
    RegionProvider::new(Region::unmapped(memfd(bytes), order).unwrap())
}

fn pool(memory: &Arc<RegionProvider<Device>>, bus: u64) -> (PagePool<Device>, Arc<CountingDomain<Files>>) {
    let domain = Arc::new(CountingDomain::new(Files(vec![(memory.region().clone(), bus)])));
    (PoolOptions::new("device").build(memory.clone(), Some(domain.clone())).unwrap(), domain)
}

/// Proves POOL-10: 80 GB of device memory in a file that cannot be mapped make a pool. The file
/// does not show up in this process's mappings, and the cost depends on the pages in use.
#[test]
fn never_mapped_and_free_until_used() {
    let private = || {
        let rollup = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
        let line = rollup.lines().find(|l| l.starts_with("Private_Dirty:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
    };
    let file = memfd(GB_80);
    let before = private();
    let memory = RegionProvider::new(Region::unmapped(unmappable(&file), 0).unwrap());
    assert_eq!((memory.region().pages(), memory.region().len() as u64), (80 << 18, GB_80));
    let (mut pool, _) = pool(&memory, 1 << 40);
    let pages: Vec<_> = (0..1000).map(|_| pool.alloc().unwrap()).collect();
    pool.device_gone();
    drop((pages, pool));
    let grown = private().saturating_sub(before);
    assert!(grown < 16 << 20, "{} MiB", grown >> 20);
    let (inode, maps) = (File::from(file).metadata().unwrap(), std::fs::read_to_string("/proc/self/maps").unwrap());
    assert_eq!(inode.blocks(), 0, "nobody wrote to it");
    assert!(!maps.contains("memfd:device"), "{maps}");
}

/// Proves POOL-10: pages and fragments of a device know their number, their offset in the file, and
/// the device address. They are returned like other pages.
#[test]
fn pages_have_a_place() {
    for order in [0, 4, 9] {
        let memory = device(16 << (12 + order), order);
        let page_size = PAGE_SIZE << order;
        let (mut pool, domain) = pool(&memory, 5 << 40);
        let out: Vec<_> = std::iter::from_fn(|| pool.alloc()).collect();
        assert_eq!(out.len(), 16);
        for page in &out {
            assert_eq!((page.len(), page.file_offset()), (page_size, u64::from(page.index()) * page_size as u64));
            assert_eq!(page.dma_addr(), (5 << 40) + page.file_offset());
        }
        let mut frags = Vec::new();
        for mut page in out {
            let (index, start) = (page.index(), page.file_offset());
            let tail = page.split_off(1500).freeze();
            assert_eq!((tail.index(), tail.file_offset(), tail.len()), (index, start + 1500, page_size - 1500));
            assert_eq!(tail.dma_addr(), (5 << 40) + start + 1500);
            let part = tail.slice(100..200);
            assert_eq!((part.file_offset(), part.offset(), part.len()), (start + 1600, 1600, 100));
            frags.extend([part, tail, page.freeze()]);
        }
        std::thread::spawn(move || drop(frags)).join().unwrap();
        assert_eq!(pool.stats().inflight(), 0);
        let closed = pool.close();
        assert_eq!((closed.outstanding, domain.maps(), domain.unmaps()), (0, 16, 16));
    }
}

/// Proves POOL-10: device memory is never synced for the CPU, also in domains that would do so.
#[test]
fn no_syncs_ever() {
    let memory = device(1 << 20, 0);
    let (mut pool, domain) = pool(&memory, 1 << 40);
    assert!(domain.needs_sync() && !pool.needs_sync());
    pool.poll(|napi| {
        let page = napi.alloc().unwrap();
        napi.sync_for_cpu(&page, 0..4096);
        napi.sync_for_device(&page, 0..4096);
    });
    assert_eq!((domain.syncs(), pool.stats().recycle_cached), ((0, 0), 1));
}

/// Proves POOL-10: without a domain, the device address is the offset in the file, for a device
/// that knows only one file.
#[test]
fn without_a_domain() {
    let memory = device(8 << 20, 0);
    let mut pool = PoolOptions::new("offsets").build(memory.clone(), None).unwrap();
    let mut page = pool.alloc().unwrap();
    let (place, rest) = (page.file_offset(), page.split_off(64));
    assert_eq!((page.dma_addr(), rest.dma_addr()), (place, place + 64));
    drop((page, rest));
    let page = memory.page().unwrap();
    assert_eq!(page.dma_addr(), page.file_offset());
}

/// Proves POOL-1 and POOL-10: domains that know only addresses, or other files, refuse device
/// memory, and pools report that.
#[test]
fn a_domain_that_knows_no_files() {
    let memory = device(1 << 20, 0);
    let domain = counting();
    let mut pool = PoolOptions::new("addresses").build(memory.clone(), Some(domain.clone())).unwrap();
    assert!(pool.alloc().is_none());
    assert_eq!((pool.stats().alloc_failed, domain.maps()), (1, 0));
    let error = PoolOptions::new("addresses").prefill(4).build(memory.clone(), Some(domain)).unwrap_err();
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert!(source.contains("use a domain that was given the file"), "{source}");
    let error = Flat::default().map_file(memory.region().fd().unwrap(), 4096, 64, Direction::default()).unwrap_err();
    assert!(matches!(error, MapError::File { offset: 4096, len: 64 }), "{error}");
    let other = device(1 << 20, 0);
    let domain = Arc::new(Files(vec![(other.region().clone(), 0)]));
    assert!(PoolOptions::new("other").prefill(1).build(memory.clone(), Some(domain)).is_err());
    let (mut pool, _) = self::pool(&memory, 0);
    assert_eq!((0..256).filter_map(|_| pool.alloc()).map(std::mem::forget).count(), 256, "nothing was lost by that");
}

/// Proves POOL-13: a file that cannot be device memory is refused with the reason.
#[test]
fn errors() {
    let build = |bytes, order| Region::unmapped(memfd(bytes), order).unwrap_err();
    assert!(matches!(build(4095, 0), RegionError::Small { bytes: 4095, page_size: 4096 }));
    assert!(matches!(build(GB_80, 10), RegionError::Order { order: 10 }));
    assert!(matches!(build(1 << 44, 0), RegionError::Pages { pages: 0x1_0000_0000 }));
    let unsealable = memfd_create("device", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&unsealable, 1 << 20).unwrap();
    assert!(matches!(Region::unmapped(unsealable, 0), Err(RegionError::Shrinkable { .. })));
    assert_eq!((Device::NAME, Device::MAPPED, Device::SHARED_BY_FD), ("device", false, true));
}

/// Proves MEM-1: a vhost memory table has entries for files that are not mapped in this process.
/// Such an entry has an address of its own for the bus and for messages, and is identified by its
/// descriptor alone.
#[test]
fn the_memory_table_knows_files() {
    let pages = RegionOptions::new(512).build::<PeerShared>().unwrap();
    let (pages, a, b) = (Arc::new(pages), device(5 * 4096, 0), device(GB_80, 0));
    let table = VhostDomain::new(std::slice::from_ref(&pages));
    let table = table.and_device(a.region().clone()).and_device(b.region().clone());
    let [mapped, first, second] = table.regions() else { panic!("three regions") };
    assert_eq!([mapped, first, second].map(VhostRegion::is_device), [false, true, true]);
    assert_eq!((first.len(), second.len() as u64), (5 * 4096, GB_80));
    assert!(first.bus() >= mapped.bus() + mapped.len() as u64 && second.bus() >= first.bus() + first.len() as u64);
    assert!(second.bus() % (2 << 20) == 0, "where huge pages can be");
    assert_eq!(mapped.user_addr(), pages.as_ptr().addr() as u64);
    assert!(first.user_addr() > 1 << 56 && second.user_addr() >= first.user_addr() + first.len() as u64);
    assert_eq!(second.fd().unwrap().as_raw_fd(), b.region().fd().unwrap().as_raw_fd());
    let fd = |memory: &Arc<RegionProvider<Device>>| memory.region().fd().unwrap().as_raw_fd();
    let map = |file: RawFd, offset, len| {
        // SAFETY: the regions keep their files open.
        table.map_file(unsafe { BorrowedFd::borrow_raw(file) }, offset, len, Direction::default())
    };
    assert_eq!(map(fd(&a), 4096, 4 * 4096).unwrap(), first.bus() + 4096);
    assert_eq!(map(fd(&b), GB_80 - 1, 1).unwrap(), second.bus() + GB_80 - 1);
    let beyond = [(fd(&a), 4096, 5 * 4096), (fd(&a), u64::MAX, 2), (fd(&b), GB_80, usize::MAX)];
    let stranger = device(4096, 0);
    for (file, offset, len) in
        beyond.into_iter().chain([(fd(&stranger), 0, 1), (pages.fd().unwrap().as_raw_fd(), 0, 1)])
    {
        assert!(matches!(map(file, offset, len), Err(MapError::File { .. })), "{offset} {len}");
    }
    let mut pool = PoolOptions::new("table").build(a, Some(Arc::new(table))).unwrap();
    let page = pool.alloc().unwrap();
    assert_eq!(page.dma_addr() % 4096, 0);
}
