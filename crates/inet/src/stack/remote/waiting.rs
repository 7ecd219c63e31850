//! How tasks wait until a socket for datagrams can send, and how they request the pages that they
//! lack from the stack.
//!
//! ```text
//!   task: no room ──► list of wakers ──► the ring's flag          stack: releases ──► the port's waker
//!   task: no page ──► list of wakers ──► Wanted, Asked::PAGE ──►  stack: pages ─────► wakes the list
//! ```
//!
//! Why a list: any number of tasks send by one socket, and a port has one waker. What is registered
//! there is the list. Waking it removes all wakers and calls them.
//!
//! # Races
//!
//! **Two tasks that wait for room.** A task puts its waker into the list, registers the list, and
//! then sets the ring's flag and reads the ring once more. So the stack that sees the flag finds
//! the waker. If two tasks register at the same time, the port may keep the registration of one of
//! them: both are the same list.
//!
//! ```text
//!   task                                      stack
//!   list: waker                               releases places
//!   the port's waker is the list              the flag is set: wakes the list
//!   sets the flag, reads the ring
//! ```
//!
//! The ring has one flag, and clears it if it finds room. So a task that finds room then wakes the
//! list: the stack may have read the flag while it was cleared, and wakes none of the others.
//!
//! ```text
//!   task A          task B                    stack
//!   sets the flag                             releases places
//!   sleeps          sets the flag, room:
//!                   clears the flag
//!                   wakes A                   the flag is not set
//! ```
//!
//! **A request for pages against the stack that reads it.** The task stores how many pages it
//! needs, and then sets the bit. The stack clears the bit, and then reads the number. So a number
//! is read with its bit, or before it by an earlier request; and a bit that is set later is another
//! request.
//!
//! ```text
//!   task                                      stack
//!   wanted = min(wanted, 3)                   clears PAGE: it was set
//!   asked |= PAGE, signal                     reads wanted: 3, and clears it
//! ```

use crate::stack::error::SocketError;
use crate::stack::remote::port::{Asked, Port};
use crate::stack::remote::ring::Sender;
use crate::stack::remote::sync::{AtomicU32, Mutex, MutexGuard, Ordering};
use std::sync::{Arc, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

/// What tasks send by, and how they wait until they can. `O` is what a new port has for the stack.
pub(crate) struct SendSide<O, T, const N: usize> {
    pub(crate) port: Arc<Port<O>>,
    sending: Mutex<Sending<T, N>>,
    wanted: Arc<Wanted>,
    writers: Arc<Writers>,
}

/// What a call uses alone.
pub(crate) struct Sending<T, const N: usize> {
    pub(crate) ring: Sender<T, N>,
    /// The call that found too few pages since the last wait; if there were several, the one that
    /// needs the fewest.
    shortage: Option<Shortage>,
}

impl<T, const N: usize> Sending<T, N> {
    /// Notes that a call has found too few pages. The wait that follows may be of another task, and
    /// each task that waits is woken for the fewest pages.
    pub(crate) fn note_shortage(&mut self, shortage: Shortage) {
        if self.shortage.is_none_or(|before| shortage.pages < before.pages) {
            self.shortage = Some(shortage);
        }
    }
}

/// What a call has found too few pages for.
#[derive(Clone, Copy)]
pub(crate) struct Shortage {
    /// The pages that it needs.
    pub(crate) pages: u32,
    /// The counts admit them, but the pool has too few.
    pub(crate) of_pool: bool,
}

impl<O, T, const N: usize> SendSide<O, T, N> {
    pub(crate) fn new(port: Arc<Port<O>>, ring: Sender<T, N>, wanted: Arc<Wanted>) -> Self {
        Self { port, sending: Mutex::new(Sending { ring, shortage: None }), wanted, writers: Arc::default() }
    }

    /// Other calls of this direction wait until the guard is dropped.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Sending<T, N>> {
        lock(&self.sending)
    }

    #[cfg(all(test, not(loom)))]
    pub(crate) fn is_locked(&self) -> bool {
        self.sending.try_lock().is_err()
    }

    /// The error with which the socket has ended.
    pub(crate) fn check(&self) -> Result<(), SocketError> {
        self.port.failure().map_or(Ok(()), Err)
    }

    /// Ready when there is room for `places` values, and no call has found too few pages since the
    /// last wait; or when the socket has ended.
    pub(crate) fn poll_writable(&self, cx: &mut Context<'_>, places: usize) -> Poll<Result<(), SocketError>> {
        self.check()?;
        let mut sending = self.lock();
        if sending.shortage.is_none() && sending.ring.has_room_for(places) {
            return Poll::Ready(Ok(()));
        }
        drop(sending);
        self.register_writer(cx);
        let mut sending = self.lock();
        if let Some(Shortage { pages, of_pool }) = sending.shortage.take() {
            // A signal to a stack that has ended calls the wakers of users, which may call this
            // socket.
            drop(sending);
            self.wanted.add(pages);
            self.port.ask(if of_pool { Asked::PAGE.and(Asked::POOL) } else { Asked::PAGE });
        } else if !sending.ring.wait_for_room_for(places) {
            drop(sending);
            // The ring's flag is cleared, also for the tasks that wait already.
            self.writers.clone().wake();
            return Poll::Ready(Ok(()));
        }
        self.check()?;
        Poll::Pending
    }

    /// Registers a waker beside those of other tasks. The caller reads what it waits for after this
    /// call.
    pub(crate) fn register_writer(&self, cx: &mut Context<'_>) {
        let mut waiting = lock(&self.writers.0);
        if !waiting.iter().any(|other| other.will_wake(cx.waker())) {
            waiting.push(cx.waker().clone());
        }
        drop(waiting);
        self.port.register_writer(&mut Context::from_waker(&Waker::from(self.writers.clone())));
    }
}

/// Tasks that wait until they can send. Waking wakes them all.
struct Writers(Mutex<Vec<Waker>>);

impl Default for Writers {
    fn default() -> Self {
        Self(Mutex::new(Vec::new()))
    }
}

impl Wake for Writers {
    fn wake(self: Arc<Self>) {
        let waiting = std::mem::take(&mut *lock(&self.0));
        waiting.into_iter().for_each(Waker::wake);
    }
}

/// A panic of another caller leaves nothing half done.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How many pages the calls need that wait for some: the fewest of those since the stack has read
/// it. A call stores it before it asks for pages.
pub(crate) struct Wanted(AtomicU32);

impl Wanted {
    const NONE: u32 = u32::MAX;

    pub(crate) fn add(&self, pages: u32) {
        self.0.fetch_min(pages, Ordering::Relaxed);
    }

    /// A request whose number the stack has read with an earlier request wants one page: what was
    /// woken then asks again.
    pub(crate) fn take(&self) -> u32 {
        match self.0.swap(Self::NONE, Ordering::Relaxed) {
            Self::NONE => 1,
            pages => pages,
        }
    }
}

impl Default for Wanted {
    fn default() -> Self {
        Self(AtomicU32::new(Self::NONE))
    }
}

/// The requests for pages of a socket's handle, as the stack knows them.
#[derive(Default)]
pub(crate) struct PageRequests {
    /// How many pages the handle waits for, if it does: the fewest of its calls.
    wanted: Option<u32>,
}

impl PageRequests {
    /// Reads the handle's requests since the last call. Returns how many pages it waits for, and
    /// whether a new request is of a pool that was empty although the counts admit the pages.
    pub(crate) fn poll<O>(&mut self, port: &Port<O>, wanted: &Wanted) -> Option<(u32, bool)> {
        let mut of_pool = false;
        if port.take(Asked::PAGE) {
            let wanted = wanted.take();
            self.wanted = Some(self.wanted.map_or(wanted, |before| before.min(wanted)));
            of_pool = port.take(Asked::POOL);
        }
        self.wanted.map(|wanted| (wanted, of_pool))
    }

    /// There are as many pages: wakes the tasks that wait.
    pub(crate) fn answer<O>(&mut self, port: &Port<O>) {
        self.wanted = None;
        port.wake_writer();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::stack::remote::ring::ring;

    #[test]
    fn the_wait_after_several_shortages_is_for_the_fewest_pages() {
        let mut sending = Sending { ring: ring::<u32, 1>().0, shortage: None };
        for pages in [9, 2, 5] {
            sending.note_shortage(Shortage { pages, of_pool: pages == 2 });
        }
        assert!(sending.shortage.is_some_and(|least| least.pages == 2 && least.of_pool));
    }
}
