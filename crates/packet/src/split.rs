//! Frames in two kinds of memory: headers where they can be read, payload where nobody here can.
//!
//! ```text
//!   receive   head: Frag<PeerShared>  ■■■■■■■■■■   payload: Option<Frag<Device>>  ■■■■■■■■■■■■■■■■■■■
//!             the first bytes, or the whole frame  the rest, if there is more
//!
//!   send      Packet<PeerShared>      ■■■■■■■■■■   [DeviceFrag]  ■■■■■■ ■■■■■■■■■ ■■■
//!             headers, written by the user         by device address; each holds what keeps its memory
//! ```

use crate::device::TxQueue;
use crate::meta::Meta;
use crate::packet::Packet;
use netmem_pool::{Device, Frag, PeerShared};

/// A received frame whose first bytes are in host memory and whose others, if it has more, are in device memory.
///
/// How many bytes are "first" is the queue's to say; a frame that is no longer has no payload. What of the payload is in
/// the head, and what of the headers in the payload, is for whoever parses the headers.
#[derive(Debug)]
pub struct SplitFrame {
    head: Frag<PeerShared>,
    payload: Option<Frag<Device>>,
    /// Offload information. Nobody here can sum what nobody can read: if the device vouches for nothing, nobody does.
    pub meta: Meta,
}

impl SplitFrame {
    /// A frame of two parts.
    #[inline]
    #[must_use]
    pub fn new(head: Frag<PeerShared>, payload: Option<Frag<Device>>, meta: Meta) -> Self {
        Self { head, payload, meta }
    }

    /// The bytes in host memory, from the Ethernet header on.
    #[inline]
    #[must_use]
    pub fn head(&self) -> &Frag<PeerShared> {
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
    pub fn into_parts(self) -> (Frag<PeerShared>, Option<Frag<Device>>, Meta) {
        (self.head, self.payload, self.meta)
    }
}

/// What happens to received frames. A closure that takes a [`SplitFrame`] is a handler.
pub trait SplitHandler {
    /// Takes a frame.
    fn frame(&mut self, frame: SplitFrame);

    /// No more frames for now: the end of each receive, in the poll contexts.
    #[inline]
    fn flush(&mut self) {}
}

impl<F: FnMut(SplitFrame)> SplitHandler for F {
    #[inline]
    fn frame(&mut self, frame: SplitFrame) {
        self(frame);
    }
}

/// Device memory to be sent: what a device reads at `dma`, and what keeps it until then.
#[derive(Debug)]
pub struct DeviceFrag<H> {
    /// The first byte's address in the sending device's DMA domain.
    pub dma: u64,
    /// Bytes, at least one.
    pub len: u32,
    /// Dropped when the device is done with the frame, by whoever completes it: a reference on the memory's binding.
    pub holder: H,
}

/// A transmit queue whose device reads payload that this process cannot.
pub trait SplitTxQueue<H>: TxQueue<Mem = PeerShared> {
    /// Queues the frame that consists of `head`'s bytes and then of `payload`'s, at most 17 fragments; the device hears of it at
    /// the next [flush](TxQueue::flush). The head is in the device's DMA domain. On success `payload` is empty, with its room kept for the next frame.
    ///
    /// A transport checksum over payload is the device's to compute: say so in the head's
    /// [`meta`](Packet::meta) ([`Checksum::Partial`](crate::Checksum::Partial)).
    ///
    /// # Errors
    ///
    /// The head as it was, and then `payload` is, too: the queue is full or stopped, the device does not compute checksums,
    /// there are too many fragments, or one is in no memory that the device was given.
    fn send_split(
        &mut self,
        head: Packet<PeerShared>,
        payload: &mut Vec<DeviceFrag<H>>,
    ) -> Result<(), Packet<PeerShared>>;
}
