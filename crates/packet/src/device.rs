//! The traits of a network device: a receive queue that is polled, a transmit queue that is filled,
//! and the handler between them.
//!
//! virtio-net queues and AF_XDP sockets differ in their rings, and a program should not. At tens of
//! nanoseconds per frame, a trait object per frame would show. So calls are per batch, the handler
//! is a type parameter, and nothing allocates.

use crate::group::RxGroup;
use crate::meta::{Checksum, Meta};
use crate::packet::Packet;
use crate::slots::{HeaderSlots, SlotFrame};
use crate::xdp::{Verdict, XdpFrame};
use netmem_pool::{Frag, Memory, Napi};

/// A handler of received frames: an XDP program, and the targets of its verdicts. A closure with a
/// [`Packet`] as its argument is a handler that passes all frames.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not handle frames in memory of the kind `{M}`",
    note = "a handler is a closure `|packet: Packet<{M}>| ..`, or a type that implements `Handler<{M}>`"
)]
pub trait Handler<M: Memory> {
    /// Whether [`run`](Self::run) needs every frame in one buffer. A frame that cannot be copied
    /// into one is dropped and counted.
    const LINEAR: bool = false;

    /// Whether this CPU reads the first bytes of frames, in [`run`](Self::run) or soon after it. A
    /// queue whose frames another CPU has written then prefetches the beginning of each frame, a
    /// few frames ahead. Set it to `false` in a handler that drops frames unread or sends them to
    /// another thread: for such a handler, a prefetch would only move cache lines. Queues that have
    /// read the frame's cache line anyway, as those of virtio-net, ignore it.
    const READS: bool = true;

    /// The XDP program: reads a frame, may edit its head, and returns the verdict.
    #[inline]
    fn run(&mut self, frame: &mut XdpFrame<M>) -> Verdict {
        let _ = frame;
        Verdict::Pass
    }

    /// Receives frames that arrived together, up to 64. By default [`run`](Self::run) is called for
    /// each, and its verdict is executed.
    ///
    /// A handler that implements it must also handle single frames, by [`run`](Self::run) and
    /// [`pass`](Self::pass): a queue delivers frames of several buffers, segments, and frames with
    /// an unfinished checksum one by one, and a queue may know no groups.
    #[inline(always)]
    fn run_batch(&mut self, group: &mut RxGroup<'_, M>)
    where
        Self: Sized,
    {
        group.run_each(self);
    }

    /// Receives a frame with the verdict [`Pass`](Verdict::Pass).
    fn pass(&mut self, packet: Packet<M>);

    /// Receives a frame with the verdict [`Tx`](Verdict::Tx), which must be transmitted. By default
    /// it is dropped.
    #[inline]
    fn tx(&mut self, packet: Packet<M>) {
        drop(packet);
    }

    /// Receives a frame with the verdict [`Redirect`](Verdict::Redirect), which leaves by the
    /// device that [`run`](Self::run) has chosen. By default the frame is dropped; a handler that
    /// redirects has a [`TxBulk`](crate::TxBulk) for each device.
    #[inline]
    fn redirect(&mut self, packet: Packet<M>) {
        drop(packet);
    }

    /// Called at the end of each [`receive`](Poll::receive), in the poll context. Flush the packets
    /// that were gathered for transmit queues here.
    #[inline]
    fn flush(&mut self) {}
}

impl<M: Memory, F: FnMut(Packet<M>)> Handler<M> for F {
    #[inline]
    fn pass(&mut self, packet: Packet<M>) {
        self(packet);
    }
}

/// A receive queue with its page pool.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no receive queue",
    note = "a queue with device memory (`VirtioSplitRx`) has a `poll` of its own, whose frames are `SplitFrame`s"
)]
pub trait RxQueue {
    /// The kind of memory that it delivers.
    type Mem: Memory;
    /// The queue while it is being polled.
    type Poll<'a>: Poll<Mem = Self::Mem>
    where
        Self: 'a;

    /// Runs `f` in the queue's poll context, on this thread. Pages of this queue that are dropped
    /// inside, also by transmit completions, return to the pool's cache.
    fn poll<R>(&mut self, f: impl FnOnce(&mut Self::Poll<'_>) -> R) -> R;
}

/// The operations inside of a poll.
pub trait Poll {
    /// The kind of memory that the queue delivers.
    type Mem: Memory;

    /// Receives up to `budget` frames, passes each to `handler`, and posts new buffers. Returns how
    /// many frames there were.
    fn receive<H: Handler<Self::Mem>>(&mut self, budget: usize, handler: &mut H) -> usize;

    /// Whether the queue has fewer buffers posted than its reserve, because the pool has no pages:
    /// valid after [`receive`](Self::receive). A user that keeps frames should then drop the frames
    /// that it has just received, so that their pages are posted again. Otherwise it may never
    /// receive the frames that would let it drop others, such as acknowledgements. By default there
    /// is no reserve. Cost: a comparison.
    fn is_short(&self) -> bool {
        false
    }

    /// Runs `f` with the pool's poll context, to allocate from it.
    fn with_napi<R>(&mut self, f: impl FnOnce(&mut Napi<'_, Self::Mem>) -> R) -> R;
}

/// A transmit queue.
///
/// [`send`](Self::send) returns the packet if the queue cannot accept it, and
/// [`sendable`](Self::sendable) reports whether it can later. [`TxBulk`](crate::TxBulk) does both
/// for many packets: it drops what the queue refuses, or keeps it until there is room.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no transmit queue",
    note = "a reference to a queue (`&mut queue`) is one; a `TxBulk` is pushed to and flushed"
)]
pub trait TxQueue {
    /// The kind of memory that it sends from.
    type Mem: Memory;

    /// Queues a packet; the device sees it at the next [`flush`](Self::flush).
    ///
    /// A packet of another DMA domain is mapped for this device until the device has completed it.
    ///
    /// # Errors
    ///
    /// The packet itself, as it was, if it can't be sent: the queue is full or stopped, or the
    /// device cannot reach the packet's pages.
    fn send(&mut self, packet: Packet<Self::Mem>) -> Result<(), Packet<Self::Mem>>;

    /// Queues packets from the front of `packets`, in order, until one is refused. A queue may
    /// check, describe and count them together. By default [`send`](Self::send) is called for each.
    /// Returns how many places, from the first on, are empty now. A place without a packet is
    /// skipped. If the number is less than the length, the packet at that place was refused as
    /// [`send`](Self::send) refuses one. It and the packets behind it are as they were.
    ///
    /// A group may fill the ring to the last entry, also where [`sendable`](Self::sendable) returns
    /// [`Later`](Sendable::Later) because a single packet might need more entries.
    fn send_group(&mut self, packets: &mut [Option<Packet<Self::Mem>>]) -> usize {
        for (sent, place) in packets.iter_mut().enumerate() {
            if let Some(packet) = place.take()
                && let Err(packet) = self.send(packet)
            {
                *place = Some(packet);
                return sent;
            }
        }
        packets.len()
    }

    /// Queues a packet as [`send`](Self::send) does, and returns another holder of its head. When
    /// this is the only value on the head's page, the device is done with the packet, if no others
    /// were there before. A queue that puts its own header in front of the packet makes the holder
    /// afterwards, because a page with another holder cannot be written.
    ///
    /// # Errors
    ///
    /// As [`send`](Self::send).
    fn send_held(&mut self, packet: Packet<Self::Mem>) -> Result<Frag<Self::Mem>, Packet<Self::Mem>> {
        let head = packet.head().clone();
        self.send(packet).map(|()| head)
    }

    /// The slots that this queue has for the first bytes of frames. By default it has none, and
    /// headers are written into a page. A queue with slots implements
    /// [`send_behind`](Self::send_behind); [`send_copied`](Self::send_copied) may stay as it is by
    /// default.
    #[inline]
    fn header_slots(&self) -> Option<&HeaderSlots> {
        None
    }

    /// Queues a frame whose first bytes are `headers`, and whose other bytes are those of
    /// `payload`: `headers` are copied into the slot of the frame's descriptor, so that no page is
    /// needed. `payload.meta` is the frame's, and its offsets count from the first byte of
    /// `headers`. Returns what [`header_slots`](Self::header_slots) reports as completed when the
    /// device is done with the frame. [`sendable`](Self::sendable) answers for `payload` what it
    /// would for the frame.
    ///
    /// # Errors
    ///
    /// The payload, as it was: as [`send`](Self::send); also if the queue has no slots, or if there
    /// are more than [`HeaderSlots::ROOM`] bytes of headers.
    #[inline]
    fn send_behind(&mut self, headers: &[u8], payload: Packet<Self::Mem>) -> Result<SlotFrame, Packet<Self::Mem>> {
        let _ = headers;
        Err(payload)
    }

    /// Queues a frame that is copied into the slot of its descriptor, so that it needs no page and
    /// no reference: its first byte is `frame`'s, and `meta` is its offload information. Returns
    /// what [`header_slots`](Self::header_slots) reports as completed when the device is done with
    /// it. By default no frame is accepted.
    ///
    /// # Errors
    ///
    /// [`Sendable::Later`]: the queue is full. [`Sendable::Never`]: it accepts this frame, if at
    /// all, only by [`send`](Self::send) or [`send_behind`](Self::send_behind). It has stopped or
    /// has no slots, the device lacks an offload that the frame needs, or the frame has more than
    /// [`HeaderSlots::ROOM`] bytes.
    #[inline]
    fn send_copied(&mut self, frame: &[u8], meta: Meta) -> Result<SlotFrame, Sendable> {
        let _ = (frame, meta);
        Err(Sendable::Never)
    }

    /// Moves the memory of a completed packet's list of fragments into `packet`, if that has no list
    /// and the queue keeps one. Its next [`push`](Packet::push) then does not allocate. By default
    /// a queue keeps none.
    #[inline]
    fn lend_list(&mut self, packet: &mut Packet<Self::Mem>) {
        let _ = packet;
    }

    /// Whether the queue can accept `packet`: now, after completions, or never. Changes and counts
    /// nothing.
    ///
    /// A queue answers by what it knew of the device in the last call that sent or
    /// [completed](Self::complete), and does not read what the device writes. So after a refusal,
    /// the answer is the reason: a packet that was refused for want of room is not reported as
    /// sendable [now](Sendable::Now) because the device has made room since. A caller that tests
    /// before it sends can receive [`Sendable::Later`] although the device has made room since.
    fn sendable(&self, packet: &Packet<Self::Mem>) -> Sendable;

    /// Whether the device supports frames with these offloads. A packet with others is refused by
    /// [`send`](Self::send); [`SoftwareTx`](crate::SoftwareTx) does these offloads in software. By
    /// default the device supports none.
    #[inline]
    fn supports(&self, meta: Meta) -> bool {
        meta.gso.is_none() && !matches!(meta.checksum, Checksum::Partial { .. })
    }

    /// Lets the device see the queued packets.
    fn flush(&mut self);

    /// Drops the packets that the device has completed; returns how many. If the queue has found
    /// room for packets without any completion, it returns 1, so that 0 means that a packet which
    /// was refused for want of room would be refused again. Inside the poll that owns their pool,
    /// their pages return to the pool's cache.
    fn complete(&mut self) -> usize;

    /// Whether `frag` is in this device's DMA domain, and its address there. Two comparisons; maps
    /// nothing.
    fn reach(&self, frag: &Frag<Self::Mem>) -> Reach;
}

/// A mutable reference to a queue is a queue.
impl<T: TxQueue + ?Sized> TxQueue for &mut T {
    type Mem = T::Mem;

    #[inline]
    fn send(&mut self, packet: Packet<Self::Mem>) -> Result<(), Packet<Self::Mem>> {
        (**self).send(packet)
    }

    #[inline]
    fn send_group(&mut self, packets: &mut [Option<Packet<Self::Mem>>]) -> usize {
        (**self).send_group(packets)
    }

    #[inline]
    fn send_held(&mut self, packet: Packet<Self::Mem>) -> Result<Frag<Self::Mem>, Packet<Self::Mem>> {
        (**self).send_held(packet)
    }

    #[inline]
    fn header_slots(&self) -> Option<&HeaderSlots> {
        (**self).header_slots()
    }

    #[inline]
    fn send_behind(&mut self, headers: &[u8], payload: Packet<Self::Mem>) -> Result<SlotFrame, Packet<Self::Mem>> {
        (**self).send_behind(headers, payload)
    }

    #[inline]
    fn send_copied(&mut self, frame: &[u8], meta: Meta) -> Result<SlotFrame, Sendable> {
        (**self).send_copied(frame, meta)
    }

    #[inline]
    fn lend_list(&mut self, packet: &mut Packet<Self::Mem>) {
        (**self).lend_list(packet);
    }

    fn sendable(&self, packet: &Packet<Self::Mem>) -> Sendable {
        (**self).sendable(packet)
    }

    #[inline]
    fn supports(&self, meta: Meta) -> bool {
        (**self).supports(meta)
    }

    #[inline]
    fn flush(&mut self) {
        (**self).flush();
    }

    #[inline]
    fn complete(&mut self) -> usize {
        (**self).complete()
    }

    #[inline]
    fn reach(&self, frag: &Frag<Self::Mem>) -> Reach {
        (**self).reach(frag)
    }
}

/// Whether a transmit queue can accept a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sendable {
    /// The queue has room. Sending can still fail, if the packet must be mapped for this device and
    /// cannot be.
    Now,
    /// The queue is full. It will have room when the device has completed packets:
    /// [`TxQueue::complete`].
    Later,
    /// The queue will never accept the packet: it has stopped, the packet has more fragments than
    /// the ring has descriptors, the device lacks an offload that the packet needs, or it cannot
    /// reach the packet's pages.
    Never,
}

/// How a device reaches a fragment: whether the two have the same DMA domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Same domain: this is the address of the first byte for the device. Sending syncs, and maps
    /// nothing.
    Mapped(u64),
    /// Another domain, or none any more: sending maps the fragment for this device, and refuses it
    /// if this device's domain cannot map it.
    Map,
    /// The device cannot reach it, and sending refuses it.
    Never,
}
