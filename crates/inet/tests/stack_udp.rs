//! Datagrams that are longer than the path's MTU, and several datagrams in one frame.
#![allow(clippy::unwrap_used, missing_docs)]

mod stack_common;

use netmem_inet::{Fragment, SocketError};
use netmem_packet::{Checksum, Gso, GsoKind, Meta};
use stack_common::{Frame, Link, addr};
use std::net::SocketAddr;

fn receive(socket: &mut netmem_inet::UdpSocket<netmem_pool::Private>) -> Result<(Vec<u8>, SocketAddr), SocketError> {
    let mut places: Vec<Fragment<_>> = (0..64).map(|_| Fragment::default()).collect();
    let received = socket.recv_from(&mut places)?;
    Ok((places[..received.fragments].iter().flat_map(|fragment| fragment.to_vec()).collect(), received.from))
}

/// A long datagram is sent in fragments that fit the path, over IPv4 and IPv6, and is received complete. A datagram
/// that is too long for a packet is refused.
#[test]
fn a_long_datagram_leaves_in_fragments() {
    for (near, far, most) in [("10.0.0.1:7", "10.0.0.2:9", 65507), ("[fd00::1]:7", "[fd00::2]:9", 65527)] {
        let mut link = Link::new(true);
        let mut to = link.far.sockets().bind(addr(far)).unwrap();
        let mut from = link.near.sockets().bind(addr(near)).unwrap();
        let payload: Vec<u8> = (0..most as u32).map(|n| (n.wrapping_mul(0x9E37_79B1) >> 24) as u8).collect();
        // The first datagram is sent before the neighbour is known. Eight packets can wait for a neighbour.
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

/// If a frame contains several datagrams, because the sender's kernel has not cut it, they are received as separate
/// datagrams.
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
