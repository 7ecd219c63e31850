//! Threads and tasks that wait for a page of a [`SharedPool`](crate::SharedPool), first come first
//! served.
//!
//! ```text
//!   waiter, under the owner's lock                a thread that drops a page
//!   draws a number in the queue
//!   if it is the first of the queue:
//!     pauses the magazines                        the magazines refuse the page
//!     marks the return stack,                     the stack is marked: passes the page to
//!     pops what is on it                          the first of the queue, and wakes it
//!   searches the depot, the stack's pages and     the queue is empty now: the mark is removed,
//!     the provider; passes what it finds to         the magazines go on
//!     the first of the queue
//!   sleeps
//! ```
//!
//! **The waiter pays.** While no thread waits, a drop is what it was: a store on this CPU's
//! magazine, or a push on the return stack. The mark is one of the values of the stack's head by
//! which the stack refuses pages, so a push tests nothing in addition.
//!
//! **The page is passed, not only the news of it.** The page goes to the waiter whose number is the
//! lowest, so no thread that comes later can take it meanwhile.
//!
//! Invariant (*marked*): the stack is marked, and the magazines are paused, exactly while the queue
//! has waiters. Both change under the queue's lock only. A queue with waiters has a pool: the
//! pool's end empties the queue first, under that lock.
//!
//! **Wait against return.** A drop finds the mark, or it pushes its page before the mark is set.
//! The mark is set by the exchange that pops what is on the stack. So the page is found by the
//! waiter, or the waiter is found by the page. The same holds for a magazine and the depot's list,
//! which is closed meanwhile: a full magazine that comes later is refused, and its pages are
//! returned one by one.
//!
//! ```text
//!   waiter                                        drop
//!   closes the gate, a barrier                    a push commits before: the waiter pops it
//!                                                   out of the CPU's magazine
//!   exchanges the stack's head for the mark       a push comes before: the page is in what
//!                                                   the waiter has taken
//!   searches                                      a push comes later: finds the mark, takes
//!   sleeps                                          the queue's lock, passes the page on
//! ```
//!
//! **Wait against a magazine in hand.** An allocation has taken a magazine from the depot, and puts
//! it back after the waiter's search. It has put it back on a list that is closed by then. So each
//! allocation that used the depot tests afterwards whether the list is closed, and passes what is
//! in the depot to the waiters.
//!
//! **Wait against cancel.** A waiter that is dropped leaves the queue under the lock. If a page had
//! been passed to it, the page is dropped, and goes to the next waiter like any other page.
//!
//! **Wait against the end.** The end of the pool, or of its device, removes all waiters from the
//! queue under the lock and wakes them with the reason.
//!
//! A thread that passes a page on holds the queue, which is shared, and not the pool: from the
//! moment at which the page is passed, the pool may be gone.

use crate::desc::{Desc, ListNode};
use crate::error::WaitError;
use crate::header::{desc_of, item_of};
use crate::memory::Memory;
use crate::page::Page;
use crate::panics::Panics;
use crate::return_stack::ReturnStack;
use crate::sync::{Condvar, Mutex, MutexGuard};
use netmem_percpu::CpuCache;
use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::num::NonZeroUsize;
use std::pin::Pin;
use std::ptr::NonNull;
use std::sync::{Arc, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

/// Why no thread can wait any more.
#[derive(Clone, Copy, Debug)]
pub(crate) enum EndReason {
    DeviceGone,
    Closed,
}

impl From<EndReason> for WaitError {
    fn from(why: EndReason) -> Self {
        match why {
            EndReason::DeviceGone => Self::DeviceGone,
            EndReason::Closed => Self::Closed,
        }
    }
}

/// The queue of a pool. It is shared with the futures, and may outlive the pool.
#[derive(Debug)]
pub(crate) struct Waiters {
    /// Both are of the pool, and used under the lock while the queue has waiters, or by the pool's
    /// owner.
    stack: NonNull<ReturnStack>,
    cpus: NonNull<CpuCache>,
    queue: Mutex<Queue>,
}

// SAFETY: the pool is shared by all threads, and the pointers are used only while it exists
// (*marked*).
unsafe impl Send for Waiters {}
// SAFETY: as above.
unsafe impl Sync for Waiters {}

#[derive(Debug, Default)]
struct Queue {
    /// The number of the next waiter.
    next: u64,
    /// With the waker of each, if it was polled.
    waiting: BTreeMap<u64, Option<Waker>>,
    /// Pages that were passed to waiters and not yet fetched by them.
    passed: BTreeMap<u64, NonZeroUsize>,
    over: Option<EndReason>,
}

impl Waiters {
    pub(crate) fn new(stack: &ReturnStack, cpus: &CpuCache) -> Arc<Self> {
        Arc::new(Self { stack: NonNull::from(stack), cpus: NonNull::from(cpus), queue: Mutex::new(Queue::default()) })
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        // No code of the user runs under the lock.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Draws a number. For the first of the queue, also what was on the return stack, as a list;
    /// and how many pages other CPUs held, which are in the depot now. Under the owner's lock.
    /// After that the caller searches.
    pub(crate) fn wait(&self) -> Result<(u64, *mut ListNode, usize), WaitError> {
        let mut queue = self.queue();
        if let Some(why) = queue.over {
            return Err(why.into());
        }
        let (mut list, mut moved) = (std::ptr::null_mut(), 0);
        if queue.waiting.is_empty() {
            // SAFETY: the caller has the pool.
            unsafe {
                moved = self.cpus.as_ref().pause()?;
                list = self.stack.as_ref().mark();
            }
        }
        let number = queue.next;
        queue.next += 1;
        queue.waiting.insert(number, None);
        Ok((number, list, moved))
    }

    /// Whether the queue has waiters.
    pub(crate) fn any(&self) -> bool {
        !self.queue().waiting.is_empty()
    }

    /// Passes a page to the first of the queue, whose waker the caller wakes. If there is none, the
    /// page is still the caller's.
    ///
    /// The caller owns the page, which keeps the pool until it is passed.
    pub(crate) fn pass(&self, desc: NonNull<Desc>) -> Result<Option<Waker>, NonNull<Desc>> {
        let mut queue = self.queue();
        let Some((number, waker)) = queue.waiting.pop_first() else { return Err(desc) };
        self.resume_if_empty(&queue);
        queue.passed.insert(number, item_of(desc));
        Ok(waker)
    }

    /// Removes the mark and reopens the magazines, if no waiter is left. A waiter has just been
    /// taken out of the queue.
    fn resume_if_empty(&self, queue: &Queue) {
        if queue.waiting.is_empty() {
            // SAFETY: *marked*: the queue had a waiter, so the pool exists until the lock is
            // released.
            unsafe {
                self.stack.as_ref().unmark();
                self.cpus.as_ref().reopen();
            }
        }
    }

    /// Ends all waiting, and returns the wakers. The magazines stay paused. Under the owner's lock,
    /// or by the owner alone.
    pub(crate) fn end(&self, why: EndReason) -> Wakers {
        let mut queue = self.queue();
        queue.over = Some(why);
        let waiting = std::mem::take(&mut queue.waiting);
        if !waiting.is_empty() {
            // SAFETY: the caller has the pool.
            unsafe { self.stack.as_ref().unmark() };
        }
        Wakers(waiting.into_values().flatten().collect())
    }

    /// Fetches the page of a waiter, or leaves the waker. Returns the waker that is not needed,
    /// too: its drop is code of the user.
    fn poll(&self, number: u64, waker: Waker) -> (Poll<Result<NonNull<Desc>, WaitError>>, Option<Waker>) {
        let mut queue = self.queue();
        if let Some(item) = queue.passed.remove(&number) {
            return (Poll::Ready(Ok(desc_of(item))), Some(waker));
        }
        match queue.waiting.get_mut(&number) {
            Some(place) => (Poll::Pending, place.replace(waker)),
            None => (Poll::Ready(Err(queue.over.map_or(WaitError::Ended, WaitError::from))), Some(waker)),
        }
    }

    /// Removes a waiter. Returns the page that had been passed to it, and its waker.
    fn cancel(&self, number: u64) -> (Option<NonNull<Desc>>, Option<Waker>) {
        let mut queue = self.queue();
        if let Some(waker) = queue.waiting.remove(&number) {
            self.resume_if_empty(&queue);
            return (None, waker);
        }
        (queue.passed.remove(&number).map(desc_of), None)
    }
}

/// Wakers that are woken when the value is dropped, which is after all locks have been released.
#[derive(Default)]
pub(crate) struct Wakers(pub(crate) Vec<Waker>);

impl Drop for Wakers {
    fn drop(&mut self) {
        let mut panics = Panics::default();
        for waker in self.0.drain(..) {
            panics.call(|| waker.wake());
        }
        panics.resume();
    }
}

/// A page of a [`SharedPool`](crate::SharedPool), as soon as there is one: from
/// [`alloc_async`](crate::SharedPool::alloc_async).
///
/// It has its place in the queue from the call on, not from the first poll. It does not borrow the
/// pool, and ends with an error when the pool or its device ends. If it is dropped, its place is
/// free, and a page that had been passed to it goes to the next waiter. A value that is leaked
/// keeps the page that is passed to it.
#[must_use = "a future has a place in the queue, and is to be polled or dropped"]
pub struct AllocFuture<M: Memory> {
    state: State,
    page_size: u32,
    kind: PhantomData<fn() -> M>,
}

enum State {
    /// A page that was found at once.
    Found(NonNull<Desc>),
    Failed(WaitError),
    Waits(Arc<Waiters>, u64),
    Ended,
}

// SAFETY: the page is the future's alone, and pages may be sent.
unsafe impl<M: Memory> Send for AllocFuture<M> where Page<M>: Send {}
// SAFETY: by shared reference nothing of it can be reached.
unsafe impl<M: Memory> Sync for AllocFuture<M> {}

impl<M: Memory> AllocFuture<M> {
    /// The page is the future's.
    pub(crate) fn found(desc: NonNull<Desc>, page_size: u32) -> Self {
        Self { state: State::Found(desc), page_size, kind: PhantomData }
    }

    pub(crate) fn failed(why: WaitError) -> Self {
        Self { state: State::Failed(why), page_size: 0, kind: PhantomData }
    }

    pub(crate) fn waits(waiters: Arc<Waiters>, number: u64, page_size: u32) -> Self {
        Self { state: State::Waits(waiters, number), page_size, kind: PhantomData }
    }

    /// # Safety
    ///
    /// The page is the caller's alone.
    unsafe fn page(&self, desc: NonNull<Desc>) -> Page<M> {
        // SAFETY: the caller's.
        unsafe { Page::from_desc(desc, 0, self.page_size) }
    }

    /// Sleeps until the future ends.
    pub(crate) fn block(mut self) -> Result<Page<M>, WaitError> {
        let parker = Arc::new(Parker { is_woken: Mutex::new(false), event: Condvar::new() });
        let waker = Waker::from(parker.clone());
        loop {
            if let Poll::Ready(page) = Pin::new(&mut self).poll(&mut Context::from_waker(&waker)) {
                return page;
            }
            parker.park();
        }
    }
}

impl<M: Memory> Future for AllocFuture<M> {
    type Output = Result<Page<M>, WaitError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        // Before the state is taken, because this is code of the user, and may panic.
        let waker = cx.waker().clone();
        match std::mem::replace(&mut self.state, State::Ended) {
            // SAFETY: the page was the future's.
            State::Found(desc) => Poll::Ready(Ok(unsafe { self.page(desc) })),
            State::Failed(why) => Poll::Ready(Err(why)),
            State::Ended => Poll::Ready(Err(WaitError::Ended)),
            State::Waits(waiters, number) => {
                let (answer, waker) = waiters.poll(number, waker);
                let answer = match answer {
                    Poll::Pending => {
                        self.state = State::Waits(waiters, number);
                        Poll::Pending
                    }
                    // SAFETY: the page was passed to this waiter.
                    Poll::Ready(page) => Poll::Ready(page.map(|desc| unsafe { self.page(desc) })),
                };
                drop(waker);
                answer
            }
        }
    }
}

impl<M: Memory> Drop for AllocFuture<M> {
    fn drop(&mut self) {
        let desc = match std::mem::replace(&mut self.state, State::Ended) {
            State::Found(desc) => Some(desc),
            State::Waits(waiters, number) => waiters.cancel(number).0,
            State::Failed(_) | State::Ended => None,
        };
        // SAFETY: the page was found by this future, or passed to it.
        drop(desc.map(|desc| unsafe { self.page(desc) }));
    }
}

impl<M: Memory> fmt::Debug for AllocFuture<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.state {
            State::Found(_) => f.write_str("AllocFuture(found)"),
            State::Failed(why) => write!(f, "AllocFuture({why})"),
            State::Waits(_, number) => write!(f, "AllocFuture(waiter {number})"),
            State::Ended => f.write_str("AllocFuture(ended)"),
        }
    }
}

/// Where a thread sleeps until its waker is called.
struct Parker {
    is_woken: Mutex<bool>,
    event: Condvar,
}

impl Parker {
    fn park(&self) {
        let mut is_woken = self.is_woken.lock().unwrap_or_else(PoisonError::into_inner);
        while !std::mem::take(&mut *is_woken) {
            is_woken = self.event.wait(is_woken).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Wake for Parker {
    fn wake(self: Arc<Self>) {
        *self.is_woken.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.event.notify_one();
    }
}
