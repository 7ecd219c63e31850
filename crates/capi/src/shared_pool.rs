//! The pool of every thread.

use crate::frag::{self, netmem_frag};
use crate::handle::{self, Kind};
use crate::options::{self, Versioned};
use crate::page_pool::netmem_pool_options;
use crate::region::{Kept, netmem_region};
use crate::status::{Failure, netmem_status, status, value};
use netmem_pool::SharedPool;
use std::ptr::NonNull;

/// A pool from which each thread allocates: magazines of each CPU, no lock while they have pages.
#[derive(Debug)]
pub struct netmem_shared_pool(());

impl Kind for netmem_shared_pool {
    type Value = SharedPool<Kept>;
    const NAME: &'static str = "netmem_shared_pool";
    const NUMBER: u64 = 0x6e65_746d_656d_0003;
}

/// Where a shared pool's pages are. Set `size` to sizeof(netmem_shared_pool_stats).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct netmem_shared_pool_stats {
    /// sizeof(netmem_shared_pool_stats)
    pub size: usize,
    /// pages that are held, or returned and not yet seen by the pool
    pub in_flight: u64,
    /// pages in the magazines of the CPUs and in the depot
    pub idle: u64,
    /// allocations that found no page
    pub failed: u64,
}

// SAFETY: repr(C), `size` is first, integers.
unsafe impl Versioned for netmem_shared_pool_stats {
    const NAME: &'static str = "netmem_shared_pool_stats";
    const LEAST: usize = 32;
}

/// Makes a pool for every thread on a region.
///
/// Errors: as netmem_page_pool_create.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_shared_pool_create(
    region: *const netmem_region,
    options: *const netmem_pool_options,
    pool: *mut *mut netmem_shared_pool,
) -> netmem_status {
    status(|| {
        let out = NonNull::new(pool).ok_or_else(|| Failure::null("pool"))?;
        // SAFETY: as the header says.
        let (region, options) = unsafe { (handle::get(region)?, netmem_pool_options::read(options)?) };
        let pool = options.build_shared(region.clone(), None)?;
        // SAFETY: the caller has room for a pointer there.
        unsafe { out.write(handle::create(pool)) };
        Ok(())
    })
}

/// Allocates up to `n` whole pages, and returns how many: fewer only if the pool has no more.
///
/// Returns 0 with a text for misuse (null).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_shared_pool_alloc(
    pool: *const netmem_shared_pool,
    frags: *mut netmem_frag,
    n: usize,
) -> usize {
    value(|| {
        // SAFETY: as the header says.
        let (pool, out) = unsafe { (handle::get(pool)?, frag::room(frags, n)?) };
        let mut done = 0;
        while done < out.len() {
            let Some(page) = pool.alloc() else { break };
            out[done].write(netmem_frag::of(page.freeze()));
            done += 1;
        }
        Ok(done)
    })
    .unwrap_or(0)
}

/// Allocates a page, and sleeps until there is one. Threads that wait are served in their order.
///
/// The page comes from this pool or from the region. Pages that another pool on the region keeps in
/// its cache are not found: give pools that wait a region of their own.
///
/// The pool must not be closed while a thread waits: release pages, so that all waiting threads
/// return, and close it then.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_SYSTEM (the kernel has no membarrier).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_shared_pool_wait(
    pool: *const netmem_shared_pool,
    frag: *mut netmem_frag,
) -> netmem_status {
    status(|| {
        let out = NonNull::new(frag).ok_or_else(|| Failure::null("frag"))?;
        // SAFETY: as the header says.
        let page = unsafe { handle::get(pool) }?.alloc_blocking()?;
        // SAFETY: the caller has room for a fragment there.
        unsafe { out.write(netmem_frag::of(page.freeze())) };
        Ok(())
    })
}

/// Counts of the pool. While other threads use it, each is of a moment of its own.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_shared_pool_get_stats(
    pool: *const netmem_shared_pool,
    stats: *mut netmem_shared_pool_stats,
) -> netmem_status {
    status(|| {
        // SAFETY: as the header says.
        let now = unsafe { handle::get(pool) }?.stats();
        let value = netmem_shared_pool_stats {
            size: size_of::<netmem_shared_pool_stats>(),
            in_flight: now.inflight,
            idle: now.idle,
            failed: now.alloc_failed,
        };
        // SAFETY: as the header says.
        unsafe { options::write(stats, &value) }
    })
}

/// Ends the pool. Its pages may still be held: they return to the region when they are released.
/// `held` gets how many, unless it is null.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_shared_pool_close(pool: *mut netmem_shared_pool, held: *mut u64) -> netmem_status {
    status(|| {
        // SAFETY: as the header says.
        let closed = unsafe { handle::close(pool) }?.close();
        if let Some(held) = NonNull::new(held) {
            // SAFETY: the caller has room for a number there.
            unsafe { held.write(closed.outstanding) };
        }
        Ok(())
    })
}
