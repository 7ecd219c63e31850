//! Several stacks of a host, each with a queue of its own: a connection lives on one of them, and
//! what arrives elsewhere finds it.

use crate::common::addr;
use crate::common::peer::{ACK, PSH, RST, SYN, Seg, Wire, frame_of};
use netmem_inet::tcp::Config;
use netmem_inet::{Fragment, ListenOptions, SocketError, StackOptions, TcpListener, UdpSocket};
use netmem_packet::{Armed, Wait};
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

/// A datagram of the peer's port 5000 to a port of the host.
fn datagram(port: u16, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let packet = etherparse::PacketBuilder::ethernet2([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]);
    packet.ipv4(PEER, [10, 0, 0, 2], 64).udp(5000, port).write(&mut bytes, payload).unwrap();
    bytes
}

/// The numbers in the datagrams that a socket has received.
fn numbers(socket: &mut UdpSocket<Private>) -> Vec<u16> {
    let mut places: [Fragment<Private>; 1] = Default::default();
    let receive = || socket.recv_from(&mut places).ok().map(|_| u16::from_be_bytes([places[0][0], places[0][1]]));
    std::iter::from_fn(receive).collect()
}

/// Frames for three stacks arrive by one queue in one poll, in runs and in turns, and a segment
/// with the addresses of a datagram before it: each goes where it belongs, in order, and no page is
/// left.
#[test]
fn frames_for_several_stacks_in_one_poll() {
    let mut wire = Wire::new(StackOptions::default());
    wire.add_queue(StackOptions::default());
    wire.add_queue(StackOptions::default());
    let all = [wire.stack.sockets(), wire.others[0].stack.sockets(), wire.others[1].stack.sockets()];
    let mut sockets: Vec<_> =
        all.iter().zip(50..).map(|(sockets, port)| sockets.bind(addr(&format!("0.0.0.0:{port}"))).unwrap()).collect();
    let mut sent = [vec![], vec![], vec![]];
    for n in 0..60_u16 {
        let to = [0, 1, 1, 2, 1, 2, 2, 0, 0, 2][usize::from(n) % 10];
        wire.frame(datagram(50 + to, &n.to_be_bytes()));
        sent[usize::from(to)].push(n);
        if n == 2 {
            wire.put(&Seg { peer: 5000, port: 51, ..seg(ACK, 1, 1, b"") });
        }
    }
    let answers = wire.poll();
    assert!(answers.len() == 1 && answers[0].has(RST), "{answers:?}");
    assert_eq!(sockets.iter_mut().map(numbers).collect::<Vec<_>>(), sent);
    let handed_over = sent[1].len() + sent[2].len();
    assert_eq!((wire.stack.stats().handed_over, wire.stack.pages()), (handed_over as u64, 0));
    assert_eq!(wire.stack.queues().0.pool.stats().inflight(), 0);
}

/// More frames than the mailbox has room for, and than the other stack processes in a poll: the
/// rest of them is dropped, and the others arrive in order. Then the same with a budget for some of
/// them.
#[test]
fn more_frames_than_another_stack_accepts() {
    let options = |receive, pages| StackOptions { receive, pages, ..StackOptions::default() };
    let mut wire = Wire::new(options(256, 4096));
    wire.add_queue(options(100, 4096));
    let mut socket = wire.others[0].stack.sockets().bind(addr("0.0.0.0:53")).unwrap();
    for n in 0..600_u16 {
        wire.frame(datagram(53, &n.to_be_bytes()));
    }
    let now = wire.now;
    for _ in 0..3 {
        wire.stack.poll(now);
    }
    let stats = wire.stack.stats();
    assert_eq!((stats.handed_over, stats.mailbox_full, wire.stack.pages()), (512, 88, 512));
    let other = &mut wire.others[0].stack;
    for polls in 1..=2 {
        assert!(other.poll(now) > 0);
        assert_eq!(numbers(&mut socket), (polls * 100 - 100..polls * 100).collect::<Vec<_>>());
        assert_eq!(other.arm().unwrap(), Armed::Work, "frames wait");
    }
    // There is room again, and what comes now comes last.
    wire.frame(datagram(53, &1000_u16.to_be_bytes()));
    wire.poll();
    assert_eq!(numbers(&mut socket), (200..512).chain([1000]).collect::<Vec<_>>());
    assert_eq!((wire.stack.pages(), wire.stack.queues().0.pool.stats().inflight()), (0, 0));
    let mut wire = Wire::new(options(256, 8));
    wire.add_queue(options(256, 4096));
    let mut socket = wire.others[0].stack.sockets().bind(addr("0.0.0.0:53")).unwrap();
    (0..20_u16).for_each(|n| wire.frame(datagram(53, &n.to_be_bytes())));
    wire.stack.poll(now);
    let stats = wire.stack.stats();
    assert_eq!((stats.handed_over, stats.over_budget, wire.stack.pages()), (8, 12, 8));
    wire.poll();
    assert_eq!((numbers(&mut socket), wire.stack.pages()), ((0..8).collect(), 0));
}
