//! The traits of a network device: a receive queue that is polled, a transmit queue that is filled, and the handler
//! between them. Batches, no allocation, no indirect call per frame.

use crate::packet::Packet;
use crate::xdp::{Verdict, XdpFrame};
use netmem_pool::{Frag, Memory, Napi};

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

    /// Takes a frame that is to leave by another device: which one is what [`run`](Self::run) has noted. Without a queue
    /// of one, see [`TxBulk`](crate::TxBulk), it is dropped.
    #[inline]
    fn redirect(&mut self, packet: Packet<M>) {
        drop(packet);
    }

    /// No more frames for now: the end of each [`receive`](Poll::receive), in the poll context. The place to flush what
    /// was gathered for transmit queues.
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
    /// A packet of another DMA domain is mapped for this device until the device is done with it.
    ///
    /// # Errors
    ///
    /// The packet itself, as it was, if it can't be sent: the queue is full or stopped, or the device cannot reach the
    /// packet's pages.
    fn send(&mut self, packet: Packet<Self::Mem>) -> Result<(), Packet<Self::Mem>>;

    /// Makes the device see what was queued.
    fn flush(&mut self);

    /// Drops the packets that the device is done with; returns how many. Inside the poll that owns their pool, their
    /// pages take the fast way home.
    fn complete(&mut self) -> usize;

    /// Whether `frag` is of this device's DMA domain, and with which address. Two comparisons; maps nothing.
    fn reach(&self, frag: &Frag<Self::Mem>) -> Reach;
}

/// A queue that is lent is a queue.
impl<T: TxQueue + ?Sized> TxQueue for &mut T {
    type Mem = T::Mem;

    #[inline]
    fn send(&mut self, packet: Packet<Self::Mem>) -> Result<(), Packet<Self::Mem>> {
        (**self).send(packet)
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

/// How a device reaches a fragment: "same domain?", answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Same domain: the device knows the first byte by this address. Sending syncs, and maps nothing.
    Mapped(u64),
    /// Another domain, or none any more: sending maps the fragment for this device, and refuses it if the domain cannot.
    Map,
    /// The device can't be made to reach it: sending refuses it.
    Never,
}
