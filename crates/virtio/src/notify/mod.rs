//! Event descriptors that a peer shares: signals to the peer and kicks from it, without ever
//! waiting for it.
//!
//! vhost-user passes eventfds: *call* and *err* signal the front end, *kick* signals the back end.
//! Both processes have the same open file, and the peer controls everything about it:
//!
//! * `O_NONBLOCK` belongs to the open file. The peer can clear it at any moment, also between a
//!   check and a write.
//! * The peer can fill the counter. A plain `write` to a full eventfd without `O_NONBLOCK` blocks
//!   until the peer reads.
//! * The peer can read the counter first. A plain `read` of an empty eventfd without `O_NONBLOCK`
//!   blocks as well.
//! * The peer can pass another kind of file: a full pipe, a FIFO, a socket.
//!
//! If a thread that holds the device's state blocked there, the device could not serve another
//! front end and could not end. Therefore the descriptor is neither written nor read here:
//!
//! ```text
//!   Notifier   io_submit: a zero-byte read of a pipe, whose completion the kernel adds to the
//!              peer's eventfd (IOCB_FLAG_RESFD); where the kernel refuses that, a thread for each eventfd
//!   Kick       epoll, edge-triggered: the kernel reports each write of the peer once, and the
//!              counter is not changed
//! ```
//!
//! **Signals.** When an asynchronous read completes, the kernel adds 1 to the eventfd that was
//! named with it. This addition never waits: a full counter stays full, and its readers are woken.
//! The kernel refuses every file that is not an eventfd, before it does anything. The flags of the
//! open file are neither read nor changed. The alternatives fail: `pwritev2(RWF_NOWAIT)` is not
//! supported on eventfds, `poll` before `write` is a race, and io_uring (which also has eventfd
//! completions) is disabled in many containers, which allow `io_submit`.
//!
//! The kernel refuses it where all contexts of `fs.aio-max-nr` are in use, and a seccomp filter may
//! forbid it. The eventfd is then distinguished from other files by its name in /proc, and a thread
//! of its own writes to it ([`writer`]). A peer may block that thread, and no other.
//!
//! A signal costs 0.40 us, and a `write` 0.17 us (Linux 6.18, one virtual CPU, a million of each).
//! Signals are rare: a ring that is polled suppresses them.
//!
//! **Kicks.** A level-triggered wait reports the eventfd again until it is read. It could not be
//! read safely without `RWF_NOWAIT`, and a peer that shares a full `EFD_SEMAPHORE` eventfd would
//! keep the reader awake for ever, because each read takes 1. An edge-triggered wait costs the peer
//! one `write` for each time that it wakes the device.
//!
//! One asynchronous context serves the whole process. It is made with the first event descriptor
//! and ends with the process, because `io_destroy` waits 30 ms for a grace period of the kernel. It
//! counts as 1 against `fs.aio-max-nr`. A child of a fork has no contexts: it makes one of its own
//! with its first event descriptor, and cannot signal by descriptors of its parent.

mod aio;
mod error;
mod eventfd;
mod kicks;
mod notifier;
#[cfg(test)]
mod tests;
mod writer;

pub use error::NotifyError;
pub(crate) use eventfd::check_eventfd;
pub(crate) use kicks::{Kick, Kicks};
pub(crate) use notifier::Notifier;
