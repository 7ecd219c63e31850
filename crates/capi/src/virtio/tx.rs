//! The driver's transmit queue: groups of fragments as frames.

use crate::frag::netmem_frag;
use crate::groups::Sends;
use crate::handle::Kind;
use crate::options::{self, Versioned};
use crate::owned::{self, Owned};
use crate::queues;
use crate::status::{netmem_status, status, value};
use crate::virtio::port::Outgoing;
use crate::virtio::rx::netmem_virtio_rx;
use netmem_packet::{Armed, Packet, Reach, Sendable, TxQueue, Wait};
use netmem_pool::{Frag, PeerShared, Region};
use netmem_virtio::driver::VirtioTx;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// A transmit queue of a virtio-net device.
#[derive(Debug)]
pub struct netmem_virtio_tx(());

impl Kind for netmem_virtio_tx {
    type Value = Transmit;
    const NAME: &'static str = "netmem_virtio_tx";
    const NUMBER: u64 = 0x6e65_746d_656d_0012;
}

impl Owned for netmem_virtio_tx {}

/// A transmit queue, and the memory that it sends from.
pub(crate) struct Transmit {
    queue: VirtioTx,
    region: Arc<Region<PeerShared>>,
    unreachable: u64,
}

impl Transmit {
    pub(crate) fn new(queue: VirtioTx, region: Arc<Region<PeerShared>>) -> Self {
        Self { queue, region, unreachable: 0 }
    }
}

impl TxQueue for Transmit {
    type Mem = PeerShared;

    #[inline]
    fn send(&mut self, packet: Packet<PeerShared>) -> Result<(), Packet<PeerShared>> {
        self.queue.send(packet)
    }

    fn sendable(&self, packet: &Packet<PeerShared>) -> Sendable {
        self.queue.sendable(packet)
    }

    fn flush(&mut self) {
        self.queue.flush();
    }

    fn complete(&mut self) -> usize {
        self.queue.complete()
    }

    fn reach(&self, frag: &Frag<PeerShared>) -> Reach {
        self.queue.reach(frag)
    }
}

impl AsFd for Transmit {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.queue.as_fd()
    }
}

impl Wait for Transmit {
    fn arm(&mut self) -> io::Result<Armed> {
        self.queue.arm()
    }

    fn disarm(&mut self) {
        self.queue.disarm();
    }

    fn check(&self) -> io::Result<()> {
        self.queue.check()
    }
}

impl Sends for Transmit {
    const UNREACHABLE: &'static str = "it has a fragment that is not of the device's memory: copy the frame into one of \
                                       netmem_virtio_net_alloc";

    /// A fragment of another region can be of another kind of memory, which this queue must not
    /// write the device's header to.
    #[inline]
    fn reaches(&mut self, frag: &netmem_frag) -> bool {
        let is_ours = frag.is_of(&self.region);
        self.unreachable += u64::from(!is_ours);
        is_ours
    }

    #[inline]
    fn fits(frags: &[netmem_frag]) -> bool {
        Outgoing::fits(frags)
    }
}

/// What a transmit queue sent and refused. Set `size` to sizeof(netmem_virtio_tx_stats). frames =
/// completed + outstanding + unconfirmed.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct netmem_virtio_tx_stats {
    /// sizeof(netmem_virtio_tx_stats)
    pub size: usize,
    /// frames posted to the device
    pub frames: u64,
    /// bytes in them
    pub bytes: u64,
    /// frames that the device is done with
    pub completed: u64,
    /// frames that the device has now
    pub outstanding: u64,
    /// times that the queue was full when a frame was to be sent
    pub full: u64,
    /// frames refused because a fragment is not of the device's memory
    pub unreachable: u64,
    /// times that the queue went on with another device
    pub restarts: u64,
    /// frames that the device had not confirmed before that: it may have sent them, or not
    pub unconfirmed: u64,
}

// SAFETY: repr(C), `size` is first, integers.
unsafe impl Versioned for netmem_virtio_tx_stats {
    const NAME: &'static str = "netmem_virtio_tx_stats";
    const LEAST: usize = 72;
}

impl netmem_virtio_tx_stats {
    fn of(tx: &Transmit) -> Self {
        let stats = tx.queue.stats();
        Self {
            size: size_of::<Self>(),
            frames: stats.frames,
            bytes: stats.bytes,
            completed: stats.completed,
            outstanding: tx.queue.posted() as u64,
            full: stats.full,
            unreachable: tx.unreachable,
            restarts: stats.restarts,
            unconfirmed: stats.unconfirmed,
        }
    }
}

/// Sends `n` fragments of the device's memory: those that its queues have received, or those of a
/// driver that shares the memory, and those of netmem_virtio_net_alloc. `sent`, which is always
/// written, gets how many were sent: whole frames, in order. Their variables are empty. The pages
/// return when the device is done with them, and netmem_virtio_tx_complete was called. The other
/// fragments stay with the caller. With NETMEM_OK they are fewer than `n` if the queue is full:
/// send the rest later. Else the first of them is of the frame that caused the error.
///
/// Without `flags` (null) each fragment is a frame. With `flags`, NETMEM_FRAG_MORE in the flags of
/// a fragment says that the frame goes on in the next one.
///
/// A fragment with 12 bytes in front of it and no other holder is sent as it is; to another one the
/// header is sent from elsewhere. A system call if the device waits for frames.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_ARGUMENT (an empty
/// fragment, wrong flags), NETMEM_ERR_UNSENDABLE (other memory, too many fragments, or not 14 to
/// 65553 bytes), NETMEM_ERR_STOPPED (the device has closed the connection, or has broken a rule of
/// the ring).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_virtio_tx_send(
    tx: *mut netmem_virtio_tx,
    frags: *mut netmem_frag,
    flags: *const u8,
    n: usize,
    sent: *mut usize,
) -> netmem_status {
    // SAFETY: as the header says.
    status(|| unsafe { queues::send(tx, (frags, flags, n), sent) })
}

/// Returns the pages of frames that the device is done with, and how many frames these are. With
/// `rx`, a queue of the same device and thread, its pages return to its cache, the cheapest way;
/// without (null) they return as on any thread. Call it in each turn of a loop. Misuse returns 0,
/// with a text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_virtio_tx_complete(tx: *mut netmem_virtio_tx, rx: *mut netmem_virtio_rx) -> usize {
    // SAFETY: as the header says.
    value(|| unsafe { queues::complete(tx, rx) }).unwrap_or(0)
}

/// The descriptor on which to wait for completions, with poll, select or epoll, for POLLIN:
/// readable after netmem_virtio_tx_arm when the device is done with frames, or has gone. It is the
/// queue's, and the same until it is closed. Never read, write or close it. -1 with a text for
/// misuse.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_virtio_tx_fd(tx: *const netmem_virtio_tx) -> i32 {
    // SAFETY: as the header says.
    value(|| unsafe { queues::fd(tx) }).unwrap_or(-1)
}

/// Asks for a wake-up, and writes to `waits` whether to sleep: false if there are completions
/// already. A thread that was woken calls netmem_virtio_tx_disarm and netmem_virtio_tx_complete. A
/// few system calls.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_STOPPED (once for each
/// connection that has ended, and then it waits for netmem_virtio_net_reconnect; after a broken
/// rule of the ring, each time until then).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_virtio_tx_arm(tx: *mut netmem_virtio_tx, waits: *mut bool) -> netmem_status {
    // SAFETY: as the header says.
    status(|| unsafe { queues::arm(tx, waits) })
}

/// Ends the request for a wake-up. Misuse leaves a text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_virtio_tx_disarm(tx: *mut netmem_virtio_tx) {
    // SAFETY: as the header says.
    status(|| unsafe { queues::disarm(tx) });
}

/// Counts of the queue.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_virtio_tx_get_stats(
    tx: *mut netmem_virtio_tx,
    stats: *mut netmem_virtio_tx_stats,
) -> netmem_status {
    status(|| {
        // SAFETY: as the header says.
        let tx = unsafe { owned::get_mut(tx) }?;
        // SAFETY: as the header says.
        unsafe { options::write(stats, &netmem_virtio_tx_stats::of(tx)) }
    })
}

/// Closes the queue: its ring is stopped, and the pages of frames that the device has return. It
/// may have sent these frames, or not: to know, complete until nothing is outstanding. Waits for
/// the device, for 3 s at most.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_virtio_tx_close(tx: *mut netmem_virtio_tx) -> netmem_status {
    // SAFETY: as the header says.
    status(|| unsafe { owned::close(tx) }.map(drop))
}
