//! Ports: the places to which the frames of a queue pair go, and from which they come.
//!
//! Ports speak frames in *wire form*: the 12 bytes of a [`VnetHdr`](crate::net::VnetHdr) and right
//! behind them the frame, so that both reach a buffer in one copy. In frames towards the driver
//! `num_buffers` is 1; the device changes it where a frame fills more.

#[cfg(feature = "pcap")]
mod capture;
mod cross;
mod echo;
mod error;
mod r#gen;
mod in_place;
mod interface;
mod linked;
#[cfg(feature = "pcap")]
mod pcap;
mod reader;
mod sink;
mod steering;
mod store;
mod tap;

#[cfg(feature = "pcap")]
pub use self::capture::LinkCapture;
pub use self::cross::Cross;
pub use self::echo::Echo;
pub use self::error::{PortError, TapError};
pub use self::r#gen::Gen;
pub use self::in_place::{Posted, Rest};
pub use self::interface::{MAX_WIRE, Port};
pub use self::linked::{LinkStats, Linked};
#[cfg(feature = "pcap")]
pub use self::pcap::Pcap;
pub use self::sink::Sink;
pub use self::steering::{Steered, Steering};
pub use self::tap::{Tap, TapQueues};
pub use super::options::ALL_OFFLOADS;
#[cfg(feature = "pcap")]
pub use netmem_packet::CaptureError;
#[cfg(feature = "pcap")]
pub use netmem_packet::Play;
