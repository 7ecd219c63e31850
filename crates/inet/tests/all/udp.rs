//! Datagrams that are longer than the path's MTU, and several datagrams in one frame.

use crate::common::{Frame, Link, addr, connected};
use netmem_inet::{Fragment, SocketError};
use netmem_packet::{Checksum, Gso, GsoKind, Meta};
use std::net::SocketAddr;
use std::time::Duration;

fn receive(socket: &mut netmem_inet::UdpSocket<netmem_pool::Private>) -> Result<(Vec<u8>, SocketAddr), SocketError> {
    let mut places: Vec<Fragment<_>> = (0..64).map(|_| Fragment::default()).collect();
    let received = socket.recv_from(&mut places)?;
    Ok((places[..received.fragments].iter().flat_map(|fragment| fragment.to_vec()).collect(), received.from))
}

/// A long datagram is sent in fragments that fit the path, over IPv4 and IPv6, and is received
/// complete. A datagram that is too long for a packet is refused.
#[test]
fn a_long_datagram_leaves_in_fragments() {
    for (near, far, most) in [("10.0.0.1:7", "10.0.0.2:9", 65507), ("[fd00::1]:7", "[fd00::2]:9", 65527)] {
        let mut link = Link::new(true);
        let mut to = link.far.sockets().bind(addr(far)).unwrap();
        let mut from = link.near.sockets().bind(addr(near)).unwrap();
        let payload: Vec<u8> = (0..most as u32).map(|n| (n.wrapping_mul(0x9E37_79B1) >> 24) as u8).collect();
        // The first datagram is sent before the neighbour is known. Eight packets can wait for a
        // neighbour.
        from.send_to(b"first", addr(far)).unwrap();
        link.settle();
        assert_eq!(receive(&mut to), Ok((b"first".to_vec(), addr(near))));
        for len in [1472, 1473, 1480, 2952, 2953, 20_000, most] {
            let before = link.near.stats().sent;
            from.send_to(&payload[..len], addr(far)).unwrap();
            link.settle();
            let (got, source) = receive(&mut to).unwrap();
            assert!(got == payload[..len] && source == addr(near), "{len}: {} came", got.len());
            let sent = link.near.stats().sent - before;
            let whole = if most == 65507 { 1472 } else { 1452 };
            assert_eq!(sent == 1, len <= whole, "{len} in {sent}");
        }
        let too_long = vec![0; most + 1];
        assert_eq!(from.send_to(&too_long, addr(far)), Err(SocketError::TooLong { len: most + 1, most }));
        // A fragment of the first datagram is lost. The second datagram is not mixed with it.
        let mut frames = 0;
        link.near.queues().1.loses = Box::new(move |_| {
            frames += 1;
            frames == 2
        });
        from.send_to(&payload[..4000], addr(far)).unwrap();
        from.send_to(&payload[4000..8000], addr(far)).unwrap();
        link.settle();
        assert!(receive(&mut to).is_ok_and(|(got, _)| got == payload[4000..8000]));
        assert_eq!((receive(&mut to), link.far.stats().wrong_checksum), (Err(SocketError::WouldBlock), 0));
    }
}

/// If a frame contains several datagrams, because the sender's kernel has not cut it, they are
/// received as separate datagrams.
#[test]
fn datagrams_that_come_in_one_frame_are_cut() {
    let mut link = Link::new(true);
    let mut to = link.far.sockets().bind(addr("10.0.0.2:9")).unwrap();
    let payload: Vec<u8> = (0..2500_u32).map(|n| n as u8).collect();
    let mut bytes = Vec::new();
    let packet = etherparse::PacketBuilder::ethernet2([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]);
    packet.ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64).udp(7, 9).write(&mut bytes, &payload).unwrap();
    let gso = Gso { kind: GsoKind::UdpSegment, size: 1000, headers: 42, ecn: false };
    let meta = Meta { checksum: Checksum::Partial { start: 34, offset: 6 }, gso: Some(gso) };
    link.far.queues().0.cable.borrow_mut().push_back(Frame { bytes, meta });
    link.settle();
    for part in payload.chunks(1000) {
        assert_eq!(receive(&mut to).map(|(bytes, _)| bytes), Ok(part.to_vec()));
    }
    assert_eq!(receive(&mut to), Err(SocketError::WouldBlock));
}

/// A connected socket receives datagrams of its peer alone. Those of other stations find no socket.
#[test]
fn a_connected_socket_receives_from_its_peer() {
    let mut link = Link::new(false);
    let mut socket = link.far.sockets().bind(addr("10.0.0.2:9")).unwrap();
    let mut peer = link.near.sockets().bind(addr("10.0.0.1:7")).unwrap();
    let mut other = link.near.sockets().bind(addr("10.0.0.1:8")).unwrap();
    socket.connect(Some(addr("10.0.0.1:7"))).unwrap();
    assert_eq!(socket.peer_addr(), Some(addr("10.0.0.1:7")));
    other.connect(Some(addr("10.0.0.2:9"))).unwrap();
    other.send(b"no").unwrap();
    peer.send_to(b"yes", addr("10.0.0.2:9")).unwrap();
    link.settle();
    assert_eq!(receive(&mut socket), Ok((b"yes".to_vec(), addr("10.0.0.1:7"))));
    assert_eq!((receive(&mut socket), receive(&mut other)), (Err(SocketError::WouldBlock), Err(SocketError::Refused)));
    socket.connect(None).unwrap();
    other.send(b"now").unwrap();
    link.settle();
    assert_eq!(receive(&mut socket).map(|(bytes, _)| bytes), Ok(b"now".to_vec()));
    assert_eq!(socket.connect(Some(addr("[fd00::1]:7"))), Err(SocketError::NoRoute));
}

/// An error "too big" about a datagram: the address and the length of the datagram must be right,
/// and it must have been sent lately. Segments of connections to the same station keep their size.
#[test]
fn an_error_about_a_datagram_changes_no_connection() {
    let mut link = Link::new(false);
    let (client, _server) = connected(&mut link);
    let mut socket = link.near.sockets().bind(addr("10.0.0.1:7")).unwrap();
    let size = client.info().unwrap().send.segment_size;
    let too_big = |link: &mut Link, port: u16, payload: usize| {
        let mut datagram = Vec::new();
        let packet = etherparse::PacketBuilder::ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64).udp(7, port);
        packet.write(&mut datagram, &vec![0; payload]).unwrap();
        let kind = etherparse::Icmpv4Type::DestinationUnreachable(
            etherparse::icmpv4::DestUnreachableHeader::FragmentationNeeded { next_hop_mtu: 600 },
        );
        let mut bytes = Vec::new();
        let packet = etherparse::PacketBuilder::ethernet2([2, 0, 0, 0, 0, 9], [2, 0, 0, 0, 0, 1]);
        packet.ipv4([10, 0, 0, 9], [10, 0, 0, 1], 64).icmpv4(kind).write(&mut bytes, &datagram[..28]).unwrap();
        link.near.queues().0.cable.borrow_mut().push_back(Frame { bytes, meta: Meta::default() });
        link.settle();
    };
    let mut frames = |link: &mut Link| {
        let before = link.near.stats().sent;
        socket.send_to(&[0; 1400], addr("10.0.0.2:9")).unwrap();
        link.settle();
        link.near.stats().sent - before
    };
    too_big(&mut link, 9, 1400);
    assert_eq!(frames(&mut link), 1, "no such datagram was sent");
    too_big(&mut link, 10, 1400);
    too_big(&mut link, 9, 1399);
    assert_eq!(frames(&mut link), 1, "of another port, of another length");
    link.pass(Duration::from_secs(4));
    too_big(&mut link, 9, 1400);
    assert_eq!(frames(&mut link), 1, "too late");
    too_big(&mut link, 9, 1400);
    assert_eq!(frames(&mut link), 3);
    assert_eq!(client.info().unwrap().send.segment_size, size);
}
