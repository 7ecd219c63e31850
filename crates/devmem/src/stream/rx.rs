//! The receive queue of a stack with device streams.
//!
//! A frame arrives with pages, and the stream needs the binding that they are in. The queue finds
//! it among the bindings of the stack, which change while the queue is polled.

use super::payload::{DeviceFrame, OnDevice};
use crate::binding::{Binding, BindingCount, BindingProvider};
use crate::tokens::Pages;
use netmem_inet::Source;
use netmem_packet::{Armed, EitherFrame, SplitFrame, SplitRxQueue, Wait};
use netmem_pool::PeerMemory;
use netmem_refs::PercpuRef;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The bindings that the receive queues of stacks may receive into. This is a handle: a clone is a
/// handle on the same list, on any thread.
///
/// Add a binding before a queue is attached to it. Then no frame of it is dropped, even if another
/// thread polls the queue meanwhile. Frames that arrive in a binding before it is added are dropped
/// and counted ([`StreamRx::foreign`]); its streams recover by retransmission.
///
/// An unbound binding is removed from the list when its last page is returned. If a dead device has
/// kept pages of a binding, the binding stays until it is [removed](Self::remove), or the list is
/// dropped.
pub struct Bindings<C: BindingCount = PercpuRef>(Arc<List<C>>);

struct List<C: BindingCount> {
    providers: Mutex<Vec<Arc<BindingProvider<C>>>>,
    /// The number of changes of the list.
    version: AtomicU64,
}

impl<C: BindingCount> Bindings<C> {
    /// An empty list.
    #[must_use]
    pub fn new() -> Self {
        Self(Arc::new(List { providers: Mutex::default(), version: AtomicU64::new(0) }))
    }

    /// Adds a binding. If the payload of a frame is in no binding of the list, the frame is dropped
    /// and counted.
    pub fn add(&self, binding: &Binding<C>) {
        let provider = binding.own_provider();
        self.change(|providers| {
            if !providers.iter().any(|known| Arc::ptr_eq(known, provider)) {
                providers.push(provider.clone());
            }
        });
    }

    /// Removes the binding with this id.
    pub fn remove(&self, binding: u64) {
        self.change(|providers| providers.retain(|known| known.binding.id() != binding));
    }

    fn change(&self, change: impl FnOnce(&mut Vec<Arc<BindingProvider<C>>>)) {
        let mut providers = self.0.providers.lock().unwrap_or_else(PoisonError::into_inner);
        let mut next = providers.clone();
        change(&mut next);
        let before = std::mem::replace(&mut *providers, next);
        self.0.version.fetch_add(1, Ordering::Release);
        drop(providers);
        // This may drop the last reference to a binding, so it happens after the lock is released.
        drop(before);
    }

    fn remove_drained(&self) {
        self.change(|providers| providers.retain(|known| !known.binding.drained()));
    }
}

impl<C: BindingCount> Default for Bindings<C> {
    fn default() -> Self {
        Self::new()
    }
}

impl<C: BindingCount> Clone for Bindings<C> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<C: BindingCount> fmt::Debug for Bindings<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let providers = self.0.providers.lock().unwrap_or_else(PoisonError::into_inner);
        f.debug_list().entries(providers.iter()).finish()
    }
}

/// A receive queue of split frames, for a stack with device streams. `Q` is a [`SplitRxQueue`]: for
/// virtio-net, a `VirtioSplitRx`, or one queue of a `VirtioRxQueues`, which bindings are attached
/// to and detached from while it is polled.
pub struct StreamRx<Q, C: BindingCount = PercpuRef> {
    queue: Q,
    bindings: Bindings<C>,
    /// A copy of the list, of the version `version`.
    known: Vec<Arc<BindingProvider<C>>>,
    version: u64,
    /// The position in `known` of the binding that contained the last frame.
    last: usize,
    foreign: u64,
}

impl<Q, C: BindingCount> StreamRx<Q, C> {
    /// Wraps a queue that may receive into these bindings.
    pub fn new(queue: Q, bindings: &Bindings<C>) -> Self {
        Self { queue, bindings: bindings.clone(), known: Vec::new(), version: 0, last: 0, foreign: 0 }
    }

    /// The queue.
    pub fn queue(&mut self) -> &mut Q {
        &mut self.queue
    }

    /// Frames that were dropped because their payload is in pages of no binding in the list.
    #[must_use]
    pub fn foreign(&self) -> u64 {
        self.foreign
    }

    /// Removes drained bindings from the list, and reads the list if it has changed.
    fn refresh(&mut self) {
        if self.known.iter().any(|known| known.binding.drained()) {
            self.bindings.remove_drained();
        }
        let version = self.bindings.0.version.load(Ordering::Acquire);
        if version != self.version {
            let known = self.bindings.0.providers.lock().unwrap_or_else(PoisonError::into_inner).clone();
            self.known = known;
            (self.version, self.last) = (version, 0);
        }
    }
}

/// The frames of a poll.
pub struct DeviceBatch<C: BindingCount, M: PeerMemory> {
    received: Vec<EitherFrame<M>>,
    frames: Vec<DeviceFrame<C, M>>,
}

impl<C: BindingCount, M: PeerMemory> fmt::Debug for DeviceBatch<C, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceBatch({} frames)", self.frames.len())
    }
}

impl<Q: SplitRxQueue<Mem = M>, C: BindingCount, M: PeerMemory> Source for StreamRx<Q, C> {
    type Payload = OnDevice<C, M>;
    type Batch = DeviceBatch<C, M>;

    fn batch(capacity: usize) -> Self::Batch {
        DeviceBatch { received: Vec::with_capacity(capacity), frames: Vec::with_capacity(capacity) }
    }

    fn frames(batch: &mut Self::Batch) -> &mut Vec<DeviceFrame<C, M>> {
        &mut batch.frames
    }

    fn poll<R>(&mut self, f: impl FnOnce(&mut dyn FnMut(usize, &mut Self::Batch) -> usize) -> R) -> R {
        self.refresh();
        let Self { queue, bindings, known, last, foreign, .. } = self;
        queue.poll(|poll| {
            f(&mut |budget, batch| {
                let DeviceBatch { received, frames } = batch;
                let n = poll(budget, received);
                for frame in received.drain(..) {
                    match frame {
                        EitherFrame::Host(packet) => frames.push(packet.into()),
                        EitherFrame::Split(frame) => {
                            match place(frame, known, last).or_else(|frame| place_late(frame, bindings, known, last)) {
                                Ok(frame) => frames.push(frame),
                                Err(_) => *foreign += 1,
                            }
                        }
                    }
                }
                n
            })
        })
    }
}

/// Finds the binding that contains a frame's payload. If no known binding contains it, returns the
/// frame as the error.
#[inline]
fn place<C: BindingCount, M: PeerMemory>(
    frame: SplitFrame<M>,
    known: &[Arc<BindingProvider<C>>],
    last: &mut usize,
) -> Result<DeviceFrame<C, M>, SplitFrame<M>> {
    if frame.payload().is_empty() {
        return Ok(DeviceFrame::without(frame));
    }
    let mut frame = frame;
    let others = (0..known.len()).filter(|n| n != last);
    for n in std::iter::once(*last).chain(others) {
        let Some(known) = known.get(n) else { continue };
        // SAFETY: this is the provider's own reference, and pools with pages of the binding keep
        // the provider.
        match unsafe { DeviceFrame::new(frame, &known.binding) } {
            Ok(found) => {
                *last = n;
                return Ok(found);
            }
            Err(other) => frame = other,
        }
    }
    Err(frame)
}

/// Finds the binding of a frame that is in none of the known ones: one can have been added, and the
/// queue attached to it, after the list was read for this poll. `known` only grows here, because
/// the last reference to a binding must not be dropped in a poll.
#[cold]
fn place_late<C: BindingCount, M: PeerMemory>(
    frame: SplitFrame<M>,
    bindings: &Bindings<C>,
    known: &mut Vec<Arc<BindingProvider<C>>>,
    last: &mut usize,
) -> Result<DeviceFrame<C, M>, SplitFrame<M>> {
    let mut added = bindings.0.providers.lock().unwrap_or_else(PoisonError::into_inner).clone();
    added.retain(|added| !known.iter().any(|known| Arc::ptr_eq(known, added)));
    known.append(&mut added);
    place(frame, known, last)
}

impl<Q: AsFd, C: BindingCount> AsFd for StreamRx<Q, C> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.queue.as_fd()
    }
}

impl<Q: Wait, C: BindingCount> Wait for StreamRx<Q, C> {
    fn arm(&mut self) -> std::io::Result<Armed> {
        self.queue.arm()
    }

    fn disarm(&mut self) {
        self.queue.disarm();
    }

    fn check(&self) -> std::io::Result<()> {
        self.queue.check()
    }
}

impl<Q: fmt::Debug, C: BindingCount> fmt::Debug for StreamRx<Q, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StreamRx({:?})", self.queue)
    }
}
