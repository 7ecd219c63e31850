//! Opens a queue of an interface: a socket, and its two halves, or the one that sends.

use super::grant::{self, netmem_xsk_grant};
use super::program::ifindex;
use super::rx::netmem_xsk_rx;
use super::tx::netmem_xsk_tx;
use super::umem::{Memory, netmem_umem};
use crate::handle;
use crate::options::{self, Versioned};
use crate::queues::Receive;
use crate::status::{Failure, netmem_status, status};
use netmem_xsk::{BusyPoll, Mode, QueueOptions};
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
    /// Busy polling, in microseconds; 0: none. The driver's work for the queue is done in the calls
    /// of the threads that use it, instead of in interrupts. A call that waits polls for so long.
    /// The interface must also defer its interrupts: `napi_defer_hard_irqs` and `gro_flush_timeout`
    /// in /sys/class/net. Needs CAP_NET_ADMIN.
    pub busy_poll: u32,
    /// The most frames that a call polls, with `busy_poll`; 0: 64.
    pub busy_poll_budget: u16,
    /// Zero.
    pub reserved_2: u16,
    /// The grant whose socket of `queue` is used, which is of the grant's interface: `interface` is
    /// null. Null: a new socket is opened.
    pub grant: *const netmem_xsk_grant,
}

// SAFETY: repr(C), `size` is first, integers and pointers.
unsafe impl Versioned for netmem_xsk_options {
    const NAME: &'static str = "netmem_xsk_options";
    const LEAST: usize = 40;
}

impl netmem_xsk_options {
    /// The options of the queue, without what is looked up.
    fn queue_options(&self) -> Result<QueueOptions, Failure> {
        if self.reserved != [0; 7] || self.reserved_2 != 0 {
            return Err(Failure::Argument("netmem_xsk_options.reserved is not zero".into()));
        }
        let mut options = QueueOptions::new();
        if self.rx_ring > 0 {
            options = options.rx_ring(self.rx_ring);
        }
        if self.tx_ring > 0 {
            options = options.tx_ring(self.tx_ring);
        }
        if self.fill > 0 {
            options = options.fill(self.fill);
        }
        options = match self.mode {
            0 => options,
            NETMEM_XSK_COPY => options.mode(Mode::Copy),
            NETMEM_XSK_ZERO_COPY => options.mode(Mode::ZeroCopy),
            other => return Err(Failure::Argument(format!("netmem_xsk_options.mode is {other}"))),
        };
        match (self.busy_poll, self.busy_poll_budget) {
            (0, 0) => Ok(options),
            (0, _) => Err(Failure::Argument("netmem_xsk_options.busy_poll_budget without busy_poll".into())),
            (microseconds, 0) => Ok(options.busy_poll(BusyPoll { microseconds, ..BusyPoll::default() })),
            (microseconds, budget) => Ok(options.busy_poll(BusyPoll { microseconds, budget })),
        }
    }
}

/// What the two functions that open a queue are called with: the UMEM, the interface's index, the
/// number of the queue, and its options. `only_sends`: the queue does not receive.
///
/// # Safety
///
/// As the header says of both.
unsafe fn target<'a>(
    umem: *const netmem_umem,
    options: *const netmem_xsk_options,
    only_sends: bool,
) -> Result<(&'a Memory, u32, u32, QueueOptions), Failure> {
    // SAFETY: as the caller promises.
    let (memory, given) = unsafe { (handle::get(umem)?, options::read(options)?) };
    let options = given.queue_options()?;
    if given.grant.is_null() {
        // SAFETY: as the caller promises.
        return Ok((memory, unsafe { ifindex(given.interface) }?, given.queue, options));
    }
    if !given.interface.is_null() {
        return Err(Failure::Argument("netmem_xsk_options.interface with a grant, which has its own".into()));
    }
    // SAFETY: as the caller promises.
    let mut grant = unsafe { grant::lock(given.grant) }?;
    if only_sends && grant.program.is_some() {
        let text = "the grant has a program, which would redirect frames to the queue: it must receive them";
        return Err(Failure::Argument(text.into()));
    }
    Ok((memory, grant.ifindex, given.queue, grant.take(given.queue, options)?))
}

/// Opens a queue of an interface: a socket with a receive queue and a transmit queue, which may be
/// used by two threads. Frames arrive when netmem_xdp_program_insert has put `rx` into a program on
/// the interface. Close both. The UMEM's handle may be closed before.
///
/// Needs CAP_NET_RAW, and locked memory: see netmem_umem_create. An AF_XDP socket of this queue
/// that was just closed is waited for, for half a second at most.
///
/// With a grant no privilege is needed. Its socket of the queue is used up, also if this fails
/// after the options were found valid; frames arrive after netmem_xsk_grant_bound.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_ARGUMENT (mode,
/// size of a ring, budget), NETMEM_ERR_NOT_FOUND (interface, queue, no socket in the grant),
/// NETMEM_ERR_NO_PAGES (fewer than `fill`), NETMEM_ERR_NO_MEMORY (RLIMIT_MEMLOCK),
/// NETMEM_ERR_PRIVILEGE, NETMEM_ERR_BUSY (another socket), NETMEM_ERR_UNSUPPORTED,
/// NETMEM_ERR_SYSTEM. Nothing is open then.
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
        let ((umem, provider), ifindex, queue, options) = unsafe { target(umem, options, false) }?;
        let (rx, tx) = umem.open(ifindex, queue, provider.clone(), options)?;
        // SAFETY: the caller has room for two pointers there.
        unsafe {
            rx_out.write(handle::create(Receive::new(rx.umem().region().clone(), rx)));
            tx_out.write(handle::create(tx));
        }
        Ok(())
    })
}

/// Opens a queue of an interface to send only: frames that the interface receives go to the kernel,
/// and no program is needed. In copy mode the UMEM needs pages only for what is sent, and `rx_ring`
/// and `fill` have no effect. A driver in zero-copy mode receives into the UMEM also what is for
/// the kernel, so that its queue needs pages as one of netmem_xsk_open does: NETMEM_XSK_COPY
/// prevents that. A grant is of a helper without a program.
///
/// Errors: those of netmem_xsk_open; NETMEM_ERR_ARGUMENT (a grant with a program),
/// NETMEM_ERR_SYSTEM (another socket of the UMEM is in zero-copy mode, and this one cannot be).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_xsk_open_tx(
    umem: *const netmem_umem,
    options: *const netmem_xsk_options,
    tx: *mut *mut netmem_xsk_tx,
) -> netmem_status {
    status(|| {
        let out = NonNull::new(tx).ok_or_else(|| Failure::null("tx"))?;
        // SAFETY: as the header says.
        let ((umem, provider), ifindex, queue, options) = unsafe { target(umem, options, true) }?;
        let tx = umem.open_tx(ifindex, queue, provider.clone(), options)?;
        // SAFETY: the caller has room for a pointer there.
        unsafe { out.write(handle::create(tx)) };
        Ok(())
    })
}
