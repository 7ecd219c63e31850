//! Capture files as queues: what is received from an interface and what is read from a file are of
//! the same types, so that a program is tested on captures without a device.
//!
//! ```text
//!   pcap, pcapng ─► Capture ─► PcapRx ─ RxQueue ─► your handler ─► TxQueue ─ PcapTx ─► pcapng
//! ```

mod error;
mod file;
mod rx;
mod tx;
mod writer;

pub use error::CaptureError;
pub use file::{Capture, Play};
pub use rx::{PcapPoll, PcapRx, PcapRxStats};
pub use tx::{PcapTx, PcapTxStats};
pub use writer::{CaptureDirection, PcapWriter};
