//! Ranges of device memory that are being sent: the values that hold a range, and the event that
//! the range may be used again.
//!
//! ```text
//!   DeviceStream::send ──► SendRange ◄── SentChunk: the connection, until acknowledged
//!                              ▲    ◄── InFlight, a BindingRef each: the transmit queue,
//!                              │                                     until the device is done
//!                              └── the last of them is dropped: Sent, by DeviceStream::sent
//! ```
//!
//! A new range holds a reference to the binding. If the binding was unbound, it refuses this
//! reference. Each transmission holds one more reference, which an unbound binding does not refuse.
//! So ranges in flight are sent completely, and lost segments are sent again.

use super::context::Context;
use crate::binding::{BindingCount, BindingRef};
use netmem_refs::PercpuRef;
use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

/// A range of device memory that may be used again: the peer has acknowledged it or the connection
/// has ended, and the device is done with each of its transmissions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sent {
    /// The number that [`DeviceStream::send`](super::DeviceStream::send) returned.
    pub range: u64,
    /// The binding's id.
    pub binding: u64,
    /// The offset of the first byte in the binding.
    pub offset: u64,
    /// The length in bytes.
    pub len: u32,
}

/// The ranges of a stream that may be used again.
pub(crate) struct Completions<C: BindingCount> {
    done: Mutex<Done>,
    /// The context of the stack, which calls wakers at the end of a poll.
    context: Arc<Context<C>>,
}

#[derive(Default)]
struct Done {
    sent: VecDeque<Sent>,
    waker: Option<Waker>,
}

impl<C: BindingCount> Completions<C> {
    pub(crate) fn new(context: Arc<Context<C>>) -> Self {
        Self { done: Mutex::default(), context }
    }

    fn lock(&self) -> MutexGuard<'_, Done> {
        self.done.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, sent: Sent) {
        let mut done = self.lock();
        done.sent.push_back(sent);
        let waker = done.waker.take();
        drop(done);
        if let Some(waker) = waker {
            self.context.wake(waker);
        }
    }

    pub(crate) fn pop(&self) -> Option<Sent> {
        self.lock().sent.pop_front()
    }

    /// Registers `waker`, which is called when the next range may be used again.
    pub(crate) fn wait(&self, waker: Waker) {
        let before = self.lock().waker.replace(waker);
        drop(before);
    }
}

/// A range that is being sent.
pub(crate) struct SendRange<C: BindingCount> {
    /// The event of this range. `None` if the range was cancelled.
    sent: Option<Sent>,
    offset: u64,
    len: u32,
    binding: BindingRef<C>,
    completions: Arc<Completions<C>>,
}

impl<C: BindingCount> SendRange<C> {
    /// Makes a range of a binding. It owns the reference `binding` from then on.
    pub(crate) fn new(number: u64, binding: BindingRef<C>, offset: u64, len: u32, to: &Arc<Completions<C>>) -> Self {
        let sent = Sent { range: number, binding: binding.id(), offset, len };
        Self { sent: Some(sent), offset, len, binding, completions: to.clone() }
    }

    /// Drops a range that was not sent, without an event.
    pub(crate) fn cancel(mut self) {
        self.sent = None;
    }

    pub(crate) fn binding(&self) -> &BindingRef<C> {
        &self.binding
    }

    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    pub(crate) fn len(&self) -> u32 {
        self.len
    }
}

impl<C: BindingCount> Drop for SendRange<C> {
    fn drop(&mut self) {
        if let Some(sent) = self.sent.take() {
            self.completions.push(sent);
        }
    }
}

impl<C: BindingCount> fmt::Debug for SendRange<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.sent, f)
    }
}

/// A part of a transmission. It keeps its device memory until the device has read it. Transmit
/// queues of device streams hold such values.
pub struct InFlight<C: BindingCount = PercpuRef> {
    _binding: BindingRef<C>,
    _range: Arc<SendRange<C>>,
}

impl<C: BindingCount> InFlight<C> {
    /// Makes the holder for a transmission of a part of `range`. The binding may have been unbound
    /// since the range was made.
    pub(crate) fn new(range: &Arc<SendRange<C>>) -> Self {
        Self { _binding: range.binding.clone(), _range: range.clone() }
    }
}

impl<C: BindingCount> fmt::Debug for InFlight<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "InFlight({:?})", self._range)
    }
}
