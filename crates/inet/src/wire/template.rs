//! The headers of the segments of a unit: they are written once, and patched for each segment.
//!
//! Why: of two segments of equal length, only sequence number, flags and checksum differ. The sum
//! of all other bytes that the checksum covers is kept.

use super::MAX_HEADERS;
use super::emit::{Body, EmitError, Outer};
use super::flow::Flow;
use super::tcp::emit_tcp;
use crate::tcp::{Flags, Header, Seq};
use netmem_packet::{Meta, Sum};

/// The headers of segments that differ in their sequence numbers, flags and payload.
#[derive(Clone, Debug)]
pub(crate) struct HeaderTemplate {
    bytes: [u8; MAX_HEADERS],
    len: usize,
    /// Where the TCP header begins.
    tcp: usize,
    meta: Meta,
    /// The sum of what the checksum covers, without sequence number, flags and payload. `None`: the
    /// device computes the checksum.
    sum: Option<Sum>,
}

/// Headers of no bytes.
impl Default for HeaderTemplate {
    fn default() -> Self {
        Self { bytes: [0; MAX_HEADERS], len: 0, tcp: 0, meta: Meta::default(), sum: None }
    }
}

impl HeaderTemplate {
    /// Headers like those of `header`, for `len` bytes of payload. If `checksum`, checksums are
    /// computed here. Otherwise the device computes them.
    ///
    /// # Errors
    ///
    /// [`EmitError`].
    pub(crate) fn new(
        outer: &Outer,
        flow: &Flow,
        header: &Header,
        len: usize,
        checksum: bool,
    ) -> Result<Self, EmitError> {
        let mut bytes = [0; MAX_HEADERS];
        let blank = Header { seq: Seq(0), flags: Flags::default(), ..*header };
        let sum = checksum.then(Sum::default);
        let emitted = emit_tcp(&mut bytes, outer, flow, &blank, Body { len, sum, segment_size: None })?;
        let tcp = outer.len(flow.local.is_ipv4());
        let sum = sum.map(|mut sum| {
            sum.add_word(!u16::from_be_bytes([bytes[tcp + 16], bytes[tcp + 17]]));
            sum
        });
        Ok(Self { bytes, len: emitted.len, tcp, meta: emitted.meta, sum })
    }

    /// The headers of a segment, with the sum of its payload, which is not used if the device
    /// computes the checksum.
    #[inline]
    pub(crate) fn segment(&mut self, seq: Seq, flags: Flags, payload: Sum) -> &[u8] {
        let Self { bytes, len, tcp, sum, .. } = self;
        let header = &mut bytes[*tcp..*tcp + 20];
        header[4..8].copy_from_slice(&seq.0.to_be_bytes());
        header[13] = flags.0;
        if let Some(mut sum) = *sum {
            sum.add_word((seq.0 >> 16) as u16);
            sum.add_word(seq.0 as u16);
            sum.add_word(u16::from(flags.0));
            sum.add_word(payload.value());
            header[16..18].copy_from_slice(&sum.checksum().to_be_bytes());
        }
        &bytes[..*len]
    }

    /// The offload information of the segments.
    #[inline]
    pub(crate) fn meta(&self) -> Meta {
        self.meta
    }
}
