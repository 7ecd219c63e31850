//! A ring of values between two threads: one pushes, the other pops, and neither waits inside a
//! call.
//!
//! ```text
//!   Sender::push ──► place ──► publish: tail = n      Receiver::pop ──► place ──► release: head = n
//!                              awaits_items? wake                               awaits_room? wake
//! ```
//!
//! **Single.** A [`Sender`] and a [`Receiver`] are no `Clone`, and their calls take `&mut self`. So
//! that one thread pushes and one pops is a matter of types.
//!
//! **Indices.** `tail` counts published values, and `head` released places. Both wrap. The places
//! from `head` to `tail` are the receiver's, and the others are the sender's. Each side writes one
//! index, knows what it has not published yet, and keeps the last value of the other index that it
//! has read. Several pushes can be published at once, and so can several pops.
//!
//! **Wake-ups** are those from empty to non-empty, and from full to non-full; a sender that waits
//! for several places ([`Sender::wait_for_room_for`]) is woken by each release, and waits again. A
//! side that finds nothing to do sets its flag, and reads the other index once more
//! ([`Receiver::wait_for_items`], [`Sender::wait_for_room`]). The other side checks the flag after
//! it has moved its index, and exchanges it for false. The side whose exchange returns true makes
//! the one call that wakes. While both sides have work, no flag is set, and nothing is woken.
//!
//! # Races
//!
//! **A value against its index.** The place is written before `tail` is (release), and read after
//! `tail` is (acquire). The same holds for `head` and a place that is written again.
//!
//! ```text
//!   sender                                    receiver
//!   write place, tail = 1 (release)
//!                                             tail is 1 (acquire): read place
//!                                             head = 1 (release)
//!   head is 1 (acquire): write place again
//! ```
//!
//! **A push against a receiver that goes to sleep.** Each side writes one word, and then reads the
//! word that the other side writes. A sequentially consistent fence stands between the two, so at
//! least one side sees the other's.
//!
//! ```text
//!   sender                                    receiver
//!   tail = 1                                  awaits_items = true
//!   fence                                     fence
//!   awaits_items is true: wakes               tail is 1: does not sleep
//! ```
//!
//! **A pop against a sender that goes to sleep** is the same, with `head` and `awaits_room`.
//!
//! **The end of both sides.** The side that is dropped last drops what is in the ring. Each side has
//! published its index before it goes.

use crate::stack::remote::sync::{Arc, AtomicBool, AtomicU32, Ordering, UnsafeCell, fence};
use std::mem::MaybeUninit;

/// The words that one side writes, on a line of their own.
#[repr(align(64))]
struct Side {
    /// Of the sender: how many values were published. Of the receiver: how many places were
    /// released.
    index: AtomicU32,
    /// This side waits for the other one.
    awaits: AtomicBool,
}

struct Ring<T, const N: usize> {
    sender: Side,
    receiver: Side,
    places: [UnsafeCell<MaybeUninit<T>>; N],
}

// SAFETY: a place is accessed by one side at a time (see the module), and values go from one thread
// to the other.
unsafe impl<T: Send, const N: usize> Send for Ring<T, N> {}
// SAFETY: as above.
unsafe impl<T: Send, const N: usize> Sync for Ring<T, N> {}

/// The side that pushes.
pub(crate) struct Sender<T, const N: usize> {
    ring: Arc<Ring<T, N>>,
    /// Values that were pushed, also those that are not published.
    tail: u32,
    /// Values that were published. Kept here because a load of the own index before its store would
    /// hide interleavings from loom.
    published: u32,
    /// The receiver's index, as it was last read.
    head: u32,
}

/// The side that pops.
pub(crate) struct Receiver<T, const N: usize> {
    ring: Arc<Ring<T, N>>,
    /// Values that were popped, also those whose places are not released.
    head: u32,
    /// Places that were released.
    released: u32,
    /// The sender's index, as it was last read.
    tail: u32,
}

/// A ring of `N` places, a power of two.
pub(crate) fn ring<T, const N: usize>() -> (Sender<T, N>, Receiver<T, N>) {
    const { assert!(N.is_power_of_two() && N <= 1 << 16, "indices wrap") };
    let side = || Side { index: AtomicU32::new(0), awaits: AtomicBool::new(false) };
    let places = std::array::from_fn(|_| UnsafeCell::new(MaybeUninit::uninit()));
    let ring = Arc::new(Ring { sender: side(), receiver: side(), places });
    let sender = Sender { ring: ring.clone(), tail: 0, published: 0, head: 0 };
    (sender, Receiver { ring, head: 0, released: 0, tail: 0 })
}

impl<T, const N: usize> Ring<T, N> {
    fn place(&self, index: u32) -> &UnsafeCell<MaybeUninit<T>> {
        &self.places[index as usize % N]
    }
}

impl Side {
    /// Moves this side's index, and returns whether the other side waits for that and is to be
    /// woken. `other` is that side.
    #[inline]
    fn move_to(&self, index: u32, other: &Self) -> bool {
        self.index.store(index, Ordering::Release);
        fence(Ordering::SeqCst);
        other.awaits.load(Ordering::Relaxed) && other.awaits.swap(false, Ordering::Relaxed)
    }

    /// This side waits until the other one moves its index away from `seen`. Returns the index; if
    /// it is not `seen`, this side does not wait.
    fn wait(&self, seen: u32, other: &Self) -> u32 {
        // An exchange, because a model does not order a store after another thread's exchange.
        self.awaits.swap(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let index = other.index.load(Ordering::Acquire);
        if index != seen {
            self.awaits.swap(false, Ordering::Relaxed);
        }
        index
    }
}

impl<T, const N: usize> Sender<T, N> {
    fn free(&self) -> usize {
        N - self.tail.wrapping_sub(self.head) as usize
    }

    /// Places for values.
    pub(crate) fn room(&mut self) -> usize {
        if self.free() == 0 {
            self.head = self.ring.receiver.index.load(Ordering::Acquire);
        }
        self.free()
    }

    /// Whether there are places for `n` values.
    pub(crate) fn has_room_for(&mut self, n: usize) -> bool {
        if self.free() < n {
            self.head = self.ring.receiver.index.load(Ordering::Acquire);
        }
        self.free() >= n
    }

    /// Puts a value into the ring. The receiver sees it after [`publish`](Self::publish).
    ///
    /// # Errors
    ///
    /// Returns the value: the ring is full.
    pub(crate) fn push(&mut self, value: T) -> Result<(), T> {
        if self.room() == 0 {
            return Err(value);
        }
        // SAFETY: the place is not between `head` and `tail`, so it is the sender's, and it has no
        // value. This is the only sender.
        self.ring.place(self.tail).with_mut(|place| unsafe { (*place).write(value) });
        self.tail = self.tail.wrapping_add(1);
        Ok(())
    }

    /// Publishes what was pushed. If the answer is true, the receiver waits, and the caller wakes
    /// it.
    #[must_use]
    pub(crate) fn publish(&mut self) -> bool {
        std::mem::replace(&mut self.published, self.tail) != self.tail
            && self.ring.sender.move_to(self.tail, &self.ring.receiver)
    }

    /// Waits for room: the receiver's next [`release`](Receiver::release) wakes the sender. Returns
    /// false if there is room.
    pub(crate) fn wait_for_room(&mut self) -> bool {
        self.wait_for_room_for(1)
    }

    /// The same for `n` values, at most all places. A release that makes room for fewer wakes the
    /// sender, too, which then waits again.
    pub(crate) fn wait_for_room_for(&mut self, n: usize) -> bool {
        while self.free() < n {
            let seen = self.head;
            self.head = self.ring.sender.wait(seen, &self.ring.receiver);
            if self.head == seen {
                return true;
            }
        }
        false
    }

    /// Whether the receiver has released all places.
    pub(crate) fn is_empty(&mut self) -> bool {
        self.head = self.ring.receiver.index.load(Ordering::Acquire);
        self.free() == N
    }
}

impl<T, const N: usize> Receiver<T, N> {
    /// Whether no value is there.
    pub(crate) fn is_empty(&mut self) -> bool {
        if self.head == self.tail {
            self.tail = self.ring.sender.index.load(Ordering::Acquire);
        }
        self.head == self.tail
    }

    /// The next value. Its place is the sender's after [`release`](Self::release).
    pub(crate) fn pop(&mut self) -> Option<T> {
        if self.is_empty() {
            return None;
        }
        // SAFETY: the place is between `head` and `tail`, so it has a value, which is the
        // receiver's. This is the only receiver, and `head` passes each value once.
        let value = self.ring.place(self.head).with_mut(|place| unsafe { (*place).assume_init_read() });
        self.head = self.head.wrapping_add(1);
        Some(value)
    }

    /// Releases the places of what was popped. If the answer is true, the sender waits, and the
    /// caller wakes it.
    #[must_use]
    pub(crate) fn release(&mut self) -> bool {
        std::mem::replace(&mut self.released, self.head) != self.head
            && self.ring.receiver.move_to(self.head, &self.ring.sender)
    }

    /// Waits for values: the sender's next [`publish`](Sender::publish) wakes the receiver. Returns
    /// false if there is one.
    pub(crate) fn wait_for_items(&mut self) -> bool {
        if self.head != self.tail {
            return false;
        }
        self.tail = self.ring.receiver.wait(self.tail, &self.ring.sender);
        self.head == self.tail
    }
}

/// What was pushed can be received after the sender is gone.
impl<T, const N: usize> Drop for Sender<T, N> {
    fn drop(&mut self) {
        self.ring.sender.index.store(self.tail, Ordering::Release);
    }
}

impl<T, const N: usize> Drop for Receiver<T, N> {
    fn drop(&mut self) {
        self.ring.receiver.index.store(self.head, Ordering::Release);
    }
}

impl<T, const N: usize> Drop for Ring<T, N> {
    fn drop(&mut self) {
        let mut head = self.receiver.index.load(Ordering::Acquire);
        let tail = self.sender.index.load(Ordering::Acquire);
        while head != tail {
            // SAFETY: the place has a value, and no side is left.
            self.place(head).with_mut(|place| unsafe { (*place).assume_init_drop() });
            head = head.wrapping_add(1);
        }
    }
}
