//! Frames in two kinds of memory: headers in host memory, payload in device memory that this
//! process does not map.
//!
//! ```text
//!   receive   head: Frag<M>  ■■■■■■■■■■            payload: DevicePayload  ■■■■■■■ ■■■■■■■ ■■■■■
//!             the first bytes, or the whole frame  the rest: a fragment of each page
//!
//!   send      Packet<M>      ■■■■■■■■■■            [DeviceFrag]  ■■■■■■ ■■■■■■■■■ ■■■
//!             headers, written by the user         by device address, with the memory's holder
//! ```
//!
//! `M` is the kind of host memory: [`PeerShared`], or the memory of a trusted peer.

use crate::device::{Sendable, TxQueue};
use crate::frags::{Frags, MAX_FRAGS};
use crate::meta::Meta;
use crate::packet::{Packet, TooManyFrags};
use crate::wait::Wait;
use netmem_pool::{Device, Frag, Memory, PeerShared};
use std::iter;

/// Bytes in device memory, in order: up to 17 fragments, of a page each.
///
/// One fragment needs no allocation. Further ones are on the heap.
#[derive(Debug)]
pub struct DevicePayload {
    first: Option<Frag<Device>>,
    /// Empty if there is no first one.
    more: Frags<Device>,
    len: u32,
}

impl Default for DevicePayload {
    fn default() -> Self {
        Self { first: None, more: Frags::NONE, len: 0 }
    }
}

impl DevicePayload {
    /// Adds a fragment at the end. Allocates if it is the second.
    ///
    /// # Errors
    ///
    /// [`TooManyFrags`] returns the fragment.
    pub fn push(&mut self, frag: Frag<Device>) -> Result<(), TooManyFrags<Device>> {
        let len = frag.len() as u32;
        if self.first.is_none() {
            self.first = Some(frag);
        } else if self.more.as_slice().len() + 1 < MAX_FRAGS {
            self.more.push(frag).map_err(TooManyFrags)?;
        } else {
            return Err(TooManyFrags(frag));
        }
        self.len += len;
        Ok(())
    }

    /// Takes the first fragment. If it is the only one, this costs no atomic and no call.
    #[inline]
    pub fn pop_front(&mut self) -> Option<Frag<Device>> {
        let first = self.first.take()?;
        self.len -= first.len() as u32;
        if !self.more.is_none() {
            self.first = self.more.pop_front();
        }
        Some(first)
    }

    /// Bytes.
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether there are no fragments.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    /// The fragments, in order.
    #[inline]
    pub fn fragments(&self) -> impl Iterator<Item = &Frag<Device>> {
        self.first.iter().chain(self.more.as_slice())
    }

    /// The fragments as [`Extent`]s: those whose bytes follow each other in the file of the memory
    /// are in one. If runs of adjacent pages were posted to the device, a large segment is in one
    /// extent.
    pub fn extents(&self) -> impl Iterator<Item = Extent> {
        let mut fragments = self.fragments().peekable();
        iter::from_fn(move || {
            let first = fragments.next()?;
            let mut extent = Extent { offset: first.file_offset(), len: first.len() as u32, fragments: 1 };
            while let Some(next) = fragments.next_if(|next| next.file_offset() == extent.end()) {
                extent.len += next.len() as u32;
                extent.fragments += 1;
            }
            Some(extent)
        })
    }
}

/// A fragment, or none.
impl From<Option<Frag<Device>>> for DevicePayload {
    #[inline]
    fn from(first: Option<Frag<Device>>) -> Self {
        let len = first.as_ref().map_or(0, Frag::len) as u32;
        Self { first, more: Frags::NONE, len }
    }
}

/// The fragments, in order. One fragment costs no allocation and no atomic.
impl IntoIterator for DevicePayload {
    type Item = Frag<Device>;
    type IntoIter = iter::Chain<std::option::IntoIter<Frag<Device>>, std::vec::IntoIter<Frag<Device>>>;

    #[inline]
    fn into_iter(self) -> Self::IntoIter {
        self.first.into_iter().chain(self.more.into_vec())
    }
}

/// Bytes that follow each other in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The offset of the first byte in the file of the memory's region.
    pub offset: u64,
    /// Bytes.
    pub len: u32,
    /// Fragments that the bytes are in.
    pub fragments: usize,
}

impl Extent {
    /// The offset in the file of the byte after the last one.
    #[inline]
    #[must_use]
    pub fn end(&self) -> u64 {
        self.offset + u64::from(self.len)
    }
}

/// A received frame whose first bytes are in host memory and whose others, if it has more, are in
/// device memory.
///
/// The queue decides how many bytes go to the head. The split point is a byte offset: the code that
/// parses the headers decides which of the bytes on either side are headers. A frame may be a large
/// segment ([`Meta::gso`]).
#[derive(Debug)]
pub struct SplitFrame<M: Memory = PeerShared> {
    head: Frag<M>,
    payload: DevicePayload,
    lost: u32,
    /// Offload information. This process cannot checksum device memory: only the device can verify
    /// the payload, or a sender on the same host can guarantee it.
    /// [`Checksum::Verified`](crate::Checksum::Verified) and
    /// [`Checksum::Partial`](crate::Checksum::Partial) mean this.
    pub meta: Meta,
}

impl<M: Memory> SplitFrame<M> {
    /// A frame of two parts.
    #[inline]
    #[must_use]
    pub fn new(head: Frag<M>, payload: impl Into<DevicePayload>, meta: Meta) -> Self {
        Self { head, payload: payload.into(), lost: 0, meta }
    }

    /// The frame, of which the queue has dropped the last `lost` bytes: there was no page of device
    /// memory for them.
    #[inline]
    #[must_use]
    pub fn with_lost(self, lost: u32) -> Self {
        Self { lost, ..self }
    }

    /// The bytes in host memory, from the Ethernet header on.
    #[inline]
    #[must_use]
    pub fn head(&self) -> &Frag<M> {
        &self.head
    }

    /// The bytes in device memory, which follow those of the head.
    #[inline]
    #[must_use]
    pub fn payload(&self) -> &DevicePayload {
        &self.payload
    }

    /// Bytes at the end of the frame that the queue has dropped, because there was no page of
    /// device memory for them.
    #[inline]
    #[must_use]
    pub fn lost(&self) -> usize {
        self.lost as usize
    }

    /// Bytes in both, and [lost](Self::lost) ones.
    #[inline]
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "a frame has an Ethernet header")]
    pub fn len(&self) -> usize {
        self.head.len() + self.payload.len() + self.lost()
    }

    /// Head, payload, and offload information. Lost bytes are not among them.
    #[inline]
    #[must_use]
    pub fn into_parts(self) -> (Frag<M>, DevicePayload, Meta) {
        (self.head, self.payload, self.meta)
    }
}

/// A handler of received frames with payload in device memory. A closure with a [`SplitFrame`] as
/// its argument is a handler.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not handle split frames whose heads are in memory of the kind `{M}`",
    note = "a handler is a closure `|frame: SplitFrame<{M}>| ..`, or a type that implements `SplitHandler<{M}>`"
)]
pub trait SplitHandler<M: Memory = PeerShared> {
    /// Receives a frame.
    fn frame(&mut self, frame: SplitFrame<M>);

    /// Called at the end of each receive, in the poll contexts.
    #[inline]
    fn flush(&mut self) {}
}

impl<M: Memory, F: FnMut(SplitFrame<M>)> SplitHandler<M> for F {
    #[inline]
    fn frame(&mut self, frame: SplitFrame<M>) {
        self(frame);
    }
}

/// A frame of a queue that can be restarted with device memory and with host memory.
#[derive(Debug)]
pub enum EitherFrame<M: Memory = PeerShared> {
    /// All of it is in host memory.
    Host(Packet<M>),
    /// Its first bytes are in host memory, the others in device memory.
    Split(SplitFrame<M>),
}

/// A receive queue whose frames have payload in device memory, unless it is restarted with host
/// memory.
pub trait SplitRxQueue: Wait {
    /// The kind of host memory.
    type Mem: Memory;

    /// Runs `f` in the queue's poll contexts, on this thread: pages that are dropped inside return
    /// to the pools' caches. The argument of `f` is a function that appends up to a requested
    /// number of received frames to a list, and returns how many there were.
    fn poll<R>(&mut self, f: impl FnOnce(&mut dyn FnMut(usize, &mut Vec<EitherFrame<Self::Mem>>) -> usize) -> R) -> R;
}

/// Device memory to be sent: the address at which the device reads it, and the value that keeps the
/// memory until then.
#[derive(Debug)]
pub struct DeviceFrag<H> {
    /// The first byte's address in the sending device's DMA domain.
    pub dma: u64,
    /// Bytes, at least one.
    pub len: u32,
    /// A reference on the memory's binding. The thread that completes the frame drops it.
    pub holder: H,
}

/// A transmit queue that can send payload in device memory, which this process cannot read.
pub trait SplitTxQueue<H>: TxQueue {
    /// Queues the frame that consists of `head`'s bytes and then of `payload`'s, at most 17
    /// fragments; the device sees it at the next [flush](TxQueue::flush). The head is in the
    /// device's DMA domain. On success `payload` is empty and keeps its capacity for the next
    /// frame.
    ///
    /// The device must compute a transport checksum over payload: set
    /// [`Checksum::Partial`](crate::Checksum::Partial) in the head's [`meta`](Packet::meta).
    ///
    /// # Errors
    ///
    /// The head; it and `payload` are unchanged. The queue is full or stopped, the device does not
    /// compute checksums, there are too many fragments, or one is not in memory that the device can
    /// reach.
    fn send_split(
        &mut self,
        head: Packet<Self::Mem>,
        payload: &mut Vec<DeviceFrag<H>>,
    ) -> Result<(), Packet<Self::Mem>>;

    /// Whether the queue can accept a frame of `head` and `payload`: now, after completions, or
    /// never. Changes and counts nothing.
    fn sendable_split(&self, head: &Packet<Self::Mem>, payload: &[DeviceFrag<H>]) -> Sendable;
}
