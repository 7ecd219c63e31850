//! Opens a queue of an interface: a socket, and its two halves.

use super::program::ifindex;
use super::rx::{Receive, netmem_xsk_rx};
use super::tx::netmem_xsk_tx;
use super::umem::netmem_umem;
use crate::handle;
use crate::options::{self, Versioned};
use crate::status::{Failure, netmem_status, status};
use netmem_xsk::{Mode, QueueOptions};
use std::ffi::c_char;
use std::ptr::NonNull;

/// In netmem_xsk_options.mode: the kernel copies each frame. Works on every interface.
pub const NETMEM_XSK_COPY: u8 = 1;
/// In netmem_xsk_options.mode: the device reads and writes the pages.
pub const NETMEM_XSK_ZERO_COPY: u8 = 2;

/// How a queue of an interface is opened. Set `size` to sizeof(netmem_xsk_options), and the rest to
/// zero where the default will do.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct netmem_xsk_options {
    /// sizeof(netmem_xsk_options)
    pub size: usize,
    /// The interface's name, in this thread's network namespace.
    pub interface: *const c_char,
    /// The number of its queue.
    pub queue: u32,
    /// Entries of the RX ring, which holds frames until they are received: a power of two; 0: 2048.
    pub rx_ring: u32,
    /// Entries of the TX ring: a power of two; 0: 2048.
    pub tx_ring: u32,
    /// Chunks that the kernel has to receive into, if there are pages; 0: 1024. At least the
    /// device's receive ring and a quarter more.
    pub fill: u32,
    /// NETMEM_XSK_COPY, NETMEM_XSK_ZERO_COPY, or 0: the best mode of the driver.
    pub mode: u8,
    /// Zero.
    pub reserved: [u8; 7],
}

// SAFETY: repr(C), `size` is first, integers and a pointer.
unsafe impl Versioned for netmem_xsk_options {
    const NAME: &'static str = "netmem_xsk_options";
    const LEAST: usize = 40;
}

/// Opens a queue of an interface: a socket with a receive queue and a transmit queue, which may be
/// used by two threads. Frames arrive when netmem_xdp_program_insert has put `rx` into a program on
/// the interface. Close both. The UMEM's handle may be closed before.
///
/// Needs CAP_NET_RAW, and locked memory: see netmem_umem_create. An AF_XDP socket of this queue
/// that was just closed is waited for, for half a second at most.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_ARGUMENT (mode,
/// size of a ring), NETMEM_ERR_NOT_FOUND (interface, queue), NETMEM_ERR_NO_PAGES (fewer than
/// `fill`), NETMEM_ERR_NO_MEMORY (RLIMIT_MEMLOCK), NETMEM_ERR_PRIVILEGE, NETMEM_ERR_BUSY (another
/// socket), NETMEM_ERR_UNSUPPORTED, NETMEM_ERR_SYSTEM. Nothing is open then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_xsk_open(
    umem: *const netmem_umem,
    options: *const netmem_xsk_options,
    rx: *mut *mut netmem_xsk_rx,
    tx: *mut *mut netmem_xsk_tx,
) -> netmem_status {
    status(|| {
        let rx_out = NonNull::new(rx).ok_or_else(|| Failure::null("rx"))?;
        let tx_out = NonNull::new(tx).ok_or_else(|| Failure::null("tx"))?;
        // SAFETY: as the header says.
        let ((umem, provider), given) = unsafe { (handle::get(umem)?, options::read(options)?) };
        if given.reserved != [0; 7] {
            return Err(Failure::Argument("netmem_xsk_options.reserved is not zero".into()));
        }
        // SAFETY: as the header says.
        let ifindex = unsafe { ifindex(given.interface) }?;
        let mut options = QueueOptions::new();
        if given.rx_ring > 0 {
            options = options.rx_ring(given.rx_ring);
        }
        if given.tx_ring > 0 {
            options = options.tx_ring(given.tx_ring);
        }
        if given.fill > 0 {
            options = options.fill(given.fill);
        }
        options = match given.mode {
            0 => options,
            NETMEM_XSK_COPY => options.mode(Mode::Copy),
            NETMEM_XSK_ZERO_COPY => options.mode(Mode::ZeroCopy),
            other => return Err(Failure::Argument(format!("netmem_xsk_options.mode is {other}"))),
        };
        let (rx, tx) = umem.open(ifindex, given.queue, provider.clone(), options)?;
        // SAFETY: the caller has room for two pointers there.
        unsafe {
            rx_out.write(handle::create(Receive::new(rx)));
            tx_out.write(handle::create(tx));
        }
        Ok(())
    })
}
