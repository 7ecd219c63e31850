//! Every message and every answer, byte for byte, and what is malformed.

#![allow(clippy::unwrap_used)]
use super::header::VERSION;
use super::*;
use rustix::event::{PollFd, PollFlags, Timespec};
use std::io::{Read, pipe};

/// A message with these bytes of payload, and with descriptors that are ends of pipes: the other
/// ends show whether a descriptor was closed.
fn packet(request: Request, payload: &[u8], fds: usize) -> (RawMessage, Vec<std::io::PipeReader>) {
    let (readers, writers): (Vec<_>, Vec<_>) = (0..fds).map(|_| pipe().unwrap()).unzip();
    let fds = writers.into_iter().map(|fd| std::os::fd::OwnedFd::from(fd).into()).collect();
    (RawMessage { request, flags: VERSION, payload: payload.to_vec(), fds }, readers)
}

fn all_closed(readers: Vec<std::io::PipeReader>) {
    for mut reader in readers {
        // A pipe is closed by a thread of its own.
        let mut end = [PollFd::new(&reader, PollFlags::IN)];
        let minute = Timespec { tv_sec: 60, tv_nsec: 0 };
        assert_eq!(rustix::event::poll(&mut end, Some(&minute)), Ok(1), "a writer is left open");
        assert_eq!(reader.read(&mut [0]).unwrap(), 0);
    }
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_ne_bytes()).collect()
}

fn halves(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_ne_bytes()).collect()
}

/// Each message that is understood: its payload by the specification, and how many descriptors it
/// has.
fn known() -> Vec<(Request, Vec<u8>, usize, &'static str)> {
    let region = [0x1000, 0x2000, 0x3000, 0x4000];
    let table = [&halves(&[2, 0])[..], &words(&region), &words(&[5, 6, 7, 8])].concat();
    let single = [&words(&[0])[..], &words(&region)].concat();
    let config = [&halves(&[2, 4, 1])[..], b"abcd"].concat();
    let inflight = [&words(&[64, 0])[..], &2u16.to_ne_bytes(), &256u16.to_ne_bytes(), &[0; 4]].concat();
    let short = inflight[..20].to_vec();
    let address = [&halves(&[3, 1])[..], &words(&[0xd, 0xe, 0xf, 0x10])].concat();
    vec![
        (Request::GET_FEATURES, vec![], 0, "GetFeatures"),
        (Request::SET_FEATURES, words(&[1 << 32]), 0, "SetFeatures(4294967296)"),
        (Request::SET_OWNER, vec![], 0, "SetOwner"),
        (Request::RESET_OWNER, vec![], 0, "ResetOwner"),
        (Request::SET_MEM_TABLE, table, 2, "guest_addr: 5, size: 6, user_addr: 7, mmap_offset: 8"),
        (Request::SET_LOG_BASE, words(&[4096, 64]), 1, "SetLogBase { size: 4096, offset: 64"),
        (Request::SET_LOG_FD, vec![], 1, "SetLogFd"),
        (Request::SET_VRING_NUM, halves(&[3, 256]), 0, "SetVringNum { index: 3, num: 256 }"),
        (
            Request::SET_VRING_ADDR,
            address,
            0,
            "descriptors: 13, used: 14, available: 15, log_addr: 16, log: true, splits: false",
        ),
        (Request::SET_VRING_BASE, halves(&[3, 7]), 0, "SetVringBase { index: 3, base: 7 }"),
        (Request::GET_VRING_BASE, halves(&[3, 0]), 0, "GetVringBase { index: 3 }"),
        (Request::SET_VRING_KICK, words(&[3]), 1, "SetVringKick { index: 3, fd: Some"),
        (Request::SET_VRING_CALL, words(&[0x103]), 0, "SetVringCall { index: 3, fd: None }"),
        (Request::SET_VRING_ERR, words(&[3]), 1, "SetVringErr { index: 3, fd: Some"),
        (Request::GET_PROTOCOL_FEATURES, vec![], 0, "GetProtocolFeatures"),
        (Request::SET_PROTOCOL_FEATURES, words(&[9]), 0, "SetProtocolFeatures(9)"),
        (Request::GET_QUEUE_NUM, vec![], 0, "GetQueueNum"),
        (Request::SET_VRING_ENABLE, halves(&[3, 1]), 0, "SetVringEnable { index: 3, enable: true }"),
        (Request::SEND_RARP, b"macmac\0\0".to_vec(), 0, "SendRarp([109, 97, 99, 109, 97, 99])"),
        (Request::NET_SET_MTU, words(&[9000]), 0, "NetSetMtu(9000)"),
        (Request::GET_CONFIG, config.clone(), 0, "GetConfig { offset: 2, size: 4, flags: 1 }"),
        (Request::GET_CONFIG, config[..12].to_vec(), 0, "GetConfig { offset: 2, size: 4, flags: 1 }"),
        (Request::SET_CONFIG, config, 0, "SetConfig { offset: 2, flags: 1, bytes: [97, 98, 99, 100] }"),
        (Request::GET_INFLIGHT_FD, short, 0, "queues: 2, queue_size: 256"),
        (Request::SET_INFLIGHT_FD, inflight, 1, "mmap_size: 64, mmap_offset: 0, queues: 2, queue_size: 256"),
        (Request::RESET_DEVICE, vec![], 0, "ResetDevice"),
        (Request::GET_MAX_MEM_SLOTS, vec![], 0, "GetMaxMemSlots"),
        (Request::ADD_MEM_REG, single.clone(), 1, "guest_addr: 4096, size: 8192, user_addr: 12288"),
        (Request::REM_MEM_REG, single, 0, "guest_addr: 4096, size: 8192, user_addr: 12288"),
        (Request::SET_STATUS, words(&[15]), 0, "SetStatus(15)"),
        (Request::GET_STATUS, vec![], 0, "GetStatus"),
    ]
}

#[test]
fn every_message_is_read_and_written_as_specified() {
    for (request, payload, fds, shown) in known() {
        let (packet, readers) = packet(request, &payload, fds);
        let message = Message::decode(packet).unwrap();
        assert_eq!(message.request(), request);
        assert!(format!("{message:?}").contains(shown), "{message:?}");
        let frame = message.encode(true);
        assert_eq!(frame.fds.len(), fds, "{request}");
        let header = halves(&[request.0, 9, (frame.bytes.len() - HEADER) as u32]);
        assert_eq!(frame.bytes[..HEADER], header, "{request}");
        // Two messages have a longer form, which ends with zeros and is the one that is sent.
        let same = if request == Request::GET_CONFIG { 12 } else { payload.len() };
        assert!(frame.bytes[HEADER..].starts_with(&payload[..same]), "{request}");
        assert!(frame.bytes[HEADER + same..].iter().all(|&b| b == 0), "{request}");
        drop(message);
        all_closed(readers);
    }
}

#[test]
fn wrong_lengths_and_descriptors_are_refused_and_closed() {
    let refused = |request, payload: &[u8], fds| {
        let (packet, readers) = packet(request, payload, fds);
        let error = Message::decode(packet).expect_err("it is malformed");
        all_closed(readers);
        assert!(error.to_string().contains(request.name().unwrap()), "{error}");
    };
    for (request, payload, fds, _) in known() {
        if let Some(short) = payload.len().checked_sub(1) {
            refused(request, &payload[..short], fds);
        }
        refused(request, &[&payload[..], &[0; 3]].concat(), fds);
        // A descriptor that is sent again with REM_MEM_REG is tolerated, and closed.
        refused(request, &payload, if request == Request::REM_MEM_REG { 2 } else { fds + 1 });
        if fds > 0 {
            refused(request, &payload, fds - 1);
        }
    }
    let (packet, readers) = packet(Request::REM_MEM_REG, &words(&[0, 1, 2, 3, 4]), 1);
    Message::decode(packet).unwrap();
    all_closed(readers);
}

#[test]
fn fields_out_of_range_are_refused() {
    let many = [&halves(&[9, 0])[..], &words(&[0; 36])].concat();
    for (request, payload, field) in [
        (Request::SET_MEM_TABLE, many, "number of regions"),
        (Request::SET_MEM_TABLE, halves(&[u32::MAX, 0]), "number of regions"),
        (Request::SET_VRING_ENABLE, halves(&[0, 2]), "state"),
        (Request::GET_CONFIG, halves(&[0, 257, 0]), "size"),
        (Request::SET_CONFIG, halves(&[0, u32::MAX, 0]), "size"),
        (Request::SET_STATUS, words(&[256]), "status"),
    ] {
        let (packet, readers) = packet(request, &payload, 0);
        let error = Message::decode(packet).unwrap_err();
        assert!(matches!(error, Malformed::Field { field: f, .. } if f == field), "{error}");
        all_closed(readers);
    }
}

#[test]
fn other_messages_keep_their_name_and_lose_their_descriptors() {
    for (number, name) in [(28, "POSTCOPY_ADVISE"), (22, "IOTLB_MSG"), (0, "message 0"), (1000, "message 1000")] {
        let (packet, readers) = packet(Request(number), &[7; 99], 3);
        let message = Message::decode(packet).unwrap();
        all_closed(readers);
        assert!(matches!(message, Message::Other(r) if r.to_string() == name), "{message:?}");
    }
}

#[test]
fn answers() {
    let answer = |asked, flags, request, payload: &[u8], fds| {
        let (packet, readers) = packet(request, payload, fds);
        let reply = Reply::decode(RawMessage { flags, ..packet }, asked).map(|reply| {
            let frame = reply.encode(asked);
            assert_eq!(frame.bytes, [&halves(&[asked.0, 5, payload.len() as u32])[..], payload].concat());
            assert_eq!(frame.fds.len(), fds);
            format!("{reply:?}")
        });
        all_closed(readers);
        reply
    };
    let inflight = [&words(&[64, 0])[..], &2u16.to_ne_bytes(), &256u16.to_ne_bytes(), &[0; 4]].concat();
    let config = [&halves(&[2, 4, 1])[..], b"abcd"].concat();
    for (asked, payload, fds, shown) in [
        (Request::GET_FEATURES, words(&[77]), 0, "Number(77)"),
        (Request::SET_MEM_TABLE, words(&[0]), 0, "Number(0)"),
        (Request::GET_VRING_BASE, halves(&[3, 9]), 0, "VringBase { index: 3, base: 9 }"),
        (Request::GET_CONFIG, config.clone(), 0, "Config { offset: 2, flags: 1, bytes: [97, 98, 99, 100] }"),
        (Request::GET_CONFIG, words(&[1]), 0, "Number(1)"),
        (Request::GET_CONFIG, vec![], 0, "Empty"),
        (Request::SET_LOG_BASE, vec![], 0, "Empty"),
        (Request::SET_LOG_BASE, words(&[0]), 0, "Number(0)"),
        (Request::GET_INFLIGHT_FD, inflight.clone(), 1, "queue_size: 256 }, Some"),
        (Request::GET_INFLIGHT_FD, inflight.clone(), 0, "queue_size: 256 }, None"),
        (Request::GET_INFLIGHT_FD, words(&[1]), 0, "Number(1)"),
    ] {
        let shows = answer(asked, 5, asked, &payload, fds).unwrap();
        assert!(shows.contains(shown), "{shows}");
        let wrong = [(5, Request::GET_STATUS, fds), (1, asked, fds), (5, asked, fds + 2)];
        for (flags, request, fds) in wrong {
            answer(asked, flags, request, &payload, fds).unwrap_err();
        }
        let long = [&payload[..], &[0; 3]].concat();
        assert!(answer(asked, 5, asked, &long, fds).is_err(), "{asked}");
    }
}

#[test]
fn headers() {
    let header = |flags: u32, size: u32| {
        let bytes = halves(&[7, flags, size]);
        RawMessage::with_header(bytes.as_slice().try_into().unwrap()).map(|(p, size)| (p.needs_reply(), size))
    };
    let request = Request::SET_LOG_FD;
    assert_eq!(header(1, 8), Ok((false, 8)));
    assert_eq!(header(9, 1024), Ok((true, 1024)));
    for flags in [0, 2, 3, 0x11, 0x8000_0001] {
        assert_eq!(header(flags, 8), Err(Malformed::Flags { request, flags }));
    }
    for size in [1025, u32::MAX] {
        assert_eq!(header(1, size), Err(Malformed::TooLong { request, size }));
    }
}

#[test]
fn names() {
    assert_eq!(Request::GET_SHMEM_CONFIG.to_string(), "GET_SHMEM_CONFIG");
    assert_eq!((1..=44).filter(|&n| Request(n).name().is_some()).count(), 44);
    assert_eq!(protocol::name(protocol::RARP | protocol::STATUS), "VHOST_USER_PROTOCOL_F_RARP");
    assert_eq!(protocol::name(1 << 63), "an unnamed protocol feature");
}
