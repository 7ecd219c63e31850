//! UDP headers (RFC 768).

use super::emit::{Body, EmitError, Emitted, Outer, Sums};
use super::flow::Flow;
use super::head::{ByteRange, Bytes, ParseError, be16};
use super::ip::protocol;
use netmem_packet::{Gso, GsoKind};

/// A UDP datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Datagram {
    /// The sender's port; 0 if it wants no answer.
    pub source_port: u16,
    /// The port that it is for.
    pub destination_port: u16,
    /// The payload.
    pub payload: ByteRange,
    /// Whether it has a checksum. Over IPv4 it may have none. Over IPv6 it must have one: without
    /// it, [`Covered::holds`](super::Covered::holds) is false, and only a receiver with checksums
    /// of its own may accept the datagram.
    pub checksum: bool,
}

const LEN: usize = 8;
/// Offset of the checksum in the header.
const CHECKSUM: u16 = 6;

impl Datagram {
    #[inline]
    pub(super) fn parse(bytes: Bytes<'_>, content: ByteRange) -> Result<Self, ParseError> {
        let udp = bytes.at::<LEN>(content.at).map_err(|drop| match drop {
            ParseError::Beyond { .. } => {
                ParseError::Beyond { port: bytes.at::<4>(content.at).ok().map(|ports| be16(ports, 2)) }
            }
            drop => drop,
        })?;
        let len = usize::from(be16(udp, 4));
        let checksum = be16(udp, 6) != 0;
        if len < LEN || len > content.len {
            return Err(ParseError::Malformed);
        }
        let payload = ByteRange { at: content.at + LEN, len: len - LEN };
        Ok(Self { source_port: be16(udp, 0), destination_port: be16(udp, 2), payload, checksum })
    }
}

/// Writes the headers of a datagram, from the link to the UDP header. `flow` is the sender's: its
/// local end is the source.
///
/// # Errors
///
/// [`EmitError`]. Bytes of `out` may have been written.
pub fn emit_udp(out: &mut [u8], outer: &Outer, flow: &Flow, body: Body) -> Result<Emitted, EmitError> {
    let len = LEN + body.len;
    let at = outer.emit(flow.local.ip(), flow.remote.ip(), protocol::UDP, len, out)?;
    let udp = out.get_mut(at..at + LEN).ok_or(EmitError::NoRoom)?;
    udp[0..2].copy_from_slice(&flow.local.port().to_be_bytes());
    udp[2..4].copy_from_slice(&flow.remote.port().to_be_bytes());
    // It fits: the IP header's length did.
    udp[4..6].copy_from_slice(&(len as u16).to_be_bytes());
    udp[6..8].fill(0);
    let gso =
        body.segment_size.map(|size| Gso { kind: GsoKind::UdpSegment, size, headers: (at + LEN) as u16, ecn: false });
    let sums =
        Sums { source: flow.local.ip(), destination: flow.remote.ip(), protocol: protocol::UDP, offset: CHECKSUM };
    Ok(sums.finish(out, at, LEN, body, gso))
}
