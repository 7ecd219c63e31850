//! The receive queue of a stack, and its batches of frames.
//!
//! Why not `RxQueue` alone: frames whose payload is in memory of a device are of another type, and
//! frames in host memory are merged before the stack processes them.

use crate::stack::payload::Payload;
use netmem_packet::{Gro, Handler, Packet, Poll, RxQueue, Wait};
use netmem_pool::Mapped;

/// A receive queue, as a stack polls it. Each [`RxQueue`] is one: its frames are in host memory,
/// and consecutive segments are merged ([`Gro`]).
pub trait Source: Wait {
    /// The kind of memory of the payload of its frames.
    type Payload: Payload;
    /// A batch, into which frames are received.
    type Batch;

    /// A batch, for about so many frames.
    fn batch(capacity: usize) -> Self::Batch;

    /// Whether the queue was short of buffers when the batch was received: payload is dropped then,
    /// and headers are processed, so that the pages of the batch are posted again. See
    /// [`netmem_packet::Poll::is_short`].
    fn is_short(batch: &Self::Batch) -> bool {
        let _ = batch;
        false
    }

    /// The frames of a batch, in order.
    fn frames(batch: &mut Self::Batch) -> &mut Vec<<Self::Payload as Payload>::Frame>;

    /// Runs `f` in the queue's poll context, on this thread: pages that are dropped inside return
    /// to the pool's cache. The argument of `f` is a function that receives up to so many frames
    /// into a batch, and returns how many frames there were.
    fn poll<R>(&mut self, f: impl FnOnce(&mut dyn FnMut(usize, &mut Self::Batch) -> usize) -> R) -> R;
}

/// The frames of a poll in host memory.
#[derive(Debug)]
pub struct Packets<M: Mapped>(Vec<Packet<M>>);

/// Frames in host memory, as they are merged.
#[derive(Debug)]
pub struct Merged<M: Mapped> {
    gro: Gro<Packets<M>, M>,
    short: bool,
}

impl<M: Mapped> Handler<M> for Packets<M> {
    #[inline]
    fn pass(&mut self, packet: Packet<M>) {
        self.0.push(packet);
    }
}

impl<R: RxQueue<Mem: Mapped> + Wait> Source for R {
    type Payload = R::Mem;
    type Batch = Merged<R::Mem>;

    fn batch(capacity: usize) -> Self::Batch {
        Merged { gro: Gro::new(Packets(Vec::with_capacity(capacity))), short: false }
    }

    #[inline]
    fn is_short(batch: &Self::Batch) -> bool {
        batch.short
    }

    #[inline]
    fn frames(batch: &mut Self::Batch) -> &mut Vec<Packet<R::Mem>> {
        &mut batch.gro.inner().0
    }

    fn poll<O>(&mut self, f: impl FnOnce(&mut dyn FnMut(usize, &mut Self::Batch) -> usize) -> O) -> O {
        RxQueue::poll(self, |poll| {
            f(&mut |budget, batch: &mut Self::Batch| {
                let received = poll.receive(budget, &mut batch.gro);
                batch.short = poll.is_short();
                received
            })
        })
    }
}
