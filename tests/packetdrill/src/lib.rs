//! The TCP of `netmem-inet` under packetdrill, the conformance test for TCP: a shared object that
//! packetdrill loads (`--so_filename`).
//!
//! ```text
//!   packetdrill ──► socket calls ──► World: sockets, a virtual clock ──► Connection, Listener
//!       ▲   ╰─────► netdev_send ──► wire: IP packets, no link ──────────────────────────►╯    │
//!       ╰───────── netdev_receive ◄── wire ◄──────────────────────────────────────────────────╯
//! ```
//!
//! packetdrill is under the GPL. It is only run as a program: nothing of it is linked or copied.
//! `tests/packetdrill/run.py` builds it and runs the scripts. docs/design/streams.md lists the
//! scripts that pass.
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
//! What this TCP does not have (Fast Open, an error queue, epoll) is an error of the call, so that
//! a script which needs it fails. Otherwise socket calls behave like those of Linux. The scripts
//! expect that `SO_SNDBUF` is twice the value that was set, and that `write` accepts as many bytes
//! as with Linux.

mod address;
mod calls;
mod errno;
mod fail;
mod interface;
mod memory;
mod options;
mod preload;
mod settings;
mod tcp_info;
mod world;
