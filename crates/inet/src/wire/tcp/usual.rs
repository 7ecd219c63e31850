//! The usual headers: Ethernet, IPv4 and TCP, with timestamps and no other option.
//!
//! Why apart: each field has a fixed place, and all that the checksums cover is known as numbers
//! before it is written. So the sums are those of 32-bit words in registers, and no byte is read
//! back that was just written. Headers of any other form take the general way, which writes the
//! same bytes.
//!
//! ```text
//!   0         14                34              54                    66
//!   │ Ethernet │ IPv4, no options │ TCP, 20 bytes │ NOP NOP TIMESTAMPS │ payload
//! ```

use super::{CHECKSUM, PADDED_TIMESTAMPS};
use crate::tcp::{Header, Options, Timestamps};
use crate::wire::Flow;
use crate::wire::emit::{Body, Emitted, Outer};
use crate::wire::ethernet::{EthernetHeader, ether_type};
use crate::wire::ip::protocol;
use netmem_packet::{Checksum, Meta};
use std::net::SocketAddr;

/// Where the IPv4 header begins, the TCP header, and the payload.
const IP: usize = EthernetHeader::LEN;
const TCP: usize = IP + 20;
const END: usize = TCP + 32;

/// The ones' complement sum of 16-bit words that were added two at a time, in fewer than 2^16
/// numbers of 32 bits.
#[inline(always)]
fn fold(sum: u64) -> u16 {
    // At most 2^32 + 2^16, then 2^17, then 2^16.
    let sum = (sum & 0xffff_ffff) + (sum >> 32);
    let sum = (sum & 0xffff) + (sum >> 16 & 0xffff) + (sum >> 32);
    let sum = (sum & 0xffff) + (sum >> 16);
    ((sum & 0xffff) + (sum >> 16)) as u16
}

/// The sum of numbers, for [`fold`].
#[inline(always)]
fn sum<const N: usize>(numbers: [u32; N]) -> u64 {
    numbers.into_iter().map(u64::from).sum()
}

/// Writes headers of this form. `None` if they are of another one, or if there is no room for them:
/// nothing was written then.
#[inline]
pub(super) fn emit(out: &mut [u8], outer: &Outer, flow: &Flow, header: &Header, body: Body) -> Option<Emitted> {
    let (SocketAddr::V4(local), SocketAddr::V4(remote)) = (flow.local, flow.remote) else { return None };
    let Options { mss: None, window_scale: None, sack_permitted: false, timestamps: Some(stamps), sack } =
        &header.options
    else {
        return None;
    };
    let (link, Timestamps { value, echo }) = (outer.link?, stamps);
    let total = u16::try_from(END - IP + body.len).ok()?;
    if !sack.is_empty() || body.segment_size.is_some() {
        return None;
    }
    let out = out.first_chunk_mut::<END>()?;
    let (source, destination) = (local.ip().to_bits(), remote.ip().to_bits());
    let addresses = u64::from(source) + u64::from(destination);

    let first = 0x4500_0000 | u32::from(outer.traffic_class) << 16 | u32::from(total);
    // Identification 0; "do not fragment".
    let second = 0x0000_4000_u32;
    let third = u32::from(outer.hop_limit) << 24 | u32::from(protocol::TCP) << 16;
    let third = third | u32::from(!fold(addresses + sum([first, second, third])));

    let ports = u32::from(local.port()) << 16 | u32::from(remote.port());
    // The length is in words, in the upper half of its byte.
    let fourth = 0x8000_0000 | u32::from(header.flags.0) << 16 | u32::from(header.window);
    let (seq, ack, urgent) = (header.seq.0, header.ack.0, u32::from(header.urgent));
    let kinds = u32::from_be_bytes(PADDED_TIMESTAMPS);
    let pseudo = addresses + sum([protocol::TCP.into(), u32::from(total) - (TCP - IP) as u32]);
    let (checksum, kind) = match body.sum {
        Some(payload) => {
            let all = pseudo + sum([ports, seq, ack, fourth, urgent, kinds, *value, *echo, payload.value().into()]);
            let checksum = match !fold(all) {
                // As `Sum::checksum` does.
                0 => 0xffff,
                checksum => checksum,
            };
            (checksum, Checksum::Verified)
        }
        None => (fold(pseudo), Checksum::Partial { start: TCP as u16, offset: CHECKSUM }),
    };
    let fifth = u32::from(checksum) << 16 | urgent;

    if let Some(out) = out.first_chunk_mut() {
        link.write(ether_type::IPV4, out);
    }
    let words = [
        first,
        second,
        third,
        source,
        destination, // IP
        ports,
        seq,
        ack,
        fourth,
        fifth,
        kinds,
        *value,
        *echo, // TCP
    ];
    for (place, word) in out[IP..].as_chunks_mut().0.iter_mut().zip(words) {
        *place = word.to_be_bytes();
    }
    Some(Emitted { len: END, meta: Meta { checksum: kind, gso: None } })
}

#[cfg(test)]
mod tests {
    use super::super::emit_any;
    use super::*;
    use crate::tcp::{Flags, Seq};
    use crate::wire::Mac;
    use netmem_packet::Sum;

    /// Random headers of this form, with and without a checksum of the payload: the same bytes and
    /// the same result as by the general way. Every fourth one has the most carries, and every
    /// fourth one the fewest.
    #[test]
    fn the_bytes_are_those_of_the_general_way() {
        let mut rng = fastrand::Rng::with_seed(5);
        for turn in 0..4000 {
            let number = |rng: &mut fastrand::Rng| match turn % 4 {
                0 => u32::MAX,
                1 => 0,
                _ => rng.u32(..),
            };
            let mut numbers = [(); 11].map(|()| number(&mut rng)).into_iter();
            let mut next = || numbers.next().unwrap();
            let mac = |one: u32, two: u32| {
                let ([a, b, c, d], [e, f, ..]) = (one.to_be_bytes(), two.to_be_bytes());
                Mac([a, b, c, d, e, f])
            };
            let end = |addr: u32, port: u32| SocketAddr::new(std::net::Ipv4Addr::from(addr).into(), port as u16);
            let link = EthernetHeader { destination: mac(next(), 0x1234_5678), source: mac(next(), 0x9abc_def0) };
            let outer = Outer { link: Some(link), traffic_class: next() as u8, hop_limit: rng.u8(1..) };
            let flow = Flow { local: end(next(), next()), remote: end(next(), next()) };
            let options =
                Options { timestamps: Some(Timestamps { value: next(), echo: next() }), ..Options::default() };
            let header = Header {
                seq: Seq(next()),
                ack: Seq(next()),
                flags: Flags(rng.u8(..)),
                window: rng.u16(..),
                urgent: if rng.bool() { 0 } else { rng.u16(..) },
                options,
            };
            let mut payload = Sum::default();
            payload.add_word(rng.u16(..));
            let body = Body { len: rng.usize(..1500), sum: rng.bool().then_some(payload), segment_size: None };
            let mut bytes = [[0xaa_u8; 80]; 2];
            let usual = emit(&mut bytes[0], &outer, &flow, &header, body).expect("the usual form");
            let general = emit_any(&mut bytes[1], &outer, &flow, &header, body).unwrap();
            assert_eq!((usual, bytes[0]), (general, bytes[1]), "{turn}: {outer:?} {flow:?} {header:?} {body:?}");
        }
    }

    /// Each other form is refused before anything is written.
    #[test]
    fn headers_of_another_form_are_left_to_the_general_way() {
        let end = |addr: &str| addr.parse::<SocketAddr>().unwrap();
        let flow = Flow { local: end("10.0.0.1:7"), remote: end("10.0.0.2:8") };
        let timestamps = Some(Timestamps { value: 1, echo: 2 });
        let header = Header { options: Options { timestamps, ..Options::default() }, ..Header::default() };
        let outer = Outer::new(Some(EthernetHeader::default()));
        let with = |change: &dyn Fn(&mut Options)| {
            let mut changed = header;
            change(&mut changed.options);
            changed
        };
        let v6 = Flow { local: end("[fd00::1]:7"), remote: end("[fd00::2]:8") };
        let long = Body { len: 65_536 - 52, ..Body::default() };
        let cut = Body { sum: None, segment_size: Some(100), ..Body::default() };
        let emitted = |outer: &Outer, flow: &Flow, header: &Header, body: Body, room: usize| {
            let mut out = [0xaa; END];
            let emitted = emit(&mut out[..room], outer, flow, header, body).is_some();
            assert_eq!(emitted, out != [0xaa; END]);
            emitted
        };
        assert!(emitted(&outer, &flow, &header, Body::default(), END));
        assert!(emitted(&outer, &flow, &header, Body { len: 65_535 - 52, ..Body::default() }, END));
        assert!(!emitted(&outer, &flow, &header, Body::default(), END - 1));
        assert!(!emitted(&Outer::new(None), &flow, &header, Body::default(), END));
        assert!(!emitted(&outer, &v6, &header, Body::default(), END));
        assert!(!emitted(&outer, &flow, &header, long, END) && !emitted(&outer, &flow, &header, cut, END));
        let others: [&dyn Fn(&mut Options); 5] = [
            &|options| options.mss = Some(1460),
            &|options| options.window_scale = Some(7),
            &|options| options.sack_permitted = true,
            &|options| options.timestamps = None,
            &|options| _ = options.sack.push(Seq(1), Seq(2)),
        ];
        for (n, change) in others.into_iter().enumerate() {
            assert!(!emitted(&outer, &flow, &with(change), Body::default(), END), "{n}");
        }
    }
}
