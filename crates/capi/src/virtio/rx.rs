//! The driver's receive queue: groups of frames as fragments.

use crate::frag::netmem_frag;
use crate::handle::Kind;
use crate::options::{self, Versioned};
use crate::owned::{self, Owned};
use crate::queues::{self, Receive};
use crate::status::{netmem_status, status, value};
use netmem_packet::Wait;
use netmem_pool::PoolStats;
use netmem_virtio::driver::{RxStats, VirtioRx};

/// A receive queue of a virtio-net device, with the page pool of its frames.
#[derive(Debug)]
pub struct netmem_virtio_rx(());

impl Kind for netmem_virtio_rx {
    type Value = Receive<VirtioRx>;
    const NAME: &'static str = "netmem_virtio_rx";
    const NUMBER: u64 = 0x6e65_746d_656d_0011;
}

impl Owned for netmem_virtio_rx {}

/// What a receive queue received and lost. Set `size` to sizeof(netmem_virtio_rx_stats).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct netmem_virtio_rx_stats {
    /// sizeof(netmem_virtio_rx_stats)
    pub size: usize,
    /// frames received, also one that waits for a call with more room
    pub frames: u64,
    /// bytes in them
    pub bytes: u64,
    /// of the frames received: those of several buffers
    pub multi_buffer: u64,
    /// frames dropped because they are in several buffers, the caller has no flags, and no page has
    /// room for them
    pub not_linear: u64,
    /// frames dropped because they are shorter than an Ethernet header
    pub runts: u64,
    /// frames dropped because the device's header is invalid
    pub bad_header: u64,
    /// frames dropped because the device's header has an offload that was not negotiated
    pub not_negotiated: u64,
    /// frames that had arrived and were lost by a reconnect, or by the close of the queue
    pub unread: u64,
    /// times that the device had fewer buffers than it should, because there was no page
    pub out_of_pages: u64,
    /// times that the queue went on with another device
    pub restarts: u64,
    /// buffers that the device has now
    pub posted: u64,
    /// pages of the queue that are posted or held
    pub in_flight: u64,
    /// pages that are never used again, because the device did not stop
    pub quarantined: u64,
}

// SAFETY: repr(C), `size` is first, integers.
unsafe impl Versioned for netmem_virtio_rx_stats {
    const NAME: &'static str = "netmem_virtio_rx_stats";
    const LEAST: usize = 112;
}

impl netmem_virtio_rx_stats {
    fn of(queue: &RxStats, posted: usize, pool: &PoolStats) -> Self {
        Self {
            size: size_of::<Self>(),
            frames: queue.passed,
            bytes: queue.bytes,
            multi_buffer: queue.multi_buffer,
            not_linear: queue.not_linear,
            runts: queue.short,
            bad_header: queue.bad_header,
            not_negotiated: queue.not_negotiated,
            unread: queue.unread,
            out_of_pages: queue.out_of_buffers,
            restarts: queue.restarts,
            posted: posted as u64,
            in_flight: pool.inflight(),
            quarantined: pool.quarantined,
        }
    }
}

/// Receives up to `n` fragments of frames that have arrived, posts new buffers, and does not wait.
/// `received` gets how many; 0 if no frame has arrived. The caller owns the fragments. The
/// variables are not read: what they hold is to be released before.
///
/// The rules of `flags` are those of netmem_xsk_rx_receive: without them (null) each fragment is a
/// frame; with them, NETMEM_FRAG_MORE says that the frame goes on in the next fragment. In
/// NETMEM_VIRTIO_SMALL each frame is one fragment.
///
/// No lock for a frame. A system call if the device waits for buffers.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_ARGUMENT (`n` is too
/// small for `flags`, or a frame waits and there are no `flags`), NETMEM_ERR_STOPPED (the device
/// has closed the connection, or has broken a rule of the ring, and no frame is left).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_virtio_rx_receive(
    rx: *mut netmem_virtio_rx,
    frags: *mut netmem_frag,
    flags: *mut u8,
    n: usize,
    received: *mut usize,
) -> netmem_status {
    // SAFETY: as the header says.
    status(|| unsafe { queues::receive(rx, (frags, flags, n), received, |queue| queue.check()) })
}

/// Releases `n` fragments on the thread of the queue, and empties the variables. Pages of this
/// queue go to its cache, the cheapest way. Others go where they belong. Empty ones are ignored.
/// netmem_frags_release does it on any thread.
///
/// Misuse (null, another thread) releases nothing, and leaves a text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_virtio_rx_release(rx: *mut netmem_virtio_rx, frags: *mut netmem_frag, n: usize) {
    // SAFETY: as the header says.
    status(|| unsafe { queues::release(rx, frags, n) });
}

/// The descriptor on which to wait for frames, with poll, select or epoll, for POLLIN: readable
/// after netmem_virtio_rx_arm when frames have arrived, or the device has gone. It is the queue's,
/// and the same until it is closed. Never read, write or close it. -1 with a text for misuse.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_virtio_rx_fd(rx: *const netmem_virtio_rx) -> i32 {
    // SAFETY: as the header says.
    value(|| unsafe { queues::fd(rx) }).unwrap_or(-1)
}

/// Asks for a wake-up, and writes to `waits` whether to sleep: false if there are frames already,
/// and if the device has too few buffers, because the caller holds the pages. A thread that was
/// woken calls netmem_virtio_rx_disarm and receives. A few system calls.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_STOPPED (once for each
/// connection that has ended, and then it waits for netmem_virtio_net_reconnect; after a broken
/// rule of the ring, each time until then).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_virtio_rx_arm(rx: *mut netmem_virtio_rx, waits: *mut bool) -> netmem_status {
    // SAFETY: as the header says.
    status(|| unsafe { queues::arm(rx, waits) })
}

/// Ends the request for a wake-up: without it the device wakes the descriptor for each group of
/// frames. Misuse leaves a text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_virtio_rx_disarm(rx: *mut netmem_virtio_rx) {
    // SAFETY: as the header says.
    status(|| unsafe { queues::disarm(rx) });
}

/// Counts of the queue.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_virtio_rx_get_stats(
    rx: *mut netmem_virtio_rx,
    stats: *mut netmem_virtio_rx_stats,
) -> netmem_status {
    status(|| {
        // SAFETY: as the header says.
        let rx = &mut unsafe { owned::get_mut(rx) }?.queue;
        let pool = rx.pool_stats();
        // SAFETY: as the header says.
        unsafe { options::write(stats, &netmem_virtio_rx_stats::of(&rx.stats(), rx.posted(), &pool)) }
    })
}

/// Closes the queue: its ring is stopped, and frames that wait are dropped. Its pages return to the
/// memory of the device's handles; those that the caller holds, when they are released. If the
/// device does not confirm within 3 s that it has stopped, the pages that it had are never used
/// again. `stats` gets the final counts, unless it is null: `in_flight` are the pages that the
/// caller holds, `unread` has the frames that were in the ring. If it has a wrong size, the queue
/// stays.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_virtio_rx_close(
    rx: *mut netmem_virtio_rx,
    stats: *mut netmem_virtio_rx_stats,
) -> netmem_status {
    let end = |rx: Receive<VirtioRx>| {
        let (counts, closed) = rx.close().close_counted();
        let pool = closed.map(|closed| closed.stats).unwrap_or_default();
        netmem_virtio_rx_stats::of(&counts, 0, &pool)
    };
    // SAFETY: as the header says.
    status(|| unsafe { owned::close_counted(rx, stats, end) })
}
