//! Frames, as they are made and as they are read. In front of each is the header in which the
//! kernel has offloads.

use etherparse::checksum::Sum16BitWords;
use etherparse::{
    ArpHardwareId, ArpOperation, ArpPacket, EtherType, IpHeaders, IpNumber, Ipv4Header, Ipv6FlowLabel, Ipv6Header,
    NetSlice, PacketBuilder, PacketBuilderStep, SlicedPacket, TcpHeader, TransportSlice,
};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

pub type Mac = [u8; 6];
pub const ALL: Mac = [0xff; 6];

/// Bytes of `virtio_net_hdr`. All are zero if a frame has no offloads.
pub const OFFLOADS: usize = 10;

pub const FIN: u8 = 1;
pub const SYN: u8 = 2;
pub const RST: u8 = 4;
pub const PSH: u8 = 8;
pub const ACK: u8 = 16;
pub const URG: u8 = 32;
pub const ECE: u8 = 64;
pub const CWR: u8 = 128;

/// The option of each SYN: an MSS of 1460 bytes.
pub const MSS: [u8; 4] = [2, 4, 0x05, 0xb4];

/// The Ethernet addresses of a frame.
#[derive(Clone, Copy, Debug)]
pub struct Link {
    pub from: Mac,
    pub to: Mac,
}

/// A segment from `from` to `to`.
#[derive(Clone, Copy, Debug)]
pub struct Segment<'a> {
    pub from: SocketAddr,
    pub to: SocketAddr,
    pub seq: u32,
    pub ack: u32,
    pub flags: u8,
    pub window: u16,
    pub options: &'a [u8],
    pub payload: &'a [u8],
}

fn ip(link: Link, from: IpAddr, to: IpAddr, hops: u8, protocol: IpNumber) -> PacketBuilderStep<IpHeaders> {
    let ethernet = PacketBuilder::ethernet2(link.from, link.to);
    match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let header = Ipv4Header::new(0, hops, protocol, from.octets(), to.octets()).unwrap();
            ethernet.ip(IpHeaders::Ipv4(header, Default::default()))
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            let header = Ipv6Header {
                traffic_class: 0,
                flow_label: Ipv6FlowLabel::ZERO,
                payload_length: 0,
                next_header: protocol,
                hop_limit: hops,
                source: from.octets(),
                destination: to.octets(),
            };
            ethernet.ip(IpHeaders::Ipv6(header, Default::default()))
        }
        _ => panic!("{from} and {to} are of two families"),
    }
}

impl Segment<'_> {
    /// The frame.
    pub fn frame(&self, link: Link) -> Vec<u8> {
        let has = |flag| self.flags & flag != 0;
        let mut header = TcpHeader::new(self.from.port(), self.to.port(), self.seq, self.window);
        header.acknowledgment_number = self.ack;
        (header.fin, header.syn, header.rst, header.psh) = (has(FIN), has(SYN), has(RST), has(PSH));
        (header.ack, header.urg, header.ece, header.cwr) = (has(ACK), has(URG), has(ECE), has(CWR));
        header.set_options_raw(self.options).unwrap();
        let mut bytes = vec![0; OFFLOADS];
        let step = ip(link, self.from.ip(), self.to.ip(), 64, IpNumber::TCP).tcp_header(header);
        step.write(&mut bytes, self.payload).unwrap();
        bytes
    }
}

/// A connection request.
pub fn request(link: Link, from: SocketAddr, to: SocketAddr) -> Vec<u8> {
    Segment { from, to, seq: 1, ack: 0, flags: SYN, window: u16::MAX, options: &MSS, payload: &[] }.frame(link)
}

/// A datagram.
pub fn udp(link: Link, from: SocketAddr, to: SocketAddr, payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; OFFLOADS];
    let step = ip(link, from.ip(), to.ip(), 64, IpNumber::UDP).udp(from.port(), to.port());
    step.write(&mut bytes, payload).unwrap();
    bytes
}

/// An ICMP message. `rest` are the bytes behind its checksum, and `body` those behind them.
pub fn icmp(link: Link, [from, to]: [IpAddr; 2], [kind, code]: [u8; 2], rest: [u8; 4], body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; OFFLOADS];
    // Neighbours accept messages of discovery only with a hop limit that no router has lowered.
    let step = |protocol| ip(link, from, to, 255, protocol);
    let written = match from {
        IpAddr::V4(_) => step(IpNumber::ICMP).icmpv4_raw(kind, code, rest).write(&mut bytes, body),
        IpAddr::V6(_) => step(IpNumber::IPV6_ICMP).icmpv6_raw(kind, code, rest).write(&mut bytes, body),
    };
    written.unwrap();
    bytes
}

/// What an error quotes of a packet from `from` to `to`: its IP header, its ports, and the 4 bytes
/// behind them, which are TCP's sequence number, or length and checksum of UDP.
pub fn quote(protocol: IpNumber, from: SocketAddr, to: SocketAddr, behind: [u8; 4], len: u16) -> Vec<u8> {
    let link = Link { from: [2; 6], to: [2; 6] };
    let mut payload = [from.port().to_be_bytes(), to.port().to_be_bytes()].concat();
    payload.extend(behind);
    payload.resize(len.into(), 0);
    let mut bytes = Vec::new();
    ip(link, from.ip(), to.ip(), 64, protocol).write(&mut bytes, protocol, &payload).unwrap();
    let header = if from.is_ipv4() { 20 } else { 40 };
    bytes[14..14 + header + 8].to_vec()
}

/// An ARP request or reply.
pub fn arp(link: Link, request: bool, sender: (Mac, Ipv4Addr), target: (Mac, Ipv4Addr)) -> Vec<u8> {
    let operation = if request { ArpOperation::REQUEST } else { ArpOperation::REPLY };
    let (sender, target) = ((sender.0, sender.1.octets()), (target.0, target.1.octets()));
    let packet =
        ArpPacket::new(ArpHardwareId::ETHERNET, EtherType::IPV4, operation, &sender.0, &sender.1, &target.0, &target.1);
    let mut bytes = vec![0; OFFLOADS];
    PacketBuilder::ethernet2(link.from, link.to).arp(packet.unwrap()).write(&mut bytes).unwrap();
    bytes
}

/// The answer to a neighbour solicitation.
pub fn advertisement(link: Link, from: Ipv6Addr, to: Ipv6Addr, mac: Mac) -> Vec<u8> {
    let option = [&from.octets()[..], &[2, 1], &mac].concat();
    icmp(link, [from.into(), to.into()], [136, 0], [0x60, 0, 0, 0], &option)
}

/// A neighbour solicitation.
pub fn solicitation(link: Link, from: Ipv6Addr, to: Ipv6Addr, mac: Mac) -> Vec<u8> {
    let option = [&to.octets()[..], &[1, 1], &mac].concat();
    icmp(link, [from.into(), to.into()], [135, 0], [0; 4], &option)
}

/// A received frame.
#[derive(Debug)]
pub enum Received<'a> {
    Segment(Arrived<'a>),
    /// An ARP request or a neighbour solicitation for `target`, sent to `to`.
    Question {
        target: IpAddr,
        to: Mac,
        asker: (Mac, IpAddr),
    },
    /// An answer to one, or an announcement.
    Answer(Mac, IpAddr),
    /// The answer to an echo request, with identifier and number.
    Echo([u8; 4]),
    Other,
}

/// A received segment.
#[derive(Debug)]
pub struct Arrived<'a> {
    pub from: SocketAddr,
    pub to: SocketAddr,
    /// The Ethernet address that it was sent to.
    pub mac: Mac,
    pub seq: u32,
    pub ack: u32,
    pub flags: u8,
    pub window: u16,
    pub payload: &'a [u8],
    /// Payload of the largest of the segments into which the kernel would cut it.
    pub size: usize,
}

/// Reads a frame of the server, behind its header of offloads. What cannot be read is
/// [`Received::Other`].
pub fn read(bytes: &[u8]) -> Received<'_> {
    let Some((offloads, bytes)) = bytes.split_at_checked(OFFLOADS) else { return Received::Other };
    let Ok(packet) = SlicedPacket::from_ethernet(bytes) else { return Received::Other };
    let mac = *bytes.first_chunk().unwrap();
    let (from, to) = match &packet.net {
        Some(NetSlice::Ipv4(ip)) => (ip.header().source_addr().into(), IpAddr::from(ip.header().destination_addr())),
        Some(NetSlice::Ipv6(ip)) => (ip.header().source_addr().into(), IpAddr::from(ip.header().destination_addr())),
        Some(NetSlice::Arp(arp)) => return read_arp(&arp.to_packet(), mac),
        None => return Received::Other,
    };
    match &packet.transport {
        Some(TransportSlice::Tcp(tcp)) => {
            let flags = [tcp.fin(), tcp.syn(), tcp.rst(), tcp.psh(), tcp.ack(), tcp.urg(), tcp.ece(), tcp.cwr()];
            let gso = usize::from(u16::from_le_bytes([offloads[4], offloads[5]]));
            let most = if offloads[1] == 0 { usize::MAX } else { gso };
            Received::Segment(Arrived {
                from: SocketAddr::new(from, tcp.source_port()),
                to: SocketAddr::new(to, tcp.destination_port()),
                mac,
                seq: tcp.sequence_number(),
                ack: tcp.acknowledgment_number(),
                flags: flags.iter().enumerate().fold(0, |all, (bit, set)| all | u8::from(*set) << bit),
                window: tcp.window_size(),
                payload: tcp.payload(),
                size: tcp.payload().len().min(most),
            })
        }
        Some(TransportSlice::Icmpv4(icmp)) if icmp.type_u8() == 0 => Received::Echo(icmp.bytes5to8()),
        Some(TransportSlice::Icmpv6(icmp)) => read_discovery(icmp.slice(), mac, from),
        _ => Received::Other,
    }
}

fn read_arp(arp: &ArpPacket, mac: Mac) -> Received<'static> {
    let address = |bytes: &[u8]| <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    let (Ok(sender), Ok(target)) = (address(arp.sender_protocol_addr()), address(arp.target_protocol_addr())) else {
        return Received::Other;
    };
    let Ok(asker) = Mac::try_from(arp.sender_hw_addr()) else { return Received::Other };
    match arp.operation {
        ArpOperation::REQUEST => Received::Question { target, to: mac, asker: (asker, sender) },
        _ => Received::Answer(asker, sender),
    }
}

/// ICMPv6: type, code, checksum, four bytes, then a target and an option with an Ethernet address.
fn read_discovery(message: &[u8], mac: Mac, from: IpAddr) -> Received<'static> {
    let target = message.get(8..24).map(|bytes| IpAddr::from(<[u8; 16]>::try_from(bytes).unwrap()));
    let option = message.get(26..32).map(|bytes| Mac::try_from(bytes).unwrap());
    match (message[0], target, option) {
        (129, ..) => Received::Echo(*message[4..].first_chunk().unwrap()),
        (135, Some(target), option) => {
            Received::Question { target, to: mac, asker: (option.unwrap_or_default(), from) }
        }
        (136, Some(target), Some(mac)) => Received::Answer(mac, target),
        _ => Received::Other,
    }
}

/// Computes the checksums of a frame with changed bytes again: that of the IPv4 header, and those
/// of TCP, UDP and ICMP directly behind an IP header. What is too damaged for that stays as it is.
pub fn fix(bytes: &mut [u8]) {
    let Some(frame) = bytes.get_mut(OFFLOADS..) else { return };
    let (start, len, protocol, addresses) = match frame.get(12..14) {
        Some([0x08, 0x00]) if frame.len() >= 34 => {
            let header = usize::from(frame[14] & 15) * 4;
            if header < 20 || frame.len() < 14 + header {
                return;
            }
            frame[24..26].fill(0);
            let sum = Sum16BitWords::new().add_slice(&frame[14..14 + header]).ones_complement();
            frame[24..26].copy_from_slice(&sum.to_ne_bytes());
            let len = usize::from(u16::from_be_bytes([frame[16], frame[17]]));
            (14 + header, len.saturating_sub(header), frame[23], 26..34)
        }
        Some([0x86, 0xdd]) if frame.len() >= 54 => {
            (54, usize::from(u16::from_be_bytes([frame[18], frame[19]])), frame[20], 22..54)
        }
        _ => return,
    };
    let place = match protocol {
        6 => 16,
        17 => 6,
        1 | 58 => 2,
        _ => return,
    };
    if len < place + 2 || frame.len() < start + len {
        return;
    }
    frame[start + place..start + place + 2].fill(0);
    let mut sum = Sum16BitWords::new().add_slice(&frame[start..start + len]);
    if protocol != 1 {
        let words = [0, protocol];
        sum = sum.add_slice(&frame[addresses]).add_2bytes(words).add_slice(&(len as u32).to_be_bytes());
    }
    let sum = sum.to_ones_complement_with_no_zero().to_ne_bytes();
    frame[start + place..start + place + 2].copy_from_slice(&sum);
}
