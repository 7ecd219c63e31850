//! The parser and the writer against `etherparse`, against each other, and against frames that were
//! damaged.

use super::*;
use crate::tcp::{Flags, Header, Options, SackBlocks, Seq, Timestamps};
use etherparse::{NetSlice, PacketBuilder, SlicedPacket, TcpOptionElement, TcpSlice, TransportSlice};
use fastrand::Rng;
use netmem_packet::{Checksum, GsoKind, Meta, Sum, complete_checksum};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

const US: Mac = Mac([2, 0, 0, 0, 0, 1]);
const PEER: Mac = Mac([2, 0, 0, 0, 0, 2]);
const LINK: EthernetHeader = EthernetHeader { destination: US, source: PEER };

fn addrs(v4: bool) -> (IpAddr, IpAddr) {
    match v4 {
        true => (Ipv4Addr::new(192, 0, 2, 1).into(), Ipv4Addr::new(198, 51, 100, 7).into()),
        false => (
            Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into(),
            Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0xff12, 0x3456).into(),
        ),
    }
}

/// From the peer to us.
fn flow(v4: bool, rng: &mut Rng) -> Flow {
    let (local, remote) = addrs(v4);
    Flow { local: SocketAddr::new(local, rng.u16(..)), remote: SocketAddr::new(remote, rng.u16(..)) }
}

fn random_header(rng: &mut Rng) -> Header {
    let mut options = Options::default();
    let flags = Flags(rng.u8(..));
    if flags.has(Flags::SYN) {
        options.mss = rng.bool().then(|| rng.u16(..));
        options.window_scale = rng.bool().then(|| rng.u8(..));
        options.sack_permitted = rng.bool();
    } else {
        (0..rng.u32(..=4)).for_each(|_| _ = options.sack.push(Seq(rng.u32(..)), Seq(rng.u32(..))));
    }
    options.timestamps = rng.bool().then(|| Timestamps { value: rng.u32(..), echo: rng.u32(..) });
    let (seq, ack) = (Seq(rng.u32(..)), Seq(rng.u32(..)));
    Header { seq, ack, flags, window: rng.u16(..), urgent: rng.u16(..), options }
}

fn sum(bytes: &[u8]) -> Sum {
    let mut sum = Sum::default();
    sum.add(bytes);
    sum
}

/// Headers of `kind` and a payload, written by this crate, with checksums.
fn emitted(v4: bool, tcp: Option<&Header>, flow: &Flow, payload: &[u8], partial: bool) -> (Vec<u8>, Meta) {
    let mut out = [0xa5; MAX_HEADERS];
    let body = Body { len: payload.len(), sum: (!partial).then(|| sum(payload)), segment_size: None };
    let outer = Outer { traffic_class: 0x2a, ..Outer::new(Some(LINK)) };
    let emitted = match tcp {
        Some(header) => emit_tcp(&mut out, &outer, flow, header, body),
        None => emit_udp(&mut out, &outer, flow, body),
    }
    .unwrap();
    assert_eq!(flow.local.is_ipv4(), v4);
    ([&out[..emitted.len], payload].concat(), emitted.meta)
}

/// Parses a whole frame, checks its checksum, and that all places are inside of it.
fn read(frame: &[u8]) -> Result<(EthernetHeader, Ip, Transport), ParseError> {
    let head = &frame[..frame.len().min(MAX_HEAD)];
    let (link, Network::Ip(ip)) = parse(head, frame.len())? else { return Err(ParseError::Unknown) };
    assert!(ip.content.end() <= frame.len());
    let transport = ip.transport(head)?;
    let payload = match transport {
        Transport::Tcp(segment) => segment.payload,
        Transport::Udp(datagram) => datagram.payload,
        Transport::Icmp(Icmp::EchoRequest { payload, .. }) => payload,
        _ => ip.content,
    };
    assert!(ip.content.at <= payload.at && payload.end() <= ip.content.end(), "{payload:?} {ip:?}");
    if let Some(covered) = ip.covered(&transport) {
        assert!(covered.range.end() <= ip.content.end());
        if !covered.holds(sum(&frame[covered.range.at..covered.range.end()])) {
            return Err(ParseError::Malformed);
        }
    }
    Ok((link, ip, transport))
}

/// The headers of each segment of a unit are those that would be written for it alone.
#[test]
fn patched_headers_are_what_would_be_written() {
    let mut rng = Rng::with_seed(15);
    for _ in 0..5_000 {
        let (v4, checksum) = (rng.bool(), rng.bool());
        let flow = flow(v4, &mut rng);
        let header = random_header(&mut rng);
        let len = rng.usize(..300);
        let outer = Outer { traffic_class: rng.u8(..), ..Outer::new(Some(LINK)) };
        let mut template = HeaderTemplate::new(&outer, &flow, &header, len, checksum).unwrap();
        for _ in 0..5 {
            let payload: Vec<u8> = (0..len).map(|_| rng.u8(..)).collect();
            let (seq, flags) = (Seq(rng.u32(..)), Flags(rng.u8(..) & !Flags::SYN.0));
            let patched = template.segment(seq, flags, sum(&payload)).to_vec();
            let mut alone = [0; MAX_HEADERS];
            let body = Body { len, sum: checksum.then(|| sum(&payload)), segment_size: None };
            let emitted = emit_tcp(&mut alone, &outer, &flow, &Header { seq, flags, ..header }, body).unwrap();
            assert_eq!((&patched[..], template.meta()), (&alone[..emitted.len], emitted.meta));
        }
    }
}

/// A frame that was written means what it should, to this crate's parser and to another, and both
/// checksums are right. A checksum that was left to a device is the same once it is computed.
#[test]
fn what_is_written_is_read_by_both_parsers() {
    let mut rng = Rng::with_seed(14);
    for turn in 0..20_000 {
        let v4 = rng.bool();
        let flow = flow(v4, &mut rng);
        let payload: Vec<u8> = (0..rng.usize(..300)).map(|_| rng.u8(..)).collect();
        let header = (turn % 3 > 0).then(|| random_header(&mut rng));
        let (frame, meta) = emitted(v4, header.as_ref(), &flow, &payload, false);
        assert_eq!(meta, Meta { checksum: Checksum::Verified, gso: None });
        let (mut later, meta) = emitted(v4, header.as_ref(), &flow, &payload, true);
        let Checksum::Partial { start, offset } = meta.checksum else { panic!("{meta:?}") };
        assert!(complete_checksum(&mut later, start, offset));
        assert_eq!(later, frame);

        let other = SlicedPacket::from_ethernet(&frame).unwrap();
        let (link, ip, transport) = read(&frame).unwrap();
        assert_eq!((link, ip.traffic_class, ip.hop_limit, ip.fragment), (LINK, 0x2a, 64, None));
        assert_eq!((ip.source, ip.destination), (flow.local.ip(), flow.remote.ip()));
        if let Some(NetSlice::Ipv4(ip)) = &other.net {
            assert_eq!(ip.header().header_checksum(), ip.header().to_header().calc_header_checksum());
            assert!(ip.header().dont_fragment());
        }
        match (transport, other.transport.unwrap()) {
            (Transport::Tcp(segment), TransportSlice::Tcp(tcp)) => {
                let mut said = header.unwrap();
                said.options.sack.truncate(if said.options.timestamps.is_some() { 3 } else { 4 });
                assert_eq!(segment.header, said);
                let got = ip.flow(segment.source_port, segment.destination_port);
                assert_eq!((got.remote, got.local), (flow.local, flow.remote));
                assert_eq!(&frame[segment.payload.at..segment.payload.end()], payload);
                assert_eq!(tcp_header_len(&said.options), segment.payload.at - ip.content.at);
                assert_same(&segment, &tcp);
                let checksum = match other.net.unwrap() {
                    NetSlice::Ipv4(ip) => tcp.calc_checksum_ipv4(ip.header().source(), ip.header().destination()),
                    NetSlice::Ipv6(ip) => tcp.calc_checksum_ipv6(ip.header().source(), ip.header().destination()),
                    NetSlice::Arp(_) => panic!("ARP"),
                };
                // 0 and 0xffff are equal.
                let checksum = checksum.unwrap();
                assert!(checksum == tcp.checksum() || checksum == 0 && tcp.checksum() == 0xffff);
            }
            (Transport::Udp(datagram), TransportSlice::Udp(udp)) => {
                assert_eq!((udp.source_port(), udp.destination_port()), (flow.local.port(), flow.remote.port()));
                assert_eq!(datagram.payload.len, payload.len());
                assert_eq!(udp.payload(), payload);
            }
            transports => panic!("{transports:?}"),
        }
    }
}

/// Both parsers read the same from a TCP header.
fn assert_same(segment: &Segment, tcp: &TcpSlice<'_>) {
    let header = &segment.header;
    assert_eq!((segment.source_port, segment.destination_port), (tcp.source_port(), tcp.destination_port()));
    assert_eq!((header.seq.0, header.ack.0), (tcp.sequence_number(), tcp.acknowledgment_number()));
    assert_eq!((header.window, header.urgent), (tcp.window_size(), tcp.urgent_pointer()));
    let bits = [tcp.fin(), tcp.syn(), tcp.rst(), tcp.psh(), tcp.ack(), tcp.urg(), tcp.ece(), tcp.cwr()];
    let flags = bits.into_iter().enumerate().fold(0, |flags, (n, bit)| flags | u8::from(bit) << n);
    assert_eq!(header.flags.0, flags);
    assert_eq!(segment.payload.len, tcp.payload().len());
    let syn = header.flags.has(Flags::SYN);
    let mut options = Options::default();
    for option in tcp.options_iterator() {
        match option {
            Ok(TcpOptionElement::MaximumSegmentSize(mss)) if syn => options.mss = Some(mss),
            Ok(TcpOptionElement::WindowScale(scale)) if syn => options.window_scale = Some(scale),
            Ok(TcpOptionElement::SelectiveAcknowledgementPermitted) if syn => options.sack_permitted = true,
            Ok(TcpOptionElement::Timestamp(value, echo)) => options.timestamps = Some(Timestamps { value, echo }),
            Ok(TcpOptionElement::SelectiveAcknowledgement(first, rest)) if !syn => {
                for (from, to) in [Some(first)].into_iter().chain(rest).flatten() {
                    options.sack.push(Seq(from), Seq(to));
                }
            }
            Ok(_) => (),
            // The other parser stops at an option that it does not know.
            Err(_) => return,
        }
    }
    assert_eq!(header.options, options);
}

fn built(rng: &mut Rng) -> Vec<u8> {
    let v4 = rng.bool();
    let (us, peer) = addrs(v4);
    let ip = PacketBuilder::ethernet2(PEER.0, US.0);
    let ip = match (peer, us) {
        (IpAddr::V4(peer), IpAddr::V4(us)) => ip.ipv4(peer.octets(), us.octets(), 9),
        (IpAddr::V6(peer), IpAddr::V6(us)) => ip.ipv6(peer.octets(), us.octets(), 9),
        _ => unreachable!("one family"),
    };
    let payload: Vec<u8> = (0..rng.usize(..60)).map(|_| rng.u8(..)).collect();
    let mut frame = Vec::new();
    let (a, b) = (rng.u16(..), rng.u16(..));
    match rng.u8(..4) {
        0 => ip.udp(a, b).write(&mut frame, &payload).unwrap(),
        1 if v4 => ip.icmpv4_echo_request(a, b).write(&mut frame, &payload).unwrap(),
        1 => ip.icmpv6_echo_request(a, b).write(&mut frame, &payload).unwrap(),
        _ => {
            let options = [
                TcpOptionElement::Noop,
                TcpOptionElement::WindowScale(7),
                TcpOptionElement::Timestamp(rng.u32(..), 5),
                TcpOptionElement::SelectiveAcknowledgement((1, 2), [Some((3, 4)), None, None]),
            ];
            let tcp = ip.tcp(a, b, rng.u32(..), rng.u16(..));
            let tcp = if rng.bool() { tcp.syn() } else { tcp.ack(rng.u32(..)) };
            tcp.options(&options[..rng.usize(..=4)]).unwrap().write(&mut frame, &payload).unwrap();
        }
    }
    frame
}

/// Frames by another writer are read; damaged ones are either dropped, or read as the other parser
/// reads them. Proves NET-6.
#[test]
fn damaged_frames_are_dropped_or_read_alike() {
    let mut rng = Rng::with_seed(15);
    let (mut read_alike, mut dropped) = (0, 0);
    for turn in 0..200_000 {
        let mut frame = built(&mut rng);
        if turn % 8 == 0 {
            frame.extend(std::iter::repeat_n(0, rng.usize(..20)));
            read(&frame).unwrap();
            continue;
        }
        for _ in 0..rng.usize(1..4) {
            let at = rng.usize(..frame.len());
            match rng.u8(..4) {
                0 => frame[at] = rng.u8(..),
                1 => frame[at] ^= 1 << rng.u8(..8),
                2 => frame.truncate(at.max(1)),
                _ => frame[at] = [0, 0xff, 0x7f, 1][rng.usize(..4)],
            }
        }
        // The header's checksum hides most damage, so mend it in most frames.
        if turn % 8 > 1 && frame.len() >= 34 && frame[12..14] == [8, 0] {
            let end = (14 + usize::from(frame[14] & 15) * 4).clamp(34, frame.len().max(34)).min(frame.len());
            frame[24..26].fill(0);
            let checksum = !sum(&frame[14..end]).value();
            frame[24..26].copy_from_slice(&checksum.to_be_bytes());
        }
        let head = &frame[..frame.len().min(rng.usize(1..=MAX_HEAD))];
        let Ok((_, Network::Ip(ip))) = parse(head, frame.len()) else {
            dropped += 1;
            continue;
        };
        let Ok(transport) = ip.transport(head) else {
            dropped += 1;
            continue;
        };
        let _ = read(&frame);
        // The other parser reads ICMP, and into more extension headers.
        let other = SlicedPacket::from_ethernet(&frame);
        let Ok(other) = other else {
            assert!(
                matches!(transport, Transport::Icmp(_) | Transport::Unknown),
                "the other parser refuses {frame:02x?}"
            );
            continue;
        };
        match (transport, other.transport) {
            (Transport::Tcp(segment), Some(TransportSlice::Tcp(tcp))) => {
                assert_same(&segment, &tcp);
                read_alike += 1;
            }
            (Transport::Udp(datagram), Some(TransportSlice::Udp(udp))) => {
                assert_eq!(datagram.payload.len, udp.payload().len());
                assert_eq!(datagram.payload.at, udp.payload().as_ptr().addr() - frame.as_ptr().addr());
                read_alike += 1;
            }
            (Transport::Icmp(_) | Transport::Unknown, _) => (),
            transports => panic!("{transports:?}"),
        }
    }
    assert!(read_alike > 10_000 && dropped > 10_000, "{read_alike} {dropped}");
    // Bytes that never were a frame.
    for _ in 0..200_000 {
        let mut frame: Vec<u8> = (0..rng.usize(1..120)).map(|_| rng.u8(..)).collect();
        if frame.len() > 20 {
            frame[12..15].copy_from_slice(&[[8, 0, 0x45], [8, 0, 0x4f], [0x86, 0xdd, 0x60], [8, 6, 0]][rng.usize(..4)]);
        }
        let _ = read(&frame);
        let _ = Ip::parse(&frame, frame.len());
    }
}

fn tcp_with(flags: Flags, options: &[u8]) -> Options {
    let mut options = options.to_vec();
    options.resize(options.len().next_multiple_of(4), 0);
    let mut frame =
        emitted(true, Some(&Header { flags, ..Header::default() }), &flow(true, &mut Rng::with_seed(1)), &[], true).0;
    frame[46] = ((20 + options.len()) * 4) as u8;
    frame.extend(&options);
    mend(&mut frame, 34 + 20 + options.len());
    let head = &frame[..frame.len().min(MAX_HEAD)];
    let Ok((_, Network::Ip(ip))) = parse(head, frame.len()) else { panic!("dropped") };
    let Ok(Transport::Tcp(segment)) = ip.transport(head) else { panic!("no segment") };
    assert_eq!(segment.payload.len, 0);
    segment.header.options
}

/// Writes the length and the checksum of an IPv4 header.
fn mend(frame: &mut [u8], len: usize) {
    frame[16..18].copy_from_slice(&((len - 14) as u16).to_be_bytes());
    frame[24..26].fill(0);
    let end = 14 + usize::from(frame[14] & 15) * 4;
    let checksum = !sum(&frame[14..end]).value();
    frame[24..26].copy_from_slice(&checksum.to_be_bytes());
}

/// RFC 9293, MUST-5 to MUST-7: options in any segment, options that are not known, and lengths that
/// are wrong.
#[test]
fn options_are_read_up_to_a_wrong_length() {
    let mss = Options { mss: Some(1460), ..Options::default() };
    assert_eq!(tcp_with(Flags::SYN, &[2, 4, 5, 180]), mss);
    // Not known, with its length; and end of the list.
    assert_eq!(tcp_with(Flags::SYN, &[254, 6, 1, 2, 3, 4, 1, 2, 4, 5, 180]), mss);
    assert_eq!(tcp_with(Flags::SYN, &[0, 2, 4, 5, 180]), Options::default());
    // Lengths of 0 and 1, beyond the header, and none.
    for wrong in [&[3, 0, 7, 7][..], &[3, 1, 7, 7], &[3, 9, 7, 7], &[1, 1, 1, 3]] {
        assert_eq!(tcp_with(Flags::SYN, &[&[2, 4, 5, 180], wrong].concat()), mss, "{wrong:?}");
        assert_eq!(tcp_with(Flags::SYN, &[wrong, &[2, 4, 5, 180]].concat()).mss, None, "{wrong:?}");
    }
    // An option that is known with the length of another is skipped.
    assert_eq!(tcp_with(Flags::SYN, &[3, 4, 9, 9, 2, 4, 5, 180]), mss);
    assert_eq!(tcp_with(Flags::ACK, &[5, 9, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1]), Options::default());
    // Options of a SYN in a segment that is none, and the reverse.
    assert_eq!(tcp_with(Flags::ACK, &[2, 4, 5, 180, 3, 3, 7, 4, 2]), Options::default());
    assert_eq!(tcp_with(Flags::SYN, &[5, 10, 0, 0, 0, 1, 0, 0, 0, 2]), Options::default());
    let mut sack = SackBlocks::default();
    sack.push(Seq(1), Seq(2));
    assert_eq!(tcp_with(Flags::ACK, &[5, 10, 0, 0, 0, 1, 0, 0, 0, 2]).sack, sack);
}

/// Each rule by which a packet of IPv4 is dropped.
#[test]
fn packets_of_ipv4_are_dropped() {
    let flow = flow(true, &mut Rng::with_seed(1));
    let good = emitted(true, None, &flow, b"payload", false).0;
    let with = |edit: &dyn Fn(&mut Vec<u8>)| {
        let mut frame = good.clone();
        edit(&mut frame);
        mend(&mut frame, good.len());
        read(&frame).map(|(_, ip, _)| ip)
    };
    assert!(with(&|_| ()).is_ok());
    let not_mended = |at: usize, value: u8| {
        let mut frame = good.clone();
        frame[at] = value;
        read(&frame).map(|(_, ip, _)| ip)
    };
    assert_eq!(not_mended(22, 63), Err(ParseError::Malformed), "header checksum");
    assert_eq!(not_mended(14, 0x44), Err(ParseError::Malformed), "header of 16 bytes");
    assert_eq!(not_mended(14, 0x55), Err(ParseError::Malformed), "version");
    assert_eq!(not_mended(17, 200), Err(ParseError::Malformed), "longer than the frame");
    assert_eq!(not_mended(12, 0x81), Err(ParseError::Unknown), "VLAN tag");
    assert_eq!(not_mended(6, 3), Err(ParseError::Martian), "from a group");
    for source in [[127, 0, 0, 1], [224, 0, 0, 1], [255, 255, 255, 255], [0, 0, 0, 0]] {
        assert_eq!(with(&|frame| frame[26..30].copy_from_slice(&source)), Err(ParseError::Martian));
    }
    for destination in [[127, 0, 0, 1], [0, 0, 0, 0]] {
        assert_eq!(with(&|frame| frame[30..34].copy_from_slice(&destination)), Err(ParseError::Martian));
    }
    // Options take the place of the first bytes of the UDP header, whose checksum is wrong then:
    // only the IP header is looked at.
    let with_options = |options: [u8; 4]| {
        let mut frame = good.clone();
        frame[14] = 0x46;
        frame[34..38].copy_from_slice(&options);
        mend(&mut frame, good.len());
        parse(&frame, frame.len()).map(|_| ())
    };
    assert_eq!(with_options([148, 4, 0, 0]), Ok(()), "router alert");
    assert_eq!(with_options([1, 131, 3, 4]), Err(ParseError::SourceRoute));
    assert_eq!(with_options([137, 3, 4, 0]), Err(ParseError::SourceRoute));
    assert_eq!(with_options([7, 5, 4, 0]), Err(ParseError::Malformed), "longer than the header");
    assert_eq!(with_options([7, 1, 4, 0]), Err(ParseError::Malformed), "shorter than itself");
    assert_eq!(with_options([0, 131, 9, 9]), Ok(()), "behind the end");
    let fragment = |place: [u8; 2]| {
        let mut frame = good.clone();
        frame[20..22].copy_from_slice(&place);
        mend(&mut frame, good.len());
        let Ok((_, Network::Ip(ip))) = parse(&frame, frame.len()) else { panic!("dropped") };
        assert_eq!(ip.transport(&frame).is_err(), ip.fragment.is_some());
        ip.fragment
    };
    assert_eq!(fragment([0x40, 0]), None);
    assert_eq!(fragment([0x20, 0]), Some(FragmentHeader { id: 0, offset: 0, more: true }));
    assert_eq!(fragment([0x1f, 0xff]), Some(FragmentHeader { id: 0, offset: 0xfff8, more: false }));
}

fn v6(next: u8, content: &[u8]) -> Result<Ip, ParseError> {
    let (IpAddr::V6(us), IpAddr::V6(peer)) = addrs(false) else { panic!("not IPv6") };
    let mut packet = vec![0x60, 0, 0, 0, 0, content.len() as u8, next, 9];
    packet.extend(peer.octets().iter().chain(&us.octets()).chain(content));
    Ip::parse(&packet[..packet.len().min(MAX_HEAD)], packet.len())
}

/// Extension headers of IPv6 are skipped within bounds, and those that a host must not follow drop
/// the packet.
#[test]
fn extension_headers_are_bounded() {
    let options = [60, 0, 1, 4, 0, 0, 0, 0];
    let last = [17, 0, 1, 4, 0, 0, 0, 0];
    assert_eq!(v6(17, &[0; 8]).unwrap().content, ByteRange { at: 40, len: 8 });
    let ip = v6(0, &[&options[..], &last, &[0; 8]].concat()).unwrap();
    assert_eq!((ip.protocol, ip.content), (17, ByteRange { at: 56, len: 8 }));
    let chain = |n: usize| v6(60, &[options.repeat(n - 1), last.to_vec(), vec![0; 8]].concat());
    assert!(chain(MAX_EXTENSIONS).is_ok());
    assert_eq!(chain(MAX_EXTENSIONS + 1), Err(ParseError::Malformed));
    assert_eq!(
        v6(60, &[0, 0, 1, 4, 0, 0, 0, 0, 17, 0, 1, 4, 0, 0, 0, 0]),
        Err(ParseError::Malformed),
        "hop by hop is first"
    );
    assert_eq!(v6(60, &[17, 1, 1, 4, 0, 0, 0, 0]), Err(ParseError::Malformed), "longer than the packet");
    assert_eq!(v6(60, &[17, 255, 1, 4, 0, 0, 0, 0]), Err(ParseError::Malformed), "longer than the packet");
    assert_eq!(v6(60, &[17, 0, 0x05, 2, 0, 0, 0, 0]).map(|ip| ip.protocol), Ok(17), "router alert");
    for refused in [[17, 0, 0x40, 4, 0, 0, 0, 0], [17, 0, 0xc2, 4, 0, 1, 0, 0], [17, 0, 1, 5, 0, 0, 0, 0]] {
        assert_eq!(v6(60, &refused), Err(ParseError::Malformed), "{refused:?}");
    }
    assert_eq!(v6(43, &[17, 0, 0, 1, 0, 0, 0, 0]), Err(ParseError::SourceRoute));
    assert_eq!(v6(43, &[17, 0, 0, 0, 0, 0, 0, 0]).map(|ip| ip.protocol), Ok(17));
    assert_eq!(v6(43, &[17, 5, 0, 0, 0, 0, 0, 0]), Err(ParseError::Malformed), "longer than the packet");
    // A fragment, and one that is the whole datagram (RFC 6946).
    let ip = v6(44, &[60, 0, 0x01, 0x01, 0, 0, 0, 7, 1, 2]).unwrap();
    assert_eq!((ip.protocol, ip.content), (60, ByteRange { at: 48, len: 2 }));
    assert_eq!(ip.fragment, Some(FragmentHeader { id: 7, offset: 0x100, more: true }));
    assert_eq!(v6(44, &[17, 0, 0, 0, 0, 0, 0, 7, 1, 2]).map(|ip| (ip.protocol, ip.fragment)), Ok((17, None)));
    // Behind what the CPU can read.
    let long = [&[60, 20, 1, 166][..], &[0; 164], &[17, 0, 1, 4, 0, 0, 0, 0]].concat();
    assert_eq!(v6(60, &long), Err(ParseError::Beyond { port: None }));
}

/// A UDP header that is cut off by the end of what can be read, and one that is cut off by the end
/// of the frame.
#[test]
fn headers_beyond_what_can_be_read_are_told_from_short_ones() {
    let frame = emitted(true, None, &flow(true, &mut Rng::with_seed(3)), b"payload", false).0;
    let port = u16::from_be_bytes([frame[36], frame[37]]);
    let parsed = |have: usize| {
        let (_, Network::Ip(ip)) = parse(&frame[..have], frame.len())? else { panic!("ARP") };
        ip.transport(&frame[..have]).map(|_| ())
    };
    assert_eq!(parsed(42), Ok(()));
    assert_eq!(parsed(41), Err(ParseError::Beyond { port: Some(port) }));
    assert_eq!(parsed(36), Err(ParseError::Beyond { port: None }));
    assert_eq!(parsed(20), Err(ParseError::Beyond { port: None }));
    assert_eq!(parse(&frame[..20], 20).map(|_| ()), Err(ParseError::Malformed));
}

/// Over IPv4 a datagram may have no checksum, over IPv6 it must.
#[test]
fn a_datagram_without_checksum() {
    for v4 in [true, false] {
        let at = if v4 { 40 } else { 60 };
        let mut frame = emitted(v4, None, &flow(v4, &mut Rng::with_seed(4)), &[0; 8], false).0;
        // What the checksum made up for is in the payload, so that the sum is right without it.
        frame.copy_within(at..at + 2, at + 2);
        frame[at..at + 2].fill(0);
        match read(&frame) {
            Ok((_, ip, transport)) => assert!(v4 && ip.covered(&transport).is_none()),
            Err(drop) => assert!(!v4 && drop == ParseError::Malformed),
        }
    }
}

/// Each kind of error comes back as it was written, with the flow and the sequence number of the
/// packet that it quotes; and one that quotes a packet of another station is dropped.
#[test]
fn errors_quote_the_packet() {
    let kinds = [
        IcmpKind::NetworkUnreachable,
        IcmpKind::HostUnreachable,
        IcmpKind::ProtocolUnreachable,
        IcmpKind::PortUnreachable,
        IcmpKind::Prohibited,
        IcmpKind::TooBig { mtu: 1400 },
        IcmpKind::TimeExceeded,
        IcmpKind::ReassemblyTimeExceeded,
        IcmpKind::ParameterProblem,
    ];
    let mut rng = Rng::with_seed(5);
    for (v4, kind) in [true, false].into_iter().flat_map(|v4| kinds.map(|kind| (v4, kind))) {
        let sent = flow(v4, &mut rng);
        let header = Header { seq: Seq(rng.u32(..)), ..Header::default() };
        let packet = &emitted(v4, Some(&header), &sent, b"payload", false).0[14..];
        let mut out = [0; 128];
        let router: IpAddr =
            if v4 { [10, 0, 0, 1].into() } else { Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 0, 1).into() };
        let mut error = |to: IpAddr| {
            let emitted = emit_icmp_error(&mut out, &Outer::new(Some(LINK)), router, to, kind, packet).unwrap();
            assert!(emitted.len <= 128);
            (read(&out[..emitted.len]).map(|(_, _, transport)| transport), out[..emitted.len].to_vec())
        };
        let quoted = Quoted { flow: sent, transport: QuotedTransport::Tcp { seq: header.seq } };
        let (read, frame) = error(sent.local.ip());
        assert_eq!(read, Ok(Transport::Icmp(Icmp::Error(IcmpError { kind, quoted }))));
        let other = SlicedPacket::from_ethernet(&frame).unwrap();
        assert!(matches!(other.transport, Some(TransportSlice::Icmpv4(_) | TransportSlice::Icmpv6(_))));
        assert_eq!(error(sent.remote.ip()).0, Err(ParseError::Martian));
    }
    // A router that does not report the MTU.
    assert_eq!(IcmpKind::from_v4(3, 4, 0, 1500), Some(IcmpKind::TooBig { mtu: 1492 }));
    assert_eq!(IcmpKind::from_v4(3, 4, 0, 60), Some(IcmpKind::TooBig { mtu: 68 }));
}

/// RFC 6633: whatever a source quench quotes, it is no error that a connection hears of.
#[test]
fn source_quench_is_no_known_error() {
    let mut rng = Rng::with_seed(5);
    let sent = flow(true, &mut rng);
    let packet = &emitted(true, Some(&Header::default()), &sent, b"payload", false).0[14..];
    let mut out = [0; 128];
    let router = [10, 0, 0, 1].into();
    let outer = Outer::new(Some(LINK));
    let len =
        emit_icmp_error(&mut out, &outer, router, sent.local.ip(), IcmpKind::PortUnreachable, packet).unwrap().len;
    assert!(matches!(read(&out[..len]), Ok((_, _, Transport::Icmp(Icmp::Error(_))))));
    // Type 4 and code 0 in place of 3 and 3, and the checksum that follows.
    let at = 14 + 20;
    let sum = u16::from_be_bytes([out[at + 2], out[at + 3]]);
    (out[at], out[at + 1]) = (4, 0);
    let sum = !sum_of(!sum, 0x0400, 0x0303);
    out[at + 2..at + 4].copy_from_slice(&sum.to_be_bytes());
    assert!(matches!(read(&out[..len]), Ok((_, _, Transport::Icmp(Icmp::Unknown)))));
}

/// A sum in one's complement in which `old` is replaced by `new`.
fn sum_of(sum: u16, new: u16, old: u16) -> u16 {
    let all = u32::from(sum) + u32::from(new) + u32::from(!old);
    let all = (all & 0xffff) + (all >> 16);
    (all + (all >> 16)) as u16
}

/// The payload and the identifier of an echo come back.
#[test]
fn echo() {
    for v4 in [true, false] {
        let (us, peer) = addrs(v4);
        let payload = b"as it was";
        let mut out = [0; 128];
        let body = Body { len: payload.len(), sum: Some(sum(payload)), segment_size: None };
        let emitted = emit_echo_reply(&mut out, &Outer::new(None), us, peer, [1, 2, 3, 4], body).unwrap();
        out[emitted.len..emitted.len + payload.len()].copy_from_slice(payload);
        let packet = &out[..emitted.len + payload.len()];
        let ip = Ip::parse(packet, packet.len()).unwrap();
        let transport = ip.transport(packet).unwrap();
        assert_eq!(transport, Transport::Icmp(Icmp::Unknown));
        assert!(ip.covered(&transport).unwrap().holds(sum(&packet[ip.content.at..])));
        let other = SlicedPacket::from_ip(packet).unwrap().transport.unwrap();
        match other {
            TransportSlice::Icmpv4(icmp) => {
                assert!(v4 && icmp.payload() == payload && icmp.bytes5to8() == [1, 2, 3, 4])
            }
            TransportSlice::Icmpv6(icmp) => {
                assert!(!v4 && icmp.payload() == payload && icmp.bytes5to8() == [1, 2, 3, 4])
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Requests and replies, and neighbour discovery; and messages that a neighbour did not send.
#[test]
fn neighbours() {
    let mut out = [0; 128];
    let arp = Arp {
        request: true,
        mac: PEER,
        sender: Ipv4Addr::new(10, 0, 0, 2),
        target: Ipv4Addr::new(10, 0, 0, 1),
        target_mac: Mac::default(),
    };
    for arp in [arp, Arp { request: false, target_mac: US, ..arp }] {
        let len = arp.emit(Mac::BROADCAST, &mut out).unwrap();
        let link = EthernetHeader { destination: Mac::BROADCAST, source: PEER };
        assert_eq!(parse(&out[..len], len), Ok((link, Network::Arp(arp))));
        let frame = out;
        let other = SlicedPacket::from_ethernet(&frame[..len]).unwrap();
        let Some(NetSlice::Arp(other)) = other.net else { panic!("{other:?}") };
        assert_eq!((other.sender_hw_addr(), other.target_protocol_addr()), (&PEER.0[..], &arp.target.octets()[..]));
        out[22] |= 1;
        assert_eq!(parse(&out[..len], len), Err(ParseError::Martian), "from a group");
    }
    assert_eq!(arp.emit(Mac::BROADCAST, &mut out[..41]), None);

    let (IpAddr::V6(us), IpAddr::V6(peer)) = addrs(false) else { panic!("not IPv6") };
    let group = solicited_node(us);
    assert_eq!(group.to_string(), "ff02::1:ff00:1");
    let link = EthernetHeader { destination: Mac::of_multicast(group.into()), source: PEER };
    assert_eq!(link.destination, Mac([0x33, 0x33, 0xff, 0, 0, 1]));
    let asks = Solicitation { target: us, mac: Some(PEER) };
    let probes = Solicitation { mac: None, ..asks };
    let len = asks.emit(&mut out, link, peer, group).unwrap().len;
    assert_eq!(read(&out[..len]).map(|(_, _, t)| t), Ok(Transport::Icmp(Icmp::Solicitation(asks))));
    let with = |edit: &dyn Fn(&mut [u8])| {
        let mut frame = out[..len].to_vec();
        edit(&mut frame);
        let (_, Network::Ip(ip)) = parse(&frame, len)? else { panic!("ARP") };
        ip.transport(&frame)
    };
    assert_eq!(with(&|frame| frame[21] = 254), Err(ParseError::Malformed), "hop limit");
    assert_eq!(with(&|frame| frame[55] = 1), Err(ParseError::Malformed), "code");
    assert_eq!(with(&|frame| frame[62] = 0xff), Err(ParseError::Malformed), "target is a group");
    assert_eq!(with(&|frame| frame[79] = 0), Err(ParseError::Malformed), "option of no bytes");
    assert_eq!(with(&|frame| frame[79] = 2), Err(ParseError::Malformed), "option behind the end");
    assert_eq!(with(&|frame| frame[22..38].fill(0)), Err(ParseError::Malformed), "a probe with an address");
    assert_eq!(
        with(&|frame| frame[80] = 3),
        Ok(Transport::Icmp(Icmp::Solicitation(probes))),
        "an address that a station cannot have"
    );
    let len = probes.emit(&mut out, link, Ipv6Addr::UNSPECIFIED, group).unwrap().len;
    assert_eq!(read(&out[..len]).map(|(_, _, t)| t), Ok(Transport::Icmp(Icmp::Solicitation(probes))));
    let len = probes.emit(&mut out, link, Ipv6Addr::UNSPECIFIED, us).unwrap().len;
    assert_eq!(read(&out[..len]).map(|(_, _, t)| t), Err(ParseError::Malformed), "a probe not to the group");
    let advertisement =
        Advertisement { target: peer, mac: Some(PEER), router: false, solicited: true, overrides: true };
    let len = advertisement.emit(&mut out, LINK, peer, us).unwrap().len;
    assert_eq!(read(&out[..len]).map(|(_, _, t)| t), Ok(Transport::Icmp(Icmp::Advertisement(advertisement))));
    let len = advertisement.emit(&mut out, LINK, peer, all_nodes()).unwrap().len;
    assert_eq!(read(&out[..len]).map(|(_, _, t)| t), Err(ParseError::Malformed), "an answer to all");
}

/// Offload information of a large segment, and headers for which there is no room.
#[test]
fn large_segments_and_short_slices() {
    let mut rng = Rng::with_seed(6);
    for v4 in [true, false] {
        let flow = flow(v4, &mut rng);
        let header = Header { flags: Flags::ACK.with(Flags::CWR), ..Header::default() };
        let outer = Outer::new(Some(LINK));
        let body = Body { len: 60_000, sum: None, segment_size: Some(1448) };
        let mut out = [0; MAX_HEADERS];
        let emitted = emit_tcp(&mut out, &outer, &flow, &header, body).unwrap();
        let gso = emitted.meta.gso.unwrap();
        assert_eq!(gso.kind, if v4 { GsoKind::TcpV4 } else { GsoKind::TcpV6 });
        assert_eq!((gso.size, usize::from(gso.headers), gso.ecn), (1448, emitted.len, true));
        for len in 0..emitted.len {
            assert_eq!(emit_tcp(&mut out[..len], &outer, &flow, &header, body), Err(EmitError::NoRoom));
            let _ = emit_udp(&mut out[..len], &outer, &flow, body);
            let _ = emit_icmp_error(
                &mut out[..len],
                &outer,
                flow.local.ip(),
                flow.remote.ip(),
                IcmpKind::TimeExceeded,
                &[1; 60],
            );
        }
        let body = Body { len: 65_536, ..body };
        assert_eq!(emit_tcp(&mut out, &outer, &flow, &header, body), Err(EmitError::TooLong));
        let mixed = Flow { remote: self::flow(!v4, &mut rng).remote, ..flow };
        assert_eq!(emit_tcp(&mut out, &outer, &mixed, &header, Body::default()), Err(EmitError::Family));
    }
}
