//! The device: the output of connections, which queues packets for packetdrill.

use super::memory::{Done, Memory};
use netmem_inet::tcp::{Accepted, Flags, Full, Header, IpFields, Outgoing, Output};
use netmem_inet::wire::{self, Body, Flow, Ip, Outer};
use std::collections::VecDeque;

/// The least path MTUs that a "packet too big" can set, as in the stack.
pub(super) const MIN_PATH_MTU_V4: u16 = 552;
pub(super) const MIN_PATH_MTU_V6: u16 = 1280;

/// The device. It passes a unit of several segments on as one packet, or cuts it as the stack does
/// for a device that does not.
pub(super) struct Device<'w> {
    pub(super) flow: Flow,
    pub(super) ip: IpFields,
    pub(super) sent: &'w mut VecDeque<Vec<u8>>,
    pub(super) full: bool,
    /// The largest payload of a unit.
    pub(super) most: usize,
    /// Whether the segments of a unit are packets of their own.
    pub(super) cuts: bool,
}

impl Output<Memory> for Device<'_> {
    fn max_payload(&self) -> usize {
        self.most
    }

    fn transmit(&mut self, segment: Outgoing<'_, Memory>) -> Result<Accepted<Done>, Full> {
        if self.full {
            return Err(Full);
        }
        let payload: Vec<u8> = segment.payload.iter().flat_map(|chunk| chunk.bytes()).copied().collect();
        let size = if self.cuts { segment.segment_size as usize } else { 0 };
        let size = if size > 0 { size } else { payload.len().max(1) };
        let (mut at, len) = (0, payload.len());
        loop {
            let end = (at + size).min(len);
            let mut header = Header { seq: segment.header.seq + at as u32, ..*segment.header };
            if end < len {
                header.flags = header.flags.without(Flags::FIN).without(Flags::PSH);
            }
            if at > 0 {
                header.flags = header.flags.without(Flags::CWR);
            }
            let packet = packet(&self.flow, &header, &payload[at..end], self.ip, segment.ect);
            self.sent.push_back(packet);
            at = end;
            if at == len {
                break;
            }
        }
        Ok(Accepted { ticket: Done, len: segment.payload_len })
    }
}

/// Bytes of the headers of IP and TCP, without options.
pub(super) fn headers(v4: bool) -> u16 {
    if v4 { 40 } else { 60 }
}

/// A packet that begins with its IP header.
pub(super) fn packet(flow: &Flow, header: &Header, payload: &[u8], ip: IpFields, ect: bool) -> Vec<u8> {
    let mut sum = netmem_packet::Sum::default();
    sum.add(payload);
    let mut bytes = vec![0; wire::MAX_HEADERS];
    let traffic_class = ip.dscp << 2 | if ect { Ip::ECT0 } else { 0 };
    let outer = Outer { traffic_class, hop_limit: ip.hop_limit, ..Outer::new(None) };
    let body = Body { len: payload.len(), sum: Some(sum), segment_size: None };
    let emitted = wire::emit_tcp(&mut bytes, &outer, flow, header, body).expect("a segment fits into an IP packet");
    bytes.truncate(emitted.len);
    bytes.extend_from_slice(payload);
    bytes
}
