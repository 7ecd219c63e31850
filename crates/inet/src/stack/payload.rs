//! The kind of memory of a stack's payload.
//!
//! Why a trait: payload may be in memory of a device, which this process does not map. Headers are
//! always in host memory, so the stack is the same for each kind.

use crate::stack::carrier::HeaderTicket;
use crate::tcp::Carrier;
use netmem_packet::{Meta, Packet, Sum, TxQueue};
use netmem_pool::{Frag, Mapped};
use netmem_refs::{Count, RcuRef};
use std::task::Waker;

/// The kind of memory of a stack's payload. It determines the type of received frames, and of the
/// payload that a connection receives and sends.
///
/// Each kind of host memory implements it, such as `PeerShared` and `Private`: frames are
/// [`Packet`]s, and payload consists of fragments of their pages. The crate `netmem-devmem` has one
/// whose payload is in the memory of a device, which this process does not map.
///
/// In each case, headers are in host memory, and so are all packets that belong to no connection:
/// ARP, ICMP, handshakes, datagrams.
pub trait Payload: Carrier<Ticket = HeaderTicket<<Self as Payload>::Mem>> {
    /// The kind of host memory, for headers and for frames that are completely in host memory.
    type Mem: Mapped;
    /// A frame that was received.
    type Frame: ReceivedFrame<Self::Mem>;
    /// The count of the references of destination entries. It is [`RcuRef`](netmem_refs::RcuRef),
    /// except in benchmarks that compare counts.
    type Count: Count;

    /// The `len` bytes of payload from byte `at` of `frame` on, as pieces in their order. No piece
    /// is empty. If the frame has fewer bytes, the missing ones count as dropped.
    fn received(frame: Self::Frame, at: usize, len: usize) -> impl Iterator<Item = Self::Received>;

    /// A fragment of host memory as payload to be sent.
    fn from_host(frag: Frag<Self::Mem>) -> Self::Sent;

    /// The fragment, if this payload is in host memory.
    fn in_host(sent: &Self::Sent) -> Option<&Frag<Self::Mem>>;
}

/// A frame that was received: its first bytes, or all of them, can be read.
#[allow(clippy::len_without_is_empty, reason = "a frame has headers")]
pub trait ReceivedFrame<M: Mapped>: From<Packet<M>> + Send + 'static {
    /// Bytes.
    fn len(&self) -> usize;

    /// Pages of the receive queue that it holds, to be counted in a budget.
    fn pages(&self) -> u32 {
        1
    }

    /// The device's offload information about it.
    fn meta(&self) -> Meta;

    /// Copies the first bytes out: as many as there are, can be read, and fit. Returns how many.
    fn peek(&self, to: &mut [u8]) -> usize;

    /// The sum of `len` bytes from byte `at` on. `None` if there are fewer, or one of them cannot
    /// be read.
    fn sum(&self, at: usize, len: usize) -> Option<Sum>;

    /// The first `len` bytes of the frame as a packet, if they are in host memory. The bytes after
    /// them are padding.
    fn into_packet(self, len: usize) -> Option<Packet<M>>;
}

/// Payload that a transmit queue of the kind `T` sends.
pub trait Transmit<T: TxQueue<Mem = <Self as Payload>::Mem>>: Payload {
    /// Sends a frame: the bytes of `packet`, then those of `rest`, one chunk or more that are not
    /// in [host memory](Payload::in_host). The checksum is partial: the device completes it.
    ///
    /// # Errors
    ///
    /// [`Unsent`]; nothing is held.
    fn transmit(tx: &mut T, packet: Packet<Self::Mem>, rest: &[Self::Sent]) -> Result<(), Unsent>;

    /// Adds the wakers of users to `wakers` that wait until sent memory can be used again, if it
    /// can.
    fn wake(tx: &mut T, wakers: &mut Vec<Waker>) {
        let _ = (tx, wakers);
    }
}

/// Why a frame was not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unsent {
    /// The queue is full. It has room when the device is done with frames that it has.
    Later,
    /// The queue never accepts it. The connection treats this as if the link had lost the frame.
    Never,
}

impl<M: Mapped> Payload for M {
    type Mem = M;
    type Frame = Packet<M>;
    type Count = RcuRef;

    #[inline]
    fn received(frame: Packet<M>, at: usize, len: usize) -> impl Iterator<Item = Frag<M>> {
        let mut frame = match frame.into_head() {
            // Nearly all frames that were not joined have one fragment.
            Ok(mut head) => {
                head.truncate(at + len);
                let skipped = at.min(head.len());
                head.advance(skipped);
                return Pieces { first: Some(head), rest: None };
            }
            Err(frame) => frame,
        };
        frame.truncate(at + len);
        if frame.pull(at).is_err() {
            return Pieces { first: None, rest: None };
        }
        let (head, rest) = frame.into_fragments();
        Pieces { first: Some(head), rest: Some(rest) }
    }

    #[inline]
    fn from_host(frag: Frag<M>) -> Frag<M> {
        frag
    }

    #[inline]
    fn in_host(sent: &Frag<M>) -> Option<&Frag<M>> {
        Some(sent)
    }
}

/// The pieces of a packet's payload.
struct Pieces<M: Mapped, I> {
    first: Option<Frag<M>>,
    rest: Option<I>,
}

impl<M: Mapped, I: Iterator<Item = Frag<M>>> Iterator for Pieces<M, I> {
    type Item = Frag<M>;

    #[inline]
    fn next(&mut self) -> Option<Frag<M>> {
        match self.first.take() {
            Some(first) if first.len() > 0 => Some(first),
            _ => self.rest.as_mut()?.find(|frag| frag.len() > 0),
        }
    }

    #[inline]
    fn size_hint(&self) -> (usize, Option<usize>) {
        let rest = self.rest.as_ref().map_or(Some(0), |rest| rest.size_hint().1);
        (0, rest.map(|rest| rest + usize::from(self.first.is_some())))
    }
}

impl<M: Mapped> ReceivedFrame<M> for Packet<M> {
    #[inline]
    fn len(&self) -> usize {
        Packet::len(self)
    }

    fn pages(&self) -> u32 {
        self.fragments().count() as u32
    }

    #[inline]
    fn meta(&self) -> Meta {
        self.meta
    }

    #[inline]
    fn peek(&self, to: &mut [u8]) -> usize {
        let n = Packet::len(self).min(to.len());
        if self.copy_to(0, &mut to[..n]).is_ok() { n } else { 0 }
    }

    #[inline]
    fn sum(&self, at: usize, len: usize) -> Option<Sum> {
        Packet::sum(self, at, len).ok()
    }

    #[inline]
    fn into_packet(mut self, len: usize) -> Option<Packet<M>> {
        self.truncate(len);
        Some(self)
    }
}

/// All payload is in host memory, so there is no rest to send.
impl<M: Mapped, T: TxQueue<Mem = M>> Transmit<T> for M {
    fn transmit(_: &mut T, _: Packet<M>, _: &[Frag<M>]) -> Result<(), Unsent> {
        Err(Unsent::Never)
    }
}
