//! packetdrill, the conformance test for TCP, for any stack: a TCP that implements [`Stack`]
//! becomes a shared object that packetdrill loads in place of the kernel's socket calls
//! (`--so_filename`).
//!
//! ```text
//!   packetdrill ──► socket calls ──► World: sockets, a virtual clock ──► Stack
//!       ▲   ╰─────► netdev_send ──► wire: IP packets, no link ─────────►╯  │
//!       ╰───────── netdev_receive ◄── wire ◄───────────────────────────────╯
//! ```
//!
//! The object is a library of the type `cdylib` that implements the trait and calls [`export!`].
//! README.md shows how. `examples/netmem` is the object of `netmem-inet`, `examples/smoltcp` that
//! of smoltcp.
//!
//! packetdrill is under the GPL. It is only run as a program: nothing of it is linked or copied.
//! `run.py` builds it and runs its scripts.
//!
//! The object is also preloaded (`LD_PRELOAD`), because packetdrill calls some functions of the C
//! library that the object must replace:
//!
//! | call | why it is answered here |
//! | --- | --- |
//! | `getsockopt` | scripts read the state of connections by `TCP_INFO` |
//! | `times` | packetdrill spins until ten ticks of the clock have passed; the clock is virtual |
//! | `mlockall`, `sched_setscheduler` | privileges that are of use only where the clock is real |
//!
//! What the object or the stack does not have (Fast Open, an error queue, epoll) is an error of the
//! call, so that a script which needs it fails. Otherwise socket calls behave like those of Linux.
//! The scripts expect that `SO_SNDBUF` is twice the value that was set.

mod address;
mod calls;
mod errno;
mod export;
mod fail;
mod interface;
mod options;
mod settings;
mod sockopt;
mod stack;
mod tcp_info;
mod world;

pub use errno::Errno;
pub use fail::fail;
pub use options::{Options, SocketOption};
pub use settings::Settings;
pub use stack::{Accepted, ConnectionId, ListenerId, Push, Readiness, Sizes, Stack};
pub use tcp_info::{TcpInfo, ca_state};
pub use world::{LOCAL_V4, LOCAL_V6};

/// What [`export!`] uses.
#[doc(hidden)]
pub mod exported {
    pub use crate::export::{getsockopt, init, times};
    pub use crate::interface::Interface;
    pub use libc::{c_char, c_int, c_long, c_void, socklen_t};
}

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
