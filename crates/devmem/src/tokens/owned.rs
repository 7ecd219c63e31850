//! The number of deliveries of a page in the table that the streams of a stack share, with the
//! socket that holds the page.
//!
//! ```text
//!   63     holder     32 31    delivered     0
//!   │ socket's number   │ wraps around at 2^32 │     if it equals `returned`, no socket holds the page
//! ```
//!
//! A page has payload of one frame, and so of one connection. If another socket returns the token
//! of the page, the return finds a different socket number, and is ignored. Without that number, a
//! late return of one socket would free a page that another one holds.
//!
//! The theory of [`table`](super::table) holds here, too: the stack's thread is the receiver, and
//! the table owns `delivered - returned` references to a page. They belong to the socket whose
//! number is in the word:
//!
//! ```text
//!                 deliver(7)                   deliver(7)
//!   no holder ────────────────► 7 holds one ────────────────► 7 holds two
//!     ▲                           │      ▲                      │     │
//!     │      a return of 7        │      └──── a return of 7 ───┘     │
//!     ├───────────────────────────┘                                   │
//!     └──────────────── take_all(7): the end of account 7 ────────────┘
//! ```
//!
//! The stack's thread changes the socket's number only if no socket holds the page. It reads
//! `returned`, which the returning CPU wrote last, only if the number differs from that of the
//! socket to which it delivers.
//!
//! # The races
//!
//! Each has a model of the same name in `model_owned.rs`.
//!
//! **Return against return.** As in the table.
//!
//! **Return against the next fragment of the page.** A page can have two fragments of one socket. As
//! in the table: the two write different numbers. The socket's number stays the same.
//!
//! **Return against the next socket.** The page was returned, and then received payload of another
//! socket. A late return of the first socket finds the whole word from before or after the
//! delivery: its own number and `delivered` equal to `returned`, or the other socket's number. Both
//! are ignored.
//!
//! ```text
//!   return, socket 7               return, socket 7            the stack's thread
//!                                  lock, (7, 1), returned 0 -> 1, unlock
//!                                  the page is returned
//!   lock
//!   (7, 1), returned 1: ignored                                deliver(8) stores (8, 2)
//!   unlock
//! ```
//!
//! **A guess against the store.** The guess finds the word from before, whose number of deliveries
//! equals `returned`, or the whole word (8, 2).
//!
//! **The end of an account against the next socket.** For each page in the list of the account, the
//! end removes everything that the account holds. The list may contain pages that the account does
//! not hold any more. What another socket holds is left as it is.
//!
//! # Memory ordering
//!
//! The ordering is that of the table. If the stack's thread finds that no socket holds a page, it
//! reads `returned` relaxed: the page was returned to its pool after that store, and the pool
//! orders all earlier accesses before those of the thread that allocates the page next.

use super::counts::{Block, Delivered, position};
use super::pages::Pages;
use super::table::Shared;
#[cfg(not(loom))]
use super::table::Table;
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

#[cfg(not(loom))]
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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::tokens::counts::ReturnLock;

    #[test]
    fn a_page_is_one_holders() {
        let (page, lock) = (Block::<Owned>::new(), ReturnLock::default());
        let take = |holder| page.take_one(3, holder, &lock.lock());
        assert!(page.accepts(3, 7) && !take(7), "nothing was delivered");
        page.deliver(3, 7);
        page.deliver(3, 7);
        assert!(page.accepts(3, 7) && !page.accepts(3, 8) && !take(8), "it belongs to another socket");
        assert_eq!([take(7), take(7), take(7)], [true, true, false]);
        assert!(page.accepts(3, 8));
        page.deliver(3, 8);
        assert!(!take(7) && page.held(3) == 1 && page.held(4) == 0);
        assert_eq!([7, 8, 8].map(|holder| page.take_all(3, holder, &lock.lock())), [0, 1, 0]);
    }
}
