//! The page pool of one thread.

use crate::frag::{self, netmem_frag};
use crate::handle::{self, Kind};
use crate::options::{self, Versioned};
use crate::owned::{self, Owned};
use crate::region::{Kept, netmem_region};
use crate::status::{Failure, netmem_status, status};
use netmem_pool::{PagePool, PoolOptions, PoolStats};
use std::ffi::c_char;
use std::ptr::NonNull;

/// A page pool: one thread allocates, in bulk and without a lock; pages are released on any thread.
#[derive(Debug)]
pub struct netmem_page_pool(());

impl Kind for netmem_page_pool {
    type Value = PagePool<Kept>;
    const NAME: &'static str = "netmem_page_pool";
    const NUMBER: u64 = 0x6e65_746d_656d_0002;
}

impl Owned for netmem_page_pool {}

/// How a pool is made, of both kinds. Set `size` to sizeof(netmem_pool_options), and the rest to
/// zero where the default will do.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct netmem_pool_options {
    /// sizeof(netmem_pool_options)
    pub size: usize,
    /// The pool's name in reports of pages that linger; null: "c". Copied.
    pub name: *const c_char,
    /// The most pages that it has from the region at a time; 0: as many as there are.
    pub limit: usize,
    /// How many pages it has from the region at once; 0: none before they are asked for.
    pub prefill: usize,
}

// SAFETY: repr(C), `size` is first, integers and a pointer.
unsafe impl Versioned for netmem_pool_options {
    const NAME: &'static str = "netmem_pool_options";
    const LEAST: usize = 32;
}

impl netmem_pool_options {
    /// # Safety
    ///
    /// As the header says of `from`.
    pub(crate) unsafe fn read(from: *const Self) -> Result<PoolOptions, Failure> {
        // SAFETY: as the caller promises.
        let given = unsafe { options::read(from) }?;
        // SAFETY: as the caller promises.
        let mut options = PoolOptions::new(unsafe { options::name(given.name, "c") });
        if given.limit > 0 {
            options = options.limit(given.limit);
        }
        if given.prefill > 0 {
            options = options.prefill(given.prefill);
        }
        Ok(options)
    }
}

/// Where a page pool's pages came from and went. Set `size` to sizeof(netmem_page_pool_stats). Once
/// all pages are released: allocated = returned.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct netmem_page_pool_stats {
    /// sizeof(netmem_page_pool_stats)
    pub size: usize,
    /// pages allocated
    pub allocated: u64,
    /// pages returned
    pub returned: u64,
    /// pages allocated and not returned
    pub in_flight: u64,
    /// allocations that found no page
    pub failed: u64,
    /// of the allocations: from the pool's cache
    pub from_cache: u64,
    /// of the allocations: from the region
    pub from_region: u64,
}

// SAFETY: repr(C), `size` is first, integers.
unsafe impl Versioned for netmem_page_pool_stats {
    const NAME: &'static str = "netmem_page_pool_stats";
    const LEAST: usize = 56;
}

impl netmem_page_pool_stats {
    fn of(stats: &PoolStats) -> Self {
        Self {
            size: size_of::<Self>(),
            allocated: stats.allocated(),
            returned: stats.returned(),
            in_flight: stats.inflight(),
            failed: stats.alloc_failed,
            from_cache: stats.alloc_fast,
            from_region: stats.alloc_slow + stats.alloc_slow_high_order,
        }
    }
}

/// Makes a page pool on a region. Any thread may; the first that allocates from it owns it.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_NO_PAGES (fewer than `prefill`),
/// NETMEM_ERR_NO_MEMORY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_page_pool_create(
    region: *const netmem_region,
    options: *const netmem_pool_options,
    pool: *mut *mut netmem_page_pool,
) -> netmem_status {
    status(|| {
        let out = NonNull::new(pool).ok_or_else(|| Failure::null("pool"))?;
        // SAFETY: as the header says.
        let (region, options) = unsafe { (handle::get(region)?, netmem_pool_options::read(options)?) };
        let pool = options.build(region.clone(), None)?;
        // SAFETY: the caller has room for a pointer there.
        unsafe { out.write(handle::create(pool)) };
        Ok(())
    })
}

/// Allocates up to `n` whole pages, and returns how many: fewer only if the pool has no more. Their
/// bytes are what the last user left. No lock, and for pages of the cache no atomic.
///
/// Returns 0 with a text for misuse (null, another thread).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_page_pool_alloc(
    pool: *mut netmem_page_pool,
    frags: *mut netmem_frag,
    n: usize,
) -> usize {
    let mut done = 0;
    // SAFETY: as the header says.
    if let Some(pool) = unsafe { owned::try_mut(pool) }
        && !frags.is_null()
    {
        // SAFETY: the caller has room for `n` variables there.
        done = pool.alloc_group(unsafe { frag::results(frags, n) });
        if done == n {
            return n;
        }
    }
    // SAFETY: as the header says.
    unsafe { alloc_rest(pool, frags, n, done) }
}

/// Allocates what the pool's cache did not have, behind the first `done` pages, and reports misuse.
/// Returns how many pages there are then. Not in line, so that the common case saves no register.
///
/// # Safety
///
/// As the header says.
#[cold]
#[inline(never)]
unsafe fn alloc_rest(pool: *mut netmem_page_pool, frags: *mut netmem_frag, n: usize, mut done: usize) -> usize {
    status(|| {
        // SAFETY: as the caller promises.
        let (pool, out) = unsafe { (owned::get_mut(pool)?, frag::room(frags, n)?) };
        while done < n {
            // By the slow path, which fills the cache.
            let Some(page) = pool.alloc_single() else { break };
            out[done].write(netmem_frag::of(page.freeze()));
            done += 1;
        }
        Ok(())
    });
    done
}

/// Releases `n` fragments on the thread that owns `pool`, and empties the variables. Pages of this
/// pool go to its cache, the cheapest way. Others go where they belong. Empty ones are ignored.
///
/// Misuse (null, another thread) releases nothing, and leaves a text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_page_pool_release(pool: *mut netmem_page_pool, frags: *mut netmem_frag, n: usize) {
    // SAFETY: as the header says.
    if let Some(pool) = unsafe { owned::try_mut(pool) }
        && !frags.is_null()
        // SAFETY: as the header says; the pool compares its pages.
        && pool.release_group(unsafe { frag::variables(frags, n) }) == n
    {
        return;
    }
    // SAFETY: as the header says.
    unsafe { release_rest(pool, frags, n) }
}

/// Releases what does not go to the pool's cache, and reports misuse. Not in line, as
/// [`alloc_rest`].
///
/// # Safety
///
/// As the header says.
#[cold]
#[inline(never)]
unsafe fn release_rest(pool: *mut netmem_page_pool, frags: *mut netmem_frag, n: usize) {
    status(|| {
        // SAFETY: as the caller promises.
        let pool = unsafe { owned::get_mut(pool) }?;
        if frags.is_null() {
            return Ok(());
        }
        let mut others = false;
        for i in 0..n {
            // SAFETY: as the caller promises.
            let variable = unsafe { &mut *frags.add(i) };
            // SAFETY: as the caller promises.
            let Some(frag) = (unsafe { variable.take() }) else { continue };
            if let Err(frag) = pool.release_single(frag) {
                *variable = netmem_frag::of(frag);
                others = true;
            }
        }
        if others {
            // A function of the program may run, which may use the pool: it is not borrowed any
            // more.
            // SAFETY: as the caller promises.
            unsafe { frag::release_all(frags, n) };
        }
        Ok(())
    });
}

/// Counts of the pool. Its thread only.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_page_pool_get_stats(
    pool: *mut netmem_page_pool,
    stats: *mut netmem_page_pool_stats,
) -> netmem_status {
    status(|| {
        // SAFETY: as the header says.
        let pool = unsafe { owned::get_mut(pool) }?;
        // SAFETY: as the header says.
        unsafe { options::write(stats, &netmem_page_pool_stats::of(&pool.stats())) }
    })
}

/// Ends the pool. Its pages may still be held: they return to the region when they are released.
/// `stats` gets the final counts, unless it is null. If it has a wrong size, the pool stays.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_page_pool_close(
    pool: *mut netmem_page_pool,
    stats: *mut netmem_page_pool_stats,
) -> netmem_status {
    // SAFETY: as the header says.
    status(|| unsafe { owned::close_counted(pool, stats, |pool| netmem_page_pool_stats::of(&pool.close().stats)) })
}
