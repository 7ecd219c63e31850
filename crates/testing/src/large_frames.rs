//! Frames of every kind that is segmented or merged, written by another library.

use etherparse::{LinkExtSlice, NetSlice, PacketBuilder, PacketBuilderStep, SlicedPacket, TcpHeader, TransportSlice};
use netmem_packet::{Checksum, Gso, GsoKind, complete_checksum};

/// The header fields of a frame.
#[derive(Clone, Copy, Debug)]
pub struct FrameKind {
    pub v6: bool,
    pub vlan: bool,
    pub tcp: Option<Tcp>,
    pub id: u16,
    pub may_fragment: bool,
    pub flow: u8,
    pub tos: u8,
}

#[derive(Clone, Copy, Debug)]
pub struct Tcp {
    pub sequence: u32,
    pub flags: u8,
    /// Bytes of options, a multiple of 4.
    pub options: usize,
    pub window: u16,
}

pub const FIN: u8 = 1;
pub const PSH: u8 = 8;
pub const ACK: u8 = 16;
pub const URG: u8 = 32;
pub const ECE: u8 = 64;
pub const CWR: u8 = 128;

impl FrameKind {
    pub fn random(rng: &mut fastrand::Rng) -> Self {
        let tcp = Tcp { sequence: rng.u32(..), flags: ACK, options: 4 * rng.usize(0..=10), window: rng.u16(..) };
        Self {
            v6: rng.bool(),
            vlan: rng.u8(0..4) == 0,
            tcp: rng.bool().then_some(tcp),
            id: rng.u16(..),
            may_fragment: rng.bool(),
            flow: 1,
            tos: rng.u8(..),
        }
    }

    /// A frame with its checksums, written by etherparse.
    pub fn frame(&self, payload: &[u8]) -> Vec<u8> {
        let ip = |ethernet: PacketBuilderStep<etherparse::Ethernet2Header>| {
            if self.v6 {
                ethernet.ipv6([self.flow; 16], [0xfe; 16], 9)
            } else {
                ethernet.ipv4([10, 0, 0, self.flow], [10, 9, 8, 7], 9)
            }
        };
        let ethernet = PacketBuilder::ethernet2([2; 6], [4; 6]);
        let mut frame = Vec::new();
        match self.tcp {
            None => ip(ethernet).udp(5, 4791).write(&mut frame, payload).unwrap(),
            Some(tcp) => {
                let mut header = TcpHeader::new(5, 4791, tcp.sequence, tcp.window);
                header.acknowledgment_number = 77;
                header.set_options_raw(&[1; 40][..tcp.options]).unwrap();
                (header.fin, header.psh, header.ack) = (tcp.flags & FIN > 0, tcp.flags & PSH > 0, tcp.flags & ACK > 0);
                (header.urg, header.ece, header.cwr) = (tcp.flags & URG > 0, tcp.flags & ECE > 0, tcp.flags & CWR > 0);
                ip(ethernet).tcp_header(header).write(&mut frame, payload).unwrap();
            }
        }
        // The fields that the builder cannot set: traffic class, identification, and the flag that
        // forbids fragments.
        if self.v6 {
            frame[14] |= self.tos >> 4;
            frame[15] |= self.tos << 4;
        } else {
            frame[15] = self.tos;
            frame[18..20].copy_from_slice(&self.id.to_be_bytes());
            frame[20..22].copy_from_slice(&if self.may_fragment { [0, 0] } else { [0x40, 0] });
            frame[24..26].fill(0);
            assert!(complete_checksum(&mut frame[..34], 14, 10));
        }
        if self.vlan {
            frame.splice(12..12, [0x81, 0, 0x0f, 0xff]);
        }
        assert_sums(&frame);
        frame
    }

    pub fn l4(&self) -> usize {
        14 + if self.vlan { 4 } else { 0 } + if self.v6 { 40 } else { 20 }
    }

    pub fn headers(&self) -> usize {
        self.l4() + self.tcp.map_or(8, |tcp| 20 + tcp.options)
    }

    fn place(&self) -> usize {
        if self.tcp.is_some() { 16 } else { 6 }
    }

    pub fn gso(&self, size: u16) -> Gso {
        let kind = match (self.tcp, self.v6) {
            (None, _) => GsoKind::UdpSegment,
            (_, false) => GsoKind::TcpV4,
            (_, true) => GsoKind::TcpV6,
        };
        let ecn = self.tcp.is_some_and(|tcp| tcp.flags & CWR > 0);
        Gso { kind, size, headers: self.headers() as u16, ecn }
    }

    pub fn partial(&self) -> Checksum {
        Checksum::Partial { start: self.l4() as u16, offset: self.place() as u16 }
    }

    /// The frames into which a frame with `payload` is segmented, written by etherparse.
    pub fn segments(&self, payload: &[u8], size: usize) -> Vec<Vec<u8>> {
        let count = payload.len().div_ceil(size);
        let segment = |(n, part): (usize, &[u8])| {
            let tcp = self.tcp.map(|tcp| {
                let not_here = if n + 1 < count { FIN | PSH } else { 0 } | if n > 0 { CWR } else { 0 };
                let sequence = tcp.sequence.wrapping_add((n * size) as u32);
                Tcp { sequence, flags: tcp.flags & !not_here, ..tcp }
            });
            Self { tcp, id: self.id.wrapping_add(n as u16), ..*self }.frame(part)
        };
        payload.chunks(size).enumerate().map(segment).collect()
    }
}

/// Checks the checksums of a frame with another library.
#[track_caller]
pub fn assert_sums(frame: &[u8]) {
    let packet = SlicedPacket::from_ethernet(frame).unwrap();
    assert!(packet.link_exts.iter().all(|ext| matches!(ext, LinkExtSlice::Vlan(_))));
    let (net, transport) = (packet.net.unwrap(), packet.transport.unwrap());
    if let NetSlice::Ipv4(ip) = &net {
        let header = ip.header().to_header();
        assert_eq!(header.header_checksum, header.calc_header_checksum());
    }
    let (have, want) = match (&net, &transport) {
        (NetSlice::Ipv4(ip), TransportSlice::Tcp(tcp)) => {
            (tcp.checksum(), tcp.calc_checksum_ipv4(ip.header().source(), ip.header().destination()).unwrap())
        }
        (NetSlice::Ipv6(ip), TransportSlice::Tcp(tcp)) => {
            (tcp.checksum(), tcp.calc_checksum_ipv6(ip.header().source(), ip.header().destination()).unwrap())
        }
        (NetSlice::Ipv4(ip), TransportSlice::Udp(udp)) => {
            (udp.checksum(), udp.to_header().calc_checksum_ipv4(&ip.header().to_header(), udp.payload()).unwrap())
        }
        (NetSlice::Ipv6(ip), TransportSlice::Udp(udp)) => {
            (udp.checksum(), udp.to_header().calc_checksum_ipv6(&ip.header().to_header(), udp.payload()).unwrap())
        }
        other => panic!("{other:?}"),
    };
    // 0 and 0xffff are equal in one's complement.
    assert_eq!(have % 0xffff, want % 0xffff);
}

/// Puts the sum of the pseudo header in the place of the checksum, as the sender of a partial
/// checksum does.
pub fn leave_partial(frame: &mut [u8], kind: &FrameKind) {
    let at = kind.l4() + kind.place();
    let sum = |bytes: &[u8]| {
        let mut sum = netmem_packet::Sum::default();
        sum.add(bytes);
        sum.value()
    };
    frame[at..at + 2].fill(0);
    let l3 = kind.l4() - if kind.v6 { 40 } else { 20 };
    let addresses = if kind.v6 { l3 + 8..l3 + 40 } else { l3 + 12..l3 + 20 };
    let mut pseudo = netmem_packet::Sum::default();
    pseudo.add_word(sum(&frame[addresses]));
    pseudo.add_word(if kind.tcp.is_some() { 6 } else { 17 });
    pseudo.add_word((frame.len() - kind.l4()) as u16);
    frame[at..at + 2].copy_from_slice(&pseudo.value().to_be_bytes());
}
