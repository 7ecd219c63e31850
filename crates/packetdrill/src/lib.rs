//! The TCP of `netmem-inet` under packetdrill, the conformance test for TCP: a shared object that packetdrill loads (`--so_filename`).
//!
//! ```text
//!   packetdrill ──► socket calls ──► World: descriptors, a virtual clock ──► tcp::{Connection, Listener}
//!       ▲   ╰─────► netdev_send ──► wire: IP packets, no link ──────────────────────────►╯    │
//!       ╰───────── netdev_receive ◄── wire ◄──────────────────────────────────────────────────╯
//! ```
//!
//! packetdrill is under the GPL. It is a program that is run: nothing of it is linked or copied. `tests/peers/packetdrill.py` builds it and
//! runs the scripts; docs/streams.md says which pass.
//!
//! The object is preloaded as well (`LD_PRELOAD`), for what packetdrill asks of the C library and not of the object:
//!
//! | call | why it is answered here |
//! | --- | --- |
//! | `getsockopt` | scripts look into connections by `TCP_INFO` |
//! | `times` | packetdrill spins until ten ticks of the system's clock have passed; the clock is virtual |
//! | `mlockall`, `sched_setscheduler` | privileges that are of use only where the clock is real |
//!
//! Socket calls are as Linux's: the scripts expect twice the `SO_SNDBUF` that was set, and a `write` that takes what Linux's would.

mod calls;
mod interface;
mod memory;
mod settings;
mod tcp_info;
mod world;

use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::OnceLock;

/// This host's addresses, unless a socket is bound. The scripts are run with `--local_ip` of the first.
const LOCAL_V4: Ipv4Addr = Ipv4Addr::new(192, 168, 0, 2);
const LOCAL_V6: Ipv6Addr = Ipv6Addr::new(0xfd, 0, 0, 0, 0, 0, 0, 1);

static WORLD: OnceLock<world::Shared> = OnceLock::new();

/// Ends packetdrill: the test has failed.
fn fail(why: &str) -> ! {
    eprintln!("netmem: {why}");
    // SAFETY: `_exit` has no preconditions. Other threads may hold any lock, so that nothing is to be cleaned up.
    unsafe { libc::_exit(1) }
}
