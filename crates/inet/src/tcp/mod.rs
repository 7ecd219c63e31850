//! TCP as a pure state machine: segments, calls and the time go in, segments and events come out.
//!
//! Why without clock, device and table of connections: each of them makes a run depend on something
//! that a test cannot repeat. `handle_*` passes on what arrived, `poll_*` asks for what follows.
//!
//! ```text
//!   segment ─┐                                          ┌─► segment: header, payload by reference
//!   call    ─┼─► Connection: Receiver, Sender, timers ──┼─► event for the user
//!   time    ─┘                                          └─► next time
//! ```
//!
//! * [`Seq`]: a sequence number. [`Header`], [`Options`]: the fields of a segment, as values;
//!   `wire` parses and writes them.
//! * [`Sender`]: chooses what is sent, and what is sent again. [`Congestion`]: limits how much is
//!   in flight.
//! * [`Carrier`]: the memory of the payload. The state machine trims payload by arithmetic, and
//!   never reads it.
//! * [`Connection`]: one end of a connection. [`Config`]: its settings. [`Event`], [`Error`]:
//!   events and errors for its user.
//! * [`Listener`]: decides which segments begin a connection.
//! * `Recording` (feature `record`): the calls and segments of a connection, which can be
//!   replayed.
//! * [`Saved`]: the state of a connection, with which it continues elsewhere.
//! * [`IdleConnection`]: a connection on which nothing happens, in little memory.
//! * [`Output`]: the destination of its segments.
//! * [`Budget`]: limits the buffers that received payload may occupy. [`Held`] counts them.
//! * [`Secret`]: the key from which initial sequence numbers are computed.

/// Adds a call to the recording of a connection. Without the feature `record`, it adds nothing.
macro_rules! record {
    ($connection:ident, $step:expr) => {
        #[cfg(feature = "record")]
        $connection.note(|| {
            use crate::tcp::recording::Step;
            $step
        });
    };
}

mod acks;
mod assembler;
mod budget;
mod carrier;
mod clock;
mod close;
#[cfg(feature = "compare")]
mod compare;
mod config;
mod connection;
mod cookie;
mod event;
mod header;
mod idle;
mod input;
mod isn;
mod limit;
mod listener;
mod output;
mod receiver;
#[cfg(feature = "record")]
mod recording;
#[cfg(feature = "record")]
mod replay;
mod reset;
mod saved;
mod segment_meta;
mod seq;
mod state;
#[cfg(test)]
mod testing;
mod timers;
mod transmit;
mod user;
mod window;

pub mod congestion;
pub mod sender;

pub use budget::{Budget, Charge, Held};
#[cfg(feature = "stack")]
pub(crate) use budget::{Charges, LocalBudget, share};
pub use carrier::{Carrier, Chunk, Ticket};
#[cfg(feature = "compare")]
#[doc(hidden)]
pub use compare::Cloned;
pub use config::{Config, Ecn, IpFields, KeepAlive};
pub use congestion::Congestion;
pub use connection::Connection;
pub use event::{DeliveryError, Error, Event, Unreachable};
pub use header::{Flags, Header, Options, SackBlocks, Timestamps};
pub use idle::IdleConnection;
pub use isn::{Secret, Start};
pub use listener::{Answer, ArrivingSegment, ConnectionTemplate, Listener};
pub use output::{Accepted, Full, Outgoing, Output};
#[cfg(feature = "record")]
pub use recording::Recording;
#[cfg(feature = "record")]
pub use replay::{Counted, Diverged, Length, Numbered};
pub use reset::reset_for;
pub use saved::Saved;
pub use segment_meta::SegmentMeta;
pub use sender::Sender;
pub use seq::Seq;
pub use state::State;
pub use user::{Info, ReadOutcome, Refusal, Refused};
