//! Streams into and out of device memory: TCP connections whose payload this process neither reads
//! nor writes.
//!
//! ```text
//!   SplitRxQueue ──► StreamRx ──► Stack ──► DeviceStream::recv ──► extents, with tokens
//!                  heads, pages     │                                 └─► StreamReturner
//!                                   │                                      the window opens
//!   SplitTxQueue ◄── StreamTx ◄─────┴────── DeviceStream::send(binding, offset, len)
//!                  headers, addresses       DeviceStream::sent: the range may be used again
//! ```
//!
//! The stack is that of `netmem-inet`, with [`OnDevice`] as the memory of its payload. Headers,
//! handshakes, ARP, ICMP and datagrams are in host memory. So is payload that the device writes
//! there. [`StreamRx`] and [`StreamTx`] wrap a queue pair, and [`Streams`] opens sockets.
//!
//! **Received payload** is delivered as extents with tokens. The streams of a stack share one table
//! of counts, in which a page belongs to one stream. A page that is queued, out of order or held by
//! the user is counted in the budgets of its connection and its stack. If a budget is used up,
//! payload is dropped and not acknowledged, but the acknowledgement in the segment is processed.
//! Make `StackOptions::pages` less than the binding's pages by the size of the receive ring, so
//! that pages stay posted.
//!
//! **Sent payload** consists of ranges of a binding, and of fragments of host memory between them.
//! A range holds its binding, and so does each of its transmissions. Addresses are looked up when a
//! segment is made, so a queue restart changes nothing for what is in flight.
//!
//! **Checksums.** Only the device can checksum device memory. If the device has not verified the
//! checksum of a segment, the segment is dropped, counted (`StackStats::unverified`) and not
//! acknowledged. After three such segments that were in the window, the stream returns an error to
//! the user once ([`StreamError::Unverified`]).

mod account;
mod context;
mod payload;
mod range;
mod rx;
mod socket;
mod streams;
mod tx;

pub use account::StreamReturner;
pub use payload::{DeviceFrame, OnDevice, ReceivedChunk, SentChunk};
pub use range::{InFlight, Sent};
pub use rx::{Bindings, DeviceBatch, StreamRx};
pub use socket::{DeviceStream, StreamError, StreamFragment, StreamSendError, StreamStats};
pub use streams::{DeviceListener, Streams};
pub use tx::StreamTx;
