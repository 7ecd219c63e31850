//! Memory that is resident, measured for the process.

use crate::common::{counting, kilobytes, provider, smaps};
use netmem_pool::{PAGE_SIZE, PeerShared, PoolOptions, Private, SystemMemory};

/// A sparse region of 80 GB uses no memory until it is touched, also when its device is removed.
#[test]
fn sparse_regions_are_free() {
    let _alone = crate::alone();
    fn resident() -> usize {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        statm.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * PAGE_SIZE
    }
    fn check<M: SystemMemory>() {
        let before = resident();
        let provider = provider::<M>(80 << 18);
        let at = provider.region().as_ptr();
        let domain = counting();
        let mut pool = PoolOptions::new("sparse").build(provider, Some(domain.clone())).unwrap();
        let page = pool.alloc().unwrap();
        pool.device_gone();
        drop(page);
        assert_eq!(domain.maps(), domain.unmaps());
        let grown = resident().saturating_sub(before);
        assert!(grown < 64 << 20, "{} MiB", grown >> 20);
        assert_eq!(kilobytes(&smaps(at), "Rss:"), 0);
    }
    check::<Private>();
    check::<PeerShared>();
}
