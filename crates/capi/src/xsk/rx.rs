//! The receive queue: groups of frames as fragments.

use crate::frag::{self, netmem_frag};
use crate::handle::Kind;
use crate::options::{self, Versioned};
use crate::owned::{self, Owned};
use crate::queues::{self, Receive};
use crate::region::Kept;
use crate::status::{Failure, netmem_status, status, value};
use netmem_packet::Wait;
use netmem_pool::{PoolStats, foreign};
use netmem_xsk::{Mode, RxDrops, RxStats, XskRx};
use std::ffi::c_void;
use std::ptr::NonNull;

/// The receive queue of an AF_XDP socket, with the page pool of its frames.
#[derive(Debug)]
pub struct netmem_xsk_rx(());

impl Kind for netmem_xsk_rx {
    type Value = Receive<XskRx<Kept>>;
    const NAME: &'static str = "netmem_xsk_rx";
    const NUMBER: u64 = 0x6e65_746d_656d_0007;
}

impl Owned for netmem_xsk_rx {}

/// What a receive queue received and lost. Set `size` to sizeof(netmem_xsk_rx_stats).
///
/// In copy mode, each frame for the socket is either received, or counted once as ring_full,
/// no_buffer, bad_shape or unpolled. In zero-copy mode the device drops frames for which it has no
/// chunk, and only the driver counts them (ethtool -S).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct netmem_xsk_rx_stats {
    /// sizeof(netmem_xsk_rx_stats)
    pub size: usize,
    /// frames received, also one that waits for a call with more room
    pub frames: u64,
    /// bytes in them
    pub bytes: u64,
    /// of the frames received: those of several fragments
    pub multi_buffer: u64,
    /// frames that the kernel dropped because the RX ring was full: it is polled too rarely
    pub ring_full: u64,
    /// frames that the kernel dropped because it had no chunk: the program holds too many pages. In
    /// copy mode also frames longer than a chunk, if the socket has no frames of several chunks.
    pub no_buffer: u64,
    /// frames that the queue dropped: shorter than an Ethernet header, in more than 18 fragments,
    /// or in several when the caller has no flags and no page has room for them
    pub bad_shape: u64,
    /// chunks that the kernel refused: not frames
    pub invalid_descriptor: u64,
    /// times that the kernel had fewer chunks than it should, because there was no page
    pub out_of_pages: u64,
    /// system calls that told the driver of new chunks
    pub wakeups: u64,
    /// chunks that the kernel has now
    pub posted: u64,
    /// pages of the queue that are posted or held
    pub in_flight: u64,
    /// frames that had arrived and were not received when the queue was closed; 0 before
    pub unpolled: u64,
}

// SAFETY: repr(C), `size` is first, integers.
unsafe impl Versioned for netmem_xsk_rx_stats {
    const NAME: &'static str = "netmem_xsk_rx_stats";
    const LEAST: usize = 96;
}

impl netmem_xsk_rx_stats {
    fn of(queue: &RxStats, drops: &RxDrops, posted: usize, pool: &PoolStats) -> Self {
        Self {
            size: size_of::<Self>(),
            frames: queue.passed,
            bytes: queue.bytes,
            multi_buffer: queue.multi_buffer,
            ring_full: drops.ring_full,
            no_buffer: drops.no_buffer,
            bad_shape: drops.shape,
            invalid_descriptor: drops.invalid_descriptor,
            out_of_pages: queue.out_of_buffers,
            wakeups: queue.wakeups,
            posted: posted as u64,
            in_flight: pool.inflight(),
            unpolled: drops.unpolled,
        }
    }
}

/// Receives up to `n` fragments of frames that have arrived, posts new chunks, and does not wait.
/// `received` gets how many; 0 if no frame has arrived. The caller owns the fragments. The
/// variables are not read: what they hold is to be released before.
///
/// Without `flags` (null) each fragment is a frame: a frame of several chunks is copied into one
/// page, or dropped and counted if none has room for it. With `flags`, which has room for `n`, too,
/// a frame is not copied: NETMEM_FRAG_MORE in the flags of a fragment says that the frame goes on
/// in the next one. `n` is at least NETMEM_FRAME_FRAGS then. A frame is never in two groups.
///
/// A frame for which a call with `flags` had no room waits for the next call. While it waits, a
/// call without `flags` is an error, and receives nothing: call with `flags` again until at most
/// `n` - NETMEM_FRAME_FRAGS fragments come.
///
/// No atomic and no lock for a frame. No system call, unless the driver asks for a wake-up.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_ARGUMENT (`n` is too
/// small for `flags`, or a frame waits and there are no `flags`), NETMEM_ERR_STOPPED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_xsk_rx_receive(
    rx: *mut netmem_xsk_rx,
    frags: *mut netmem_frag,
    flags: *mut u8,
    n: usize,
    received: *mut usize,
) -> netmem_status {
    // SAFETY: as the header says.
    status(|| unsafe {
        queues::receive(rx, (frags, flags, n), received, |queue| {
            queue.stats().stopped.map_or(Ok(()), |_| queue.check())
        })
    })
}

/// Releases `n` fragments on the thread of the queue, and empties the variables. Pages of this
/// queue go to its cache, the cheapest way. Others go where they belong. Empty ones are ignored.
/// netmem_frags_release does it on any thread.
///
/// Misuse (null, another thread) releases nothing, and leaves a text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_xsk_rx_release(rx: *mut netmem_xsk_rx, frags: *mut netmem_frag, n: usize) {
    // SAFETY: as the header says.
    status(|| unsafe { queues::release(rx, frags, n) });
}

/// Copies the `n` bytes in front of a received frame: the metadata that the caller's own XDP
/// program wrote there (bpf_xdp_adjust_meta). `frag` is the first fragment of a frame of this
/// queue, as it was received: the others have no metadata, and no other holder writes to its page.
/// A frame that was copied into one page has its metadata.
///
/// The number and the meaning of the bytes are an agreement with that program. Without metadata
/// they are old bytes. All are in the frame's chunk: where several chunks share a page, no bytes of
/// another frame are read.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_ARGUMENT (empty, or of
/// another region), NETMEM_ERR_RANGE (more than 256, or than there are in front of it in its
/// chunk).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_xsk_rx_metadata(
    rx: *const netmem_xsk_rx,
    frag: *const netmem_frag,
    to: *mut c_void,
    n: usize,
) -> netmem_status {
    const MOST: usize = 256;
    status(|| {
        let to = NonNull::new(to).ok_or_else(|| Failure::null("to"))?;
        // SAFETY: as the header says.
        let (Receive { queue, region, .. }, frag) = unsafe { (owned::peek(rx)?, frag::get(frag)?) };
        if region.index_of(frag).is_none() {
            return Err(Failure::Argument("the fragment is not of the queue's region".into()));
        }
        let have = (frag.offset() % queue.umem().chunk_size()).min(MOST);
        if n > have {
            return Err(Failure::Range { offset: 0, len: n, have });
        }
        // SAFETY: so many bytes of the chunk are in front of the fragment, and the caller has room
        // for them.
        unsafe { foreign::copy_across(frag.as_ptr().sub(n), to.as_ptr().cast(), n) };
        Ok(())
    })
}

/// The descriptor on which to wait for frames, with poll, select or epoll, for POLLIN: readable
/// after netmem_xsk_rx_arm when frames have arrived, or the interface is gone. It is the queue's,
/// and the same until it is closed. Never read, write or close it. -1 with a text for misuse.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_xsk_rx_fd(rx: *const netmem_xsk_rx) -> i32 {
    // SAFETY: as the header says.
    value(|| unsafe { queues::fd(rx) }).unwrap_or(-1)
}

/// Asks for a wake-up, and writes to `waits` whether to sleep: false if there are frames already,
/// and if the kernel has no chunk to receive into, because the caller holds all pages. A thread
/// that was woken calls netmem_xsk_rx_disarm and receives. A thread that holds all pages releases
/// fragments before it asks, or it turns without a sleep. A few system calls.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_STOPPED,
/// NETMEM_ERR_SYSTEM.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_xsk_rx_arm(rx: *mut netmem_xsk_rx, waits: *mut bool) -> netmem_status {
    // SAFETY: as the header says.
    status(|| unsafe { queues::arm(rx, waits) })
}

/// Ends the request for a wake-up: without it the kernel wakes the descriptor for each group of
/// frames. One system call if it was armed. Misuse leaves a text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_xsk_rx_disarm(rx: *mut netmem_xsk_rx) {
    // SAFETY: as the header says.
    status(|| unsafe { queues::disarm(rx) });
}

/// Whether the device writes frames into the pages itself (zero-copy mode). False for misuse.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_xsk_rx_is_zero_copy(rx: *const netmem_xsk_rx) -> bool {
    // SAFETY: as the header says.
    value(|| Ok(unsafe { owned::peek(rx) }?.queue.socket().mode() == Mode::ZeroCopy)).unwrap_or(false)
}

/// Counts of the queue. A system call.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD,
/// NETMEM_ERR_SYSTEM.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_xsk_rx_get_stats(
    rx: *mut netmem_xsk_rx,
    stats: *mut netmem_xsk_rx_stats,
) -> netmem_status {
    status(|| {
        // SAFETY: as the header says.
        let rx = &mut unsafe { owned::get_mut(rx) }?.queue;
        let (drops, pool) = (rx.drops().map_err(Failure::Queue)?, rx.pool_stats());
        // SAFETY: as the header says.
        unsafe { options::write(stats, &netmem_xsk_rx_stats::of(&rx.stats(), &drops, rx.posted(), &pool)) }
    })
}

/// Closes the queue: its frames go to the kernel again, and frames that wait are dropped. Its pages
/// return to the region. Those that the caller holds return when they are released. Chunks that the
/// kernel has return when it lets the queue be opened again, or when the interface is gone. The
/// socket is closed with the second of its two queues. `stats` gets the final counts, unless it is
/// null: `in_flight` are the pages that the caller holds, `unpolled` the frames that were in the
/// ring. If it has a wrong size, the queue stays.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_xsk_rx_close(rx: *mut netmem_xsk_rx, stats: *mut netmem_xsk_rx_stats) -> netmem_status {
    let end = |rx: Receive<XskRx<Kept>>| {
        let closed = rx.close().close_counted();
        let pool = closed.pool.map(|closed| closed.stats).unwrap_or_default();
        netmem_xsk_rx_stats::of(&closed.stats, &closed.drops, 0, &pool)
    };
    // SAFETY: as the header says.
    status(|| unsafe { owned::close_counted(rx, stats, end) })
}
