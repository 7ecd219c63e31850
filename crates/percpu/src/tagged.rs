//! A list of magazines that many threads push and pop, one magazine at a time.
//!
//! ```text
//!   head = tag (40 bits) | closed (1 bit) | index and 1 of the first magazine (23 bits)
//! ```
//!
//! **ABA.** A pop reads the first magazine and the one behind it, and exchanges the head. Other
//! threads may change the list in between:
//!
//! ```text
//!   thread A                         others
//!   head = X, next = X.next (Y)
//!                                    pop X, pop Y, push X         X is the head again, Y is in use
//!   head: X -> Y ?                   Y would be handed out twice
//! ```
//! So every pop increments the tag, and the exchange of thread A fails. The tag wraps after 2^40
//! pops, all of which would have to happen between two instructions of thread A. At ten million
//! pops a second, which is more than the line of the head can move between CPUs, that takes a day;
//! 2^31 pops would take less than four minutes, and a thread can be stopped for as long.
//!
//! **Closed.** A closed list refuses [`push`](List::push), which threads use to put items.
//! [`put_back`](List::put_back) and [`pop`](List::pop) work as before: a thread that popped a
//! magazine before the list was closed still returns it.
//!
//! **Ordering.** A push is a release and a pop an acquire, so what is in a magazine is passed on.
//! Closing is a release, and a refused push an acquire.

use crate::magazine::{Magazine, numbered};
use crate::sync::{AtomicU64, Ordering};

const INDEX_BITS: u32 = 23;
const TAG_BITS: u32 = 40;
const INDEX: u64 = (1 << INDEX_BITS) - 1;
const CLOSED: u64 = 1 << INDEX_BITS;
const TAG: u64 = 1 << (INDEX_BITS + 1);
const _: () = assert!(TAG_BITS >= 40 && TAG_BITS + 1 + INDEX_BITS == u64::BITS && TAG << (TAG_BITS - 1) == 1 << 63);

/// The most magazines that lists can have: the index plus 1 of each fits the head.
pub(crate) const MOST: usize = INDEX as usize;

#[derive(Debug)]
pub(crate) struct List {
    head: AtomicU64,
}

impl List {
    pub(crate) fn new() -> Self {
        Self { head: AtomicU64::new(0) }
    }

    /// Puts a magazine that only the caller has on the list. Returns false if the list is closed;
    /// the magazine is then still the caller's.
    ///
    /// # Safety
    ///
    /// `this` lives until the magazine is on the list. Nothing of it is touched afterwards.
    pub(crate) unsafe fn push(this: *const Self, magazine: *const Magazine) -> bool {
        // By pointer: a reference to the list would have to be good until the return.
        // SAFETY: the caller's.
        unsafe { Self::link(&raw const (*this).head, magazine, CLOSED) }
    }

    /// Puts a magazine that only the caller has on the list, also if the list is closed.
    pub(crate) fn put_back(&self, magazine: &Magazine) {
        // SAFETY: the caller keeps both.
        unsafe { Self::link(&raw const self.head, magazine, 0) };
    }

    unsafe fn link(head: *const AtomicU64, magazine: *const Magazine, refused: u64) -> bool {
        // SAFETY: the list lives until the exchange has succeeded, and the magazine is the caller's
        // until then.
        unsafe {
            let mut was = (*head).load(Ordering::Acquire);
            while was & refused == 0 {
                (*magazine).next.store((was & INDEX) as u32, Ordering::Relaxed);
                let new = was & !INDEX | u64::from((*magazine).index);
                match (*head).compare_exchange_weak(was, new, Ordering::Release, Ordering::Acquire) {
                    Ok(_) => return true,
                    Err(now) => was = now,
                }
            }
        }
        false
    }

    /// Pops the magazine that was pushed last. It is one of `magazines`, as all on the list are.
    pub(crate) fn pop<'m>(&self, magazines: &'m [Magazine]) -> Option<&'m Magazine> {
        let mut head = self.head.load(Ordering::Acquire);
        loop {
            let magazine = numbered(magazines, (head & INDEX) as u32)?;
            // If another thread has popped it by now, this number is out of date, and the exchange
            // fails by the tag.
            let next = u64::from(magazine.next.load(Ordering::Relaxed));
            let new = (head & !INDEX).wrapping_add(TAG) | next;
            match self.head.compare_exchange_weak(head, new, Ordering::Acquire, Ordering::Acquire) {
                Ok(_) => return Some(magazine),
                Err(now) => head = now,
            }
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.head.load(Ordering::Relaxed) & INDEX == 0
    }

    /// Refuses every later [`push`](Self::push).
    pub(crate) fn close(&self) {
        // AcqRel: a thread whose push is refused comes after what the closing thread did before.
        self.head.fetch_or(CLOSED, Ordering::AcqRel);
    }

    /// Accepts [`push`](Self::push) again.
    pub(crate) fn reopen(&self) {
        self.head.fetch_and(!CLOSED, Ordering::AcqRel);
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.head.load(Ordering::Acquire) & CLOSED != 0
    }

    /// How many magazines were ever popped, modulo 2^32.
    pub(crate) fn pops(&self) -> u32 {
        (self.head.load(Ordering::Acquire) / TAG) as u32
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// The tag differs after 2^31 pops, and after 2^32. When it wraps, it changes neither the index
    /// nor whether the list is closed.
    #[test]
    fn the_tag_wraps_after_all_its_bits() {
        let magazines: Vec<_> = (1..=2).map(|index| Magazine::new(1, index)).collect();
        for (pops, closed) in [(1 << 31, false), (1 << 32, true), (1 << 40, false), (1 << 40, true)] {
            let list = List::new();
            magazines.iter().for_each(|magazine| list.put_back(magazine));
            let first = list.head.load(Ordering::Relaxed);
            // As if all pops but one had happened, each followed by a push.
            list.head.store(first | ((pops - 1) * TAG), Ordering::Relaxed);
            if closed {
                list.close();
            }
            let popped = list.pop(&magazines).expect("two are on the list");
            assert_eq!(popped.index, 2);
            list.put_back(popped);
            let wraps = pops == 1 << 40;
            let now = list.head.load(Ordering::Relaxed);
            assert_eq!(now & !CLOSED == first, wraps, "after {pops:#x} pops: {now:#x}");
            assert_eq!((list.is_closed(), now & INDEX), (closed, 2));
            let rest: Vec<_> = std::iter::from_fn(|| list.pop(&magazines)).map(|m| m.index).collect();
            assert_eq!(rest, [2, 1]);
        }
    }
}
