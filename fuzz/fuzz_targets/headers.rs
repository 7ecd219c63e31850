//! Headers of streams: what is read is inside of the frame, and what is written from it reads the
//! same.
#![no_main]

use libfuzzer_sys::fuzz_target;
use netmem_fuzz::Input;
use netmem_inet::tcp::{Flags, Header, Options, Seq, Timestamps};
use netmem_inet::wire::{self, Body, ByteRange, Flow, Icmp, Ip, Network, Outer, Transport};
use netmem_packet::Sum;

fuzz_target!(|data: &[u8]| {
    let mut input = Input(data);
    match input.u8() % 3 {
        0 => frame(&mut input),
        1 => packet(&mut input),
        _ => options(&mut input),
    }
});

/// A frame as a port brings it: the first bytes, and a length that need not be theirs.
fn frame(input: &mut Input) {
    let longer = usize::from(input.u16());
    let bytes = input.bytes(2048);
    let len = if longer < 1 << 15 { bytes.len() } else { bytes.len() + (longer & 0xfff) };
    let head = &bytes[..bytes.len().min(wire::MAX_HEAD)];
    if let Ok((_, Network::Ip(ip))) = wire::parse(head, len) {
        content(&ip, head, len);
    }
}

/// A packet that begins with its IP header.
fn packet(input: &mut Input) {
    let bytes = input.bytes(2048);
    if let Ok(ip) = Ip::parse(bytes, bytes.len()) {
        content(&ip, bytes, bytes.len());
    }
}

fn inside(part: ByteRange, len: usize) {
    assert!(part.at <= part.end() && part.end() <= len, "{part:?} of {len}");
}

fn content(ip: &Ip, head: &[u8], len: usize) {
    inside(ip.content, len);
    assert_eq!(ip.source.is_ipv4(), ip.destination.is_ipv4());
    let Ok(transport) = ip.transport(head) else { return };
    if let Some(covered) = ip.covered(&transport) {
        inside(covered.range, len);
    }
    match transport {
        Transport::Tcp(segment) => {
            inside(segment.payload, len);
            let flow = ip.flow(segment.source_port, segment.destination_port);
            written(&flow, &segment.header, segment.payload.len);
        }
        Transport::Udp(datagram) => inside(datagram.payload, len),
        Transport::Icmp(Icmp::EchoRequest { payload, .. }) => inside(payload, len),
        Transport::Icmp(_) | Transport::Unknown => {}
    }
}

/// A header that is written reads the same.
fn written(flow: &Flow, header: &Header, len: usize) {
    let mut out = [0; wire::MAX_HEADERS];
    let payload = vec![0; len.min(100)];
    let body = Body { len: payload.len(), sum: Some(Sum::default()), segment_size: None };
    // The flow is the receiver's: its remote end sent this.
    let sender = Flow { local: flow.remote, remote: flow.local };
    let emitted = wire::emit_tcp(&mut out, &Outer::new(None), &sender, header, body).expect("it fits");
    let mut bytes = out[..emitted.len].to_vec();
    bytes.extend_from_slice(&payload);
    if sender.local.ip().is_unspecified() || sender.local.ip().is_multicast() {
        return;
    }
    let Ok(ip) = Ip::parse(&bytes, bytes.len()) else { return };
    let Ok(transport) = ip.transport(&bytes) else { panic!("what was written is not read: {header:?}") };
    let covered = ip.covered(&transport).expect("TCP has a checksum");
    let mut sum = Sum::default();
    sum.add(&bytes[covered.range.at..covered.range.end()]);
    assert!(covered.holds(sum), "the checksum is wrong");
    let Transport::Tcp(segment) = transport else { panic!("not TCP") };
    let mut expected = *header;
    // Blocks for which there is no room are left out.
    expected.options.sack.truncate(if header.options.timestamps.is_some() { 3 } else { 4 });
    assert_eq!(segment.header, expected);
    assert_eq!((segment.payload.len, ip.flow(segment.source_port, segment.destination_port)), (payload.len(), *flow));
}

/// Any combination of options that a connection can want to write.
fn options(input: &mut Input) {
    let flags = Flags(input.u8());
    let has = input.u8();
    let syn = flags.has(Flags::SYN);
    let mut options = Options {
        mss: (syn && has & 1 != 0).then(|| input.u16()),
        window_scale: (syn && has & 2 != 0).then(|| input.u8()),
        sack_permitted: syn && has & 4 != 0,
        timestamps: (has & 8 != 0).then(|| Timestamps { value: input.u32(), echo: input.u32() }),
        ..Options::default()
    };
    for _ in 0..if syn { 0 } else { has >> 4 & 7 } {
        options.sack.push(Seq(input.u32()), Seq(input.u32()));
    }
    let header = Header {
        seq: Seq(input.u32()),
        ack: Seq(input.u32()),
        flags,
        window: input.u16(),
        urgent: input.u16(),
        options,
    };
    let (v4, v6) = (["10.0.0.1:1", "10.0.0.2:2"], ["[fd::1]:1", "[fd::2]:2"]);
    let [local, remote] = if input.u8() & 1 == 0 { v4 } else { v6 };
    let flow = Flow { local: local.parse().expect("an address"), remote: remote.parse().expect("an address") };
    assert!((20..=60).contains(&wire::tcp_header_len(&options)));
    written(&flow, &header, input.below(100));
}
