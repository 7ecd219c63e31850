//! Regions: memory that is cut into pages.

use crate::callback;
use crate::handle::{self, Kind};
use crate::options::{self, Versioned};
use crate::status::{Failure, netmem_status, status};
use netmem_pool::{KernelShared, Region, RegionOptions, RegionProvider};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

/// The kind of memory of every handle: this process and the kernel access it.
pub(crate) type Kept = KernelShared;

/// Memory that is cut into pages. Pools allocate from it.
#[derive(Debug)]
pub struct netmem_region(());

impl Kind for netmem_region {
    type Value = Arc<RegionProvider<Kept>>;
    const NAME: &'static str = "netmem_region";
    const NUMBER: u64 = 0x6e65_746d_656d_0001;
}

/// How a region is made. Set `size` to sizeof(netmem_region_options), and the rest to zero where
/// the default will do.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct netmem_region_options {
    /// sizeof(netmem_region_options)
    pub size: usize,
    /// How many pages; at least 1.
    pub pages: usize,
    /// A page is 4096 << order bytes; at most 9.
    pub order: u8,
    /// Not zero: no transparent huge pages are asked for.
    pub no_huge_pages: u8,
    /// Not zero: from the system's reserved huge pages, where it has as many.
    pub reserved_huge_pages: u8,
    /// Not zero: memory is touched now, and not when it is first used.
    pub populate: u8,
    /// Not zero: memory is locked (mlock).
    pub lock: u8,
    /// Zero.
    pub reserved: [u8; 3],
}

// SAFETY: repr(C), `size` is first, integers.
unsafe impl Versioned for netmem_region_options {
    const NAME: &'static str = "netmem_region_options";
    const LEAST: usize = 24;
}

/// Allocates a region. One memfd and one mapping.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_ARGUMENT (no pages, or a wrong
/// order), NETMEM_ERR_NO_MEMORY, NETMEM_ERR_SYSTEM.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_region_create(
    options: *const netmem_region_options,
    region: *mut *mut netmem_region,
) -> netmem_status {
    status(|| {
        // SAFETY: as the header says.
        let given = unsafe { options::read(options) }?;
        let out = NonNull::new(region).ok_or_else(|| Failure::null("region"))?;
        if given.reserved != [0; 3] {
            return Err(Failure::Argument("netmem_region_options.reserved is not zero".into()));
        }
        let options = RegionOptions::new(given.pages)
            .order(given.order)
            .huge_pages(given.no_huge_pages == 0)
            .reserved_huge_pages(given.reserved_huge_pages != 0)
            .populate(given.populate != 0)
            .lock(given.lock != 0);
        let made = handle::create(RegionProvider::new(options.build::<Kept>()?));
        // SAFETY: the caller has room for a pointer there.
        unsafe { out.write(made) };
        Ok(())
    })
}

/// Called once, when the last page of a region of foreign memory is back and the region is closed:
/// the memory may be freed. Runs on the thread that released the last page or closed the region or
/// pool. It may call every function of the library. If it throws, the process aborts; it must not
/// jump out.
pub type netmem_release_fn = Option<unsafe extern "C-unwind" fn(context: *mut c_void)>;

/// Foreign memory, and how it is released.
struct Foreign {
    release: netmem_release_fn,
    context: *mut c_void,
}

// SAFETY: the header says that the function is called on any thread.
unsafe impl Send for Foreign {}

impl Drop for Foreign {
    fn drop(&mut self) {
        if let Some(release) = self.release {
            // SAFETY: the caller of `netmem_region_from_memory` promised it for this context.
            callback::run(|| unsafe { release(self.context) });
        }
    }
}

/// Makes a region of memory that the caller has: `length` bytes at `address`, which are initialised,
/// readable and writable, and accessed through the library only, until `release` is called. The
/// address is a multiple of the page's size. `release` may be null.
///
/// On failure `release` is not called, and the memory stays with the caller.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_ARGUMENT (alignment, less than a page, order),
/// NETMEM_ERR_NO_MEMORY (for descriptors).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_region_from_memory(
    address: *mut c_void,
    length: usize,
    order: u8,
    release: netmem_release_fn,
    context: *mut c_void,
    region: *mut *mut netmem_region,
) -> netmem_status {
    status(|| {
        let out = NonNull::new(region).ok_or_else(|| Failure::null("region"))?;
        let memory = NonNull::new(address.cast::<u8>()).ok_or_else(|| Failure::null("address"))?;
        // The function is set once the region exists: what fails before drops this owner.
        let armed = Arc::new(std::sync::Mutex::new(Foreign { release: None, context }));
        // SAFETY: the caller promises it of the memory.
        let made = unsafe { Region::<Kept>::from_raw(memory, length, order, Arc::clone(&armed)) }?;
        armed.lock().unwrap_or_else(std::sync::PoisonError::into_inner).release = release;
        drop(armed);
        let made = handle::create(RegionProvider::new(made));
        // SAFETY: the caller has room for a pointer there.
        unsafe { out.write(made) };
        Ok(())
    })
}

/// The address of the region's first page; null for a region that is null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_region_address(region: *const netmem_region) -> *mut c_void {
    // SAFETY: as the header says.
    unsafe { handle::get(region) }.map_or(std::ptr::null_mut(), |region| region.region().as_ptr().cast())
}

/// The region's bytes, which can be more than the pages take: whole huge pages. 0 for a region that
/// is null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_region_length(region: *const netmem_region) -> usize {
    // SAFETY: as the header says.
    unsafe { handle::get(region) }.map_or(0, |region| region.region().len())
}

/// The bytes of each of its pages; 0 for a region that is null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_region_page_size(region: *const netmem_region) -> usize {
    // SAFETY: as the header says.
    unsafe { handle::get(region) }.map_or(0, |region| region.region().page_size())
}

/// Gives up the handle. The memory stays until the last pool on it is closed and the last page is
/// back.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_region_close(region: *mut netmem_region) -> netmem_status {
    // SAFETY: as the header says.
    status(|| unsafe { handle::close(region) }.map(drop))
}
