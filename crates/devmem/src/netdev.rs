//! A device's receive queues, and which binding each of them receives into.
//!
//! ```text
//!   attach    check all ──► restart queue 3 ──► restart queue 5 ──► restart queue 7 fails
//!                                                                    │
//!             as it was ◄── restart queue 3 ◄── restart queue 5 ◄────┘   in reverse, with host memory
//! ```

use crate::{Binding, BindingCount};
use netmem_pool::{Device, Provider};
use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use thiserror::Error;

/// What can be done with the receive queues of a device: each can be stopped and started again with other memory.
pub trait Queues {
    /// Why a queue was not restarted.
    type Error: Error + 'static;

    /// How many queues there are: 0 to so many.
    fn queues(&self) -> usize;

    /// Restarts a queue, which receives into host memory, with pages of `memory`.
    ///
    /// # Errors
    ///
    /// It goes on as it was, or has stopped: either way nothing is received into `memory`.
    fn attach(&mut self, queue: usize, memory: Arc<dyn Provider<Device>>) -> Result<(), Self::Error>;

    /// Restarts a queue, which receives into device memory, with host memory.
    ///
    /// # Errors
    ///
    /// It goes on as it was, or has stopped.
    fn detach(&mut self, queue: usize) -> Result<(), Self::Error>;
}

/// Why a binding was not attached.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum AttachError<E: Error + 'static> {
    /// The device has no such queue. Nothing has changed.
    #[error("there is no queue {queue}: the device has {queues}, from 0 on")]
    NoSuchQueue {
        /// What was asked for.
        queue: usize,
        /// What there are.
        queues: usize,
    },
    /// Another binding receives there, or the queue was named twice. Nothing has changed.
    #[error("queue {queue} is taken by binding {binding}; unbind that first, or use another queue")]
    Taken {
        /// The queue.
        queue: usize,
        /// Who has it.
        binding: u64,
    },
    /// A queue was not restarted. Those before it were given host memory again, but for those that are listed.
    #[error("queue {queue} was not restarted with device memory ({} queues did not get their own back)", stuck.len())]
    Restart {
        /// The queue.
        queue: usize,
        /// Why.
        source: E,
        /// Queues that were attached and could not be detached again. They are still the binding's.
        stuck: Vec<(usize, E)>,
    },
}

/// Why a queue was not detached. It goes on as it was or has stopped, and is taken still; those with smaller numbers are as
/// they were.
#[derive(Debug, Error)]
#[error("queue {queue} was not restarted with host memory")]
pub struct DetachError<E: Error + 'static> {
    /// The queue.
    pub queue: usize,
    /// Why.
    pub source: E,
}

/// A binding was not unbound, and is live. Queues may have been detached.
#[derive(Error)]
#[error("binding {} is still bound", binding.id())]
pub struct UnbindError<C: BindingCount, E: Error + 'static> {
    /// The binding.
    pub binding: Box<Binding<C>>,
    /// Why. `None`: queues of another device are attached.
    #[source]
    pub source: Option<DetachError<E>>,
}

impl<C: BindingCount, E: Error> fmt::Debug for UnbindError<C, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UnbindError({:?}, {:?})", self.binding, self.source)
    }
}

/// Who a queue belongs to. It counts there for as long as this exists.
struct Taken {
    binding: u64,
    /// The binding's number of queues, which outlives it.
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

/// The receive queues of a device, each free or attached to one binding. With this value its queues go, and are attached no more,
/// also those of a device that died and could not be detached.
pub struct Netdev<Q: Queues> {
    queues: Q,
    /// Behind the queues, which go first.
    taken: Vec<Option<Taken>>,
}

impl<Q: Queues> Netdev<Q> {
    /// A device none of whose queues is attached.
    #[must_use]
    pub fn new(queues: Q) -> Self {
        let taken = (0..queues.queues()).map(|_| None).collect();
        Self { queues, taken }
    }

    /// The queues, to be polled. Who restarts one does so behind this value's back.
    pub fn queues_mut(&mut self) -> &mut Q {
        &mut self.queues
    }

    /// The queues alone. None counts as attached from then on: who has them knows what they receive into.
    #[must_use]
    pub fn into_queues(self) -> Q {
        self.queues
    }

    /// The id of the binding that a queue is attached to.
    #[must_use]
    pub fn attached(&self, queue: usize) -> Option<u64> {
        Some(self.taken.get(queue)?.as_ref()?.binding)
    }

    /// Attaches a binding to queues: all of them, or none. Each is restarted, in the order given.
    ///
    /// # Errors
    ///
    /// [`AttachError`].
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

    /// Detaches one queue, whatever it is attached to. False: it is not.
    ///
    /// # Errors
    ///
    /// The queue was not restarted, and is still taken.
    pub fn detach(&mut self, queue: usize) -> Result<bool, DetachError<Q::Error>> {
        if self.attached(queue).is_none() {
            return Ok(false);
        }
        self.release(queue).map_err(|source| DetachError { queue, source })?;
        Ok(true)
    }

    /// Detaches all queues of a binding, the last first, and unbinds it.
    ///
    /// # Errors
    ///
    /// A queue was not restarted, or the binding has queues of another device; it comes back, and is live.
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
