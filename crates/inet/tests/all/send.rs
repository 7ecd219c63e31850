//! Sending without copies, and the number of pieces.

use crate::common::{Cable, Link, addr, connected, host, pair, stack};
use bytes::Bytes;
use netmem_inet::tcp::{Config, Ecn, IpFields};
use netmem_inet::{ListenOptions, SocketError, StackOptions, TcpStream};
use netmem_pool::Private;
use std::cell::{Cell, RefCell};
use std::io::IoSlice;
use std::rc::Rc;

fn read(stream: &mut TcpStream<Private>, link: &mut Link, n: usize) -> Vec<u8> {
    let mut bytes = vec![0; n];
    let mut at = 0;
    while at < n {
        link.settle();
        match stream.read(&mut bytes[at..]) {
            Ok(0) => panic!("it ends after {at} of {n}"),
            Ok(read) => at += read,
            Err(error) => assert_eq!(error, SocketError::WouldBlock),
        }
        link.step();
    }
    bytes
}

/// Proves INET-3: `Bytes` that were made of a fragment are sent from its page, also in a write of
/// several slices. They are found by their address. Other bytes are copied, and counted.
#[test]
fn bytes_of_fragments_are_written_without_a_copy() {
    let mut link = Link::new(true);
    let (mut client, mut server) = connected(&mut link);
    let mut page = link.near_pool.alloc().unwrap();
    page.as_mut_slice().iter_mut().enumerate().for_each(|(n, byte)| *byte = n as u8);
    let body = Bytes::from(page.freeze_range(100..4000));
    let expected = body.to_vec();
    assert_eq!(client.write(&body), Ok(3900));
    assert_eq!(link.near.stats().copied_sent, 0);
    assert!(read(&mut server, &mut link, 3900) == expected);
    // The write has a separate head, a slice of the body, a short slice, and bytes that are in no
    // page.
    let vec = vec![7; 1000];
    let slices = [&b"head"[..], &body[500..1500], &body[..511], &vec].map(IoSlice::new);
    assert_eq!(client.write_vectored(&slices), Ok(4 + 1000 + 511 + 1000));
    assert_eq!(link.near.stats().copied_sent, 4 + 511 + 1000);
    let sent = [&b"head"[..], &expected[500..1500], &expected[..511], &vec].concat();
    assert!(read(&mut server, &mut link, sent.len()) == sent);
    drop((client, server, body));
    while link.step() {}
    link.near_pool.reclaim();
    assert_eq!(link.near_pool.stats().inflight, 0, "the page is returned when its bytes are acknowledged");
}

/// Many small writes to one page are joined to one piece, so that a frame has room for them.
#[test]
fn small_writes_become_one_piece() {
    let mut link = Link::new(false);
    let (mut client, mut server) = connected(&mut link);
    client.set_cork(true);
    for n in 0..200_u8 {
        assert_eq!(client.write(&[n; 10]), Ok(10));
    }
    client.set_cork(false);
    let before = link.near.stats();
    let received = read(&mut server, &mut link, 2000);
    assert!(received.chunks(10).enumerate().all(|(n, part)| part == [n as u8; 10]));
    let sent = link.near.stats().sent - before.sent;
    assert!(sent <= 3, "{sent} segments for 2000 bytes");
}

/// A device that cuts nothing and has a short ring: a unit is cut here, and the ring gets the
/// first segments of it. Each byte is sent once, in frames of the MTU, with a right checksum.
#[test]
fn a_short_ring_gets_a_part_of_a_unit() {
    // Headers are in slots of the queue, or in pages.
    for (room, slots) in [1, 2, 7].into_iter().flat_map(|room| [(room, true), (room, false)]) {
        let mut link = Link::new(false);
        let (mut client, mut server) = connected(&mut link);
        let (longest, bytes) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
        let ssthresh = client.info().unwrap().send.ssthresh;
        let tx = link.near.queues().1;
        tx.size = room;
        if !slots {
            tx.slots = None;
        }
        let (most, count) = (longest.clone(), bytes.clone());
        tx.loses = Box::new(move |frame| {
            most.set(most.get().max(frame.len()));
            // Headers of Ethernet, IPv4, and TCP with timestamps.
            count.set(count.get() + frame.len().saturating_sub(66));
            false
        });
        let sent: Vec<u8> = (0..60_000_u32).map(|n| (n % 251) as u8).collect();
        assert_eq!(client.write(&sent), Ok(sent.len()));
        client.shutdown();
        assert!(read(&mut server, &mut link, sent.len()) == sent, "a ring of {room}, slots: {slots}");
        assert_eq!(server.read(&mut [0; 1]), Ok(0), "FIN is behind the last byte");
        assert_eq!((longest.get(), link.far.stats().wrong_checksum), (1514, 0));
        assert_eq!(bytes.get(), sent.len(), "nothing is sent twice");
        assert_eq!(client.info().unwrap().send.ssthresh, ssthresh, "nothing counts as lost");
    }
}

/// A queue has slots for headers, and accepts no frame that is copied as a whole. All frames are
/// sent: small ones, those without payload, and those with a payload of a page.
#[test]
fn a_queue_with_slots_that_copies_no_frame() {
    for offloads in [false, true] {
        let mut link = Link::new(offloads);
        link.near.queues().1.copies = false;
        link.far.queues().1.copies = false;
        let (mut client, mut server) = connected(&mut link);
        for len in [1, 100, 5000] {
            assert_eq!(client.write(&vec![3; len]), Ok(len));
            assert_eq!(read(&mut server, &mut link, len), vec![3; len]);
        }
        assert_eq!((link.near.stats().refused, link.far.stats().refused), (0, 0));
    }
}

/// A queue has room for a frame, and cannot map it for its device. It is tried once, dropped and
/// counted, and its payload is sent again.
#[test]
fn a_frame_that_cannot_be_mapped_counts_as_lost() {
    // A segment whose headers are in a slot, or in a page, and a unit that is cut.
    for (slots, len) in [(true, 1000), (true, 5000), (false, 100), (false, 5000)] {
        let mut link = Link::new(false);
        let (mut client, mut server) = connected(&mut link);
        let tx = link.near.queues().1;
        if !slots {
            tx.slots = None;
        }
        tx.refusals = 1;
        assert_eq!(client.write(&vec![3; len]), Ok(len));
        assert_eq!(read(&mut server, &mut link, len), vec![3; len]);
        assert_eq!((link.near.stats().refused, link.near.queues().1.refusals), (1, 0), "slots: {slots}, {len}");
        assert!(client.info().unwrap().send.retransmitted > 0, "slots: {slots}, {len}");
    }
}

/// The payload of a frame was read for its checksum. It counts if the frame is sent.
#[test]
fn checksums_of_frames_that_are_not_sent_do_not_count() {
    // A frame that is copied, one whose headers are in a slot or a page, and a unit that is cut.
    for (slots, len) in [(true, 100), (true, 1000), (true, 5000), (false, 100), (false, 5000)] {
        let mut link = Link::new(false);
        let (mut client, mut server) = connected(&mut link);
        let tx = link.near.queues().1;
        if !slots {
            tx.slots = None;
        }
        tx.accepts = false;
        let before = link.near.stats();
        assert_eq!(client.write(&vec![3; len]), Ok(len));
        link.settle();
        let after = link.near.stats();
        let (sent, refused) = (after.sent - before.sent, after.refused - before.refused);
        assert_eq!((sent, refused), (0, len.div_ceil(1448) as u64), "slots: {slots}, {len}");
        assert_eq!(after.checksummed_sent, before.checksummed_sent, "slots: {slots}, {len}");
        link.near.queues().1.accepts = true;
        assert_eq!(read(&mut server, &mut link, len), vec![3; len]);
        assert!(link.near.stats().checksummed_sent > before.checksummed_sent, "slots: {slots}, {len}");
    }
}

/// If a device can only cut segments without congestion marks, it gets large segments of
/// connections that do not use ECN. Those of other connections are cut before.
#[test]
fn a_device_without_ecn_cuts_segments_of_connections_without_ecn() {
    for (ecn, large) in [(Ecn::Off, true), (Ecn::Request, false)] {
        let (there, back) = (Cable::default(), Cable::default());
        let (rx, mut tx) = pair(&back, &there, true);
        tx.ecn = false;
        let mut link = Link::new(true);
        link.near = stack(&host(1), (rx, tx), StackOptions::default());
        link.far = stack(&host(2), pair(&there, &back, true), StackOptions::default());
        let mut listener = link.far.sockets().listen(addr("10.0.0.2:80"), ListenOptions::default()).unwrap();
        let config = Config { ecn, ..Config::default() };
        let mut client = link.near.sockets().connect(addr("10.0.0.2:80"), &config).unwrap();
        link.settle();
        let mut server = listener.accept().unwrap();
        let (mut at, mut read, sent) = (0, 0, vec![9; 400_000]);
        let mut bytes = vec![0; sent.len()];
        while read < sent.len() {
            at += client.write(&sent[at..]).unwrap_or(0);
            link.settle();
            read += server.read(&mut bytes[read..]).unwrap_or(0);
            assert!(link.step() || read == sent.len());
        }
        let stats = link.near.stats();
        assert!(bytes == sent && stats.refused == 0, "{stats:?}");
        assert_eq!(stats.sent < 150, large, "{ecn:?}: {} frames", stats.sent);
    }
}

/// Each segment of a connection has the code point and the hop limit that its user chose, from the
/// first SYN on, also those of a server that answers with a cookie. A change holds for the segments
/// after it. ECN's bits stay.
#[test]
fn the_user_chooses_fields_of_the_ip_headers() {
    // Class and hop limit of each frame of TCP, as they are on the wire.
    type Seen = Rc<RefCell<Vec<(u8, u8)>>>;
    fn watch(seen: &Seen) -> crate::common::Loses {
        let seen = seen.clone();
        Box::new(move |frame| {
            match frame[12..14] {
                [0x08, 0x00] if frame[23] == 6 => seen.borrow_mut().push((frame[15], frame[22])),
                [0x86, 0xdd] if frame[20] == 6 => {
                    seen.borrow_mut().push((frame[14] << 4 | frame[15] >> 4, frame[21]));
                }
                _ => {}
            }
            false
        })
    }
    for (to, backlog) in [("10.0.0.2:80", 16), ("[fd00::2]:80", 16), ("10.0.0.2:80", 0), ("[fd00::2]:80", 0)] {
        let (there, back) = (Cable::default(), Cable::default());
        let (near, far) = (Seen::default(), Seen::default());
        let (mut ours, mut theirs) = (pair(&back, &there, true), pair(&there, &back, true));
        (ours.1.loses, theirs.1.loses) = (watch(&near), watch(&far));
        let mut link = Link::new(true);
        link.near = stack(&host(1), ours, StackOptions::default());
        link.far = stack(&host(2), theirs, StackOptions::default());

        let (client, server) = (IpFields { dscp: 46, hop_limit: 7 }, IpFields { dscp: 10, hop_limit: 0 });
        let connection = Config { ip: server, ecn: Ecn::Accept, ..Config::default() };
        let options = ListenOptions { connection, half_open: backlog, ..ListenOptions::default() };
        let mut listener = link.far.sockets().listen(addr("[::]:80"), options).unwrap();
        let config = Config { ip: client, ecn: Ecn::Request, ..Config::default() };
        let mut client = link.near.sockets().connect(addr(to), &config).unwrap();
        link.settle();
        let mut server = listener.accept().unwrap();
        client.write(&[1; 4000]).unwrap();
        read(&mut server, &mut link, 4000);
        assert!(near.borrow().iter().all(|(class, hops)| (class >> 2, *hops) == (46, 7)), "{to} {near:?}");
        assert!(far.borrow().iter().all(|(class, hops)| (class >> 2, *hops) == (10, 1)), "{to} {far:?}");
        assert!(near.borrow().len() > 2 && !far.borrow().is_empty());
        assert!(near.borrow().iter().any(|(class, _)| class & 3 != 0), "{to} {near:?}");

        near.borrow_mut().clear();
        client.set_ip(IpFields { dscp: 255, ..IpFields::default() });
        client.write(&[1; 10]).unwrap();
        read(&mut server, &mut link, 10);
        assert!(near.borrow().iter().all(|(class, hops)| (class >> 2, *hops) == (63, 64)), "{to} {near:?}");
        assert!(!near.borrow().is_empty());
    }
}
