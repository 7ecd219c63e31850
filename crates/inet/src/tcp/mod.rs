//! TCP as a pure state machine: segments, calls and the time go in, segments and events come out.
//!
//! ```text
//!   segment ─┐                                            ┌─► segment: header, payload by reference
//!   call    ─┼─► Connection: Receiver, Sender, timers  ──┼─► event for the user
//!   time    ─┘                                            └─► next deadline
//! ```
//!
//! * [`Seq`]: a place in the sequence space. [`Header`], [`Options`]: what a segment says, as values; `wire` reads and writes them.
//! * [`Sender`]: what is sent when, and again. [`Congestion`]: how much may be in flight.
//! * [`Carrier`]: what holds the payload. The state machine trims payload by arithmetic, and never reads it.

mod carrier;
mod header;
mod seq;

pub mod congestion;
pub mod sender;

pub use carrier::{Carrier, Chunk, Ticket};
pub use congestion::Congestion;
pub use header::{Flags, Header, Options, SackBlocks, Timestamps};
pub use sender::Sender;
pub use seq::Seq;
