//! What the handles of queues have in common: those of AF_XDP and of the virtio driver.
//!
//! Each function is the body of one of the header for every kind of queue. A pointer is what the
//! page of that function says it is.

use crate::frag::{self, netmem_frag};
use crate::groups::{self, Sends, Waiting};
use crate::owned::{self, Owned};
use crate::status::Failure;
use netmem_packet::{Armed, Poll, RxQueue, TxQueue, Wait};
use netmem_pool::Region;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

/// A receive queue, and the frames that it has received and the caller had no room for.
pub(crate) struct Receive<Q: RxQueue> {
    pub(crate) queue: Q,
    pub(crate) region: Arc<Region<Q::Mem>>,
    waiting: Waiting<Q::Mem>,
}

impl<Q: RxQueue> Receive<Q> {
    pub(crate) fn new(region: Arc<Region<Q::Mem>>, queue: Q) -> Self {
        Self { queue, region, waiting: Waiting::new() }
    }

    /// The queue, to close it. Frames that wait are dropped.
    pub(crate) fn close(self) -> Q {
        self.queue
    }
}

impl<Q: RxQueue + AsFd> AsFd for Receive<Q> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.queue.as_fd()
    }
}

impl<Q: RxQueue + Wait> Wait for Receive<Q> {
    /// Frames that wait are work.
    fn arm(&mut self) -> io::Result<Armed> {
        if self.waiting.is_empty() { self.queue.arm() } else { Ok(Armed::Work) }
    }

    fn disarm(&mut self) {
        self.queue.disarm();
    }

    fn check(&self) -> io::Result<()> {
        self.queue.check()
    }
}

/// Receives into the arrays, and writes how many fragments. If that is none, `check` says whether
/// the queue has stopped.
///
/// # Safety
///
/// See the module.
#[inline]
pub(crate) unsafe fn receive<K: Owned<Value = Receive<Q>>, Q: RxQueue>(
    rx: *mut K,
    (frags, flags, n): (*mut netmem_frag, *mut u8, usize),
    received: *mut usize,
    check: impl FnOnce(&Q) -> io::Result<()>,
) -> Result<(), Failure> {
    let count = NonNull::new(received).ok_or_else(|| Failure::null("received"))?;
    // SAFETY: as the caller promises.
    let Receive { queue, waiting, .. } = unsafe { owned::get_mut(rx) }?;
    // SAFETY: as the caller promises.
    let done = unsafe { groups::receive(queue, waiting, frags, flags, n) }?;
    if done == 0 {
        check(queue).map_err(Failure::Queue)?;
    }
    // SAFETY: the caller has room for a number there.
    unsafe { count.write(done) };
    Ok(())
}

/// Releases fragments: those of the queue to its cache, and the others when it is not borrowed.
///
/// # Safety
///
/// See the module.
#[inline]
pub(crate) unsafe fn release<K: Owned<Value = Receive<Q>>, Q: RxQueue>(
    rx: *mut K,
    frags: *mut netmem_frag,
    n: usize,
) -> Result<(), Failure> {
    let others = {
        // SAFETY: as the caller promises.
        let Receive { queue, region, .. } = unsafe { owned::get_mut(rx) }?;
        if n == 0 {
            return Ok(());
        }
        if frags.is_null() {
            return Err(Failure::null("frags"));
        }
        queue.poll(|poll| {
            // SAFETY: as the caller promises; the pool compares its pages.
            poll.with_napi(|napi| unsafe {
                napi.release_group(frag::variables(frags, n)) < n && frag::release_of(region, frags, n)
            })
        })
    };
    if others {
        // SAFETY: as the caller promises.
        unsafe { frag::release_all(frags, n) };
    }
    Ok(())
}

/// Sends from the arrays, and writes how many fragments.
///
/// # Safety
///
/// See the module.
#[inline]
pub(crate) unsafe fn send<K: Owned<Value: Sends>>(
    tx: *mut K,
    (frags, flags, n): (*mut netmem_frag, *const u8, usize),
    sent: *mut usize,
) -> Result<(), Failure> {
    // SAFETY: as the caller promises.
    unsafe { counted(sent, |done| groups::send(owned::get_mut(tx)?, frags, flags, n, done)) }
}

/// Calls `send`, which counts what it has sent, and writes that, also if it fails.
///
/// # Safety
///
/// `sent` is null, or there is room for a number.
#[inline]
pub(crate) unsafe fn counted(
    sent: *mut usize,
    send: impl FnOnce(&mut usize) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let count = NonNull::new(sent).ok_or_else(|| Failure::null("sent"))?;
    // SAFETY: as the caller promises.
    unsafe { count.write(0) };
    let mut done = 0;
    let outcome = send(&mut done);
    // SAFETY: as the caller promises.
    unsafe { count.write(done) };
    outcome
}

/// Completes, in the poll context of `rx` if it is not null.
///
/// # Safety
///
/// See the module.
#[inline]
pub(crate) unsafe fn complete<T, R, Q>(tx: *mut T, rx: *mut R) -> Result<usize, Failure>
where
    T: Owned<Value: TxQueue>,
    R: Owned<Value = Receive<Q>>,
    Q: RxQueue,
{
    // SAFETY: as the caller promises.
    let tx = unsafe { owned::get_mut(tx) }?;
    if rx.is_null() {
        return Ok(tx.complete());
    }
    // SAFETY: as the caller promises.
    let rx = unsafe { owned::get_mut(rx) }?;
    Ok(rx.queue.poll(|poll| poll.with_napi(|_| tx.complete())))
}

/// The descriptor to wait on.
///
/// # Safety
///
/// See the module.
pub(crate) unsafe fn fd<K: Owned<Value: AsFd>>(queue: *const K) -> Result<i32, Failure> {
    // SAFETY: as the caller promises.
    Ok(unsafe { owned::peek(queue) }?.as_fd().as_raw_fd())
}

/// Asks for a wake-up, and writes whether to sleep.
///
/// # Safety
///
/// See the module.
pub(crate) unsafe fn arm<K: Owned<Value: Wait>>(queue: *mut K, waits: *mut bool) -> Result<(), Failure> {
    let out = NonNull::new(waits).ok_or_else(|| Failure::null("waits"))?;
    // SAFETY: as the caller promises.
    let armed = unsafe { owned::get_mut(queue) }?.arm().map_err(Failure::Queue)?;
    // SAFETY: the caller has room for it there.
    unsafe { out.write(armed.waits()) };
    Ok(())
}

/// Ends the request for a wake-up.
///
/// # Safety
///
/// See the module.
pub(crate) unsafe fn disarm<K: Owned<Value: Wait>>(queue: *mut K) -> Result<(), Failure> {
    // SAFETY: as the caller promises.
    unsafe { owned::get_mut(queue) }?.disarm();
    Ok(())
}
