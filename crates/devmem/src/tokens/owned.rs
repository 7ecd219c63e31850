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

use super::counts::{Block, Delivered, position};
use super::pages::Pages;
use super::table::{Shared, Table};
use crate::sync::{AtomicU64, Ordering};

/// The number of deliveries of a page, and the number of the socket to which it is delivered.
#[derive(Default)]
#[repr(transparent)]
pub(crate) struct Owned(AtomicU64);

fn word(holder: u32, times: u32) -> u64 {
    u64::from(holder) << 32 | u64::from(times)
}

impl Owned {
    fn holder(&self) -> u32 {
        (self.0.load(Ordering::Relaxed) >> 32) as u32
    }
}

impl Delivered for Owned {
    type Holder = u32;

    #[inline]
    fn to(&self, holder: u32) -> Option<u32> {
        let now = self.0.load(Ordering::Acquire);
        ((now >> 32) as u32 == holder).then_some(now as u32)
    }

    #[inline]
    fn times(&self) -> u32 {
        self.0.load(Ordering::Relaxed) as u32
    }
}

impl Block<Owned> {
    /// Whether page `at` can be delivered to the socket: it is delivered to no socket, or to
    /// this one.
    #[inline]
    pub(crate) fn accepts(&self, at: u32, holder: u32) -> bool {
        self.delivered(at).holder() == holder || self.held(at) == 0
    }

    /// Counts a delivery to the socket, after [`accepts`](Self::accepts) returned true.
    #[inline]
    pub(crate) fn deliver(&self, at: u32, holder: u32) {
        let delivered = self.delivered(at);
        // No other thread writes the word. Release: publishes what the receiver did with the page
        // before.
        delivered.0.store(word(holder, delivered.times().wrapping_add(1)), Ordering::Release);
    }
}

impl<B> Table<B, Owned> {
    /// Whether the holder may have a reference to the page of a token. If it has one, the result is
    /// true.
    pub(crate) fn is_held(&self, token: u32, holder: u32) -> bool {
        let at = position(token);
        self.find(at).is_some_and(|(block, _)| block.held_by(at, holder) > 0)
    }
}

impl<B: Pages + Clone> Shared<B, Owned> {
    /// Returns everything that `holder` holds of the pages of these tokens, at the end of its
    /// account. Returns how many references that were.
    pub(crate) fn return_all(&self, tokens: &[u32], holder: u32) -> u32 {
        let (mut freed, mut drained) = (0, false);
        for tokens in tokens.chunks(64) {
            self.snapshot.read(|table| {
                for at in tokens.iter().map(|token| position(*token)) {
                    let Some((block, range)) = table.and_then(|table| table.find(at)) else { continue };
                    let n = block.take_all(at, holder, &self.returns.lock());
                    if n > 0 {
                        // SAFETY: the table owned `n` references to this page of the binding for
                        // the holder, and this call has removed them from the table.
                        unsafe { range.binding.put(at - range.base, n) };
                        freed += n;
                        drained |= range.binding.drained();
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
