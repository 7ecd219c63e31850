//! Counts of pages in the table that the streams of a stack share. Each count belongs to one
//! socket.
//!
//! ```text
//!   63     holder     32 31      count      0
//!   │ socket's number   │ references held     │       if the count is 0, it belongs to no socket
//! ```
//!
//! A page has payload of one frame, and so of one connection. If another socket returns the token
//! of the page, the return finds a different socket number, and is ignored. Only the stack's thread
//! adds to counts. If this thread finds a count of 0, or a count of the socket that it delivers to,
//! no other thread changes that before this thread adds. So a count of 0 is overwritten by a plain
//! store, which costs no atomic read-modify-write.
//!
//! The theory of [`table`](super::table) holds here, too: if a count is n, the table owns n
//! references to the page. In addition, the word contains the number of the socket that holds them:
//!
//! ```text
//!            give(7): store                 give(7): + 1
//!   0 held ────────────────► 7 holds one ────────────────► 7 holds two
//!     ▲                        │      ▲                      │     │
//!     │      take_one(7)       │      └──── take_one(7) ─────┘     │
//!     ├────────────────────────┘                                   │
//!     └──────────────── take_all(7): the end of account 7 ─────────┘
//! ```
//!
//! # The races
//!
//! Each has a model of the same name in `model_owned.rs`.
//!
//! **Return against return.** Two threads return a token that their socket received once.
//! `take_one` is a compare-and-swap from a count of this socket, so only one of the threads
//! succeeds.
//!
//! **Return against the next fragment of the page.** A page can have two fragments of one socket. A
//! return may come after the stack's thread has read the word and before it adds. Then it adds to a
//! count of 0. The count still belongs to the same socket, because the socket's number stays in the
//! word.
//!
//! ```text
//!   return, socket 7                        the stack's thread
//!   finds (7, 1)
//!                                           give(7) finds (7, 1), so it adds
//!   exchange (7, 1) -> (7, 0)
//!                                           (7, 0) + 1 = (7, 1): the count was 0,
//!                                           so the token is listed again
//! ```
//!
//! **Return against the next socket.** The page was returned, and then received payload of another
//! socket. A late return of the first socket had found its own number. Its exchange fails, it reads
//! the word again, and finds the number of the other socket.
//!
//! ```text
//!   return, socket 7               return, socket 7            the stack's thread
//!   finds (7, 1)
//!                                  exchange (7, 1) -> (7, 0)
//!                                  the page is returned
//!                                                              give(8) finds 0, stores (8, 1)
//!   exchange (7, 1) fails: (8, 1)
//!   the count of another socket: ignored
//! ```
//!
//! **A guess against the store.** A thread that returns a token while the count is 0 writes
//! nothing. So the store of the stack's thread overwrites no change of another thread. The guess
//! finds either a count of 0, or the whole word (8, 1).
//!
//! **The end of an account against the next socket.** For each page in the list of the account, the
//! end removes everything that the account holds. The list may contain pages that the account does
//! not hold any more. The count of another socket is left as it is.
//!
//! # Memory ordering
//!
//! The ordering is that of the table: `give` is a release, and `take_one` and `take_all` are
//! acquires. The store is a release, too. The store begins a new release sequence. This is correct,
//! because the page was returned before: the pool orders all earlier accesses before those of the
//! thread that allocates the page next.

use super::counts::Counter;
use super::pages::Pages;
use super::table::{Range, Shared};
use crate::sync::{AtomicU64, Ordering};

/// How often a page was delivered to one socket of a stack and not returned yet, and the number of
/// this socket.
#[derive(Default)]
#[repr(transparent)]
pub(crate) struct Owned(AtomicU64);

fn word(holder: u32, count: u32) -> u64 {
    u64::from(holder) << 32 | u64::from(count)
}

/// The count if it belongs to the holder, or else 0.
fn count(word: u64, holder: u32) -> u32 {
    if (word >> 32) as u32 == holder { word as u32 } else { 0 }
}

impl Owned {
    /// Whether the count is 0 or belongs to the holder, so that one can be added for the holder.
    #[inline]
    pub(crate) fn accepts(&self, holder: u32) -> bool {
        let now = self.0.load(Ordering::Relaxed);
        now as u32 == 0 || (1..u32::MAX).contains(&count(now, holder))
    }

    /// Adds one for the holder, after [`accepts`](Self::accepts) returned true. Returns whether the
    /// count was 0 before.
    #[inline]
    pub(crate) fn give(&self, holder: u32) -> bool {
        // Release: publishes what the receiver did with the page before.
        if self.0.load(Ordering::Relaxed) as u32 == 0 {
            self.0.store(word(holder, 1), Ordering::Release);
            return true;
        }
        self.0.fetch_add(1, Ordering::Release) as u32 == 0
    }

    /// Removes everything that the holder has. Returns how many references that were.
    fn take_all(&self, holder: u32) -> u32 {
        let take = |now| (count(now, holder) > 0).then_some(0);
        let taken = self.0.fetch_update(Ordering::Acquire, Ordering::Relaxed, take);
        taken.map_or(0, |now| now as u32)
    }
}

// SAFETY: it is a number.
unsafe impl Counter for Owned {
    type Holder = u32;

    #[inline]
    fn take_one(&self, holder: u32) -> bool {
        let mut now = self.0.load(Ordering::Relaxed);
        while count(now, holder) > 0 {
            // Acquire: everything that the receiver did with the page before it delivered the page
            // happens before the put.
            match self.0.compare_exchange_weak(now, now - 1, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(other) => now = other,
            }
        }
        false
    }

    #[inline]
    fn held(&self) -> u32 {
        self.0.load(Ordering::Relaxed) as u32
    }
}

impl<B> Range<B, Owned> {
    /// Whether the holder has a reference to page `index`. The page must be in the range.
    pub(crate) fn is_held(&self, index: u32, holder: u32) -> bool {
        count(self.count(index).0.load(Ordering::Relaxed), holder) > 0
    }
}

impl<B: Pages + Clone> Shared<B, Owned> {
    /// Returns everything that `holder` holds of the pages of these tokens, at the end of its
    /// account. Returns how many references that were.
    pub(crate) fn return_all(&self, tokens: &[u32], holder: u32) -> u32 {
        let (mut freed, mut drained) = (0, false);
        for tokens in tokens.chunks(64) {
            self.snapshot.read(|table| {
                for &token in tokens {
                    let Some(range) = table.and_then(|table| table.find(token)) else { continue };
                    let (index, binding) = (token - range.first, &range.attached.binding);
                    let n = range.count(index).take_all(holder);
                    if n > 0 {
                        // SAFETY: the count was `n`, so the table owned `n` references to this page
                        // of the binding.
                        unsafe { binding.put(index, n) };
                        freed += n;
                        drained |= binding.drained();
                    }
                }
            });
        }
        if drained {
            self.release_drained();
        }
        freed
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_count_is_one_holders() {
        let page = Owned::default();
        assert!(page.accepts(7) && page.give(7) && !page.give(7));
        assert!(!page.accepts(8) && !page.take_one(8), "the count belongs to another socket");
        assert!(page.take_one(7) && page.take_one(7) && !page.take_one(7));
        assert!(page.accepts(8) && page.give(8) && !page.take_one(7));
        assert_eq!((page.take_all(7), page.held(), page.take_all(8), page.held()), (0, 1, 1, 0));
    }
}
