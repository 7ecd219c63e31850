//! Packets, XDP frames and verdicts, and the traits of a network device.
//!
//! ```text
//!   RxQueue::poll ──► XdpFrame ──► Handler::run ──► Verdict::Drop, Aborted   the pages go home at once
//!                                                   Verdict::Tx              Packet to Handler::tx
//!                                                   Verdict::Pass            Packet to Handler::pass
//! ```
//!
//! A queue is generic over nothing at run time: the handler is a type, called directly for every frame.

mod device;
mod frags;
mod meta;
mod packet;
mod xdp;

pub use device::{Handler, Poll, RxQueue, TxQueue};
pub use frags::MAX_FRAGS;
pub use meta::{Checksum, Gso, GsoKind, Meta};
pub use packet::{Packet, TooManyFrags};
pub use xdp::{LineariseError, Verdict, XdpFrame};
