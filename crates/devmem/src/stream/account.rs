//! The account of a stream: the tokens that its user holds, and the pages that are counted in the
//! stream's budget.
//!
//! ```text
//!   DeviceStream ──┐
//!                  ├──► Account ──► the stack's table: counts of its pages have its number
//!   StreamReturner ┘       └──► Budget: a page is counted until its token is returned,
//!                               which opens the window and wakes the stack
//! ```
//!
//! When the stream receives a page, it adds the token to a list. When the stream is dropped, it
//! passes the list to the account. So closing the account reads only the counts of this list, and
//! not the whole table. When the list is twice as long as after its last shortening, it is
//! shortened to the tokens that are still held. So shortening costs constant time for each token.

use crate::binding::{BindingCount, BindingRef};
use crate::tokens::{Owned, Receiver, Shared, TokenRange, TokenStats, TooManyRanges};
use netmem_inet::tcp::Budget;
use netmem_refs::PercpuRef;
use std::cell::RefCell;
use std::collections::HashSet;
use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The table of a stack, as the stack's thread uses it: this handle can receive.
pub(crate) struct TokenTableHandle<C: BindingCount> {
    pub(crate) receiver: RefCell<Receiver<BindingRef<C>, Owned>>,
    table: Arc<Table<C>>,
}

/// The table, as all threads use it.
struct Table<C: BindingCount> {
    counts: Arc<Shared<BindingRef<C>, Owned>>,
    holders: Mutex<Holders>,
}

/// The numbers of accounts. As long as an account has a handle, no other account has its number.
#[derive(Default)]
struct Holders {
    live: HashSet<u32>,
    last: u32,
}

impl<C: BindingCount> TokenTableHandle<C> {
    pub(crate) fn new() -> Self {
        let receiver = Receiver::new();
        let table = Table { counts: receiver.shared.clone(), holders: Mutex::default() };
        Self { receiver: RefCell::new(receiver), table: Arc::new(table) }
    }

    /// Opens an account without tokens. Its pages are counted in `budget`.
    pub(crate) fn open(&self, budget: Budget) -> Arc<Account<C>> {
        let mut holders = self.table.holders.lock().unwrap_or_else(PoisonError::into_inner);
        // The loop ends: each account needs memory, so there are fewer accounts than numbers.
        loop {
            holders.last = holders.last.wrapping_add(1).max(1);
            let number = holders.last;
            if holders.live.insert(number) {
                break;
            }
        }
        let (number, table) = (holders.last, self.table.clone());
        let (out, foreign, excess) = (AtomicU32::new(0), AtomicU64::new(0), AtomicU64::new(0));
        Arc::new(Account { number, table, budget, delivered: Mutex::default(), out, foreign, excess })
    }

    pub(crate) fn stats(&self) -> TokenStats {
        self.table.counts.stats()
    }

    pub(crate) fn release_drained(&self) -> usize {
        self.table.counts.release_drained()
    }
}

/// The number of tokens in a list before it is shortened for the first time.
const FIRST: usize = 64;

/// The tokens of pages that a stream received. The list contains every token that the account
/// holds, and may contain others.
pub(crate) struct DeliveredTokens {
    tokens: Vec<u32>,
    /// The length above which the list is shortened.
    most: usize,
}

impl DeliveredTokens {
    pub(crate) fn new() -> Self {
        Self { tokens: Vec::new(), most: FIRST }
    }

    /// Adds the token of a page that was received.
    #[inline]
    pub(crate) fn push<C: BindingCount>(&mut self, token: u32, account: &Account<C>) {
        self.tokens.push(token);
        if self.tokens.len() > self.most {
            self.shorten(account);
        }
    }

    #[cold]
    fn shorten<C: BindingCount>(&mut self, account: &Account<C>) {
        self.tokens.sort_unstable();
        self.tokens.dedup();
        account.table.counts.snapshot.read(|table| {
            let held = |token: &u32| table.is_some_and(|table| table.is_held(*token, account.number));
            self.tokens.retain(held);
        });
        self.most = FIRST.max(2 * self.tokens.len());
    }
}

/// The account of a stream. See the module.
pub(crate) struct Account<C: BindingCount> {
    number: u32,
    table: Arc<Table<C>>,
    budget: Budget,
    /// The list of the stream, after the stream was dropped.
    delivered: Mutex<Vec<u32>>,
    /// The number of tokens that were received and not returned.
    out: AtomicU32,
    foreign: AtomicU64,
    excess: AtomicU64,
}

impl<C: BindingCount> Account<C> {
    /// The number of this account in the table.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// Counts `tokens` more tokens as held by the user.
    pub(crate) fn received(&self, tokens: u32) {
        self.out.fetch_add(tokens, Ordering::Relaxed);
    }

    /// Keeps the list of the stream, which is being dropped.
    pub(crate) fn leave(&self, delivered: &mut DeliveredTokens) {
        *self.delivered.lock().unwrap_or_else(PoisonError::into_inner) = std::mem::take(&mut delivered.tokens);
    }

    fn return_tokens(&self, ranges: &[TokenRange]) -> Result<usize, TooManyRanges> {
        TooManyRanges::check(ranges)?;
        let done = self.table.counts.return_tokens(ranges, self.number);
        if done.foreign | done.excess > 0 {
            self.foreign.fetch_add(done.foreign.into(), Ordering::Relaxed);
            self.excess.fetch_add(done.excess.into(), Ordering::Relaxed);
        }
        if done.freed > 0 {
            self.out.fetch_sub(done.freed, Ordering::Relaxed);
            // The pages were returned before this call, so the stack that it wakes can use them.
            self.budget.uncharge(done.freed);
        }
        Ok(done.freed as usize)
    }

    pub(crate) fn stats(&self) -> AccountStats {
        AccountStats {
            out: self.out.load(Ordering::Relaxed),
            foreign: self.foreign.load(Ordering::Relaxed),
            excess: self.excess.load(Ordering::Relaxed),
        }
    }
}

pub(crate) struct AccountStats {
    pub(crate) out: u32,
    pub(crate) foreign: u64,
    pub(crate) excess: u64,
}

/// When the last handle is gone, the pages of all tokens that are still held are returned to their
/// pools.
impl<C: BindingCount> Drop for Account<C> {
    fn drop(&mut self) {
        let Table { counts, holders } = &*self.table;
        let delivered = self.delivered.get_mut().unwrap_or_else(PoisonError::into_inner);
        let freed = counts.return_all(delivered, self.number);
        if freed > 0 {
            self.budget.uncharge(freed);
        }
        holders.lock().unwrap_or_else(PoisonError::into_inner).live.remove(&self.number);
    }
}

/// A handle that returns a stream's tokens. It can be used on any thread, while other threads
/// return tokens and the stream receives.
pub struct StreamReturner<C: BindingCount = PercpuRef>(Arc<Account<C>>);

impl<C: BindingCount> StreamReturner<C> {
    pub(crate) fn new(account: Arc<Account<C>>) -> Self {
        Self(account)
    }

    /// Returns tokens, each as often as it is named. Returns how many fragments were freed.
    ///
    /// A call processes at most 1024 fragments ([`MAX_FRAGMENTS`](crate::MAX_FRAGMENTS)), valid or
    /// not, and ignores the rest. So a call returns at most 64 extents of 16 pages. Tokens of other
    /// streams, tokens that were never received, and tokens that were returned as often as received
    /// are ignored and counted.
    ///
    /// If the peer's window was closed because pages were missing, the stack is woken to open it.
    ///
    /// Costs a critical section, a lock of the stack's returning threads for each 16 fragments, and
    /// two atomic operations for the call.
    ///
    /// # Errors
    ///
    /// [`TooManyRanges`]: there are more than 128 ranges ([`MAX_RANGES`](crate::MAX_RANGES)).
    /// Nothing was returned.
    pub fn return_tokens(&self, ranges: &[TokenRange]) -> Result<usize, TooManyRanges> {
        self.0.return_tokens(ranges)
    }

    /// Subtracts pages from the budget that were received without tokens: see
    /// [`DeviceStream::recv_bare`](super::DeviceStream::recv_bare).
    #[cfg(feature = "bench")]
    pub fn return_bare(&self, pages: u32) {
        self.0.budget.uncharge(pages);
    }

    /// The number of tokens that the user holds.
    #[must_use]
    pub fn out(&self) -> u32 {
        self.0.stats().out
    }
}

impl<C: BindingCount> Clone for StreamReturner<C> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<C: BindingCount> fmt::Debug for StreamReturner<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StreamReturner({} tokens out)", self.out())
    }
}
