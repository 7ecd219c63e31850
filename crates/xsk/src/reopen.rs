//! A queue that is opened again, after its interface was deleted and made again, for instance: with
//! another socket, on the same pool and the same pages.
//!
//! ```text
//!   XskRx + XskTx ── ClosedQueue::new ──► ClosedQueue ── reopen ──► XskRx + XskTx
//!                                            │    ▲
//!                                            └────┘ NotReopened: why not, and the queue
//! ```
//!
//! | pages | return to their pool |
//! | --- | --- |
//! | of packets that the program has | when the program drops them, at any time |
//! | of frames in the RX ring | when the queue is closed; the frames are counted (`RxStats::unpolled`) |
//! | of chunks that the kernel has to receive into | when a socket is bound to the same queue; at once if the interface is gone |
//! | of frames that are being sent | the same; the frames are counted (`TxStats::unconfirmed`) |
//!
//! No page is in two places: a chunk is posted to the new socket only after its page has come back
//! to the pool, and it comes back once, from one of these places. So no frame is delivered twice:
//! the rings of the closed socket are unmapped, and the accounts of the new one begin empty.

use crate::error::XskError;
use crate::ethtool;
use crate::held;
use crate::left::LeftChunks;
use crate::netlink::Interface;
use crate::open::Target;
use crate::options::QueueOptions;
use crate::queue_key::QueueKey;
use crate::rx::{Counters, Detached, XskRx};
use crate::stats::{RxStats, TxStats};
use crate::sys;
use crate::tx::XskTx;
use crate::umem::Umem;
use crate::umem_memory::UmemMemory;
use netmem_pool::{KernelShared, PagePool, Provider};
use std::fmt;
use std::os::fd::AsFd;
use std::sync::Arc;

/// A queue whose socket is closed, and which can be opened again: after its interface was deleted
/// and made again, after the number of the interface's queues was changed, or to use other options.
///
/// The queue's pool and its counters stay. Packets that the program has stay valid.
///
/// ```no_run
/// use netmem_xsk::{ClosedQueue, Program, QueueOptions, XskRx, XskTx};
/// use std::os::fd::AsFd;
/// use std::time::Duration;
///
/// fn open_again(rx: XskRx, tx: XskTx) -> Result<(XskRx, XskTx, Program), Box<dyn std::error::Error>> {
///     let mut queue = ClosedQueue::new(rx, tx)?;
///     let (rx, tx) = loop {
///         queue = match queue.reopen(QueueOptions::new()) {
///             Ok(queues) => break queues,
///             Err(error) => {
///                 eprintln!("{error}: {}", error.source);
///                 error.queue
///             }
///         };
///         std::thread::sleep(Duration::from_secs(1));
///     };
///     // If the interface was deleted, its program has gone with it.
///     let program = Program::attach(rx.socket().ifindex(), &Default::default())?;
///     program.insert(rx.socket().queue(), rx.socket().as_fd())?;
///     Ok((rx, tx, program))
/// }
/// ```
///
/// If this value is dropped, the queue ends like an [`XskRx`] that is dropped.
#[must_use = "a queue ends when it is dropped"]
pub struct ClosedQueue<M: UmemMemory = KernelShared>(Box<Closed<M>>);

struct Closed<M: UmemMemory> {
    /// `None` when the queue has been opened again.
    parts: Option<(PagePool<M>, LeftChunks<M>, Counters)>,
    provider: Arc<dyn Provider<M>>,
    umem: Umem<M>,
    interface: String,
    ifindex: u32,
    queue: u32,
    key: QueueKey,
    tx: TxStats,
}

/// A queue that was not opened again, and the reason.
#[derive(Debug, thiserror::Error)]
#[error("queue {} of {} was not opened again", queue.queue(), queue.interface())]
pub struct NotReopened<M: UmemMemory = KernelShared> {
    /// The queue, for another attempt.
    pub queue: ClosedQueue<M>,
    /// The reason.
    pub source: XskError,
}

/// A receive queue and a transmit queue that are not the halves of one socket.
#[derive(Debug, thiserror::Error)]
#[error("the receive queue is of {}, and the transmit queue is of another socket: {}", halves.0.socket(), halves.1.socket())]
pub struct MixedHalves<M: UmemMemory = KernelShared> {
    /// The two queues.
    pub halves: Box<(XskRx<M>, XskTx<M>)>,
}

impl<M: UmemMemory> ClosedQueue<M> {
    /// Closes a socket.
    ///
    /// The socket leaves the maps that it was [inserted](crate::Program::insert) into, so that the
    /// kernel gets the frames. Frames that were received and not polled are counted and dropped.
    /// Waits for the frames that are being sent, for a tenth of a second at most, and for an RCU
    /// grace period (milliseconds), so that each frame that was redirected to the socket is
    /// counted.
    ///
    /// # Errors
    ///
    /// [`MixedHalves`] if the two queues are not the halves of one socket. They go on.
    pub fn new(rx: XskRx<M>, tx: XskTx<M>) -> Result<Self, MixedHalves<M>> {
        if !std::ptr::eq(rx.socket(), tx.socket()) {
            return Err(MixedHalves { halves: Box::new((rx, tx)) });
        }
        let (interface, ifindex, queue) = {
            let socket = rx.socket();
            (socket.interface().to_owned(), socket.ifindex(), socket.queue())
        };
        let key = rx.socket().key();
        let Detached { pool, left, counters, provider, umem } = rx.detach();
        let tx = tx.detach();
        let parts = Some((pool, left, counters));
        Ok(Self(Box::new(Closed { parts, provider, umem, interface, ifindex, queue, key, tx })))
    }

    /// Opens the queue again: makes a socket, and binds it to the queue of the same number. The
    /// interface is that of the same index in the network namespace of this thread, or else that of
    /// the same name, which was made anew.
    ///
    /// The memory, the pool and the counters are those of before. Of `options`, those of the pool
    /// (name and cache) have no effect. The socket is in no map:
    /// [insert](crate::Program::insert) it.
    ///
    /// The queue may begin with fewer chunks than the fill level, if the program holds the pages.
    /// It posts them when they come back.
    ///
    /// # Errors
    ///
    /// [`NotReopened`], with the queue for another attempt. Its reason is
    /// [`XskError::NoInterface`] while there is no interface, [`XskError::NoQueue`] if the
    /// interface has fewer queues now, [`XskError::Busy`] if another socket has the queue, or
    /// another error of [`Umem::open`].
    pub fn reopen(mut self, options: QueueOptions) -> Result<(XskRx<M>, XskTx<M>), NotReopened<M>> {
        match self.0.reopen(options) {
            Ok(queues) => Ok(queues),
            Err(source) => Err(NotReopened { queue: self, source }),
        }
    }

    /// The name of the interface that the queue was opened on.
    #[must_use]
    pub fn interface(&self) -> &str {
        &self.0.interface
    }

    /// The number of the queue.
    #[must_use]
    pub fn queue(&self) -> u32 {
        self.0.queue
    }

    /// The number of chunks that the kernel had to receive into, and whose pages return when the
    /// queue is opened again.
    #[must_use]
    pub fn left(&self) -> usize {
        self.0.parts.as_ref().map_or(0, |(_, left, _)| left.count() as usize)
    }

    /// The counters of the receive queue, and of the transmit queue.
    #[must_use]
    pub fn stats(&self) -> (RxStats, TxStats) {
        (self.0.parts.as_ref().map_or_else(RxStats::default, |(_, _, before)| before.stats), self.0.tx)
    }
}

impl<M: UmemMemory> Closed<M> {
    fn reopen(&mut self, mut options: QueueOptions) -> Result<(XskRx<M>, XskTx<M>), XskError> {
        held::release_gone();
        let ifindex = self.find(&options)?;
        let (mut pool, mut left, counters) = self.parts.take().expect("the queue is opened once, which consumes it");
        let opened = Target::find(ifindex, self.queue, &mut options)
            .and_then(|target| self.umem.bind(target, &mut pool, Some(&mut left), options));
        match opened {
            Ok(opened) => {
                let (mut rx, mut tx) = opened.queues(&self.umem, pool, self.provider.clone());
                left.keep(self.umem.number());
                rx.go_on(counters);
                tx.set_counters(self.tx);
                Ok((rx, tx))
            }
            Err(error) => {
                self.parts = Some((pool, left, counters));
                Err(error)
            }
        }
    }

    /// The index of the interface.
    fn find(&self, options: &QueueOptions) -> Result<u32, XskError> {
        let elsewhere = options.socket.as_ref().is_some_and(|socket| !sys::is_of_this_namespace(socket.as_fd()));
        if elsewhere || ethtool::name(self.ifindex).is_some() {
            return Ok(self.ifindex);
        }
        let missing = |_| XskError::NoInterface { interface: self.interface.clone() };
        Interface::by_name(&self.interface).map(|interface| interface.index).map_err(missing)
    }
}

impl<M: UmemMemory> Drop for Closed<M> {
    fn drop(&mut self) {
        let Some((pool, left, _)) = self.parts.take() else { return };
        let (_, pages) = left.quarantine(pool);
        let memory = (&self.provider, self.umem.region());
        if pages.is_empty() {
            return;
        }
        if held::is_gone(self.key) {
            held::release_posted(memory, pages);
        } else {
            held::keep_posted(self.key, self.umem.number(), memory, pages);
        }
    }
}

impl<M: UmemMemory> fmt::Debug for ClosedQueue<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ClosedQueue(queue {} of {}, {} chunks left)", self.queue(), self.interface(), self.left())
    }
}
