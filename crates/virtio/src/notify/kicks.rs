//! Kicks from a peer, and the other events that end the sleep of a thread.

use super::error::NotifyError;
use super::eventfd::check_eventfd;
use rustix::event::{Timespec, epoll};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// An epoll descriptor with every [`Kick`], on which a thread sleeps until a peer kicks. Clones are
/// the same descriptor.
#[derive(Clone, Debug)]
pub(crate) struct Kicks(Arc<OwnedFd>);

/// The numbers with which files are added to the epoll descriptor. They identify the kind of an
/// event.
mod event_kind {
    pub(super) const KICK: u64 = 0;
    pub(super) const HANG_UP: u64 = 1;
    pub(super) const WAKE: u64 = 2;
}

impl Kicks {
    pub(crate) fn new() -> Result<Self, NotifyError> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC);
        Ok(Self(Arc::new(epoll.map_err(|e| NotifyError::Io { what: "epoll_create", source: e.into() })?)))
    }

    fn add(&self, fd: BorrowedFd<'_>, kind: u64, flags: epoll::EventFlags) -> Result<(), NotifyError> {
        let failed = |e: rustix::io::Errno| NotifyError::Io { what: "epoll_ctl", source: e.into() };
        epoll::add(&self.0, fd, epoll::EventData::new_u64(kind), flags).map_err(failed)
    }

    /// Watches the connection `socket`: one event is reported when the peer closes it. Ends when
    /// `socket` is closed.
    ///
    /// One-shot and not by edges: a peer that shuts the socket down and then closes it makes
    /// several.
    pub(crate) fn watch_hang_up(&self, socket: BorrowedFd<'_>) -> Result<(), NotifyError> {
        self.add(socket, event_kind::HANG_UP, epoll::EventFlags::RDHUP | epoll::EventFlags::ONESHOT)
    }

    /// Adds a descriptor that is always readable, for [`wake`](Self::wake). It is reported once
    /// from now on.
    pub(crate) fn watch_ready(&self, ready: BorrowedFd<'_>) -> Result<(), NotifyError> {
        self.add(ready, event_kind::WAKE, epoll::EventFlags::IN | epoll::EventFlags::ONESHOT)
    }

    /// Ends a sleep, now or the next. `ready` is the descriptor that was added by
    /// [`watch_ready`](Self::watch_ready): a one-shot file is reported once more after it was
    /// modified.
    pub(crate) fn wake(&self, ready: BorrowedFd<'_>) {
        let (data, flags) =
            (epoll::EventData::new_u64(event_kind::WAKE), epoll::EventFlags::IN | epoll::EventFlags::ONESHOT);
        if let Err(error) = epoll::modify(&self.0, ready, data, flags) {
            netmem_pool::trace::warn!(%error, "a thread that waits for a queue is not woken");
        }
    }

    /// Watches a descriptor by which a peer kicks, and owns it. A peer may pass the same eventfd
    /// for several rings.
    ///
    /// # Errors
    ///
    /// [`NotifyError`]: it is not an eventfd, or it cannot be waited for.
    pub(crate) fn watch(&self, fd: OwnedFd) -> Result<Kick, NotifyError> {
        check_eventfd(fd.as_fd())?;
        self.add(fd.as_fd(), event_kind::KICK, epoll::EventFlags::IN | epoll::EventFlags::ET)?;
        Ok(Kick { fd, epoll: Some(Arc::clone(&self.0)) })
    }

    /// Forgets the kicks until now. Must be called after a sleep, before the rings are read.
    /// Returns whether the peer has closed a [watched](Self::watch_hang_up) connection since the
    /// last call.
    ///
    /// Kicks that one call does not clear end the next sleep at once, so none is lost.
    pub(crate) fn clear(&self) -> bool {
        let mut events = [const { std::mem::MaybeUninit::<epoll::Event>::uninit() }; 64];
        match epoll::wait(&self.0, &mut events, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
            Ok((events, _)) => events.iter().any(|event| event.data.u64() == event_kind::HANG_UP),
            Err(_) => false,
        }
    }
}

impl AsFd for Kicks {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// An eventfd by which a peer kicks. It is watched until it is dropped.
#[derive(Debug)]
pub(crate) struct Kick {
    fd: OwnedFd,
    epoll: Option<Arc<OwnedFd>>,
}

impl Kick {
    /// An eventfd that is not watched: its ring is only polled.
    pub(crate) fn unwatched(fd: OwnedFd) -> Self {
        Self { fd, epoll: None }
    }
}

impl AsFd for Kick {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Kick {
    fn drop(&mut self) {
        // The peer has the open file, too, so it would stay in the epoll set after this descriptor
        // is closed.
        let _ = self.epoll.as_ref().map(|epoll| epoll::delete(epoll, &self.fd));
    }
}
