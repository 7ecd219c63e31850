//! The page budget: how many buffers received payload may occupy.
//!
//! The window promises bytes, and it must not shrink. A peer that sends one byte in each segment turns these bytes into as many
//! buffers. Buffers are therefore counted, for each connection and for its queue, from the moment a segment is kept until the user
//! drops the payload.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// A number of buffers that may be occupied. A clone is the same budget.
///
/// A connection's budget is part of its queue's: a buffer is counted in both.
#[derive(Clone)]
pub struct Budget(Arc<Counts>);

struct Counts {
    used: AtomicU32,
    limit: u32,
    parent: Option<Budget>,
}

impl Budget {
    /// A budget of `limit` buffers.
    #[must_use]
    pub fn new(limit: u32) -> Self {
        Self::within(limit, None)
    }

    /// A budget of `limit` buffers that are also counted in `parent`.
    #[must_use]
    pub fn within(limit: u32, parent: Option<&Self>) -> Self {
        Self(Arc::new(Counts { used: AtomicU32::new(0), limit, parent: parent.cloned() }))
    }

    /// Buffers that are counted now.
    #[must_use]
    pub fn used(&self) -> u32 {
        self.0.used.load(Ordering::Relaxed)
    }

    /// Buffers that can still be counted, here and in the parent.
    #[must_use]
    pub fn free(&self) -> u32 {
        let here = self.0.limit.saturating_sub(self.used());
        self.0.parent.as_ref().map_or(here, |parent| here.min(parent.free()))
    }

    /// Counts one more buffer, if the limits allow it. Cost: an atomic addition here and in the parent.
    #[must_use]
    pub fn take(&self) -> Option<Charge> {
        // Two queues can take the parent's last one at the same time. The limit is then exceeded by one for each queue.
        (self.free() > 0).then(|| self.force())
    }

    /// Counts one more buffer, even above the limits: for the one segment that is always admitted.
    #[must_use]
    pub fn force(&self) -> Charge {
        let mut at = Some(self);
        while let Some(budget) = at {
            budget.0.used.fetch_add(1, Ordering::Relaxed);
            at = budget.0.parent.as_ref();
        }
        Charge(self.clone())
    }

    fn put(&self) {
        let mut at = Some(self);
        while let Some(budget) = at {
            budget.0.used.fetch_sub(1, Ordering::Relaxed);
            at = budget.0.parent.as_ref();
        }
    }
}

impl fmt::Debug for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} buffers", self.used(), self.0.limit)
    }
}

/// One buffer that is counted, until this is dropped.
#[derive(Debug)]
pub struct Charge(Budget);

impl Drop for Charge {
    fn drop(&mut self) {
        self.0.put();
    }
}

/// Payload that is counted in its connection's [`Budget`] until it is dropped. It can be sent to other threads.
#[derive(Debug)]
pub struct Held<T> {
    chunk: T,
    charge: Charge,
}

impl<T> Held<T> {
    /// `chunk`, counted by `charge`.
    #[must_use]
    pub fn new(chunk: T, charge: Charge) -> Self {
        Self { chunk, charge }
    }

    /// The payload, and what counts it.
    #[must_use]
    pub fn into_parts(self) -> (T, Charge) {
        (self.chunk, self.charge)
    }
}

impl<T> Deref for Held<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.chunk
    }
}

impl<T> DerefMut for Held<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.chunk
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_counts_in_both_budgets_until_it_is_dropped() {
        let queue = Budget::new(3);
        let one = Budget::within(2, Some(&queue));
        let two = Budget::within(2, Some(&queue));
        let held: Vec<_> = [one.take(), one.take(), two.take()].into_iter().map(Option::unwrap).collect();
        assert!(one.take().is_none(), "the connection's limit");
        assert!(two.take().is_none(), "the queue's limit");
        let forced = Held::new(7, two.force());
        assert_eq!((one.used(), two.used(), queue.used(), queue.free()), (2, 2, 4, 0));
        drop(held);
        assert_eq!((one.used(), two.used(), queue.used()), (0, 1, 1));
        let (chunk, charge) = forced.into_parts();
        assert_eq!((chunk, two.used()), (7, 1));
        drop(charge);
        assert_eq!((two.used(), queue.used()), (0, 0));
    }
}
