//! A mailbox: a bounded queue of datagrams between the network side and a socket.
//!
//! ```text
//!   FlowQueue (one for each receive queue) ──► mailbox ──► Socket::recv
//!   full: dropped and counted               └─► the socket's bell, if a thread waits
//! ```
//!
//! When a socket closes, it takes the mailbox out of the flow table and empties it. A receive queue
//! that had found the mailbox before may push a datagram after that. Such a datagram is dropped
//! with the mailbox, when the critical section of that receive queue has ended.

use crate::bell::{Bell, EventFd};
use crate::{BindingCount, BindingRef};
use crossbeam_queue::ArrayQueue;
use netmem_packet::{Armed, DevicePayload, MAX_FRAGS};
use netmem_pool::{Device, Frag, PeerShared};
use rustix::io::Errno;
use std::fmt;
use std::iter;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// Payload in device memory.
///
/// Invariant: `binding` points to the reference in the provider to which the page of `frag`
/// belongs. The fragment keeps its page, the page keeps its pool, and the pool keeps the provider.
/// So the reference exists as long as the fragment, without a count.
pub(crate) struct Payload<C: BindingCount> {
    frag: Frag<Device>,
    binding: NonNull<BindingRef<C>>,
    /// Bytes of payload. The fragment may be longer; the rest is padding.
    len: u32,
    /// The page's index. It is stored here so that the receiver does not read the page's
    /// descriptor, which the CPU of the network side wrote last.
    index: u32,
}

// SAFETY: a fragment and a reference to a binding are both `Send` and `Sync`.
unsafe impl<C: BindingCount> Send for Payload<C> {}
// SAFETY: as above.
unsafe impl<C: BindingCount> Sync for Payload<C> {}

impl<C: BindingCount> Payload<C> {
    /// The first `len` bytes of `frag`. Returns `None` if `frag` is in a page of another binding.
    ///
    /// # Safety
    ///
    /// `binding` must be the reference in its binding's provider. Every pool with pages of the
    /// binding keeps this provider.
    #[inline]
    pub(crate) unsafe fn new(frag: Frag<Device>, binding: &BindingRef<C>, len: u32) -> Option<Self> {
        let index = binding.region().index_of(&frag)?;
        Some(Self { frag, binding: NonNull::from(binding), len, index })
    }

    /// The binding in which the payload is. The reference is valid as long as this value exists.
    #[inline]
    pub(crate) fn binding(&self) -> &BindingRef<C> {
        // SAFETY: the invariant.
        unsafe { self.binding.as_ref() }
    }

    /// The page's index in the binding.
    #[inline]
    pub(crate) fn index(&self) -> u32 {
        self.index
    }

    /// The offset in the binding of the first byte.
    #[inline]
    pub(crate) fn offset(&self) -> u64 {
        let page = u64::from(self.index) * self.binding().region().page_size() as u64;
        page + self.frag.offset() as u64
    }

    /// The length in bytes.
    #[inline]
    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// Drops the first `n` bytes. The payload must have at least `n` bytes.
    #[inline]
    pub(crate) fn advance(&mut self, n: usize) {
        self.frag.advance(n);
        self.len -= n as u32;
    }

    /// Drops all but the first `len` bytes.
    #[inline]
    pub(crate) fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len as u32);
    }

    /// Drops this value but keeps the fragment's count of its page. The caller then owns this
    /// count.
    #[inline]
    pub(crate) fn into_count(self) {
        let _ = self.frag.into_count();
    }
}

/// A clone refers to the same bytes, and has a count of its own.
impl<C: BindingCount> Clone for Payload<C> {
    fn clone(&self) -> Self {
        Self { frag: self.frag.clone(), ..*self }
    }
}

/// The part of a datagram that is in device memory: up to 17 fragments, of one binding. One
/// fragment needs no allocation.
pub(crate) struct InDevice<C: BindingCount> {
    pub(crate) first: Option<Payload<C>>,
    /// The fragments behind the first one, the last one first. `None` for a datagram in one page,
    /// which costs that a test. If there are some, there is a first one.
    #[allow(clippy::box_collection, reason = "a vector in place is three words in each datagram of the queue")]
    pub(crate) more: Option<Box<Vec<Payload<C>>>>,
}

impl<C: BindingCount> InDevice<C> {
    /// The first `len` bytes of `payload`, in order. The rest is padding, whose pages are returned.
    /// Returns `None` if a page is of another binding, or if there are fewer bytes. Allocates if
    /// there are several pages.
    ///
    /// # Safety
    ///
    /// As for [`Payload::new`].
    #[inline]
    pub(crate) unsafe fn new(mut payload: DevicePayload, binding: &BindingRef<C>, len: usize) -> Option<Self> {
        if len == 0 {
            return Some(Self { first: None, more: None });
        }
        let first = payload.pop_front()?;
        if first.len() < len {
            // SAFETY: the caller's.
            return unsafe { Self::several(first, payload, binding, len) };
        }
        // SAFETY: the caller's.
        let first = unsafe { Payload::new(first, binding, len as u32) }?;
        Some(Self { first: Some(first), more: None })
    }

    /// [`new`](Self::new) for bytes in more than one page.
    ///
    /// # Safety
    ///
    /// As for [`Payload::new`].
    #[cold]
    unsafe fn several(
        first: Frag<Device>,
        rest: DevicePayload,
        binding: &BindingRef<C>,
        mut len: usize,
    ) -> Option<Self> {
        let mut all = Vec::with_capacity(MAX_FRAGS);
        for frag in iter::once(first).chain(rest) {
            let here = frag.len().min(len);
            if here > 0 {
                len -= here;
                // SAFETY: the caller's.
                all.push(unsafe { Payload::new(frag, binding, here as u32) }?);
            }
        }
        all.reverse();
        (len == 0).then(|| Self { first: all.pop(), more: Some(Box::new(all)) })
    }

    /// Takes the next fragment. The caller restores the invariant of `more`.
    #[inline]
    pub(crate) fn next(&mut self) -> Option<Payload<C>> {
        self.first.take().or_else(|| self.more.as_mut()?.pop())
    }
}

/// A received datagram, or the part of it that was not delivered yet.
pub(crate) struct Datagram<C: BindingCount> {
    pub(crate) peer: SocketAddr,
    pub(crate) vouched: bool,
    /// Payload in host memory. It comes before that in device memory.
    pub(crate) linear: Option<Frag<PeerShared>>,
    pub(crate) device: InDevice<C>,
}

/// Counters of a mailbox. They are read one after the other.
#[derive(Debug, Default)]
pub(crate) struct Delivered {
    pub(crate) headers_in_device: AtomicU64,
    pub(crate) unvouched: AtomicU64,
    pub(crate) full: AtomicU64,
}

/// The part of a socket that the network side uses.
pub(crate) struct Mailbox<C: BindingCount> {
    queue: ArrayQueue<Datagram<C>>,
    /// Whether the socket accepts datagrams whose checksum the device has not verified.
    unvouched: bool,
    /// The bell that a delivery rings if the socket waits.
    bell: Bell<EventFd>,
    pub(crate) delivered: Delivered,
}

impl<C: BindingCount> Mailbox<C> {
    /// Makes an empty mailbox for `capacity` datagrams.
    ///
    /// # Errors
    ///
    /// The system has no descriptor for the bell.
    pub(crate) fn new(capacity: usize, unvouched: bool) -> Result<Self, Errno> {
        let (queue, bell) = (ArrayQueue::new(capacity), Bell::new(EventFd::new()?));
        Ok(Self { queue, unvouched, bell, delivered: Delivered::default() })
    }

    /// Delivers a datagram. The network side calls this, on any thread.
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

    /// Asks to be woken by the next datagram, if the queue is empty.
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

    /// Drops all datagrams in the queue, so that their pages are returned to their pools.
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
