//! The payload of streams in device memory, in the types that the stack handles.
//!
//! The stack is generic in its payload, so that the same TCP serves host memory and device memory.
//! It needs to cut payload, order it and measure it, and never to read it.

use super::range::{InFlight, SendRange};
use super::tx::StreamTx;
use crate::binding::{BindingCount, BindingRef};
use crate::bound_frag::BoundFrag;
use netmem_inet::tcp::{Carrier, Chunk};
use netmem_inet::{HeaderTicket, Payload, ReceivedFrame, Transmit, Unsent};
use netmem_packet::{DeviceFrag, DevicePayload, Meta, Packet, SplitFrame, SplitTxQueue, Sum};
use netmem_pool::{Frag, PeerMemory, PeerShared};
use netmem_refs::{PercpuRef, RcuRef};
use std::fmt;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;
use std::task::Waker;

/// The payload of a stack whose streams are in device memory: an implementation of the trait
/// [`Payload`] of `netmem-inet`.
///
/// `C` is the kind of reference count of the bindings. `M` is the kind of host memory. It contains
/// headers, payload that the device wrote to host memory, and bytes that the user wrote.
pub struct OnDevice<C: BindingCount = PercpuRef, M: PeerMemory = PeerShared>(PhantomData<fn() -> (C, M)>);

impl<C: BindingCount, M: PeerMemory> Carrier for OnDevice<C, M> {
    type Received = ReceivedChunk<C, M>;
    type Sent = SentChunk<C, M>;
    type Ticket = HeaderTicket<M>;
}

/// A chunk of received payload.
pub struct ReceivedChunk<C: BindingCount, M: PeerMemory>(pub(crate) ReceivedIn<C, M>);

/// The memory that a received chunk is in.
pub(crate) enum ReceivedIn<C: BindingCount, M: PeerMemory> {
    /// In the head of its frame, behind the headers.
    Host(Frag<M>),
    /// In a page of a binding.
    Device(BoundFrag<C>),
}

impl<C: BindingCount, M: PeerMemory> Clone for ReceivedChunk<C, M> {
    fn clone(&self) -> Self {
        Self(match &self.0 {
            ReceivedIn::Host(frag) => ReceivedIn::Host(frag.clone()),
            ReceivedIn::Device(bound) => ReceivedIn::Device(bound.clone()),
        })
    }
}

impl<C: BindingCount, M: PeerMemory> Chunk for ReceivedChunk<C, M> {
    type Tail = ();

    #[inline]
    fn len(&self) -> usize {
        match &self.0 {
            ReceivedIn::Host(frag) => frag.len(),
            ReceivedIn::Device(bound) => bound.len() as usize,
        }
    }

    #[inline]
    fn advance(&mut self, n: usize) {
        match &mut self.0 {
            ReceivedIn::Host(frag) => frag.advance(n),
            ReceivedIn::Device(bound) => bound.advance(n),
        }
    }

    #[inline]
    fn truncate(&mut self, len: usize) {
        match &mut self.0 {
            ReceivedIn::Host(frag) => frag.truncate(len),
            ReceivedIn::Device(bound) => bound.truncate(len),
        }
    }
}

impl<C: BindingCount, M: PeerMemory> fmt::Debug for ReceivedChunk<C, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let memory = if matches!(self.0, ReceivedIn::Host(_)) { "host" } else { "device" };
        write!(f, "ReceivedChunk({} bytes in {memory} memory)", Chunk::len(self))
    }
}

/// A chunk of payload to be sent.
pub struct SentChunk<C: BindingCount, M: PeerMemory>(SentIn<C, M>);

/// The memory that a chunk to be sent is in.
enum SentIn<C: BindingCount, M: PeerMemory> {
    Host(Frag<M>),
    /// In device memory: `len` bytes from `offset` in the range's binding.
    Device {
        range: Arc<SendRange<C>>,
        offset: u64,
        len: u32,
    },
}

impl<C: BindingCount, M: PeerMemory> SentChunk<C, M> {
    /// A chunk that is a whole range.
    pub(crate) fn of(range: Arc<SendRange<C>>) -> Self {
        let (offset, len) = (range.offset(), range.len());
        Self(SentIn::Device { range, offset, len })
    }

    /// Cancels a range that was not sent, if this chunk is its only holder.
    pub(crate) fn cancel(self) {
        if let SentIn::Device { range, .. } = self.0
            && let Some(range) = Arc::into_inner(range)
        {
            range.cancel();
        }
    }

    /// Returns the fragment, if the chunk is in host memory.
    pub(crate) fn into_host(self) -> Option<Frag<M>> {
        match self.0 {
            SentIn::Host(frag) => Some(frag),
            SentIn::Device { .. } => None,
        }
    }
}

impl<C: BindingCount, M: PeerMemory> Clone for SentChunk<C, M> {
    fn clone(&self) -> Self {
        Self(match &self.0 {
            SentIn::Host(frag) => SentIn::Host(frag.clone()),
            SentIn::Device { range, offset, len } => {
                SentIn::Device { range: range.clone(), offset: *offset, len: *len }
            }
        })
    }
}

/// In a frame, chunks in host memory precede chunks in device memory.
impl<C: BindingCount, M: PeerMemory> Chunk for SentChunk<C, M> {
    type Tail = ();

    const MIXED: bool = true;

    #[inline]
    fn precedes(&self, next: &Self) -> bool {
        matches!(self.0, SentIn::Host(_)) || matches!(next.0, SentIn::Device { .. })
    }

    #[inline]
    fn len(&self) -> usize {
        match &self.0 {
            SentIn::Host(frag) => frag.len(),
            SentIn::Device { len, .. } => *len as usize,
        }
    }

    #[inline]
    fn advance(&mut self, n: usize) {
        match &mut self.0 {
            SentIn::Host(frag) => frag.advance(n),
            SentIn::Device { offset, len, .. } => {
                *offset += n as u64;
                *len -= n as u32;
            }
        }
    }

    #[inline]
    fn truncate(&mut self, to: usize) {
        match &mut self.0 {
            SentIn::Host(frag) => frag.truncate(to),
            SentIn::Device { len, .. } => *len = (*len).min(to as u32),
        }
    }
}

impl<C: BindingCount, M: PeerMemory> fmt::Debug for SentChunk<C, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            SentIn::Host(frag) => write!(f, "SentChunk({} bytes in host memory)", frag.len()),
            SentIn::Device { offset, len, range } => write!(f, "SentChunk({len} bytes at {offset} of {range:?})"),
        }
    }
}

/// A received frame. Either it is in host memory, or its payload is in pages of a binding, or its
/// payload was dropped because pages were missing.
pub struct DeviceFrame<C: BindingCount, M: PeerMemory>(FrameIn<C, M>);

enum FrameIn<C: BindingCount, M: PeerMemory> {
    Host(Packet<M>),
    /// A frame of `len` bytes, of which the queue has dropped all bytes behind the head. The
    /// acknowledgement in its header is still used.
    Lost {
        head: Frag<M>,
        meta: Meta,
        len: usize,
    },
    /// Invariant: there is at least one fragment, all fragments are in pages of the binding, and
    /// `binding` points to the reference in the binding's provider. A fragment keeps its page, the
    /// page keeps its pool, and the pool keeps the provider.
    Device {
        head: Frag<M>,
        payload: DevicePayload,
        meta: Meta,
        binding: NonNull<BindingRef<C>>,
    },
}

// SAFETY: the fragments are `Send`, and the reference to the binding, which the fragments keep, is,
// too.
unsafe impl<C: BindingCount, M: PeerMemory> Send for DeviceFrame<C, M> {}

impl<C: BindingCount, M: PeerMemory> DeviceFrame<C, M> {
    /// Makes a frame whose payload is in pages of `binding`. If the payload is not in such pages,
    /// returns the frame as the error.
    ///
    /// # Safety
    ///
    /// `binding` must be the reference in its binding's provider. Every pool with pages of the
    /// binding keeps this provider.
    #[inline]
    pub(crate) unsafe fn new(frame: SplitFrame<M>, binding: &BindingRef<C>) -> Result<Self, SplitFrame<M>> {
        let region = binding.region();
        if frame.payload().is_empty() || frame.payload().fragments().any(|frag| region.index_of(frag).is_none()) {
            return Err(frame);
        }
        let (head, payload, meta) = frame.into_parts();
        Ok(Self(FrameIn::Device { head, payload, meta, binding: NonNull::from(binding) }))
    }
}

impl<C: BindingCount, M: PeerMemory> DeviceFrame<C, M> {
    /// Makes a frame that has no payload in device memory.
    pub(crate) fn without(frame: SplitFrame<M>) -> Self {
        let (len, lost) = (frame.len(), frame.lost());
        let (head, _, meta) = frame.into_parts();
        if lost > 0 {
            return Self(FrameIn::Lost { head, meta, len });
        }
        let mut packet = Packet::new(head);
        packet.meta = meta;
        packet.into()
    }
}

impl<C: BindingCount, M: PeerMemory> From<Packet<M>> for DeviceFrame<C, M> {
    #[inline]
    fn from(packet: Packet<M>) -> Self {
        Self(FrameIn::Host(packet))
    }
}

impl<C: BindingCount, M: PeerMemory> ReceivedFrame<M> for DeviceFrame<C, M> {
    #[inline]
    fn len(&self) -> usize {
        match &self.0 {
            FrameIn::Host(packet) => packet.len(),
            FrameIn::Lost { len, .. } => *len,
            FrameIn::Device { head, payload, .. } => head.len() + payload.len(),
        }
    }

    #[inline]
    fn meta(&self) -> Meta {
        match &self.0 {
            FrameIn::Host(packet) => packet.meta,
            FrameIn::Lost { meta, .. } | FrameIn::Device { meta, .. } => *meta,
        }
    }

    #[inline]
    fn peek(&self, to: &mut [u8]) -> usize {
        match &self.0 {
            FrameIn::Host(packet) => ReceivedFrame::peek(packet, to),
            FrameIn::Lost { head, .. } | FrameIn::Device { head, .. } => {
                let n = head.len().min(to.len());
                if head.copy_to(0, &mut to[..n]).is_ok() { n } else { 0 }
            }
        }
    }

    fn sum(&self, at: usize, len: usize) -> Option<Sum> {
        match &self.0 {
            FrameIn::Host(packet) => packet.sum(at, len).ok(),
            // The checksum may still lie within the head: the bytes in device memory may be padding
            // only.
            FrameIn::Lost { head, .. } | FrameIn::Device { head, .. } => Packet::new(head.clone()).sum(at, len).ok(),
        }
    }

    fn into_packet(self, len: usize) -> Option<Packet<M>> {
        let mut packet = match self.0 {
            FrameIn::Host(packet) => packet,
            FrameIn::Lost { head, meta, .. } | FrameIn::Device { head, meta, .. } => {
                let mut packet = Packet::new(head);
                packet.meta = meta;
                Some(packet).filter(|packet| len <= packet.len())?
            }
        };
        packet.truncate(len);
        Some(packet)
    }
}

impl<C: BindingCount, M: PeerMemory> fmt::Debug for DeviceFrame<C, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceFrame({} bytes)", ReceivedFrame::len(self))
    }
}

impl<C: BindingCount, M: PeerMemory> Payload for OnDevice<C, M> {
    type Mem = M;
    type Frame = DeviceFrame<C, M>;
    type Count = RcuRef;

    fn received(frame: DeviceFrame<C, M>, at: usize, len: usize) -> impl Iterator<Item = ReceivedChunk<C, M>> {
        let (host, device) = match frame.0 {
            FrameIn::Host(packet) => (Some(M::received(packet, at, len)), None),
            FrameIn::Lost { head, .. } => {
                let len = len.min(head.len().saturating_sub(at));
                (Some(M::received(Packet::new(head), at, len)), None)
            }
            FrameIn::Device { head, payload, binding, .. } => {
                // SAFETY: the invariant of the frame.
                let pieces = unsafe { pieces(head, payload, binding, at, len) };
                (None, Some(pieces))
            }
        };
        let host = host.into_iter().flatten().map(|frag| ReceivedChunk(ReceivedIn::Host(frag)));
        host.chain(device.into_iter().flatten())
    }

    #[inline]
    fn from_host(frag: Frag<M>) -> SentChunk<C, M> {
        SentChunk(SentIn::Host(frag))
    }

    #[inline]
    fn in_host(sent: &SentChunk<C, M>) -> Option<&Frag<M>> {
        match &sent.0 {
            SentIn::Host(frag) => Some(frag),
            SentIn::Device { .. } => None,
        }
    }
}

/// Cuts out the `len` bytes from byte `at` of a frame on: first the bytes in the head, then the
/// bytes in pages.
///
/// # Safety
///
/// `binding` is the reference in its binding's provider, and all fragments are in pages of that
/// binding.
unsafe fn pieces<C: BindingCount, M: PeerMemory>(
    mut head: Frag<M>,
    payload: DevicePayload,
    binding: NonNull<BindingRef<C>>,
    at: usize,
    len: usize,
) -> impl Iterator<Item = ReceivedChunk<C, M>> {
    // The headers end in the head or at its end, because the parser can read no other bytes of the
    // frame.
    let skip = at.min(head.len());
    let mut beyond = at - skip;
    head.advance(skip);
    head.truncate(len);
    let mut left = len - head.len();
    let linear = Some(head).filter(|head| head.len() > 0).map(|head| ReceivedChunk(ReceivedIn::Host(head)));
    let device = payload.into_iter().map_while(move |mut frag| {
        if left == 0 {
            return None;
        }
        let skip = beyond.min(frag.len());
        beyond -= skip;
        frag.advance(skip);
        let n = frag.len().min(left);
        left -= n;
        // SAFETY: the caller's promise; this fragment keeps the provider.
        let bound = unsafe { BoundFrag::new(frag, binding.as_ref(), n as u32) }?;
        Some(ReceivedChunk(ReceivedIn::Device(bound)))
    });
    linear.into_iter().chain(device.filter(|piece| Chunk::len(piece) > 0))
}

impl<C, M, T> Transmit<StreamTx<T, C>> for OnDevice<C, M>
where
    C: BindingCount,
    M: PeerMemory,
    T: SplitTxQueue<InFlight<C>, Mem = M>,
{
    fn transmit(tx: &mut StreamTx<T, C>, packet: Packet<M>, rest: &[SentChunk<C, M>]) -> Result<(), Unsent> {
        for part in rest {
            // `Chunk::precedes` makes sure that no host memory follows device memory in a frame.
            let SentIn::Device { range, offset, len } = &part.0 else { return tx.refuse() };
            // The address is looked up for each transmission, and not kept.
            let Some(base) = tx.base(range) else { return tx.refuse() };
            tx.payload.push(DeviceFrag { dma: base + offset, len: *len, holder: InFlight::new(range) });
        }
        tx.send(packet)
    }

    fn wake(tx: &mut StreamTx<T, C>, wakers: &mut Vec<Waker>) {
        tx.context.take_wakers(wakers);
    }
}
