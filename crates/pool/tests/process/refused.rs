//! A system without memory for a provider that has to grow. The limit applies to the
//! whole process.

use netmem_pool::{GrowingProvider, PagePool, PoolOptions, Private, RegionOptions};
use rustix::process::{Resource, getrlimit, setrlimit};

fn address_space() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split_whitespace().next().unwrap().parse::<u64>().unwrap() * 4096
}

fn all(pool: &mut PagePool<Private>) -> Vec<netmem_pool::Page<Private>> {
    std::iter::from_fn(|| pool.alloc()).collect()
}

/// Proves POOL-13: if the system refuses memory, the refusal is counted and the provider returns no
/// page. The provider does not ask the system again with every request. It gets the memory as soon
/// as the system has some.
#[test]
fn a_refusal_is_no_end() {
    let _alone = crate::alone();
    let step = RegionOptions::new(256).order(9).huge_pages(false).populate(false);
    let memory = GrowingProvider::new(step, 256 * 64).unwrap();
    let mut pool = PoolOptions::new("refused").build(memory.clone(), None).unwrap();
    let free = getrlimit(Resource::As);
    let mut tight = free;
    tight.current = Some(address_space() + (1 << 30));
    setrlimit(Resource::As, tight).unwrap();

    let out = all(&mut pool);
    assert!((256..256 * 4).contains(&out.len()), "a gigabyte holds less than two more regions: {}", out.len());
    assert_eq!((memory.pages(), memory.out_of_pages()), (out.len(), 1));
    for n in 2..500 {
        assert!(pool.alloc().is_none());
        assert_eq!((pool.stats().alloc_failed, memory.out_of_pages(), memory.pages()), (n, n, out.len()));
    }
    setrlimit(Resource::As, free).unwrap();
    assert!(pool.alloc().is_none(), "the refusal is still believed");
    let asked = (0..5000).position(|_| pool.alloc().is_some());
    assert!(asked.is_some_and(|n| n > 100), "{asked:?}");
    assert_eq!(memory.pages(), out.len() + 256);
}
