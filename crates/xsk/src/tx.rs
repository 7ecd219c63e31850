//! The transmit queue: frames for the kernel to send, and the pages that are returned after that.
//!
//! ```text
//!   packet ─ send ─► counts of pages ─ TX ring ─► kernel ─ completion ring ─► counts put ─► pools
//!                                         ▲ flush, kick
//! ```
//!
//! A fragment of a packet becomes a descriptor for each chunk that it touches. The queue keeps a
//! count of the fragment's page for each descriptor. A completion names an address, and so a chunk.
//! Completions arrive in any order. Descriptors of one chunk are not distinguished: each completion
//! puts one count of the page.
//!
//! # Kicks
//!
//! In copy mode the kernel sends in a system call, up to 32 frames by default, and returns `EAGAIN`
//! if there are more. [`flush`](TxQueue::flush) repeats the call as long as the kernel sends
//! frames. If the kernel sends none (its send buffer is full, it lacks memory, or the device is
//! busy), the rest stays in the ring, and a kick is *pending*: each later
//! [`flush`](TxQueue::flush), [`complete`](TxQueue::complete) and [`arm`](Wait::arm) tries again.
//! No kick is lost.
//!
//! # Sleeping
//!
//! In zero-copy mode the kernel wakes no thread when frames complete. While frames are out, a timer
//! wakes a sleeping thread after a millisecond: see `wait_set.rs`.
//!
//! # Late completions
//!
//! A frame completes when its last user is done with it. In copy mode, this is when the socket that
//! received the kernel's copy has released it. With a driver that batches completions, it is when
//! another frame is sent. If descriptors are out, and none completes for a second, they are counted
//! as late, once, and the kernel is notified of the ring again. Their pages are returned when they
//! complete.
//!
//! # The end
//!
//! A queue that is dropped waits for its descriptors to complete, for a tenth of a second at most.
//! The pages of the others return at once if the kernel has unbound the socket, because the
//! interface was deleted. Otherwise they stay out until the kernel lets the queue be bound again:
//! see `held.rs`. A device may still be reading these pages, and the bytes that it sends must not
//! be those of another frame.

mod copy_pool;
mod held_frames;
mod send;

use self::copy_pool::CopyPool;
use self::send::{Unsendable, most_descriptors};
use crate::accounts::Outstanding;
use crate::fault::Fault;
use crate::held::keep_sent;
use crate::held_frame::Times;
use crate::if_xdp::Desc;
use crate::layout::Layout;
use crate::metadata::{NoLaunchTimes, Timestamps, TxRequest, TxTimestamp, launch_times};
use crate::netlink::XdpFeatures;
use crate::ring::{Consumer, Producer};
use crate::rx::XskRx;
use crate::socket::{TxRings, XskSocket};
use crate::stats::{TxStats, state};
use crate::sys;
use crate::umem::Umem;
use crate::umem_memory::UmemMemory;
use crate::wait_set::WaitSet;
use netmem_packet::{Armed, Checksum, Meta, Packet, Reach, Sendable, TxQueue, Wait};
use netmem_pool::{Frag, KernelShared, Provider, Region};
use rustix::io::Errno;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// The number of completions that are handled at a time.
const COMPLETION_BATCH: u32 = 64;
/// If no descriptor completes for this time, the descriptors that are out are late. In unit tests
/// they are late at once.
const LATE: Duration = if cfg!(test) { Duration::ZERO } else { Duration::from_secs(1) };

/// How long the end of a queue waits for frames to complete. In unit tests it does not wait.
const CLOSING: Duration = if cfg!(test) { Duration::ZERO } else { Duration::from_millis(100) };

/// A transmit queue: see [`TxQueue`]. It is one half of a socket; the other is
/// [`XskRx`](crate::XskRx).
///
/// It sends every page of the UMEM's region, from any pool, even from a pool of another DMA domain:
/// a frame that a virtio-net queue received into the same region is sent without a copy. Frames in
/// other memory are refused ([`Reach::Never`]).
///
/// Its descriptor is for waiting only: it becomes readable when frames have completed. In zero-copy
/// mode the kernel does not report this. The descriptor then becomes readable a millisecond after
/// [`arm`](Wait::arm) while frames are out.
#[must_use = "a queue stops when it is dropped"]
pub struct XskTx<M: UmemMemory = KernelShared> {
    region: Arc<Region<M>>,
    layout: Layout,
    tx: Producer<Desc>,
    completion: Consumer<u64>,
    out: Outstanding,
    /// The largest number of descriptors that are out: the number of entries of the completion
    /// ring, or what the accounts can count.
    limit: u32,
    /// The largest number of descriptors of a frame.
    max_descriptors: u32,
    /// The pages of packets that are copied.
    copies: CopyPool<M>,
    /// Whether the kernel's index was behind its completions when the queue was last completed: it
    /// consumes a descriptor before it completes it, and can publish so later. Otherwise at least
    /// as many places are known to be free as the accounts allow to use.
    is_behind: bool,
    /// Whether the kernel has sent fewer frames than there were, and must be notified again.
    kick_pending: bool,
    /// The time since which nothing has completed, although descriptors are out.
    waiting: Option<Instant>,
    /// The number of descriptors that were counted as late and are still out.
    late: u64,
    /// For [`held_frames`](Self::held_frames).
    times: Times,
    timestamps: Timestamps,
    launch_times: Result<(), NoLaunchTimes>,
    stats: TxStats,
    wait_set: WaitSet,
    /// Keeps the fill ring filled, for a driver in zero-copy mode, of a queue that only sends.
    filled: Option<Box<XskRx<M>>>,
    // The socket is closed before the UMEM is dropped.
    socket: Arc<XskSocket>,
    umem: Umem<M>,
}

impl<M: UmemMemory> XskTx<M> {
    pub(crate) fn new(
        umem: Umem<M>,
        socket: Arc<XskSocket>,
        rings: TxRings,
        wait_set: WaitSet,
        provider: Arc<dyn Provider<M>>,
        features: Option<XdpFeatures>,
    ) -> Self {
        let TxRings { tx, completion } = rings;
        let layout = *umem.layout();
        let launch_times = launch_times(layout.tx_metadata, sys::kernel(), || features);
        let zero_copy = features.map(|features| features.zero_copy_fragments);
        let max_descriptors = most_descriptors(socket.mode(), socket.is_multi_buffer(), zero_copy);
        Self {
            region: umem.region().clone(),
            layout,
            limit: tx.size().min(Outstanding::MOST),
            tx,
            completion,
            out: Outstanding::new(layout.chunks()),
            max_descriptors,
            copies: CopyPool::new(provider),
            is_behind: false,
            kick_pending: false,
            waiting: None,
            late: 0,
            times: Times::default(),
            timestamps: Timestamps::default(),
            launch_times,
            stats: TxStats::default(),
            wait_set,
            filled: None,
            socket,
            umem,
        }
    }

    /// Keeps the other half of the socket, which has the chunks for a driver in zero-copy mode.
    pub(crate) fn keep_filled(mut self, rx: XskRx<M>) -> Self {
        self.filled = Some(Box::new(rx));
        self
    }

    /// The queue's counters.
    #[must_use]
    pub fn stats(&self) -> TxStats {
        self.stats
    }

    /// The number of descriptors that were posted to the kernel and have not completed.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.out.total() as usize
    }

    /// The largest number of descriptors of a frame: 1 without frames of several buffers, 18 in
    /// copy mode, and what the driver reports in zero-copy mode. A packet that needs more is copied
    /// when it is sent ([`TxStats::linearised`]).
    #[must_use]
    pub fn max_descriptors(&self) -> u32 {
        self.max_descriptors
    }

    /// For [`crate::hostile`]: sends as if the driver had this limit.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn set_max_descriptors(&mut self, most: u32) {
        self.max_descriptors = most;
    }

    /// The socket. The receive queue is its other half.
    #[must_use]
    pub fn socket(&self) -> &XskSocket {
        &self.socket
    }

    /// The memory of the queue.
    #[must_use]
    pub fn umem(&self) -> &Umem<M> {
        &self.umem
    }

    /// Queues a packet with a request to the device. Needs
    /// [`UmemOptions::tx_metadata`](crate::UmemOptions::tx_metadata), and a driver that supports
    /// the request: `netmem info` lists the features of a driver. A driver without timestamps
    /// reports no time ([`TxTimestamp::time`]).
    ///
    /// # Errors
    ///
    /// As for [`TxQueue::send`]. The head of a packet that is not copied needs 24 free bytes in
    /// front of it, in its chunk, and no other holder. A requested checksum is stored in the head's
    /// first chunk. A launch time needs [`launch_times`](Self::launch_times).
    pub fn send_with(&mut self, packet: Packet<M>, request: TxRequest) -> Result<(), Packet<M>> {
        if self.stats.stopped.is_some() {
            return Err(packet);
        }
        self.send_metadata(packet, request)
    }

    /// Whether packets can have a launch time, as reported by the kernel and the driver when the
    /// queue was opened.
    ///
    /// # Errors
    ///
    /// The missing feature. [`send_with`](Self::send_with) then refuses packets with a launch time.
    pub fn launch_times(&self) -> Result<(), NoLaunchTimes> {
        self.launch_times
    }

    /// Returns the oldest known time at which a packet with such a request was sent, and removes
    /// it. Call this after [`complete`](TxQueue::complete).
    pub fn timestamp(&mut self) -> Option<TxTimestamp> {
        self.timestamps.pop()
    }

    /// Notifies the kernel of the frames in the ring, until it has sent all or sends none.
    fn kick(&mut self) {
        self.kick_pending = false;
        let mut before = match self.tx.pending() {
            Ok(pending) => pending,
            Err(fault) => return self.stop(fault),
        };
        loop {
            self.stats.kicks += 1;
            let answer = sys::kick_tx(self.socket.as_fd());
            let left = match self.tx.pending() {
                Ok(left) => left,
                Err(fault) => return self.stop(fault),
            };
            match answer {
                Ok(()) => return,
                Err(Errno::INTR) => {}
                // The kernel lacks a resource that it may have next time; or the device has dropped
                // frames.
                Err(Errno::AGAIN | Errno::BUSY | Errno::NOBUFS | Errno::NOMEM) => {
                    if left == 0 {
                        return;
                    }
                    if left == before {
                        self.stats.busy += 1;
                        self.kick_pending = true;
                        return;
                    }
                    self.stats.kicks_again += 1;
                }
                Err(error) => return self.refused(error),
            }
            before = left;
        }
    }

    #[cold]
    fn refused(&mut self, error: Errno) {
        if self.socket.is_gone() {
            return self.stop(Fault::Gone);
        }
        netmem_pool::trace::debug!(%error, "the kernel does not send now");
        self.stats.down += 1;
        self.kick_pending = true;
    }

    #[cold]
    fn stop(&mut self, fault: Fault) {
        if self.stats.stopped.is_none() {
            netmem_pool::trace::warn!(%fault, "a transmit queue is stopped");
            self.stats.stopped = Some(fault);
        }
    }

    /// Reaps the descriptors that the kernel has completed, and adds their number to `done`, also
    /// of those in front of a fault.
    #[inline(always)]
    fn reap(&mut self, done: &mut u32) -> Result<(), Fault> {
        // The loop reaps at most as many as were outstanding, so that it ends.
        while *done < self.limit {
            let n = self.completion.available(1)?.min(COMPLETION_BATCH);
            if n == 0 {
                break;
            }
            for i in 0..n {
                self.region.prefetch(self.layout.page_index(self.completion.peek(i)));
            }
            for i in 0..n {
                let addr = self.completion.consume();
                let Some(chunk) = self.layout.chunk_of(addr).filter(|&chunk| self.out.remove(chunk)) else {
                    *done += i;
                    return Err(Fault::Address { addr });
                };
                self.timestamps.completed(addr, &self.region);
                // SAFETY: *sent*: the table had a count of the page for this descriptor, which is
                // put.
                unsafe { self.region.put(self.layout.page_of(chunk).0, 1) };
            }
            self.completion.release();
            *done += n;
        }
        Ok(())
    }

    /// Whether as many places are free as the accounts allow to use. Reads the kernel's index if
    /// fewer are known.
    #[inline]
    fn has_all_room(&mut self) -> Result<bool, Fault> {
        let most = self.limit - self.out.total();
        Ok(self.tx.free(most)? >= most)
    }

    /// Handles that descriptors are out, and none has completed.
    #[cold]
    #[inline(never)]
    fn wait_for_completions(&mut self) {
        let since = *self.waiting.get_or_insert_with(Instant::now);
        if self.late > 0 || since.elapsed() < LATE {
            return;
        }
        self.late = u64::from(self.out.total());
        self.stats.late += self.late;
        netmem_pool::trace::warn!(descriptors = self.late, "sent frames do not complete");
        self.kick_pending = true;
    }
}

impl<M: UmemMemory> TxQueue for XskTx<M> {
    type Mem = M;

    #[inline(always)]
    fn send(&mut self, packet: Packet<M>) -> Result<(), Packet<M>> {
        match self.queue_plain(packet) {
            Ok(()) => Ok(()),
            Err(packet) => self.send_slowly(packet),
        }
    }

    fn send_group(&mut self, packets: &mut [Option<Packet<M>>]) -> usize {
        let mut done = 0;
        loop {
            done += self.queue_plain_group(&mut packets[done..]);
            let Some(place) = packets.get_mut(done) else { return done };
            if let Some(packet) = place.take()
                && let Err(packet) = self.send_slowly(packet)
            {
                *place = Some(packet);
                return done;
            }
            done += 1;
        }
    }

    fn sendable(&self, packet: &Packet<M>) -> Sendable {
        if self.stats.stopped.is_some() || !self.supports(packet.meta) {
            return Sendable::Never;
        }
        match self.descriptors(packet).or_else(Unsendable::copied) {
            Err(_) => Sendable::Never,
            Ok(descriptors) if self.limit - self.out.total() >= descriptors && self.tx.known_free() >= descriptors => {
                Sendable::Now
            }
            Ok(_) => Sendable::Later,
        }
    }

    /// Whether the queue supports frames with this `meta`: they must not need segmentation. The
    /// device computes their checksums only if the UMEM was made for
    /// [metadata](crate::UmemOptions::tx_metadata).
    #[inline]
    fn supports(&self, meta: Meta) -> bool {
        meta.gso.is_none() && (self.layout.tx_metadata || !matches!(meta.checksum, Checksum::Partial { .. }))
    }

    fn flush(&mut self) {
        if (self.tx.publish() || self.kick_pending) && self.stats.stopped.is_none() {
            // A driver that is working sees the ring without a system call.
            if self.socket.always_kicks() || self.tx.needs_wakeup() {
                self.kick();
            }
        }
    }

    fn complete(&mut self) -> usize {
        if self.stats.stopped.is_some() && self.stats.stopped != Some(Fault::Gone) {
            return 0;
        }
        let mut done = 0;
        let was_behind = self.is_behind;
        let outcome = self.reap(&mut done).and_then(|()| self.has_all_room());
        if done > 0 {
            self.stats.completed += u64::from(done);
            self.waiting = None;
            if self.late > 0 {
                let late = self.late.min(u64::from(done));
                self.late -= late;
                self.stats.late_completed += late;
            }
        }
        match outcome {
            Err(fault) => self.stop(fault),
            Ok(has_all_room) => {
                self.is_behind = !has_all_room;
                if done == 0 && self.out.total() > 0 {
                    self.wait_for_completions();
                }
                if self.kick_pending {
                    self.flush();
                }
            }
        }
        done.max(u32::from(was_behind && !self.is_behind)) as usize
    }

    #[inline]
    fn reach(&self, frag: &Frag<M>) -> Reach {
        self.addr(frag).map_or(Reach::Never, Reach::Mapped)
    }
}

impl<M: UmemMemory> AsFd for XskTx<M> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wait_set.as_fd()
    }
}

/// See [`Wait`]. A transmit queue has work when frames have completed. Arming flushes the queue
/// first. A queue does not wait if the kernel does not send its frames now, for instance because
/// the interface is down.
impl<M: UmemMemory> Wait for XskTx<M> {
    fn arm(&mut self) -> io::Result<Armed> {
        self.flush();
        let waits = self.out.total() > 0 || self.is_behind;
        if self.wait_set.arm(self.socket.as_fd(), waits)? && self.socket.is_gone() {
            self.stop(Fault::Gone);
        }
        let checked = self.check();
        let completed = self.completion.available(1).map_or(true, |n| n > 0);
        let has_caught_up = self.is_behind && self.has_all_room().unwrap_or(true);
        if checked.is_ok() && !self.kick_pending && !completed && !has_caught_up {
            return Ok(Armed::Waits);
        }
        self.disarm();
        checked.map(|()| Armed::Work)
    }

    /// Removes the socket from the set on which a thread waits. While it is there, the kernel calls
    /// the set for each frame that completes. One system call.
    fn disarm(&mut self) {
        self.wait_set.disarm(self.socket.as_fd());
    }

    /// The error is a [`QueueStopped`](crate::QueueStopped).
    fn check(&self) -> io::Result<()> {
        self.socket.check(self.stats.stopped)
    }
}

impl<M: UmemMemory> Drop for XskTx<M> {
    /// Waits for the frames that are being sent, for a tenth of a second at most.
    fn drop(&mut self) {
        self.end();
    }
}

impl<M: UmemMemory> XskTx<M> {
    /// Ends the queue, to be opened again. Returns its counters.
    pub(crate) fn detach(mut self) -> TxStats {
        self.end();
        self.stats
    }

    /// Goes on with the counters of the queue before it was opened again.
    pub(crate) fn set_counters(&mut self, stats: TxStats) {
        self.stats = TxStats { stopped: None, ..stats };
    }

    fn end(&mut self) {
        if self.out.total() == 0 {
            return;
        }
        let begin = Instant::now();
        self.complete();
        while self.out.total() > 0 && self.stats.stopped.is_none() && begin.elapsed() < CLOSING {
            self.kick_pending = true;
            sleep(CLOSING / 200);
            self.complete();
        }
        if self.out.total() > 0 {
            self.stats.unconfirmed += u64::from(self.out.total());
            let layout = self.layout;
            let counts = self.out.drain().map(|(chunk, n)| (layout.page_of(chunk).0, n));
            if self.socket.is_unbound() {
                // SAFETY: *sent*: the table had these counts of the page.
                counts.for_each(|(page, n)| unsafe { self.region.put(page, n) });
            } else {
                keep_sent(self.socket.key(), self.umem.number(), &self.region, counts.collect());
            }
        }
    }
}

impl<M: UmemMemory> fmt::Debug for XskTx<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "XskTx({}, {}, {} out)", self.socket, state(self.stats.stopped), self.out.total())
    }
}
