//! Several stacks of a host, each with a queue of its own: a connection lives on one of them, and
//! what arrives elsewhere finds it.

use crate::common::addr;
use crate::common::peer::{ACK, PSH, SYN, Seg, Wire, frame_of};
use netmem_inet::tcp::Config;
use netmem_inet::{ListenOptions, SocketError, StackOptions, TcpListener};
use netmem_pool::Private;
use std::time::Duration;

const PEER: [u8; 4] = [10, 0, 0, 1];

fn seg(flags: u8, seq: u32, ack: u32, payload: &[u8]) -> Seg {
    Seg { peer: 5000, port: 80, flags, seq, ack, window: u16::MAX, payload: payload.to_vec() }
}

/// Two stacks that listen on the same port.
fn two(options: ListenOptions) -> (Wire, [TcpListener<Private>; 2]) {
    let mut wire = Wire::new(StackOptions::default());
    wire.add_queue(StackOptions::default());
    let listen = |stack: &crate::common::peer::Server| stack.sockets().listen(addr("0.0.0.0:80"), options).unwrap();
    let listeners = [listen(&wire.stack), listen(&wire.others[0].stack)];
    (wire, listeners)
}

/// A connection lives where its SYN arrives, if that stack listens. No frame goes through a
/// mailbox.
#[test]
fn a_connection_lives_where_its_syn_arrives() {
    let (mut wire, mut listeners) = two(ListenOptions::default());
    let mut streams = Vec::new();
    for peer in 5000..5050 {
        let queue = usize::from(peer % 2);
        let put = |wire: &mut Wire, seg: Seg| {
            let frame = frame_of(PEER, &Seg { peer, ..seg });
            if queue == 0 {
                wire.frame(frame)
            } else {
                wire.others[0].frame(frame)
            }
            wire.poll()
        };
        let answer = put(&mut wire, seg(SYN, 1000, 0, b"")).pop().unwrap();
        put(&mut wire, seg(ACK | PSH, 1001, answer.seq + 1, b"hello"));
        assert_eq!(listeners[1 - queue].accept().unwrap_err(), SocketError::WouldBlock);
        let stream = listeners[queue].accept().unwrap();
        assert_eq!(stream.readable(), 5);
        streams.push(stream);
    }
    assert_eq!((wire.stack.stats().handed_over, wire.others[0].stack.stats().handed_over), (0, 0));
}

/// The kernel or a NIC moves a flow to another queue during the handshake. The stack there knows
/// nothing of the cookie.
#[test]
fn a_cookie_can_return_by_another_queue() {
    let (mut wire, mut listeners) = two(ListenOptions { half_open: 0, ..ListenOptions::default() });
    let answer = wire.exchange(seg(SYN, 1000, 0, b"")).pop().unwrap();
    assert!(answer.has(SYN | ACK));
    wire.others[0].frame(frame_of(PEER, &seg(ACK | PSH, 1001, answer.seq + 1, b"hello")));
    wire.poll();
    let streams = listeners.each_mut().map(TcpListener::accept);
    assert!(streams[0].is_err() && streams[1].as_ref().is_ok_and(|stream| stream.readable() == 5));
}

/// A router's error arrives by a queue of its own choice.
#[test]
fn an_error_finds_its_connection_on_another_queue() {
    let (mut wire, mut listeners) = two(ListenOptions::default());
    wire.open(5000, 80, 1000);
    let mut stream = listeners[0].accept().unwrap();
    let size = stream.info().unwrap().send.segment_size;
    stream.write(&[0; 1000]).unwrap();
    let sent = wire.poll().pop().unwrap();
    let too_big = |seq: u32| {
        let mut quoted = Vec::new();
        let packet = etherparse::PacketBuilder::ipv4([10, 0, 0, 2], PEER, 64).tcp(80, 5000, seq, 0);
        packet.write(&mut quoted, &[]).unwrap();
        let kind = etherparse::Icmpv4Type::DestinationUnreachable(
            etherparse::icmpv4::DestUnreachableHeader::FragmentationNeeded { next_hop_mtu: 600 },
        );
        let mut bytes = Vec::new();
        let packet = etherparse::PacketBuilder::ethernet2([2, 1, 10, 0, 0, 9], [2, 0, 0, 0, 0, 2]);
        packet.ipv4([10, 0, 0, 9], [10, 0, 0, 2], 64).icmpv4(kind).write(&mut bytes, &quoted[..28]).unwrap();
        bytes
    };
    wire.others[0].frame(too_big(sent.seq + 1_000_000));
    wire.poll();
    assert_eq!(stream.info().unwrap().send.segment_size, size, "the number is not in flight");
    wire.others[0].frame(too_big(sent.seq));
    wire.poll();
    assert_eq!(stream.info().unwrap().send.segment_size, 560);
    assert_eq!(wire.others[0].stack.stats().handed_over, 2);
}

/// The neighbour's answer arrives by the queue of another stack. The stack whose connection waits
/// for it does not wait for its timer.
#[test]
fn a_neighbour_is_resolved_by_any_queue() {
    let mut wire = Wire::new(StackOptions::default());
    wire.add_queue(StackOptions::default());
    wire.answers_arp = false;
    let sockets = wire.others[0].stack.sockets();
    let _stream = sockets.connect(addr("10.0.0.7:80"), &Config::default()).unwrap();
    assert_eq!((wire.poll(), wire.questions), (vec![], 1));
    let answer = [
        &[2, 0, 0, 0, 0, 2][..],
        &[2, 1, 10, 0, 0, 7],
        &[8, 6, 0, 1, 8, 0, 6, 4, 0, 2],
        &[2, 1, 10, 0, 0, 7, 10, 0, 0, 7],
        &[2, 0, 0, 0, 0, 2, 10, 0, 0, 2],
    ];
    wire.frame(answer.concat());
    let sent = wire.poll();
    assert!(matches!(&sent[..], [syn] if syn.has(SYN)), "{sent:?}");
    wire.pass(Duration::from_millis(1));
}

/// Where the device's hash is known, a connection is opened from a port whose answers arrive by its
/// own queue.
#[test]
fn a_connection_is_opened_from_a_port_of_its_own_queue() {
    let mut wire = Wire::new(StackOptions::default());
    wire.add_queue(StackOptions::default());
    assert!(wire.host.set_spread(|remote, local| usize::from(remote.port() ^ local.port()) % 2));
    assert!(!wire.host.set_spread(|_, _| 0), "it was declared");
    let queues = [wire.stack.sockets(), wire.others[0].stack.sockets()];
    for (queue, sockets) in queues.into_iter().enumerate() {
        for _ in 0..50 {
            let stream = sockets.connect(addr("10.0.0.1:81"), &Config::default()).unwrap();
            assert_eq!(usize::from(stream.local_addr().port() ^ 81) % 2, queue);
        }
    }
}
