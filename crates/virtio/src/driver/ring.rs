//! The ring of a queue as the back end knows it: its place in memory, its event descriptors, and
//! the connection that it belongs to. What is in the ring is the [queue](crate::virtqueue)'s.

use crate::notify::{Kick, Kicks, Notifier, NotifyError};
use crate::vhost_user::RingAddresses;
use crate::virtqueue::driver::{AnyDriverQueue, AnyRing, AnyShapedQueue, RingEnd, Tables};
use crate::virtqueue::{Negotiated, PackedLayout, PackedRing, Position, SplitLayout, SplitRing};
use netmem_packet::Armed;
use netmem_pool::{PeerShared, Region};
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// The event descriptors of a ring: the only part that can fail when a ring is made again. The
/// device has the same open files, so `call` is watched and never read.
pub(crate) struct Events {
    kick: Notifier,
    call: Kick,
}

impl Events {
    /// Makes new ones. `kicks` becomes readable when the device signals; without it, the ring is
    /// only polled.
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

/// Where a ring lies in its memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RingPlacement {
    /// Where the ring begins, in bytes.
    pub(crate) offset: usize,
    /// Entries.
    pub(crate) size: u16,
    /// Where its tables of descriptors begin and how the device knows that address, if it has
    /// tables.
    pub(crate) tables: Option<(usize, u64)>,
}

impl RingPlacement {
    /// What a ring is aligned to.
    pub(crate) const ALIGN: usize =
        if SplitLayout::ALIGN > PackedLayout::ALIGN { SplitLayout::ALIGN } else { PackedLayout::ALIGN };

    /// Bytes of a ring of `size` entries.
    pub(crate) fn bytes(negotiated: Negotiated, size: u16) -> usize {
        let total = if negotiated.packed() { PackedLayout::new(size).total } else { SplitLayout::new(size).total };
        total.next_multiple_of(Self::ALIGN)
    }
}

/// See the module.
pub(crate) struct RingHandle {
    events: Events,
    placement: RingPlacement,
    negotiated: Negotiated,
    memory: Arc<Region<PeerShared>>,
    /// The number of the connection whose back end runs it.
    connection: u32,
    /// Whether the back end is asked to split frames behind their headers.
    splits: bool,
}

impl RingHandle {
    /// Descriptors in a table: as many as the longest packet with payload from device memory has,
    /// and one for a header.
    pub(crate) const PER_TABLE: u16 = 2 * netmem_packet::MAX_FRAGS as u16 + 2;

    /// A ring at `place` of `memory`, which must be zero there, as fresh memory is. `connection` is
    /// the number of the connection whose back end is to run it. `kicks` becomes readable when the
    /// device signals.
    ///
    /// # Panics
    ///
    /// If it does not fit there, or its size is no power of two. The caller has computed the
    /// layout.
    pub(crate) fn new(
        memory: &Arc<Region<PeerShared>>,
        placement: RingPlacement,
        negotiated: Negotiated,
        connection: u32,
        kicks: Option<&Kicks>,
    ) -> Result<Self, NotifyError> {
        assert!(placement.size.is_power_of_two() && placement.offset.is_multiple_of(RingPlacement::ALIGN));
        assert!(placement.offset + RingPlacement::bytes(negotiated, placement.size) <= memory.len());
        if let Some((offset, _)) = placement.tables {
            let bytes = usize::from(placement.size) * usize::from(Self::PER_TABLE) * Tables::ENTRY;
            assert!(offset.is_multiple_of(Tables::ENTRY) && offset + bytes <= memory.len());
        }
        Ok(Self {
            events: Events::new(kicks)?,
            placement,
            negotiated,
            memory: memory.clone(),
            connection,
            splits: false,
        })
    }

    /// The ring, with `splits` for [`splits`](Self::splits).
    pub(crate) fn with_splits(self, splits: bool) -> Self {
        Self { splits, ..self }
    }

    /// Whether the back end puts the headers of each frame into the first segment of a buffer, and
    /// what follows them into the others. If not, it fills the segments in order.
    pub(crate) fn splits(&self) -> bool {
        self.splits
    }

    /// A new ring in the place of this one, which the device has stopped.
    pub(crate) fn again(&self, events: Events) -> Self {
        match self.words() {
            AnyRing::Split(ring) => ring.clear(),
            AnyRing::Packed(ring) => ring.clear(),
        }
        Self { events, memory: self.memory.clone(), splits: false, ..*self }
    }

    fn base(&self) -> *mut u8 {
        self.memory.as_ptr().wrapping_add(self.placement.offset)
    }

    /// The ring's words. They are valid for as long as this handle is there.
    fn words(&self) -> AnyRing {
        // SAFETY: `new` has checked that the block lies in the region, which the handle keeps, and
        // its alignment in the region; a region is aligned to a page at least.
        unsafe {
            match self.negotiated.packed() {
                true => AnyRing::Packed(PackedRing::from_layout(self.base(), self.placement.size)),
                false => AnyRing::Split(SplitRing::from_layout(self.base(), self.placement.size)),
            }
        }
    }

    /// The ring's tables, valid as [`words`](Self::words).
    fn tables(&self) -> Option<Tables> {
        let (offset, addr) = self.placement.tables?;
        // SAFETY: `new` has checked that they lie in the region, which the handle keeps, and their
        // alignment.
        Some(unsafe { Tables::new(self.memory.as_ptr().wrapping_add(offset), addr, Self::PER_TABLE) })
    }

    /// The number of the connection whose back end runs it.
    #[inline]
    pub(crate) fn connection(&self) -> u32 {
        self.connection
    }

    pub(crate) fn kick(&self) -> BorrowedFd<'_> {
        self.events.kick.as_fd()
    }

    pub(crate) fn call(&self) -> BorrowedFd<'_> {
        self.events.call.as_fd()
    }

    /// The parameters of the ring for the back end.
    pub(crate) fn addresses(&self) -> RingAddresses {
        let (at, size) = (self.base().addr() as u64, self.placement.size);
        if self.negotiated.packed() {
            let layout = PackedLayout::new(size);
            let start = u32::from(Position::START.bits());
            let (avail, used) = (at + layout.driver as u64, at + layout.device as u64);
            // The positions of the driver and of the device.
            RingAddresses { size, desc: at, avail, used, base: start | start << 16, splits: self.splits }
        } else {
            let layout = SplitLayout::new(size);
            let (avail, used) = (at + layout.avail as u64, at + layout.used as u64);
            RingAddresses { size, desc: at, avail, used, base: 0, splits: self.splits }
        }
    }

    #[cold]
    fn wake(&self) {
        self.events.kick.signal();
    }
}

/// A queue with its ring.
pub(crate) struct RingQueue<Q> {
    pub(crate) queue: Q,
    /// Keeps the memory of the ring.
    handle: RingHandle,
}

impl<B: Default> RingQueue<AnyShapedQueue<B>> {
    /// A queue whose buffers all consist of writable segments of these lengths, described in tables
    /// if `tables` is set and the ring has tables.
    pub(crate) fn shaped(handle: RingHandle, lens: &[u32], tables: bool) -> Self {
        let tables = handle.tables().filter(|_| tables);
        Self { queue: AnyShapedQueue::new(handle.words(), handle.negotiated, lens, tables), handle }
    }
}

impl<B: Default> RingQueue<AnyDriverQueue<B>> {
    /// A queue whose buffers each have their own segments.
    pub(crate) fn new(handle: RingHandle) -> Self {
        Self { queue: AnyDriverQueue::new(handle.words(), handle.negotiated, handle.tables()), handle }
    }
}

impl<Q: RingEnd<Words = AnyRing>> RingQueue<Q> {
    /// Switches to another ring, in which no buffer is posted. Buffers stay in their slots.
    pub(crate) fn replace(&mut self, handle: RingHandle) {
        self.queue.replace(handle.words(), handle.tables());
        self.handle = handle;
    }

    #[inline]
    pub(crate) fn handle(&self) -> &RingHandle {
        &self.handle
    }

    /// Wakes the device if it sleeps. To be called before a thread waits for what was published; it
    /// executes a full fence, so it is not called for every batch.
    #[inline]
    pub(crate) fn notify(&mut self) {
        if self.queue.should_notify() {
            self.handle.wake();
        }
    }

    /// Requests a notification for the next used buffer, and checks whether there is one already.
    /// If so, the queue is not armed.
    pub(crate) fn arm(&mut self) -> Armed {
        self.queue.arm()
    }

    /// Suppresses notifications: the queue is polled.
    pub(crate) fn disarm(&mut self) {
        self.queue.disarm();
    }
}
