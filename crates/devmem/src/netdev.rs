//! A device's receive queues, and the binding that each of them receives into.
//!
//! A queue changes its memory by a restart, and a restart can fail. A user attaches a binding to
//! several queues at once, and must never have half of them. So the record of what is attached and
//! the restarts are in one value, and a failed attach is undone.
//!
//! ```text
//!   attach    check all ──► restart queue 3 ──► restart queue 5 ──► restart queue 7 fails
//!                                                                    │
//!             undone ◄── restart queue 3 ◄── restart queue 5 ◄───────┘  in reverse, host memory
//! ```

use crate::binding::{Binding, BindingCount};
use netmem_packet::Queues;
use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use thiserror::Error;

/// The reason why a binding was not attached.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum AttachError<E: Error + 'static> {
    /// The device has no such queue. Nothing has changed.
    #[error("there is no queue {queue}: the device has {queues}, from 0 on")]
    NoSuchQueue {
        /// The number of the requested queue.
        queue: usize,
        /// The number of queues of the device.
        queues: usize,
    },
    /// A binding is already attached to the queue, or the queue is in the list twice. Nothing has
    /// changed.
    #[error("queue {queue} is taken by binding {binding}; unbind that first, or use another queue")]
    Taken {
        /// The queue.
        queue: usize,
        /// The id of the binding that is attached to it.
        binding: u64,
    },
    /// The device does not know the memory, and it cannot be added to the device. Nothing has
    /// changed.
    #[error("the device cannot use the memory of binding {binding}")]
    Memory {
        /// The binding's id.
        binding: u64,
        /// The device's error.
        source: E,
    },
    /// A queue was not restarted. The queues before it in the list were restarted with host memory
    /// again, except those in `stuck`.
    #[error("queue {queue} was not restarted with device memory ({} queues did not get their own back)", stuck.len())]
    Restart {
        /// The queue.
        queue: usize,
        /// The queue's error.
        source: E,
        /// Queues that were attached and could not be detached again. They still count as attached
        /// to the binding.
        stuck: Vec<(usize, E)>,
    },
}

/// The reason why a queue was not detached. Either the queue continues as before, or it has
/// stopped. In both cases it still counts as attached. If it has stopped, the next attempt to
/// detach it succeeds for the queues of virtio-net devices.
#[derive(Debug, Error)]
#[non_exhaustive]
#[error("queue {queue} was not restarted with host memory")]
pub struct DetachError<E: Error + 'static> {
    /// The queue.
    pub queue: usize,
    /// The queue's error.
    pub source: E,
}

/// The error that a binding was not unbound. The binding is live. Some of its queues may have been
/// detached.
#[derive(Error)]
#[non_exhaustive]
#[error("binding {} is still bound", binding.id())]
pub struct UnbindError<C: BindingCount, E: Error + 'static> {
    /// The binding.
    pub binding: Box<Binding<C>>,
    /// The reason why a queue was not detached. `None`: queues of another device are attached.
    #[source]
    pub source: Option<DetachError<E>>,
}

impl<C: BindingCount, E: Error> fmt::Debug for UnbindError<C, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UnbindError({:?}, {:?})", self.binding, self.source)
    }
}

/// The binding to which a queue is attached. While this value exists, the queue counts in that
/// binding's number of queues.
struct Taken {
    binding: u64,
    /// The binding's number of queues. It outlives the binding.
    attached: Arc<AtomicUsize>,
}

impl Taken {
    fn new<C: BindingCount>(binding: &Binding<C>) -> Self {
        let attached = binding.attached().clone();
        attached.fetch_add(1, Ordering::Relaxed);
        Self { binding: binding.id(), attached }
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.attached.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The receive queues of a device, and the binding that each of them receives into, if any.
///
/// For a virtio-net device, `Q` is `netmem_virtio::driver::VirtioRxQueues`.
///
/// Dropping this value drops the queues, and then none of them counts as attached. This also holds
/// for queues that could not be detached. If `Q` is a handle, as `VirtioRxQueues` is, drop its
/// clones first.
#[must_use = "the queues go with it"]
pub struct Netdev<Q: Queues> {
    queues: Q,
    /// Declared after the queues, so that it is dropped after them.
    taken: Vec<Option<Taken>>,
}

impl<Q: Queues> Netdev<Q> {
    /// A device without attached queues.
    pub fn new(queues: Q) -> Self {
        let taken = (0..queues.queues()).map(|_| None).collect();
        Self { queues, taken }
    }

    /// The queues, to poll them. A queue that the caller restarts here, without `attach` or
    /// `detach`, is still counted as it was before.
    pub fn queues_mut(&mut self) -> &mut Q {
        &mut self.queues
    }

    /// Removes the queues. After this call none of them counts as attached, even if it still
    /// receives into a binding.
    #[must_use]
    pub fn into_queues(self) -> Q {
        self.queues
    }

    /// The id of the binding to which a queue is attached, or `None`.
    #[must_use]
    pub fn attached(&self, queue: usize) -> Option<u64> {
        Some(self.taken.get(queue)?.as_ref()?.binding)
    }

    /// Attaches a binding to queues: to all of them, or to none. If the device does not know the
    /// memory, the memory is added to it first, if the device supports this while it runs. The
    /// memory is removed from the device when the binding is gone. The queues are restarted in the
    /// order of the list.
    ///
    /// # Errors
    ///
    /// [`AttachError`]. If a queue was not restarted, the queues before it are restarted with host
    /// memory.
    pub fn attach<C: BindingCount>(
        &mut self,
        binding: &Binding<C>,
        queues: &[usize],
    ) -> Result<(), AttachError<Q::Error>> {
        for (at, &queue) in queues.iter().enumerate() {
            if queue >= self.taken.len() {
                return Err(AttachError::NoSuchQueue { queue, queues: self.taken.len() });
            }
            let twice = queues[..at].contains(&queue).then_some(binding.id());
            if let Some(binding) = self.attached(queue).or(twice) {
                return Err(AttachError::Taken { queue, binding });
            }
        }
        match self.queues.bind(binding.region()) {
            Ok(unbind) => unbind.into_iter().for_each(|unbind| binding.when_gone(unbind)),
            Err(source) => return Err(AttachError::Memory { binding: binding.id(), source }),
        }
        for (at, &queue) in queues.iter().enumerate() {
            if let Err(source) = self.queues.attach(queue, binding.provider()) {
                let undone = queues[..at].iter().rev();
                let stuck = undone.filter_map(|&q| Some((q, self.release(q).err()?))).collect();
                return Err(AttachError::Restart { queue, source, stuck });
            }
            self.taken[queue] = Some(Taken::new(binding));
        }
        Ok(())
    }

    /// Detaches one queue from its binding: restarts it with host memory. Returns false if the
    /// queue is not attached.
    ///
    /// # Errors
    ///
    /// The queue was not restarted, and still counts as attached.
    pub fn detach(&mut self, queue: usize) -> Result<bool, DetachError<Q::Error>> {
        if self.attached(queue).is_none() {
            return Ok(false);
        }
        self.release(queue).map_err(|source| DetachError { queue, source })?;
        Ok(true)
    }

    /// Detaches all queues of a binding, the highest number first, and unbinds it.
    ///
    /// # Errors
    ///
    /// A queue was not restarted, or the binding has queues of another device. The error returns
    /// the binding, which is live.
    pub fn unbind<C: BindingCount>(&mut self, binding: Binding<C>) -> Result<(), UnbindError<C, Q::Error>> {
        for queue in (0..self.taken.len()).rev() {
            if self.attached(queue) != Some(binding.id()) {
                continue;
            }
            if let Err(source) = self.detach(queue) {
                return Err(UnbindError { binding: Box::new(binding), source: Some(source) });
            }
        }
        binding.unbind().map_err(|still| UnbindError { binding: still.binding, source: None })
    }

    fn release(&mut self, queue: usize) -> Result<(), Q::Error> {
        self.queues.detach(queue)?;
        self.taken[queue] = None;
        Ok(())
    }
}

impl<Q: Queues> fmt::Debug for Netdev<Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let taken: Vec<_> = (0..self.taken.len()).map(|q| self.attached(q)).collect();
        f.debug_struct("Netdev").field("attached", &taken).finish_non_exhaustive()
    }
}
