//! The driver's side of a virtqueue: what was made available, what came back, and when to kick.
//!
//! The one place that knows that the ring is a split one. It trusts nothing that it reads from the ring and reads nothing
//! back that it wrote there: indices, heads and descriptors have private copies.

use super::stats::DeviceFault;
use crate::notify::{Kick, Kicks, Notifier, NotifyError};
use crate::vhost_user::RingAddresses;
use crate::virtqueue::event::full_fence;
use crate::virtqueue::{AVAIL_NO_INTERRUPT, DESC_NEXT, DESC_WRITE, Desc, SplitLayout, SplitRing, USED_NO_NOTIFY};
use netmem_packet::Armed;
use netmem_pool::{PeerShared, Region};
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

pub(crate) struct DriverRing {
    ring: SplitRing,
    /// Heads as written into the available ring, so that one which stays is not written again.
    heads: Box<[u16]>,
    next_avail: u16,
    next_used: u16,
    /// `next_avail` as of the last look at whether the device sleeps.
    notified: u16,
    kick: Notifier,
    call: Kick,
    addresses: RingAddresses,
    offset: usize,
    memory: Arc<Region<PeerShared>>,
    /// The number of the connection whose back end runs it.
    connection: u32,
}

/// The event descriptors of a ring: the one thing that a ring may fail to have when it is made again. The device has the
/// same open files, so `call` is watched and never read.
pub(crate) struct Events {
    kick: Notifier,
    call: Kick,
}

impl Events {
    /// New ones. `kicks` is told when the device signals; without it, the ring is polled only.
    pub(crate) fn new(kicks: Option<&Kicks>) -> Result<Self, NotifyError> {
        let failed = |e: rustix::io::Errno| NotifyError::Io { what: "eventfd", source: e.into() };
        let eventfd = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(failed);
        let (kick, call) = (Notifier::new(eventfd()?)?, eventfd()?);
        let call = match kicks {
            Some(kicks) => kicks.watch(call)?,
            None => Kick::unwatched(call),
        };
        Ok(Self { kick, call })
    }
}

impl DriverRing {
    /// A ring of `size` entries at `offset` of `memory`, which must be zero there, as fresh memory is. `connection` is the number
    /// of the connection whose back end is to run it. `kicks` is told when the device signals.
    ///
    /// # Panics
    ///
    /// If it does not fit there, or `size` is no power of two: the caller laid it out.
    pub(crate) fn new(
        memory: &Arc<Region<PeerShared>>,
        offset: usize,
        size: u16,
        connection: u32,
        kicks: Option<&Kicks>,
    ) -> Result<Self, NotifyError> {
        Ok(Self::at(memory, offset, size, connection, Events::new(kicks)?))
    }

    /// A new ring in the place of this one, which the device has stopped.
    pub(crate) fn again(&self, events: Events) -> Self {
        self.ring.clear();
        Self::at(&self.memory, self.offset, self.size(), self.connection, events)
    }

    fn at(memory: &Arc<Region<PeerShared>>, offset: usize, size: u16, connection: u32, events: Events) -> Self {
        let layout = SplitLayout::new(size);
        assert!(offset.is_multiple_of(SplitLayout::ALIGN) && offset + layout.total <= memory.len());
        let base = memory.as_ptr().wrapping_add(offset);
        let at = base.addr() as u64;
        let addresses =
            RingAddresses { size, desc: at, avail: at + layout.avail as u64, used: at + layout.used as u64 };
        // SAFETY: the block lies in the region, which the value keeps; a region is aligned to a huge page.
        let ring = unsafe { SplitRing::from_layout(base, size) };
        ring.set_avail_flags(AVAIL_NO_INTERRUPT);
        Self {
            ring,
            heads: vec![u16::MAX; usize::from(size)].into(),
            next_avail: 0,
            next_used: 0,
            notified: 0,
            kick: events.kick,
            call: events.call,
            addresses,
            offset,
            memory: memory.clone(),
            connection,
        }
    }

    /// The number of the connection whose back end runs it.
    #[inline]
    pub(crate) fn connection(&self) -> u32 {
        self.connection
    }

    pub(crate) fn kick(&self) -> BorrowedFd<'_> {
        self.kick.as_fd()
    }

    pub(crate) fn call(&self) -> BorrowedFd<'_> {
        self.call.as_fd()
    }

    pub(crate) fn addresses(&self) -> RingAddresses {
        self.addresses
    }

    pub(crate) fn size(&self) -> u16 {
        self.ring.size()
    }

    /// Writes descriptor `id`: `next` chains it to another.
    pub(crate) fn describe(&self, id: u16, addr: u64, len: u32, writable: bool, next: Option<u16>) {
        let flags = if writable { DESC_WRITE } else { 0 } | if next.is_some() { DESC_NEXT } else { 0 };
        self.ring.set_desc(id, Desc { addr, len, flags, next: next.unwrap_or(0) });
    }

    /// Changes where descriptor `id` points; the rest of it stays as it was described.
    #[inline]
    pub(crate) fn point(&self, id: u16, addr: u64) {
        self.ring.set_desc_addr(id, addr);
    }

    /// Adds the chain that begins at `head` to what the device will see at the next [`publish`](Self::publish).
    #[inline]
    pub(crate) fn expose(&mut self, head: u16) {
        self.expose_all(&[head]);
    }

    /// [`expose`](Self::expose), of several.
    #[inline]
    pub(crate) fn expose_all(&mut self, heads: &[u16]) {
        let mut at = self.next_avail;
        for &head in heads {
            let slot = &mut self.heads[usize::from(at & (self.ring.size() - 1))];
            if *slot != head {
                *slot = head;
                self.ring.set_avail_entry(at, head);
            }
            at = at.wrapping_add(1);
        }
        self.next_avail = at;
    }

    /// Lets the device see what was exposed. A device that polls needs no more; [`notify`](Self::notify) wakes one that
    /// sleeps.
    #[inline]
    pub(crate) fn publish(&self) {
        self.ring.set_avail_idx(self.next_avail);
    }

    /// Wakes the device if it sleeps. To be called before a thread waits for what was published. It empties the store
    /// buffer, so it is not called for every batch.
    #[inline]
    pub(crate) fn notify(&mut self) {
        if self.notified == self.next_avail {
            return;
        }
        self.notified = self.next_avail;
        full_fence();
        if self.ring.used_flags() & USED_NO_NOTIFY == 0 {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        self.kick.signal();
    }

    /// Asks the device for a signal when it gives the next chain back, and looks whether it has done so already. Then the
    /// ring is not armed.
    ///
    /// We write our flag, then look at the device's index; the device writes its index, then looks at our flag. Both execute
    /// a full fence in between, so at least one of the two looks sees what the other side wrote before.
    pub(crate) fn arm(&self) -> Armed {
        self.ring.set_avail_flags(0);
        full_fence();
        // A jump of the index is for the next poll to find.
        if self.ring.used_idx() == self.next_used {
            return Armed::Waits;
        }
        self.disarm();
        Armed::Work
    }

    /// Asks the device for no signals: the ring is polled.
    pub(crate) fn disarm(&self) {
        self.ring.set_avail_flags(AVAIL_NO_INTERRUPT);
    }

    /// Chains that the device has given back and that were not consumed yet.
    #[inline]
    pub(crate) fn pending(&self) -> Result<u16, DeviceFault> {
        let by = self.ring.used_idx().wrapping_sub(self.next_used);
        let posted = self.next_avail.wrapping_sub(self.next_used);
        DeviceFault::ahead(by, posted)
    }

    /// The `i`th of them: head and length as the device claims them.
    #[inline]
    pub(crate) fn used(&self, i: u16) -> (u32, u32) {
        self.ring.used_entry(self.next_used.wrapping_add(i))
    }

    /// Is done with the first `n` of them.
    #[inline]
    pub(crate) fn consume(&mut self, n: u16) {
        self.next_used = self.next_used.wrapping_add(n);
    }
}
