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
//! * [`Connection`]: one end of a connection. [`Config`]: how it behaves. [`Event`], [`Error`]: what its user must know.
//! * [`Listener`]: which segments begin a connection.
//! * [`Recording`]: what happened to a connection, to make it happen again.
//! * [`Saved`]: a connection as numbers, which goes on elsewhere.
//! * [`Output`]: where its segments go.
//! * [`Budget`]: how many buffers received payload may occupy, counted by [`Held`].
//! * [`Secret`]: where a connection begins in the sequence space.

mod acks;
mod assembler;
mod budget;
mod carrier;
mod clock;
mod close;
mod config;
mod connection;
mod cookie;
mod event;
mod header;
mod input;
mod isn;
mod limit;
mod listener;
mod output;
mod receiver;
mod record;
mod saved;
mod seq;
#[cfg(test)]
mod testing;
mod transmit;

pub mod congestion;
pub mod sender;

pub use budget::{Budget, Charge, Held};
pub use carrier::{Carrier, Chunk, Ticket};
pub use config::{Config, Ecn, KeepAlive};
pub use congestion::Congestion;
pub use connection::{Connection, Info, Received, Refusal, Refused, State};
pub use event::{Error, Event, IcmpError, Unreachable};
pub use header::{Flags, Header, Options, SackBlocks, Timestamps};
pub use input::Meta;
pub use isn::{Secret, Start};
pub use listener::{Answer, Arriving, Listener, reset_for};
pub use output::{Full, Outgoing, Output};
pub use record::{Counted, Diverged, Length, Numbered, Recording};
pub use saved::Saved;
pub use sender::Sender;
pub use seq::Seq;
