//! The transmit queue: groups of fragments as frames.

use crate::frag::netmem_frag;
use crate::groups::Sends;
use crate::handle::Kind;
use crate::options::{self, Versioned};
use crate::owned::{self, Owned};
use crate::queues;
use crate::region::Kept;
use crate::status::{netmem_status, status, value};
use crate::xsk::rx::netmem_xsk_rx;
use netmem_xsk::XskTx;

/// The transmit queue of an AF_XDP socket.
#[derive(Debug)]
pub struct netmem_xsk_tx(());

impl Kind for netmem_xsk_tx {
    type Value = XskTx<Kept>;
    const NAME: &'static str = "netmem_xsk_tx";
    const NUMBER: u64 = 0x6e65_746d_656d_0008;
}

impl Owned for netmem_xsk_tx {}

/// What a transmit queue sent and refused. Set `size` to sizeof(netmem_xsk_tx_stats). A descriptor
/// is a part of a frame in one chunk; most frames have one. descriptors = completed + outstanding.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct netmem_xsk_tx_stats {
    /// sizeof(netmem_xsk_tx_stats)
    pub size: usize,
    /// frames posted to the kernel
    pub frames: u64,
    /// bytes in them
    pub bytes: u64,
    /// descriptors posted to the kernel
    pub descriptors: u64,
    /// descriptors that the kernel is done with
    pub completed: u64,
    /// descriptors that the kernel has now
    pub outstanding: u64,
    /// times that the queue was full when a frame was to be sent
    pub full: u64,
    /// frames refused because a fragment is not of the UMEM's region
    pub unreachable: u64,
    /// frames refused because they have no bytes, or too many fragments
    pub bad_shape: u64,
    /// frames copied into fewer fragments, because the driver does not send as many
    pub copied: u64,
    /// system calls that told the kernel of frames
    pub kicks: u64,
    /// times that the kernel sent nothing because memory, the send buffer or the device was full;
    /// the frames stay in the ring
    pub busy: u64,
    /// times that the kernel sent nothing because the interface is down; the frames stay in the
    /// ring
    pub down: u64,
    /// descriptors that were out for a second without any completion
    pub late: u64,
    /// frames refused because their request could not be written in front of them
    pub no_offload: u64,
}

// SAFETY: repr(C), `size` is first, integers.
unsafe impl Versioned for netmem_xsk_tx_stats {
    const NAME: &'static str = "netmem_xsk_tx_stats";
    const LEAST: usize = 112;
}

impl netmem_xsk_tx_stats {
    fn of(queue: &XskTx<Kept>) -> Self {
        let stats = queue.stats();
        Self {
            size: size_of::<Self>(),
            frames: stats.frames,
            bytes: stats.bytes,
            descriptors: stats.descriptors,
            completed: stats.completed,
            outstanding: queue.outstanding() as u64,
            full: stats.full,
            unreachable: stats.unreachable,
            bad_shape: stats.bad_shape,
            copied: stats.linearised,
            kicks: stats.kicks,
            busy: stats.busy,
            down: stats.down,
            late: stats.late,
            no_offload: stats.no_offload,
        }
    }
}

impl Sends for XskTx<Kept> {
    const UNREACHABLE: &'static str = "it has a fragment that is not of the UMEM's region";

    /// The queue compares each page with its region before it reads one, and counts.
    #[inline]
    fn reaches(&mut self, _: &netmem_frag) -> bool {
        true
    }
}

/// Sends `n` fragments, of any pool on the UMEM's region, and tells the kernel. `sent`, which is
/// always written, gets how many were sent: whole frames, in order. Their variables are empty. The
/// pages return to their pools when the kernel is done with them, and netmem_xsk_tx_complete was
/// called. The other fragments stay with the caller. With NETMEM_OK they are fewer than `n` if the
/// queue is full: send the rest later. Else the first of them is of the frame that caused the
/// error.
///
/// Without `flags` (null) each fragment is a frame. With `flags`, NETMEM_FRAG_MORE in the flags of
/// a fragment says that the frame goes on in the next one.
///
/// The kernel adds no checksum: netmem_xsk_tx_send_with asks the device for one. A system call,
/// unless a driver in zero-copy mode is working.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_ARGUMENT (an empty
/// fragment, wrong flags), NETMEM_ERR_UNSENDABLE (another region, no bytes, too many fragments),
/// NETMEM_ERR_STOPPED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_xsk_tx_send(
    tx: *mut netmem_xsk_tx,
    frags: *mut netmem_frag,
    flags: *const u8,
    n: usize,
    sent: *mut usize,
) -> netmem_status {
    // SAFETY: as the header says.
    status(|| unsafe { queues::send(tx, (frags, flags, n), sent) })
}

/// Returns the pages of frames that the kernel has sent, and how many descriptors these are. With
/// `rx`, a queue of the same thread, its pages return to its cache, the cheapest way; without
/// (null) they return as on any thread. Call it in each turn of a loop. Misuse returns 0, with a
/// text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_xsk_tx_complete(tx: *mut netmem_xsk_tx, rx: *mut netmem_xsk_rx) -> usize {
    // SAFETY: as the header says.
    value(|| unsafe { queues::complete(tx, rx) }).unwrap_or(0)
}

/// The descriptor on which to wait for completions, with poll, select or epoll, for POLLIN:
/// readable after netmem_xsk_tx_arm when the kernel is done with frames, or the interface is gone.
/// It is the queue's, and the same until it is closed. Never read, write or close it. -1 with a
/// text for misuse.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_xsk_tx_fd(tx: *const netmem_xsk_tx) -> i32 {
    // SAFETY: as the header says.
    value(|| unsafe { queues::fd(tx) }).unwrap_or(-1)
}

/// Asks for a wake-up, and writes to `waits` whether to sleep: false if there are completions
/// already, or frames that the kernel does not send now. A thread that was woken calls
/// netmem_xsk_tx_disarm and netmem_xsk_tx_complete. A few system calls.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_STOPPED,
/// NETMEM_ERR_SYSTEM.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_xsk_tx_arm(tx: *mut netmem_xsk_tx, waits: *mut bool) -> netmem_status {
    // SAFETY: as the header says.
    status(|| unsafe { queues::arm(tx, waits) })
}

/// Ends the request for a wake-up. One system call if it was armed. Misuse leaves a text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_xsk_tx_disarm(tx: *mut netmem_xsk_tx) {
    // SAFETY: as the header says.
    status(|| unsafe { queues::disarm(tx) });
}

/// Counts of the queue.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_xsk_tx_get_stats(
    tx: *mut netmem_xsk_tx,
    stats: *mut netmem_xsk_tx_stats,
) -> netmem_status {
    status(|| {
        // SAFETY: as the header says.
        let tx = unsafe { owned::get_mut(tx) }?;
        // SAFETY: as the header says.
        unsafe { options::write(stats, &netmem_xsk_tx_stats::of(tx)) }
    })
}

/// Closes the queue. It waits for frames that the kernel has not sent, for a tenth of a second at
/// most. Pages that the kernel still has return when it lets the queue be opened again, when the
/// UMEM ends, or in netmem_xsk_reclaim. The socket is closed with the second of its two queues. If
/// the UMEM's handle is closed, the last queue of the UMEM waits as netmem_umem_close does.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_xsk_tx_close(tx: *mut netmem_xsk_tx) -> netmem_status {
    // SAFETY: as the header says.
    status(|| unsafe { owned::close(tx) }.map(drop))
}
