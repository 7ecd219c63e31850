//! A privileged helper that opens sockets for an unprivileged worker.
//!
//! ```text
//!   helper: CAP_NET_RAW, CAP_NET_ADMIN, CAP_BPF             worker: no capability
//!                       ◄─────────────── request ────────── Grant::receive
//!   Grant::open    sockets, their options,
//!                  program, link, map
//!   Grant::send ──────── descriptors (SCM_RIGHTS) ────────► registers memory, makes rings, binds
//!                       ◄──────── sockets are bound ─────── Grant::bound, which Xsk::open calls
//!   puts the sockets into the map ─────── done ───────────► moves frames
//!   and it has no descriptor any more
//! ```
//!
//! The kernel drops frames that the program redirects to a socket that is not bound. So a socket is
//! put into the map when the worker has bound it; until then the kernel's network stack has the
//! frames. If the worker ends before, or exceeds its time limit, the helper detaches the program.
//!
//! The worker then holds the only descriptors: when the worker ends, the program is detached from
//! the interface. The helper can end before. The worker may be another user, in a container with
//! another network namespace: a socket stays in the namespace in which it was opened.
//!
//! The worker can bind each socket to *any* interface and queue of that namespace, and send any
//! frame there. If workers must not be able to do this, the helper opens its sockets in a namespace
//! that has only one interface.
//!
//! [`Server`] listens on a path, and serves workers one after another, whatever they do.
//! [`Grant::send`] is for one worker at a connected socket.

pub(crate) mod error;
mod grant;
mod listener;
mod names;
mod options;
mod protocol;
mod server;
#[cfg(test)]
mod tests;

pub use error::{HelperError, Refusal};
pub use grant::Grant;
pub use options::{HelperOptions, MAX_SOCKETS};
pub use server::{Event, Peer, Server, ServerOptions, ServerStats};
