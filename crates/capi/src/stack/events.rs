//! What can be used again: the wakers of listeners and connections, and the list that they fill.
//!
//! A place is in the list at most once: when its flags become other than 0. The flags are cleared
//! when it leaves the list. All calls are of the stack's thread. The types are for several threads
//! because a waker is.
//!
//! **Why two lists.** A waker adds to `woken`, and each poll of the stack moves those to `places`,
//! from which the program reads. Without that, a program whose call can do nothing, and requests an
//! event that is there at once, would read events for ever, and never poll.

use crate::handle::Kind;
use crate::options::Versioned;
use crate::stack::handles::{netmem_tcp, netmem_tcp_listener};
use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Wake, Waker};

/// In netmem_event.flags: receive again, or accept again. There is something, or the end.
pub const NETMEM_EVENT_READ: u32 = 1;
/// In netmem_event.flags: send or write again. There is room, or the connection has been made, or
/// it has ended.
pub const NETMEM_EVENT_WRITE: u32 = 2;

/// A listener or a connection that can do again what it could not do before.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct netmem_event {
    /// sizeof(netmem_event)
    pub size: usize,
    /// the connection; null if it is a listener's event
    pub connection: *mut netmem_tcp,
    /// the listener; null if it is a connection's event
    pub listener: *mut netmem_tcp_listener,
    /// what the program has set as the context of the connection or the listener
    pub context: *mut c_void,
    /// NETMEM_EVENT_READ, NETMEM_EVENT_WRITE, or both
    pub flags: u32,
    /// zero
    pub reserved: u32,
}

// SAFETY: repr(C), `size` is first, integers and pointers.
unsafe impl Versioned for netmem_event {
    const NAME: &'static str = "netmem_event";
    const LEAST: usize = 40;
}

/// The list of a stack.
#[derive(Default)]
pub(crate) struct Ready {
    places: Mutex<VecDeque<Arc<Place>>>,
    /// What the next poll adds to `places`.
    woken: Mutex<VecDeque<Arc<Place>>>,
    /// The stack was closed: places keep the list, so the list keeps no place.
    closed: AtomicBool,
}

impl Ready {
    fn places(&self) -> MutexGuard<'_, VecDeque<Arc<Place>>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn woken(&self) -> MutexGuard<'_, VecDeque<Arc<Place>>> {
        self.woken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether there is no event, also after the next poll.
    pub(crate) fn is_empty(&self) -> bool {
        [self.places(), self.woken()].into_iter().all(|mut list| {
            while list.front().is_some_and(|place| place.is_gone()) {
                list.pop_front();
            }
            list.is_empty()
        })
    }

    /// At the end of a poll: its events, and those that were requested since the last.
    pub(crate) fn publish(&self) {
        self.places().append(&mut self.woken());
    }

    /// Removes the event that was first.
    pub(crate) fn next(&self) -> Option<netmem_event> {
        let mut places = self.places();
        loop {
            let place = places.pop_front()?;
            if !place.is_gone() {
                return Some(place.event());
            }
        }
    }

    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        self.places().clear();
        self.woken().clear();
    }
}

/// The kind of handle of a place.
#[derive(Clone, Copy)]
pub(crate) enum Of {
    Connection,
    Listener,
}

/// The flags of a place whose handle was closed. It stays in the list until it is the first: its
/// removal would be linear in the list.
const GONE: u32 = u32::MAX;

/// A listener or a connection, as the list has it.
pub(crate) struct Place {
    ready: Arc<Ready>,
    of: Of,
    handle: AtomicPtr<c_void>,
    context: AtomicPtr<c_void>,
    flags: AtomicU32,
}

impl Place {
    fn wake(self: &Arc<Self>, flag: u32) {
        if !self.ready.closed.load(Ordering::Relaxed) && self.flags.fetch_or(flag, Ordering::Relaxed) == 0 {
            self.ready.woken().push_back(self.clone());
        }
    }

    /// Its handle was closed.
    fn is_gone(&self) -> bool {
        self.flags.load(Ordering::Relaxed) == GONE
    }

    fn event(&self) -> netmem_event {
        let handle = self.handle.load(Ordering::Relaxed);
        let (connection, listener) = match self.of {
            Of::Connection => (handle.cast(), std::ptr::null_mut()),
            Of::Listener => (std::ptr::null_mut(), handle.cast()),
        };
        let (context, flags) = (self.context.load(Ordering::Relaxed), self.flags.swap(0, Ordering::Relaxed));
        netmem_event { size: size_of::<netmem_event>(), connection, listener, context, flags, reserved: 0 }
    }
}

/// A place's waker for one of its flags.
struct Side {
    place: Arc<Place>,
    flag: u32,
}

impl Wake for Side {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.place.wake(self.flag);
    }
}

/// The wakers of a listener or a connection. After this is dropped, it has no event.
pub(crate) struct Wakers {
    place: Arc<Place>,
    pub(crate) read: Waker,
    pub(crate) write: Waker,
}

impl Wakers {
    pub(crate) fn new(ready: &Arc<Ready>, of: Of) -> Self {
        let (handle, context, flags) = (AtomicPtr::default(), AtomicPtr::default(), AtomicU32::new(0));
        let place = Arc::new(Place { ready: ready.clone(), of, handle, context, flags });
        let side = |flag| Waker::from(Arc::new(Side { place: place.clone(), flag }));
        Self { read: side(NETMEM_EVENT_READ), write: side(NETMEM_EVENT_WRITE), place }
    }

    pub(crate) fn set_handle<K: Kind>(&self, handle: *mut K) {
        self.place.handle.store(handle.cast(), Ordering::Relaxed);
    }

    pub(crate) fn set_context(&self, context: *mut c_void) {
        self.place.context.store(context, Ordering::Relaxed);
    }

    pub(crate) fn ready(&self) -> &Arc<Ready> {
        &self.place.ready
    }
}

impl Drop for Wakers {
    fn drop(&mut self) {
        // A waker that is called later finds flags, and adds nothing.
        self.place.flags.store(GONE, Ordering::Relaxed);
    }
}
