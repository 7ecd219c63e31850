//! TCP headers (RFC 9293), and their options.

use super::emit::{Body, EmitError, Emitted, Outer, Sums};
use super::flow::Flow;
use super::head::{ByteRange, Bytes, ParseError, be16, be32};
use super::ip::protocol;
use crate::tcp::{Flags, Header, Options, Seq, Timestamps};
use netmem_packet::{Gso, GsoKind};

/// A TCP segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The sender's port.
    pub source_port: u16,
    /// The port that it is for.
    pub destination_port: u16,
    /// The rest of the header.
    pub header: Header,
    /// The payload.
    pub payload: ByteRange,
}

/// Offset of the checksum in the header.
const CHECKSUM: u16 = 16;

/// Kinds of options.
mod kind {
    pub(super) const END: u8 = 0;
    pub(super) const NOP: u8 = 1;
    pub(super) const MSS: u8 = 2;
    pub(super) const WINDOW_SCALE: u8 = 3;
    pub(super) const SACK_PERMITTED: u8 = 4;
    pub(super) const SACK: u8 = 5;
    pub(super) const TIMESTAMPS: u8 = 8;
}

/// The usual headers: those of almost all segments of a connection.
mod usual;

/// Timestamps, padded in front to a multiple of 4.
const PADDED_TIMESTAMPS: [u8; 4] = [kind::NOP, kind::NOP, kind::TIMESTAMPS, 10];

impl Segment {
    #[inline]
    pub(super) fn parse(bytes: Bytes<'_>, content: ByteRange) -> Result<Self, ParseError> {
        let tcp = bytes.at::<20>(content.at)?;
        let len = usize::from(tcp[12] >> 4) * 4;
        if len < 20 || len > content.len {
            return Err(ParseError::Malformed);
        }
        let flags = Flags(tcp[13]);
        let options = match len {
            20 => Options::default(),
            _ => parse_options(bytes.range(content.at + 20, len - 20)?, flags),
        };
        let header = Header {
            seq: Seq(be32(tcp, 4)),
            ack: Seq(be32(tcp, 8)),
            flags,
            window: be16(tcp, 14),
            urgent: be16(tcp, 18),
            options,
        };
        let payload = ByteRange { at: content.at + len, len: content.len - len };
        Ok(Self { source_port: be16(tcp, 0), destination_port: be16(tcp, 2), header, payload })
    }
}

/// Reads options. An option with a wrong length ends the list: the segment is processed with the
/// options in front of it.
///
/// Options that belong to a SYN are ignored in other segments, and selective acknowledgements in a
/// SYN.
#[inline]
fn parse_options(options: &[u8], flags: Flags) -> Options {
    match <&[u8; 12]>::try_from(options) {
        // The options of almost all segments of a connection.
        Ok(&[a, b, c, d, v0, v1, v2, v3, e0, e1, e2, e3]) if [a, b, c, d] == PADDED_TIMESTAMPS => {
            let [value, echo] = [[v0, v1, v2, v3], [e0, e1, e2, e3]].map(u32::from_be_bytes);
            Options { timestamps: Some(Timestamps { value, echo }), ..Options::default() }
        }
        _ => walk_options(options, flags),
    }
}

fn walk_options(mut at: &[u8], flags: Flags) -> Options {
    let syn = flags.has(Flags::SYN);
    let mut options = Options::default();
    while let [kind, rest @ ..] = at {
        if *kind == kind::END {
            break;
        }
        if *kind == kind::NOP {
            at = rest;
            continue;
        }
        let Some((&len, _)) = rest.split_first() else { break };
        let Some(option) = at.get(2..usize::from(len)) else { break };
        match (*kind, option) {
            (kind::MSS, &[a, b]) if syn => options.mss = Some(u16::from_be_bytes([a, b])),
            (kind::WINDOW_SCALE, &[scale]) if syn => options.window_scale = Some(scale),
            (kind::SACK_PERMITTED, []) if syn => options.sack_permitted = true,
            (kind::TIMESTAMPS, &[_, _, _, _, _, _, _, _]) => {
                options.timestamps = Some(Timestamps { value: be32(option, 0), echo: be32(option, 4) });
            }
            (kind::SACK, blocks) if !syn && blocks.len().is_multiple_of(8) => {
                for block in blocks.as_chunks::<8>().0 {
                    options.sack.push(Seq(be32(block, 0)), Seq(be32(block, 4)));
                }
            }
            _ => (),
        }
        at = &at[usize::from(len)..];
    }
    options
}

/// Room for options in a header.
const MAX_OPTIONS: usize = 40;

/// How many blocks of selective acknowledgements are written behind `len` bytes of other options.
#[inline]
fn sack_blocks(options: &Options, len: usize) -> usize {
    options.sack.len().min((MAX_OPTIONS - len).saturating_sub(4) / 8)
}

/// Bytes of options without selective acknowledgements. At most 24.
#[inline]
fn plain_len(options: &Options) -> usize {
    // Permission for selective acknowledgements uses the padding of timestamps, or 4 bytes.
    4 * (usize::from(options.mss.is_some())
        + usize::from(options.window_scale.is_some())
        + usize::from(options.sack_permitted && options.timestamps.is_none()))
        + 12 * usize::from(options.timestamps.is_some())
}

/// Bytes of the TCP header with these options, as [`emit_tcp`] writes it: from 20 to 60. Blocks of
/// selective acknowledgements for which there is no room are left out, from the last on.
#[inline]
#[must_use]
pub fn tcp_header_len(options: &Options) -> usize {
    let plain = plain_len(options);
    20 + plain
        + match sack_blocks(options, plain) {
            0 => 0,
            blocks => 4 + 8 * blocks,
        }
}

/// Writes the headers of a segment, from the link to the TCP header. `flow` is the sender's: its
/// local end is the source.
///
/// # Errors
///
/// [`EmitError`]. Bytes of `out` may have been written.
#[inline]
pub fn emit_tcp(out: &mut [u8], outer: &Outer, flow: &Flow, header: &Header, body: Body) -> Result<Emitted, EmitError> {
    match usual::emit(out, outer, flow, header, body) {
        Some(emitted) => Ok(emitted),
        None => emit_any(out, outer, flow, header, body),
    }
}

/// The same for headers of any form.
fn emit_any(out: &mut [u8], outer: &Outer, flow: &Flow, header: &Header, body: Body) -> Result<Emitted, EmitError> {
    let len = tcp_header_len(&header.options);
    let at = outer.emit(flow.local.ip(), flow.remote.ip(), protocol::TCP, len + body.len, out)?;
    let tcp = out.get_mut(at..at + len).ok_or(EmitError::NoRoom)?;
    tcp[0..2].copy_from_slice(&flow.local.port().to_be_bytes());
    tcp[2..4].copy_from_slice(&flow.remote.port().to_be_bytes());
    tcp[4..8].copy_from_slice(&header.seq.0.to_be_bytes());
    tcp[8..12].copy_from_slice(&header.ack.0.to_be_bytes());
    // In words, in the upper half.
    tcp[12] = (len * 4) as u8;
    tcp[13] = header.flags.0;
    tcp[14..16].copy_from_slice(&header.window.to_be_bytes());
    tcp[16..18].fill(0);
    tcp[18..20].copy_from_slice(&header.urgent.to_be_bytes());
    emit_options(&mut tcp[20..], &header.options);
    let gso = body.segment_size.map(|size| Gso {
        kind: if flow.local.is_ipv4() { GsoKind::TcpV4 } else { GsoKind::TcpV6 },
        size,
        // Headers are at most `MAX_HEADERS` long.
        headers: (at + len) as u16,
        ecn: header.flags.has(Flags::CWR),
    });
    let sums =
        Sums { source: flow.local.ip(), destination: flow.remote.ip(), protocol: protocol::TCP, offset: CHECKSUM };
    Ok(sums.finish(out, at, len, body, gso))
}

/// Writes the options: the bytes that [`tcp_header_len`] has counted.
fn emit_options(out: &mut [u8], options: &Options) {
    let mut at = 0;
    let mut put = |bytes: &[u8]| {
        out[at..at + bytes.len()].copy_from_slice(bytes);
        at += bytes.len();
    };
    if let Some(mss) = options.mss {
        put(&[kind::MSS, 4]);
        put(&mss.to_be_bytes());
    }
    match (options.sack_permitted, options.timestamps) {
        (true, Some(_)) => put(&[kind::SACK_PERMITTED, 2, kind::TIMESTAMPS, 10]),
        (true, None) => put(&[kind::NOP, kind::NOP, kind::SACK_PERMITTED, 2]),
        (false, Some(_)) => put(&PADDED_TIMESTAMPS),
        (false, None) => (),
    }
    if let Some(Timestamps { value, echo }) = options.timestamps {
        put(&value.to_be_bytes());
        put(&echo.to_be_bytes());
    }
    if let Some(scale) = options.window_scale {
        put(&[kind::NOP, kind::WINDOW_SCALE, 3, scale]);
    }
    let blocks = sack_blocks(options, plain_len(options));
    if blocks > 0 {
        put(&[kind::NOP, kind::NOP, kind::SACK, 2 + 8 * blocks as u8]);
        for (from, to) in &options.sack[..blocks] {
            put(&from.0.to_be_bytes());
            put(&to.0.to_be_bytes());
        }
    }
}
