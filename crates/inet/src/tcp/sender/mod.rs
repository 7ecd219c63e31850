//! The sending half of a connection: the choice of what is sent, and what is sent again.
//!
//! ```text
//!   send ──► Queue ──► poll_transmit ──► the connection: header, output ──► handle_sent(ticket)
//!              ▲            ▲                                                    │
//!        drops │            │ lost segments, new data, a probe                   ▼
//!   handle_ack ┴───► Scoreboard ◄── Rack, Recovery, Congestion, timer ◄── Posted tickets
//! ```
//!
//! Why it is separate from the connection: loss recovery is half of TCP, and can be tested without
//! states, windows of this side and headers (`tests`, `random`).
//!
//! SYN, data and FIN occupy sequence numbers, and are acknowledged and repeated in the same way.
//! Payload is held until it is acknowledged. Each transmission holds a clone until the device is
//! done with it. A range is not sent again while its last [`Ticket`] is pending: the device could
//! send the earlier copy after the memory was reused, with a valid checksum.
//!
//! An acknowledgement of new data in order causes no allocation, and its cost is constant on
//! average.
//!
//! [`Ticket`]: crate::tcp::Ticket

mod ack;
mod clocks;
mod core;
mod idle;
mod info;
mod options;
mod pacing;
mod path;
mod path_size;
mod posted;
mod prr;
mod queue;
mod rack;
#[cfg(test)]
mod random;
mod recovery;
mod recovery_state;
mod rtt;
mod sacks;
mod save;
mod scoreboard;
#[cfg(test)]
mod tests;
mod timer;
mod transmit;
mod usage;

pub use self::core::Sender;
pub(super) use idle::IdleSender;
pub use info::SendInfo;
pub use options::{Ack, Acked, Negotiated, SendOptions, TimedOut, Transmission, TransmissionKind};
pub use recovery_state::RecoveryState;
pub use save::SavedSender;
