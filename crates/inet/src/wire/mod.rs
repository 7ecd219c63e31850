//! Headers on the fast path: fixed offsets, no allocation, each length is checked once.
//!
//! Why not a general parser: a peer chooses each byte, and each packet passes here. What a stack
//! does not need is refused by the first check that finds it.
//!
//! ```text
//!   ├─ Ethernet ─┤─ IPv4, or IPv6 and its extensions ─┤─ TCP, UDP, ICMP ─┤─ payload ─┤─ padding ─┤
//!                │                                    ├──── Ip::content ─────────────┤
//!   parse        Ip::parse                            Ip::transport      ByteRange
//! ```
//!
//! **Reading.** The caller copies the first bytes of a frame, at most [`MAX_HEAD`], into memory of
//! its own. The peer or the device may change the frame meanwhile, so nothing is read twice from
//! there. [`parse`] reads a frame of Ethernet. [`Ip::parse`] reads a packet that begins with its IP
//! header. Both get the length of the frame, and return values and places ([`ByteRange`]) that are
//! inside of the frame. Checksums of transport headers cover payload, which the copy does not have:
//! [`Ip::covered`] is the range of bytes to add up.
//!
//! **Writing.** Functions called `emit` write headers from the first byte of a slice on, and return
//! how many bytes they wrote, with the offload information of the frame ([`Emitted`]). A page for
//! headers therefore has [`HEADROOM`] bytes in front, for a device's own header, and
//! [`MAX_HEADERS`] after them.
//!
//! **What is refused.** VLAN tags, because a stack has one network, and does not know the tag of
//! it. IPv4 with source routing, and IPv6 routing headers with segments left. Addresses that cannot
//! be on a link. Extensions of IPv6 beyond [`MAX_EXTENSIONS`]. [`ParseError`] has the reason.

mod arp;
mod emit;
mod ethernet;
mod flow;
mod frame;
mod head;
mod icmp;
mod ip;
mod known;
mod neighbor;
mod tcp;
mod template;
#[cfg(test)]
mod tests;
mod transport;
mod udp;

pub use arp::Arp;
pub use emit::{Body, EmitError, Emitted, Outer, emit_fragment};
pub use ethernet::{EthernetHeader, Mac};
pub use flow::Flow;
pub use frame::{Network, parse};
pub use head::{ByteRange, ParseError};
pub use icmp::{Icmp, IcmpError, IcmpKind, Quoted, QuotedTransport, emit_echo_reply, emit_icmp_error};
pub use ip::{FragmentHeader, Ip, MAX_EXTENSIONS, protocol};
#[cfg(feature = "compare")]
#[doc(hidden)]
pub use known::PredictedHeaders;
pub(crate) use known::{KnownHeaders, KnownSegment};
pub use neighbor::{Advertisement, Solicitation, all_nodes, solicited_node};
pub use tcp::{Segment, emit_tcp, tcp_header_len};
pub(crate) use template::HeaderTemplate;
pub use transport::{Covered, Transport};
pub use udp::{Datagram, emit_udp};

/// The number of a frame's first bytes that are parsed.
pub const MAX_HEAD: usize = 192;

/// Bytes to leave free in front of headers, for a device's own header.
pub const HEADROOM: usize = 64;

/// The longest headers that are written: Ethernet, IPv6, TCP with 40 bytes of options. Errors of
/// ICMP quote more.
pub const MAX_HEADERS: usize = EthernetHeader::LEN + 40 + 60;
