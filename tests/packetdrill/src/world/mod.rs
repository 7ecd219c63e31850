//! A host with a virtual clock: descriptors, the stack, and the packets that it has sent.
//!
//! # Time
//!
//! The clock stands still while the host works. It moves in three cases: when packetdrill sleeps;
//! by a microsecond each time packetdrill reads the time (it spins for the last part of a wait);
//! and to the next timer when packetdrill waits for a packet and there is none. On its way the
//! clock stops at each timer.
//!
//! # Threads
//!
//! packetdrill makes a call that may block on a second thread, and continues with the script. The
//! two threads pass the turn to each other, so that the order of events is that of the script.
//! After each event for which the blocked call could wait, the call tries again before the clock
//! moves. If the call returns, the clock stands still until packetdrill has read the time at which
//! it returned.
//!
//! | turn | moves on | passes to |
//! | --- | --- | --- |
//! | `Main` | packetdrill's main thread | `Caller`, after a packet or timer, if a call is blocked |
//! | `Caller` | the blocked call tries again | `Main` if it still blocks, `Ending` if it returns |
//! | `Ending` | the call returned | `Main`, when its thread asked for the time |

mod host;
mod sockets;
mod turns;

pub(crate) use host::{SocketKind, World};
pub(crate) use sockets::Reading;
pub use sockets::{LOCAL_V4, LOCAL_V6};
pub(crate) use turns::{Shared, WORLD, shared};
