//! Frames in two kinds of memory: headers in host memory, payload in device memory that this process does not map.
//!
//! ```text
//!   receive   head: Frag<M>  ■■■■■■■■■■            payload: Option<Frag<Device>>  ■■■■■■■■■■■■■■■■■■■
//!             the first bytes, or the whole frame  the rest, if there is more
//!
//!   send      Packet<M>      ■■■■■■■■■■            [DeviceFrag]  ■■■■■■ ■■■■■■■■■ ■■■
//!             headers, written by the user         by device address; each holds what keeps its memory
//! ```
//!
//! `M` is the kind of host memory: [`PeerShared`], or the memory of a trusted peer.

use crate::device::TxQueue;
use crate::meta::Meta;
use crate::packet::Packet;
use netmem_pool::{Device, Frag, Memory, PeerShared};

/// A received frame whose first bytes are in host memory and whose others, if it has more, are in device memory.
///
/// The queue decides how many bytes go to the head; a frame of at most that length has no payload. The split point is a
/// byte offset: the code that parses the headers decides which of the bytes on either side are headers.
#[derive(Debug)]
pub struct SplitFrame<M: Memory = PeerShared> {
    head: Frag<M>,
    payload: Option<Frag<Device>>,
    /// Offload information. This process cannot checksum device memory: only the device can vouch for the payload.
    pub meta: Meta,
}

impl<M: Memory> SplitFrame<M> {
    /// A frame of two parts.
    #[inline]
    #[must_use]
    pub fn new(head: Frag<M>, payload: Option<Frag<Device>>, meta: Meta) -> Self {
        Self { head, payload, meta }
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
    pub fn payload(&self) -> Option<&Frag<Device>> {
        self.payload.as_ref()
    }

    /// Bytes in both.
    #[inline]
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "a frame has an Ethernet header")]
    pub fn len(&self) -> usize {
        self.head.len() + self.payload.as_ref().map_or(0, Frag::len)
    }

    /// Head, payload, and offload information.
    #[inline]
    #[must_use]
    pub fn into_parts(self) -> (Frag<M>, Option<Frag<Device>>, Meta) {
        (self.head, self.payload, self.meta)
    }
}

/// What happens to received frames with payload in device memory. A closure that takes a [`SplitFrame`] is a handler.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not handle split frames whose heads are in memory of the kind `{M}`",
    note = "a handler is a closure `|frame: SplitFrame<{M}>| ..`, or a type that implements `SplitHandler<{M}>`"
)]
pub trait SplitHandler<M: Memory = PeerShared> {
    /// Takes a frame.
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

/// Device memory to be sent: the address at which the device reads it, and the value that keeps the memory until then.
#[derive(Debug)]
pub struct DeviceFrag<H> {
    /// The first byte's address in the sending device's DMA domain.
    pub dma: u64,
    /// Bytes, at least one.
    pub len: u32,
    /// A reference on the memory's binding. The thread that completes the frame drops it.
    pub holder: H,
}

/// A transmit queue whose device reads payload that this process cannot.
pub trait SplitTxQueue<H>: TxQueue {
    /// Queues the frame that consists of `head`'s bytes and then of `payload`'s, at most 17 fragments; the device sees it at
    /// the next [flush](TxQueue::flush). The head is in the device's DMA domain. On success `payload` is empty and keeps its
    /// capacity for the next frame.
    ///
    /// The device must compute a transport checksum over payload: set [`Checksum::Partial`](crate::Checksum::Partial) in the
    /// head's [`meta`](Packet::meta).
    ///
    /// # Errors
    ///
    /// The head as it was, and then `payload` is, too: the queue is full or stopped, the device does not compute checksums,
    /// there are too many fragments, or one is in no memory that the device was given.
    fn send_split(
        &mut self,
        head: Packet<Self::Mem>,
        payload: &mut Vec<DeviceFrag<H>>,
    ) -> Result<(), Packet<Self::Mem>>;
}
