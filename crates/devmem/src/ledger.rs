//! A binding's ledger: one word with the number of allocated pages, and with a flag that ends
//! allocation.
//!
//! ```text
//!   63      62                0
//!   │ CLOSED │ pages out      │
//! ```
//!
//! An unbound binding may be released only when all of its pages were returned and none can be
//! allocated any more. Two words could not be read at one moment, so both facts are in one. An
//! allocation is one compare-and-swap, which fails once the word is closed. So if the word is
//! closed and no page is out, the word stays so, and the binding is *drained*.

use crate::sync::{AtomicU64, Ordering};

const CLOSED: u64 = 1 << 63;

/// Invariant: the lower bits are at least the number of pages that the provider has allocated and
/// that were not returned to it.
#[derive(Debug)]
pub(crate) struct Ledger(AtomicU64);

impl Ledger {
    pub(crate) fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Notes that up to `n` pages are allocated. Returns false if the ledger is closed. Then no
    /// page may be allocated.
    pub(crate) fn take(&self, n: u64) -> bool {
        let more = |word| (word & CLOSED == 0).then_some(word + n);
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).is_ok()
    }

    /// Notes that `n` of the pages were returned.
    pub(crate) fn give(&self, n: u64) {
        // Release: everything that was done with the pages happens before a thread finds the ledger
        // drained.
        self.0.fetch_sub(n, Ordering::AcqRel);
    }

    /// Closes the ledger: after this call no page may be allocated.
    pub(crate) fn close(&self) {
        self.0.fetch_or(CLOSED, Ordering::AcqRel);
    }

    #[cfg(not(loom))]
    pub(crate) fn is_closed(&self) -> bool {
        self.0.load(Ordering::Acquire) & CLOSED != 0
    }

    /// The number of allocated pages.
    pub(crate) fn out(&self) -> u64 {
        self.0.load(Ordering::Acquire) & !CLOSED
    }

    /// Whether no page is allocated and none can ever be allocated again.
    pub(crate) fn is_drained(&self) -> bool {
        self.0.load(Ordering::Acquire) == CLOSED
    }
}
