//! Regions: their backing, their errors, and their cost.

use crate::common::{alloc, kilobytes, provider, smaps};
use netmem_pool::{
    Backing, Direction, DmaDomain, KernelShared, MapError, PAGE_SIZE, PeerShared, PoolOptions, Private, Region,
    RegionError, RegionOptions, RegionProvider, SystemMemory, VhostDomain,
};
use netmem_testing::skip;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::Arc;

fn plain<M: SystemMemory>(pages: usize) -> Region<M> {
    RegionOptions::new(pages).huge_pages(false).build().unwrap()
}

/// Proves POOL-13: order and size are as requested, page after page, and the mapping has whole huge
/// pages.
#[test]
fn orders_and_sizes() {
    for (order, pages) in [(0, 1), (0, 513), (3, 10), (9, 2)] {
        let region = RegionOptions::new(pages).order(order).huge_pages(false).build::<Private>().unwrap();
        assert_eq!(region.page_size(), PAGE_SIZE << order);
        assert_eq!((region.pages() as usize, region.len() % (2 << 20)), (pages, 0));
        assert!(region.len() >= pages * region.page_size());
        assert_eq!((region.backing(), region.is_empty()), (Backing::Plain, false));
        let mut pool = PoolOptions::new("order").build(RegionProvider::new(region), None).unwrap();
        let mut out = alloc(&mut pool, pages);
        for page in &mut out {
            assert_eq!(page.len(), PAGE_SIZE << order);
            let n = page.index() as u8;
            page.as_mut_slice().fill(n);
        }
        assert!(out.iter().all(|p| p.as_slice().iter().all(|&b| b == p.index() as u8)), "pages overlap");
    }
}

/// Proves POOL-13: huge pages are requested; if there are none, the region has small pages.
#[test]
fn huge_pages_with_fallback() {
    let region = RegionOptions::new(512).build::<PeerShared>().unwrap();
    eprintln!("backing: {}", region.backing());
    assert_eq!(region.as_ptr().addr() % (2 << 20), 0);
    assert!(RegionOptions::new(512).build::<Private>().is_ok());
}

/// Proves POOL-13: huge pages that the administrator has reserved are taken only by a region that
/// asks for them.
#[test]
fn reserved_huge_pages_are_asked_for() {
    let setting = "/proc/sys/vm/nr_hugepages";
    let had: usize = std::fs::read_to_string(setting).unwrap().trim().parse().unwrap();
    if std::fs::write(setting, format!("{}", had + 2)).is_err() {
        return skip("it takes root to have two huge pages for a moment");
    }
    let backings = [false, true].map(|asked| {
        let options = RegionOptions::new(512).reserved_huge_pages(asked);
        let shared = options.clone().build::<PeerShared>().unwrap();
        [options.build::<Private>().unwrap().backing(), shared.backing()]
    });
    std::fs::write(setting, format!("{had}")).unwrap();
    assert!(!backings[0].contains(&Backing::Huge), "taken without being asked for: {backings:?}");
    if backings[1] != [Backing::Huge; 2] {
        skip(&format!("the system has not two huge pages now: {backings:?}"));
    }
}

/// Proves POOL-13: errors name what was wrong.
#[test]
fn errors() {
    let build = |o: RegionOptions| o.huge_pages(false).populate(false).build::<Private>().unwrap_err();
    assert!(matches!(build(RegionOptions::new(0)), RegionError::Pages { pages: 0 }));
    assert!(matches!(build(RegionOptions::new(1 << 32)), RegionError::Pages { .. }));
    assert!(matches!(build(RegionOptions::new(usize::MAX).order(9)), RegionError::Pages { .. }));
    assert!(matches!(build(RegionOptions::new(1).order(10)), RegionError::Order { order: 10 }));
    for node in [1023, 1024, u32::MAX] {
        let error = build(RegionOptions::new(1).node(node));
        assert!(matches!(error, RegionError::Node { .. }), "{error}");
        assert!(error.to_string().contains(&node.to_string()), "{error}");
    }
    // More than an address space has room for.
    let error = build(RegionOptions::new(u32::MAX as usize).order(9));
    assert!(matches!(&error, RegionError::System { step: "map", .. }), "{error}");
    assert!(error.to_string().contains("private"), "{error}");
}

/// Proves POOL-13: more memory than is available is refused beforehand, with both figures in the
/// error, unless pages are populated on demand.
#[test]
fn more_than_there_is() {
    let info = std::fs::read_to_string("/proc/meminfo").unwrap();
    let total = kilobytes(&info, "MemTotal:") << 10;
    let options = RegionOptions::new(2 * total / PAGE_SIZE).huge_pages(false);
    let error = options.clone().build::<Private>().unwrap_err();
    assert!(matches!(error, RegionError::TooLittle { bytes, available } if bytes >= 2 * total && available <= total));
    assert!(error.to_string().contains("ask for fewer pages"), "{error}");
    assert!(options.populate(false).build::<Private>().is_ok());
}

/// Proves POOL-13: a region is on the requested NUMA node.
#[test]
fn the_first_node_exists() {
    match RegionOptions::new(1).huge_pages(false).node(0).build::<Private>() {
        Ok(region) => {
            let maps = std::fs::read_to_string("/proc/self/numa_maps").unwrap();
            let line = maps.lines().find(|l| l.starts_with(&format!("{:x} ", region.as_ptr().addr()))).unwrap();
            assert!(line.contains(" bind:0 ") && line.contains(" N0="), "{line}");
        }
        Err(error) => skip(&format!("this machine cannot place memory: {error}")),
    }
}

/// Proves POOL-10: only peer-shared memory has a file, and the size of the file is sealed.
#[test]
fn the_file_is_sealed() {
    assert!(plain::<Private>(1).fd().is_none());
    assert!(plain::<KernelShared>(1).fd().is_none());
    let region = plain::<PeerShared>(600);
    let fd = region.fd().unwrap().as_raw_fd();
    for len in [0, PAGE_SIZE, region.len() + PAGE_SIZE] {
        // SAFETY: a call on a descriptor of the region, which must fail.
        assert_eq!(unsafe { libc::ftruncate(fd, len as i64) }, -1, "to {len}");
        assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EPERM));
    }
    // SAFETY: as above.
    assert_eq!(unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, libc::F_SEAL_WRITE) }, -1, "sealed against more seals");
}

/// No child process gets a copy of the memory.
#[test]
fn children_do_not_inherit() {
    for at in [plain::<Private>(1), plain::<Private>(1024)].iter().map(Region::as_ptr) {
        let flags = smaps(at);
        assert!(flags.lines().last().unwrap().split_whitespace().any(|f| f == "dc"), "{flags}");
    }
    let shared = plain::<PeerShared>(1);
    assert!(smaps(shared.as_ptr()).contains(" dc"));
}

/// Proves POOL-13: populated memory is resident from the start.
#[test]
fn populated_regions_are_resident() {
    let region = plain::<Private>(1024);
    assert_eq!(kilobytes(&smaps(region.as_ptr()), "Rss:"), 4096);
}

/// The file of a region for a device in this process is handed out by no safe function: neither the
/// region nor a memory table has it.
#[test]
fn the_file_of_a_region_for_this_process_stays_here() {
    let region = Arc::new(RegionOptions::new(4).huge_pages(false).build_in_process().unwrap());
    let table = VhostDomain::new(std::slice::from_ref(&region));
    assert!(region.fd().is_none() && table.regions()[0].fd().is_none());
    // SAFETY: nothing writes to it.
    let fds = unsafe { [region.in_process_fd(), table.regions()[0].in_process_fd()] };
    let [Some(one), Some(two)] = fds else { panic!("the device gets the file") };
    assert_eq!(one.as_raw_fd(), two.as_raw_fd());
    let shared = plain::<PeerShared>(4);
    // SAFETY: as above.
    assert!(shared.fd().is_some() && unsafe { shared.in_process_fd() }.is_some());
}

/// Proves POOL-1: a vhost memory table maps exactly the bytes of its regions.
#[test]
fn the_memory_table_knows_its_regions() {
    let (a, b) = (provider::<PeerShared>(512), provider::<PeerShared>(1));
    let table = VhostDomain::new(&[a.region().clone(), b.region().clone()]);
    let [first, second] = table.regions() else { panic!("two regions") };
    assert_eq!(second.bus(), first.bus() + a.region().len() as u64);
    let at = |region: &Region<PeerShared>, offset| region.as_ptr().wrapping_add(offset);
    assert_eq!(table.map(at(a.region(), 4096), 4096, Direction::default()).unwrap(), first.bus() + 4096);
    assert_eq!(table.map(at(b.region(), 0), b.region().len(), Direction::default()).unwrap(), second.bus());
    let end = a.region().len();
    for (ptr, len) in [(at(a.region(), end - 4095), 4096), (ptr::null_mut(), 1), (at(a.region(), 0), usize::MAX)] {
        assert!(matches!(table.map(ptr, len, Direction::default()), Err(MapError::Outside { .. })), "{ptr:?} {len}");
    }
    let mut pool = PoolOptions::new("table").build(b, Some(std::sync::Arc::new(table))).unwrap();
    assert_eq!(pool.alloc().unwrap().dma_addr() % 4096, 0);
    let stranger = provider::<PeerShared>(1);
    let other = VhostDomain::new(&[a.region().clone()]);
    let mut pool = PoolOptions::new("stranger").build(stranger, Some(std::sync::Arc::new(other))).unwrap();
    assert!(pool.alloc().is_none(), "memory outside of the table cannot be mapped");
}
