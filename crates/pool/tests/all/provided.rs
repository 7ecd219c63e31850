//! Memory that the user provides: address ranges, and files that are mapped.

use crate::common::alloc;
use netmem_pool::{
    Backing, Frag, KernelShared, PAGE_SIZE, PeerShared, PoolOptions, Private, Readable, Region, RegionError,
    RegionProvider, SystemMemory, VhostDomain,
};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags};
use std::fs::File;
use std::ops::RangeBounds;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A mapping of the user, and a count of the mappings that still exist.
struct Range(NonNull<u8>, usize, Arc<AtomicUsize>);

// SAFETY: an address range belongs to no thread.
unsafe impl Send for Range {}

impl Range {
    fn new(len: usize, there: &Arc<AtomicUsize>) -> Self {
        // SAFETY: the kernel chooses a fresh range, so nothing is replaced.
        let at = unsafe {
            rustix::mm::mmap_anonymous(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        };
        there.fetch_add(1, Ordering::Relaxed);
        Self(NonNull::new(at.unwrap().cast()).unwrap(), len, there.clone())
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping, and there are no pointers into it any more.
        unsafe { rustix::mm::munmap(self.0.as_ptr().cast(), self.1) }.unwrap();
        self.2.fetch_sub(1, Ordering::Relaxed);
    }
}

fn memfd(bytes: u64, flags: MemfdFlags) -> OwnedFd {
    let file = memfd_create("provided", MemfdFlags::CLOEXEC | flags).unwrap();
    ftruncate(&file, bytes).unwrap();
    file
}

/// Proves POOL-10: a range of the user is memory like any other, of the kind that the user chooses.
/// It is released exactly when pool, provider and the last page have been dropped.
#[test]
fn a_range_of_the_users() {
    fn check<M: Readable + SystemMemory>(order: u8) {
        let there = Arc::default();
        let range = Range::new(64 << 12, &there);
        let (at, len) = (range.0, range.1 - 100);
        let page_size = PAGE_SIZE << order;
        // A mapping begins at a page boundary. For larger pages, the test skips to their boundary.
        let skip = at.addr().get().next_multiple_of(page_size) - at.addr().get();
        // SAFETY: the range exists as long as its owner, and is used by no other code.
        let region = unsafe { Region::<M>::from_raw(at.add(skip), len - skip, order, range) }.unwrap();
        assert_eq!((region.page_size(), region.backing()), (page_size, Backing::Provided));
        assert_eq!(
            (region.pages() as usize, region.as_ptr()),
            ((len - skip) / page_size, at.as_ptr().wrapping_add(skip))
        );
        assert_eq!((region.len(), region.fd().is_none()), (region.pages() as usize * page_size, true));
        let pages = region.pages();
        let mut pool = PoolOptions::new("range").build(RegionProvider::new(region), None).unwrap();
        let mut out: Vec<_> = std::iter::from_fn(|| pool.alloc()).collect();
        assert_eq!(out.len() as u32, pages);
        for page in &mut out {
            let n = page.index() as u8 + 1;
            page.as_mut_slice().fill(n);
        }
        assert!(out.iter().all(|p| p.as_slice().iter().all(|&b| u32::from(b) == p.index() + 1)), "pages overlap");
        let last = out.pop().unwrap().freeze();
        drop((out, pool));
        assert_eq!(there.load(Ordering::Relaxed), 1, "a fragment is still out");
        assert_eq!(last[0], last[page_size - 1]);
        drop(last);
        assert_eq!(there.load(Ordering::Relaxed), 0);
    }
    check::<Private>(0);
    check::<KernelShared>(0);
    check::<Private>(3);
}

/// Proves POOL-13: a range that cannot hold pages is refused with the reason, and its owner is
/// dropped.
#[test]
fn ranges_that_cannot_be() {
    let there = Arc::default();
    let build = |skip: usize, len: usize, order: u8| {
        let range = Range::new(16 << 12, &there);
        // SAFETY: as above. A length beyond the range is refused before the range is accessed.
        let refused = unsafe { Region::<Private>::from_raw(range.0.add(skip), len, order, range) }.unwrap_err();
        assert_eq!(there.load(Ordering::Relaxed), 0);
        refused
    };
    let error = build(8, 4096, 0);
    assert!(matches!(error, RegionError::Unaligned { page_size: 4096, .. }), "{error}");
    assert!(error.to_string().contains("multiple of the page size, 4096 bytes"), "{error}");
    assert!(matches!(build(0, 4095, 0), RegionError::Small { bytes: 4095, page_size: 4096 }));
    assert!(matches!(build(0, 8191, 1), RegionError::Small { bytes: 8191, page_size: 8192 }));
    assert!(matches!(build(0, 1 << 44, 0), RegionError::Pages { pages: 0x1_0000_0000 }));
    assert!(matches!(build(0, 4096, 10), RegionError::Order { order: 10 }));
}

/// Proves POOL-10: a file of the user is mapped completely, each side sees what the other writes,
/// and a vhost table accepts the file.
#[test]
fn a_file_of_the_users() {
    for (bytes, order) in [(4096, 0), (600 * 4096, 0), (512 * 4096, 9), (64 * 4096 + 100, 2)] {
        let file = memfd(bytes, MemfdFlags::ALLOW_SEALING);
        let peer = File::from(file.try_clone().unwrap());
        let memory = RegionProvider::new(Region::from_fd(file, .., order).unwrap());
        let region = memory.region().clone();
        assert_eq!(
            (region.len() as u64, region.pages()),
            (bytes & !((4096 << order) - 1), (bytes >> (12 + order)) as u32)
        );
        assert_eq!((region.backing(), region.page_size()), (Backing::Provided, 4096 << order));
        let table = VhostDomain::new(&[region]);
        let bus = table.regions()[0].bus();
        let mut pool = PoolOptions::new("provided").build(memory, Some(Arc::new(table))).unwrap();
        let mut page = pool.alloc().unwrap();
        page.copy_from(5, b"from here").unwrap();
        let mut seen = [0; 9];
        let offset = page.dma_addr() - bus;
        peer.read_exact_at(&mut seen, offset + 5).unwrap();
        assert_eq!(&seen, b"from here");
        peer.write_all_at(b"from there", offset).unwrap();
        assert_eq!(&page.read_at::<10>(0).unwrap(), b"from there");
    }
}

/// Proves POOL-10: memory of a peer that was declared trusted is shared by descriptor as before.
/// Each side sees what the other writes, and the bytes are slices and `Bytes`. Declaring a region
/// trusted does not change it: its file, its pages and the seal stay.
#[test]
fn memory_of_a_trusted_peer() {
    fn needs_slices<M: Readable>(frag: Frag<M>) -> bytes::Bytes {
        frag.into()
    }
    let file = memfd(64 << 12, MemfdFlags::ALLOW_SEALING);
    let peer = File::from(file.try_clone().unwrap());
    let region = Region::from_fd(file, .., 1).unwrap();
    let (at, fd) = (region.as_ptr(), region.fd().unwrap().as_raw_fd());
    // SAFETY: the peer is this test, which writes only to buffers that are posted to it.
    let region = unsafe { region.trust_peer() };
    assert_eq!((region.as_ptr(), region.fd().unwrap().as_raw_fd(), region.pages()), (at, fd, 32));
    assert_eq!(format!("{region:?}"), "Region<trusted-peer>(32 pages of 8192 B, provided)");
    assert_eq!(ftruncate(region.fd().unwrap(), 0).unwrap_err(), rustix::io::Errno::PERM);

    let memory = RegionProvider::new(region);
    let rings = Arc::new(Region::from_fd(memfd(4096, MemfdFlags::ALLOW_SEALING), .., 0).unwrap());
    let table = VhostDomain::new(std::slice::from_ref(&rings)).and_shared(memory.region().clone());
    let [first, second] = table.regions() else { panic!("two regions") };
    assert_eq!((first.user_addr(), second.user_addr()), (rings.as_ptr().addr() as u64, at.addr() as u64));
    assert_eq!((first.is_device(), second.is_device(), second.len()), (false, false, 64 << 12));
    let bus = second.bus();
    let mut pool = PoolOptions::new("trusted").build(memory, Some(Arc::new(table))).unwrap();
    let mut page = pool.alloc().unwrap();
    page[..9].copy_from_slice(b"from here");
    let mut seen = [0; 9];
    let offset = page.dma_addr() - bus;
    peer.read_exact_at(&mut seen, offset).unwrap();
    assert_eq!(&seen, b"from here");
    // The page is posted: the peer writes, and this process has no slice of it.
    peer.write_all_at(b"from there", offset).unwrap();
    let bytes = needs_slices(page.freeze_range(0..10));
    assert_eq!((&bytes[..], pool.stats().inflight()), (&b"from there"[..], 1));
    drop(bytes);
    assert_eq!(pool.stats().inflight(), 0);
}

/// Proves POOL-10: a memfd that the user provides can no longer be shortened. A memfd that refuses
/// the seal is refused. Files without seals are accepted without a check.
#[test]
fn files_and_their_seals() {
    let region = Region::from_fd(memfd(8192, MemfdFlags::ALLOW_SEALING), .., 0).unwrap();
    assert!(fcntl_get_seals(region.fd().unwrap()).unwrap().contains(SealFlags::SHRINK));
    assert_eq!(ftruncate(region.fd().unwrap(), 0).unwrap_err(), rustix::io::Errno::PERM);
    assert!(ftruncate(region.fd().unwrap(), 1 << 20).is_ok(), "longer harms nobody");

    let sealed = memfd(8192, MemfdFlags::ALLOW_SEALING);
    fcntl_add_seals(&sealed, SealFlags::SHRINK | SealFlags::SEAL).unwrap();
    assert!(Region::from_fd(sealed, .., 0).is_ok());

    let error = Region::from_fd(memfd(8192, MemfdFlags::empty()), .., 0).unwrap_err();
    assert!(matches!(error, RegionError::Shrinkable { .. }), "{error}");
    assert!(error.to_string().contains("MFD_ALLOW_SEALING"), "{error}");

    // One file is in memory and has seals, but none can be set. The other is on a disk.
    for dir in ["/dev/shm".into(), std::env::temp_dir()] {
        let Ok(file) = tempfile::tempfile_in(&dir) else { continue };
        file.set_len(8192).unwrap();
        assert_eq!(Region::from_fd(file, .., 0).unwrap().pages(), 2, "{}", dir.display());
    }
}

/// Proves POOL-10: a region of a range of a file covers exactly that range. The peer finds each
/// page at its offset, and two regions of one file do not overlap. The domain has the offset for
/// a peer that maps the file.
#[test]
fn a_range_of_a_file() {
    let file = memfd(64 << 12, MemfdFlags::ALLOW_SEALING);
    let peer = File::from(file.try_clone().unwrap());
    let rings = Region::from_fd(file.try_clone().unwrap(), ..16 << 12, 0).unwrap();
    let pages = Region::from_fd(file.try_clone().unwrap(), 16 << 12..(63 << 12) + 100, 1).unwrap();
    let rest = Region::from_fd(file, 63 << 12..=(64 << 12) - 1, 0).unwrap();
    assert_eq!([&rings, &pages, &rest].map(|r| (r.pages(), r.file_offset() >> 12)), [(16, 0), (23, 16), (1, 63)]);
    let memory = RegionProvider::new(pages);
    let table = VhostDomain::new(&[Arc::new(rings), memory.region().clone(), Arc::new(rest)]);
    assert_eq!(table.regions().iter().map(|e| e.file_offset() >> 12).collect::<Vec<_>>(), [0, 16, 63]);
    let bus = table.regions()[1].bus();
    let mut pool = PoolOptions::new("range").build(memory, Some(Arc::new(table))).unwrap();
    let mut pages: Vec<_> = std::iter::from_fn(|| pool.alloc()).collect();
    assert_eq!(pages.len(), 23);
    for page in &mut pages {
        let number = page.index() as u8 + 1;
        page.copy_from(8191, &[number]).unwrap();
    }
    let mut all = vec![0; 64 << 12];
    peer.read_exact_at(&mut all, 0).unwrap();
    for page in &pages {
        let at = (page.dma_addr() - bus) as usize + (16 << 12) + 8191;
        assert_eq!(u32::from(std::mem::take(&mut all[at])), page.index() + 1);
    }
    assert!(all.iter().all(|&b| b == 0), "a page lies elsewhere");
}

/// Proves POOL-13: a range that is not in the file, or that no mapping can begin at, is refused
/// with the reason.
#[test]
fn ranges_that_a_file_cannot_have() {
    fn build(range: impl RangeBounds<u64>) -> RegionError {
        Region::<PeerShared>::from_fd(memfd(8 << 12, MemfdFlags::ALLOW_SEALING), range, 0).unwrap_err()
    }
    let size = 8 << 12;
    let error = build(100..8192);
    assert!(matches!(error, RegionError::Range { start: 100, end: 8192, .. }), "{error}");
    assert!(error.to_string().contains("multiple of 4096"), "{error}");
    assert!(matches!(build(..=size), RegionError::Range { start: 0, end: 32769, size: 32768 }));
    assert!(matches!(build(..=u64::MAX), RegionError::Range { end: u64::MAX, .. }));
    #[allow(clippy::reversed_empty_ranges)]
    let reversed = 8192..4096;
    assert!(matches!(build(reversed), RegionError::Range { start: 8192, end: 4096, .. }));
    assert!(matches!(build(size + 4096..), RegionError::Range { .. }));
    assert!(matches!(build(size..), RegionError::Small { bytes: 0, .. }));
    assert!(matches!(build(4096..8191), RegionError::Small { bytes: 4095, .. }));
}

/// Proves POOL-13: a file that cannot be used as memory is refused with the reason.
#[test]
fn files_that_cannot_be() {
    let build = |file: OwnedFd, order| Region::<PeerShared>::from_fd(file, .., order).unwrap_err();
    assert!(matches!(build(memfd(0, MemfdFlags::ALLOW_SEALING), 0), RegionError::Small { bytes: 0, page_size: 4096 }));
    assert!(matches!(build(memfd(4096, MemfdFlags::ALLOW_SEALING), 1), RegionError::Small { bytes: 4096, .. }));
    assert!(matches!(build(memfd(4096, MemfdFlags::ALLOW_SEALING), 10), RegionError::Order { order: 10 }));
    assert!(matches!(build(memfd(1 << 44, MemfdFlags::ALLOW_SEALING), 0), RegionError::Pages { pages: 0x1_0000_0000 }));
    let (pipe, _end) = rustix::pipe::pipe().unwrap();
    assert!(matches!(build(pipe, 0), RegionError::Small { bytes: 0, .. }));
    let file = memfd(4096, MemfdFlags::ALLOW_SEALING);
    fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    let read_only = File::open(format!("/proc/self/fd/{}", file.as_fd().as_raw_fd())).unwrap();
    let error = build(read_only.into(), 0);
    assert!(matches!(error, RegionError::File { step: "map", .. }), "{error}");
    assert!(error.to_string().contains("open for reading and writing"), "{error}");
}

/// No child process gets a copy of a file's mapping.
#[test]
fn children_do_not_inherit() {
    let region = Region::from_fd(memfd(8192, MemfdFlags::ALLOW_SEALING), .., 0).unwrap();
    let all = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let from = all.find(&format!("{:x}-", region.as_ptr().addr())).unwrap();
    let flags = all[from..].lines().find(|l| l.starts_with("VmFlags")).unwrap();
    assert!(flags.contains(" dc"), "{flags}");
}

/// Proves POOL-10: memory of the system and memory of the user go through the same pools, side by
/// side.
#[test]
fn beside_memory_of_the_systems() {
    let there = Arc::default();
    let range = Range::new(8 << 12, &there);
    // SAFETY: the range exists as long as its owner, and is used by no other code.
    let region = unsafe { Region::<Private>::from_raw(range.0, range.1, 0, range) }.unwrap();
    let mut provided = PoolOptions::new("provided").build(RegionProvider::new(region), None).unwrap();
    let (mut own, domain) = crate::common::pool(PoolOptions::new("own"), 8);
    let mut mixed = alloc(&mut provided, 8);
    mixed.extend(alloc(&mut own, 8));
    drop(mixed);
    assert_eq!((provided.stats().inflight(), own.stats().inflight()), (0, 0));
    crate::common::close_balanced(own, &domain);
}

/// A range that ends within a huge page is mapped, kept from children, and unmapped with the whole
/// huge page. This needs a reserved huge page. On systems without one, the test does nothing.
#[test]
fn a_part_of_a_huge_page() {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    let Ok(file) = memfd_create("part of a huge page", flags) else { return };
    ftruncate(&file, 2 << 20).unwrap();
    let region = match Region::from_fd(file, ..12 << 10, 0) {
        Err(RegionError::File { source, .. }) if source.kind() == std::io::ErrorKind::OutOfMemory => {
            eprintln!("skipped: there is no huge page");
            return;
        }
        region => region.unwrap(),
    };
    let mapped = || std::fs::read_to_string("/proc/self/maps").unwrap().contains("part of a huge page");
    assert!(region.pages() == 3 && mapped());
    drop(region);
    assert!(!mapped());
}
