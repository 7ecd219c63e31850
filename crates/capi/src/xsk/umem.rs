//! The UMEM: a region that is registered with the kernel.

use crate::handle::{self, Kind};
use crate::options::{self, Versioned};
use crate::region::{Kept, netmem_region};
use crate::status::{Failure, netmem_status, status, value};
use netmem_pool::RegionProvider;
use netmem_xsk::{Umem, UmemOptions};
use std::ptr::NonNull;
use std::sync::Arc;

/// A region from whose pages AF_XDP queues receive and send.
#[derive(Debug)]
pub struct netmem_umem(());

/// A UMEM, and where the pages of its queues come from.
pub(crate) type Memory = (Umem<Kept>, Arc<RegionProvider<Kept>>);

impl Kind for netmem_umem {
    type Value = Memory;
    const NAME: &'static str = "netmem_umem";
    const NUMBER: u64 = 0x6e65_746d_656d_0005;
}

/// How a UMEM is made. Set `size` to sizeof(netmem_umem_options), and the rest to zero where the
/// default will do.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct netmem_umem_options {
    /// sizeof(netmem_umem_options)
    pub size: usize,
    /// Bytes in a chunk, into which the kernel writes one frame or a part of one: 2048 or 4096; 0:
    /// 4096. Several chunks can share a page.
    pub chunk: u32,
    /// Bytes that are left free in front of each received frame, besides the kernel's 256.
    pub headroom: u32,
    /// Not zero: frames are sent with requests to the device, netmem_xsk_tx_send_with (Linux 6.11).
    pub tx_metadata: u8,
    /// Not zero: in copy mode the kernel computes requested checksums on the CPU. For tests.
    pub software_checksums: u8,
    /// Zero.
    pub reserved: [u8; 6],
}

// SAFETY: repr(C), `size` is first, integers.
unsafe impl Versioned for netmem_umem_options {
    const NAME: &'static str = "netmem_umem_options";
    const LEAST: usize = 16;
}

/// Makes a UMEM of all pages of a region. The kernel pins them when the first queue is opened:
/// without CAP_IPC_LOCK they count towards RLIMIT_MEMLOCK. The region's handle may be closed.
///
/// Queues of one UMEM share its registration, and have the mode of the first one.
///
/// Warning: in zero-copy mode the device may write to its chunks for a moment after the queue was
/// closed. Memory of netmem_region_create stays with the kernel until then. Foreign memory
/// (netmem_region_from_memory) does not: its `release` can be called before, so that it must not be
/// used for anything else. Open queues on foreign memory with NETMEM_XSK_COPY.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_ARGUMENT (chunk,
/// headroom, reserved).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_umem_create(
    region: *const netmem_region,
    options: *const netmem_umem_options,
    umem: *mut *mut netmem_umem,
) -> netmem_status {
    status(|| {
        let out = NonNull::new(umem).ok_or_else(|| Failure::null("umem"))?;
        // SAFETY: as the header says.
        let (provider, given) = unsafe { (handle::get(region)?, options::read(options)?) };
        if given.reserved != [0; 6] {
            return Err(Failure::Argument("netmem_umem_options.reserved is not zero".into()));
        }
        let headroom = u16::try_from(given.headroom)
            .map_err(|_| Failure::Argument(format!("a headroom of {} bytes", given.headroom)))?;
        let mut options = UmemOptions::new()
            .headroom(headroom)
            .tx_metadata(given.tx_metadata != 0)
            .software_checksums(given.software_checksums != 0);
        if given.chunk > 0 {
            options = options.chunk(given.chunk as usize);
        }
        let made = Umem::new(provider.region().clone(), &options)?;
        // SAFETY: the caller has room for a pointer there.
        unsafe { out.write(handle::create((made, provider.clone()))) };
        Ok(())
    })
}

/// Gives up the handle. The memory stays registered until the last queue is closed. If no queue is
/// left, and pages of sent frames are not back, it waits for the kernel to release them, for half a
/// second at most.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_umem_close(umem: *mut netmem_umem) -> netmem_status {
    // SAFETY: as the header says.
    status(|| unsafe { handle::close(umem) }.map(drop))
}

/// Returns sent pages of queues and UMEMs that were closed, if the kernel has released them
/// meanwhile: the receiver of a frame can hold it for long. Returns how many are still kept. Needs
/// CAP_NET_RAW, and the network namespace of the interface. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn netmem_xsk_reclaim() -> usize {
    value(|| Ok(netmem_xsk::reclaim())).unwrap_or(0)
}
