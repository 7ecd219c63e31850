//! The transmit queue of a stack with device streams.
//!
//! A segment names payload by its offset in a binding, and the device needs an address. The address
//! is looked up here, for each transmission, so that the connection keeps no address that a restart
//! of the queue changes.

use super::context::Context;
use super::range::{InFlight, SendRange};
use crate::binding::BindingCount;
use netmem_inet::Unsent;
use netmem_packet::{
    Armed, DeviceFrag, HeaderSlots, MAX_FRAGS, Meta, Packet, Reach, Sendable, SlotFrame, SplitTxQueue, TxQueue, Wait,
};
use netmem_pool::{DmaDomain, Frag};
use netmem_refs::PercpuRef;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// A transmit queue that sends from bindings: `T` is a [`SplitTxQueue`] whose fragments are held by
/// [`InFlight`] values.
///
/// Addresses of device memory are looked up for each transmission. The queue remembers the
/// addresses of the last bindings that were looked up in the DMA domain.
pub struct StreamTx<T, C: BindingCount = PercpuRef> {
    queue: T,
    pub(crate) context: Arc<Context<C>>,
    /// The ids of bindings, and the addresses of their first bytes in the domain. An address does
    /// not change while its binding exists, and an id is used once.
    known: Vec<(u64, u64)>,
    /// The payload of the frame that is being made.
    pub(crate) payload: Vec<DeviceFrag<InFlight<C>>>,
}

/// The number of bindings whose addresses are remembered.
const KNOWN: usize = 16;

impl<T: SplitTxQueue<InFlight<C>>, C: BindingCount> StreamTx<T, C> {
    /// Wraps a queue of a device whose DMA domain is `domain`. For a virtio-net device,
    /// `VirtioNet::domain` returns the domain, and `VirtioTx::into_split` makes such a queue. The
    /// device must compute checksums.
    pub fn new(queue: T, domain: &Arc<dyn DmaDomain>) -> Self {
        let context = Arc::new(Context::new(domain.clone()));
        Self { queue, context, known: Vec::with_capacity(KNOWN), payload: Vec::with_capacity(MAX_FRAGS) }
    }

    /// The queue.
    pub fn queue(&mut self) -> &mut T {
        &mut self.queue
    }

    /// The address of the first byte of a range's binding.
    #[inline]
    pub(crate) fn base(&mut self, range: &SendRange<C>) -> Option<u64> {
        let id = range.binding().id();
        match self.known.iter().find(|(known, _)| *known == id) {
            Some((_, base)) => Some(*base),
            None => self.look_up(range),
        }
    }

    #[cold]
    fn look_up(&mut self, range: &SendRange<C>) -> Option<u64> {
        let base = self.context.map(range.binding()).ok()?;
        if self.known.len() == KNOWN {
            self.known.remove(0);
        }
        self.known.push((range.binding().id(), base));
        Some(base)
    }

    /// Sends a frame that consists of `packet` and the payload that was collected.
    pub(crate) fn send(&mut self, packet: Packet<T::Mem>) -> Result<(), Unsent> {
        let Err(packet) = self.queue.send_split(packet, &mut self.payload) else { return Ok(()) };
        let sendable = self.queue.sendable_split(&packet, &self.payload);
        self.payload.clear();
        Err(if sendable == Sendable::Never { Unsent::Never } else { Unsent::Later })
    }

    /// Discards the frame that is being made, because it can never be sent.
    #[cold]
    pub(crate) fn refuse(&mut self) -> Result<(), Unsent> {
        self.payload.clear();
        Err(Unsent::Never)
    }
}

impl<T: TxQueue, C: BindingCount> TxQueue for StreamTx<T, C> {
    type Mem = T::Mem;

    #[inline]
    fn send(&mut self, packet: Packet<T::Mem>) -> Result<(), Packet<T::Mem>> {
        self.queue.send(packet)
    }

    #[inline]
    fn send_group(&mut self, packets: &mut [Option<Packet<T::Mem>>]) -> usize {
        self.queue.send_group(packets)
    }

    #[inline]
    fn send_held(&mut self, packet: Packet<T::Mem>) -> Result<Frag<T::Mem>, Packet<T::Mem>> {
        self.queue.send_held(packet)
    }

    #[inline]
    fn header_slots(&self) -> Option<&HeaderSlots> {
        self.queue.header_slots()
    }

    #[inline]
    fn send_behind(&mut self, headers: &[u8], payload: Packet<T::Mem>) -> Result<SlotFrame, Packet<T::Mem>> {
        self.queue.send_behind(headers, payload)
    }

    #[inline]
    fn send_copied(&mut self, frame: &[u8], meta: Meta) -> Result<SlotFrame, Sendable> {
        self.queue.send_copied(frame, meta)
    }

    #[inline]
    fn lend_list(&mut self, packet: &mut Packet<T::Mem>) {
        self.queue.lend_list(packet);
    }

    #[inline]
    fn sendable(&self, packet: &Packet<T::Mem>) -> Sendable {
        self.queue.sendable(packet)
    }

    #[inline]
    fn supports(&self, meta: Meta) -> bool {
        self.queue.supports(meta)
    }

    #[inline]
    fn flush(&mut self) {
        self.queue.flush();
    }

    #[inline]
    fn complete(&mut self) -> usize {
        self.queue.complete()
    }

    #[inline]
    fn reach(&self, frag: &Frag<T::Mem>) -> Reach {
        self.queue.reach(frag)
    }
}

impl<T: AsFd, C: BindingCount> AsFd for StreamTx<T, C> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.queue.as_fd()
    }
}

impl<T: Wait, C: BindingCount> Wait for StreamTx<T, C> {
    fn arm(&mut self) -> std::io::Result<Armed> {
        self.queue.arm()
    }

    fn disarm(&mut self) {
        self.queue.disarm();
    }

    fn check(&self) -> std::io::Result<()> {
        self.queue.check()
    }
}

impl<T, C: BindingCount> Drop for StreamTx<T, C> {
    fn drop(&mut self) {
        self.context.end();
    }
}

impl<T: fmt::Debug, C: BindingCount> fmt::Debug for StreamTx<T, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StreamTx({:?})", self.queue)
    }
}
