//! Datagrams between the network side and a socket: a bounded queue.
//!
//! ```text
//!   FlowQueue (one for each receive queue) ──► mailbox ──► Socket::recv
//!   full: dropped and counted               └─► the socket's bell, if a thread waits
//! ```
//!
//! A socket that closes takes the mailbox out of the flow table and empties it. Who had found it before may put something in
//! after that; it goes with the mailbox, when the critical section in which that was found has ended.

use crate::bell::{Bell, EventFd};
use crate::{BindingCount, BindingRef};
use crossbeam_queue::ArrayQueue;
use netmem_packet::Armed;
use netmem_pool::{Device, Frag, PeerShared};
use rustix::io::Errno;
use std::fmt;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// Payload in device memory.
///
/// Invariant: `binding` is the reference in the provider whose page `frag` is in. The fragment keeps its page, the page
/// its pool, and the pool the provider; so it is there as long as the fragment, and no count says so.
pub(crate) struct Payload<C: BindingCount> {
    frag: Frag<Device>,
    binding: NonNull<BindingRef<C>>,
    /// Bytes: the fragment may have more, which are padding.
    len: u32,
    /// The page's number: who receives need not look at the page's descriptor, which the network's CPU changed last.
    index: u32,
}

// SAFETY: what a fragment and a reference to a binding are.
unsafe impl<C: BindingCount> Send for Payload<C> {}
// SAFETY: as above.
unsafe impl<C: BindingCount> Sync for Payload<C> {}

impl<C: BindingCount> Payload<C> {
    /// The first `len` bytes of `frag`. `None`: that is in another binding's page.
    ///
    /// # Safety
    ///
    /// `binding` is the reference in its binding's provider, which every pool with pages of the binding keeps.
    #[inline]
    pub(crate) unsafe fn new(frag: Frag<Device>, binding: &BindingRef<C>, len: u32) -> Option<Self> {
        let index = binding.region().index_of(&frag)?;
        Some(Self { frag, binding: NonNull::from(binding), len, index })
    }

    /// The binding that the payload is in, as long as that is here.
    #[inline]
    pub(crate) fn binding(&self) -> &BindingRef<C> {
        // SAFETY: the invariant.
        unsafe { self.binding.as_ref() }
    }

    /// The page's number.
    #[inline]
    pub(crate) fn index(&self) -> u32 {
        self.index
    }

    /// Where it begins in the binding.
    #[inline]
    pub(crate) fn offset(&self) -> u64 {
        let page = u64::from(self.index) * self.binding().region().page_size() as u64;
        page + self.frag.offset() as u64
    }

    /// Bytes.
    #[inline]
    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// Keeps the page's count, and nothing else.
    #[inline]
    pub(crate) fn into_count(self) {
        let _ = self.frag.into_count();
    }
}

/// A datagram that was received, or what is left of one.
pub(crate) struct Datagram<C: BindingCount> {
    pub(crate) peer: SocketAddr,
    pub(crate) vouched: bool,
    /// Payload that landed in host memory: so many bytes of it, from so many on.
    pub(crate) linear: Option<(Frag<PeerShared>, usize, usize)>,
    pub(crate) payload: Option<Payload<C>>,
}

/// What has become of what was delivered. Numbers of different moments.
#[derive(Debug, Default)]
pub(crate) struct Delivered {
    pub(crate) headers_in_device: AtomicU64,
    pub(crate) unvouched: AtomicU64,
    pub(crate) full: AtomicU64,
}

/// A socket as the network side sees it.
pub(crate) struct Mailbox<C: BindingCount> {
    queue: ArrayQueue<Datagram<C>>,
    /// Whether datagrams are wanted whose checksum is not vouched for.
    unvouched: bool,
    /// Rung for each datagram, if the socket waits.
    bell: Bell<EventFd>,
    pub(crate) delivered: Delivered,
}

impl<C: BindingCount> Mailbox<C> {
    /// # Errors
    ///
    /// There is no descriptor for it.
    pub(crate) fn new(capacity: usize, unvouched: bool) -> Result<Self, Errno> {
        let (queue, bell) = (ArrayQueue::new(capacity), Bell::new(EventFd::new()?));
        Ok(Self { queue, unvouched, bell, delivered: Delivered::default() })
    }

    /// For the network side, on any thread.
    pub(crate) fn deliver(&self, datagram: Datagram<C>) {
        let Delivered { unvouched, full, .. } = &self.delivered;
        if !datagram.vouched {
            unvouched.fetch_add(1, Ordering::Relaxed);
            if !self.unvouched {
                return;
            }
        }
        if self.queue.push(datagram).is_err() {
            full.fetch_add(1, Ordering::Relaxed);
        }
        self.bell.delivered();
    }

    /// Asks to be woken by the next datagram, if none is here.
    pub(crate) fn arm(&self) -> Armed {
        self.bell.arm(|| !self.queue.is_empty())
    }

    pub(crate) fn disarm(&self) {
        self.bell.disarm();
    }

    pub(crate) fn pop(&self) -> Option<Datagram<C>> {
        self.queue.pop()
    }

    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Gives back all that is here.
    pub(crate) fn empty(&self) {
        while self.pop().is_some() {}
    }
}

impl<C: BindingCount> AsFd for Mailbox<C> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.event().as_fd()
    }
}

impl<C: BindingCount> fmt::Debug for Mailbox<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mailbox").field("len", &self.len()).field("delivered", &self.delivered).finish_non_exhaustive()
    }
}
