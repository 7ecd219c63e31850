//! A mailbox: a bounded queue of datagrams between the network side and a socket.
//!
//! A receive queue must not wait for a user, and a slow user must not hold all pages. So a delivery
//! never blocks, and a full mailbox drops.
//!
//! ```text
//!   FlowQueue (one for each receive queue) ──► mailbox ──► Socket::recv
//!   full: dropped and counted               └─► the socket's notifier, if a thread waits
//! ```
//!
//! When a socket closes, it removes the mailbox from the flow table and empties it. A receive queue
//! that had found the mailbox before may push a datagram after that. Such a datagram is dropped
//! with the mailbox, when the critical section of that receive queue has ended.

use super::notifier::{EventFd, Notifier};
use crate::binding::{BindingCount, BindingRef};
use crate::bound_frag::BoundFrag;
use crossbeam_queue::ArrayQueue;
use netmem_packet::{Armed, DevicePayload, MAX_FRAGS};
use netmem_pool::{Device, Frag, PeerShared};
use rustix::io::Errno;
use std::fmt;
use std::iter;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};

/// The part of a datagram that is in device memory: up to 17 fragments, of one binding. One
/// fragment needs no allocation.
pub(crate) struct InDevice<C: BindingCount> {
    pub(crate) first: Option<BoundFrag<C>>,
    /// The fragments behind the first one, the last one first. `None` for a datagram in one page,
    /// which costs that a test. If there are some, there is a first one.
    #[allow(clippy::box_collection, reason = "a vector in place is three words in each datagram of the queue")]
    pub(crate) more: Option<Box<Vec<BoundFrag<C>>>>,
}

impl<C: BindingCount> InDevice<C> {
    /// The first `len` bytes of `payload`, in order. The rest is padding, whose pages are returned.
    /// Returns `None` if a page is of another binding, or if there are fewer bytes. Allocates if
    /// there are several pages.
    ///
    /// # Safety
    ///
    /// As for [`BoundFrag::new`].
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
        let first = unsafe { BoundFrag::new(first, binding, len as u32) }?;
        Some(Self { first: Some(first), more: None })
    }

    /// [`new`](Self::new) for bytes in more than one page.
    ///
    /// # Safety
    ///
    /// As for [`BoundFrag::new`].
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
                all.push(unsafe { BoundFrag::new(frag, binding, here as u32) }?);
            }
        }
        all.reverse();
        (len == 0).then(|| Self { first: all.pop(), more: Some(Box::new(all)) })
    }

    /// Removes the next fragment. The caller restores the invariant of `more`.
    #[inline]
    pub(crate) fn next(&mut self) -> Option<BoundFrag<C>> {
        self.first.take().or_else(|| self.more.as_mut()?.pop())
    }
}

/// A received datagram, or the part of it that was not delivered yet.
pub(crate) struct Datagram<C: BindingCount> {
    pub(crate) peer: SocketAddr,
    pub(crate) verified: bool,
    /// Payload in host memory. It precedes that in device memory.
    pub(crate) linear: Option<Frag<PeerShared>>,
    pub(crate) device: InDevice<C>,
}

/// Counters of a mailbox. They are read one after the other.
#[derive(Debug, Default)]
pub(crate) struct Delivered {
    pub(crate) headers_in_device: AtomicU64,
    pub(crate) unverified: AtomicU64,
    pub(crate) full: AtomicU64,
}

/// The part of a socket that the network side uses.
pub(crate) struct Mailbox<C: BindingCount> {
    queue: ArrayQueue<Datagram<C>>,
    /// Whether the socket accepts datagrams whose checksum the device has not verified.
    unverified: bool,
    /// Wakes the receiver on a delivery, if it waits.
    notifier: Notifier<EventFd>,
    pub(crate) delivered: Delivered,
}

impl<C: BindingCount> Mailbox<C> {
    /// Makes an empty mailbox for `capacity` datagrams.
    ///
    /// # Errors
    ///
    /// The system has no descriptor for the notifier.
    pub(crate) fn new(capacity: usize, unverified: bool) -> Result<Self, Errno> {
        let (queue, notifier) = (ArrayQueue::new(capacity), Notifier::new(EventFd::new()?));
        Ok(Self { queue, unverified, notifier, delivered: Delivered::default() })
    }

    /// Delivers a datagram. The network side calls this, on any thread.
    pub(crate) fn deliver(&self, datagram: Datagram<C>) {
        let Delivered { unverified, full, .. } = &self.delivered;
        if !datagram.verified {
            unverified.fetch_add(1, Ordering::Relaxed);
            if !self.unverified {
                return;
            }
        }
        if self.queue.push(datagram).is_err() {
            full.fetch_add(1, Ordering::Relaxed);
        }
        self.notifier.delivered();
    }

    /// Asks to be woken by the next datagram, if the queue is empty.
    pub(crate) fn arm(&self) -> Armed {
        self.notifier.arm(|| !self.queue.is_empty())
    }

    pub(crate) fn disarm(&self) {
        self.notifier.disarm();
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
        self.notifier.event().as_fd()
    }
}

impl<C: BindingCount> fmt::Debug for Mailbox<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mailbox").field("len", &self.len()).field("delivered", &self.delivered).finish_non_exhaustive()
    }
}
