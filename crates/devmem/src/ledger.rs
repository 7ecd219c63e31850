//! How many of a binding's pages are out, and whether more may go: one word.
//!
//! ```text
//!   63      62                0
//!   │ CLOSED │ pages out      │
//! ```
//!
//! Taking pages is one compare-and-swap that fails once the word is closed; so a word that is closed and zero stays that:
//! the binding is *drained*.

use crate::sync::{AtomicU64, Ordering};

const CLOSED: u64 = 1 << 63;

/// Invariant: the lower bits are at least the pages that the provider has handed out and that have not come back.
#[derive(Debug)]
pub(crate) struct Ledger(AtomicU64);

impl Ledger {
    pub(crate) fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Notes that up to `n` pages go out. False: none may, any more.
    pub(crate) fn take(&self, n: u64) -> bool {
        let more = |word| (word & CLOSED == 0).then_some(word + n);
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).is_ok()
    }

    /// Notes that `n` of them are home.
    pub(crate) fn give(&self, n: u64) {
        // Release: what was done with the pages happens before a thread finds the word drained.
        self.0.fetch_sub(n, Ordering::AcqRel);
    }

    /// No page goes out from now on.
    pub(crate) fn close(&self) {
        self.0.fetch_or(CLOSED, Ordering::AcqRel);
    }

    #[cfg(not(loom))]
    pub(crate) fn is_closed(&self) -> bool {
        self.0.load(Ordering::Acquire) & CLOSED != 0
    }

    /// Pages out.
    pub(crate) fn out(&self) -> u64 {
        self.0.load(Ordering::Acquire) & !CLOSED
    }

    /// Whether no page is out, for good.
    pub(crate) fn is_drained(&self) -> bool {
        self.0.load(Ordering::Acquire) == CLOSED
    }
}
