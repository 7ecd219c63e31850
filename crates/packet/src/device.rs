//! The traits of a network device: a receive queue that is polled, a transmit queue that is filled, and the handler
//! between them. Batches, no allocation, no indirect call per frame.

use crate::packet::Packet;
use crate::xdp::{Verdict, XdpFrame};
use netmem_pool::{Memory, Napi};

/// What happens to received frames. A closure that takes a [`Packet`] is a handler that passes all of them.
pub trait Handler<M: Memory> {
    /// Whether [`run`](Self::run) wants every frame in one buffer. Frames that cannot be made so are dropped and counted.
    const LINEAR: bool = false;

    /// The XDP program: looks at a frame, may change its head, decides.
    #[inline]
    fn run(&mut self, frame: &mut XdpFrame<M>) -> Verdict {
        let _ = frame;
        Verdict::Pass
    }

    /// Takes a frame that was passed.
    fn pass(&mut self, packet: Packet<M>);

    /// Takes a frame that is to be transmitted. Without a transmit queue it is dropped.
    #[inline]
    fn tx(&mut self, packet: Packet<M>) {
        drop(packet);
    }
}

impl<M: Memory, F: FnMut(Packet<M>)> Handler<M> for F {
    #[inline]
    fn pass(&mut self, packet: Packet<M>) {
        self(packet);
    }
}

/// A receive queue with its page pool.
pub trait RxQueue {
    /// The kind of memory that it delivers.
    type Mem: Memory;
    /// The queue while it is being polled.
    type Poll<'a>: Poll<Mem = Self::Mem>
    where
        Self: 'a;

    /// Runs `f` in the queue's poll context, on this thread. Pages of this queue that are dropped inside, also by transmit
    /// completions, take the fast way home.
    fn poll<R>(&mut self, f: impl FnOnce(&mut Self::Poll<'_>) -> R) -> R;
}

/// The inside of a poll.
pub trait Poll {
    /// The kind of memory that the queue delivers.
    type Mem: Memory;

    /// Receives up to `budget` frames, gives each to `handler`, and posts new buffers. Returns how many frames there were.
    fn receive<H: Handler<Self::Mem>>(&mut self, budget: usize, handler: &mut H) -> usize;

    /// Runs `f` with the pool's poll context, to allocate from it.
    fn with_napi<R>(&mut self, f: impl FnOnce(&mut Napi<'_, Self::Mem>) -> R) -> R;
}

/// A transmit queue.
pub trait TxQueue {
    /// The kind of memory that it sends from.
    type Mem: Memory;

    /// Queues a packet; the device hears of it at the next [`flush`](Self::flush).
    ///
    /// # Errors
    ///
    /// The packet itself if it can't be sent: the queue is full or stopped, or the packet's pages are of another DMA
    /// domain.
    fn send(&mut self, packet: Packet<Self::Mem>) -> Result<(), Packet<Self::Mem>>;

    /// Makes the device see what was queued.
    fn flush(&mut self);

    /// Drops the packets that the device is done with; returns how many. Inside the poll that owns their pool, their
    /// pages take the fast way home.
    fn complete(&mut self) -> usize;
}
