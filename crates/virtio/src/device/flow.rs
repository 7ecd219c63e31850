//! Headers and checksums of TCP and UDP frames, for devices that steer frames and verify checksums.
//!
//! A port with several queues must know the flow of a frame before it has a queue for it. The
//! checksum is verified while the frame is in the cache.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use netmem_packet::{Headers, Transport};

/// Bytes of a frame that are searched for its headers.
const PARSED_BYTES: usize = 512;

/// The flow of a frame, and whether its checksum is right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Flow {
    pub(super) transport: Transport,
    pub(super) source: SocketAddr,
    pub(super) destination: SocketAddr,
    /// There is a checksum, and it is right.
    pub(super) valid: bool,
}

impl Flow {
    /// Parses a frame; `sums`: its checksum is verified. `None` if the frame is neither TCP nor
    /// UDP, is not complete, or is a fragment.
    pub(super) fn of(frame: &[u8], sums: bool) -> Option<Self> {
        let headers = Headers::parse(&frame[..frame.len().min(PARSED_BYTES)])?;
        if !(headers.payload..=frame.len()).contains(&headers.end(frame)) {
            return None;
        }
        let [source, destination] = addresses(headers.addresses(frame))?;
        let (from, to) = headers.ports(frame);
        Some(Self {
            transport: headers.transport,
            source: SocketAddr::new(source, from),
            destination: SocketAddr::new(destination, to),
            valid: sums && headers.has_right_checksum(frame),
        })
    }
}

/// The addresses of either IP.
fn addresses(bytes: &[u8]) -> Option<[IpAddr; 2]> {
    if let Some((source, destination)) = bytes.split_first_chunk::<4>()
        && let Ok(destination) = <[u8; 4]>::try_from(destination)
    {
        return Some([Ipv4Addr::from(*source).into(), Ipv4Addr::from(destination).into()]);
    }
    let (source, destination) = bytes.split_first_chunk::<16>()?;
    let destination = <[u8; 16]>::try_from(destination).ok()?;
    Some([Ipv6Addr::from(*source).into(), Ipv6Addr::from(destination).into()])
}

#[cfg(test)]
mod tests {
    use super::*;
    use etherparse::PacketBuilder;

    fn frames() -> Vec<(Transport, Vec<u8>)> {
        let ethernet = || PacketBuilder::ethernet2([2; 6], [4; 6]);
        let v4 = || ethernet().ipv4([10, 1, 2, 3], [10, 9, 8, 7], 9);
        let v6 = || ethernet().ipv6([0xfd; 16], [0xfe; 16], 9);
        [0, 1, 2, 63, 64, 1399]
            .into_iter()
            .flat_map(|n| {
                let payload: Vec<u8> = (0..n).map(|i| (i * 7) as u8).collect();
                let mut frames = [const { Vec::new() }; 4];
                let [udp4, udp6, tcp4, tcp6] = &mut frames;
                v4().udp(5, 4791).write(udp4, &payload).unwrap();
                v6().udp(5, 4791).write(udp6, &payload).unwrap();
                v4().tcp(5, 4791, 9, 9).options_raw(&[1; 12]).unwrap().write(tcp4, &payload).unwrap();
                v6().tcp(5, 4791, 9, 9).write(tcp6, &payload).unwrap();
                [Transport::Udp, Transport::Udp, Transport::Tcp, Transport::Tcp].into_iter().zip(frames)
            })
            .collect()
    }

    /// Proves MEM-10: a checksum is marked as verified only if it is right.
    #[test]
    fn sums_are_looked_at() {
        for (transport, mut frame) in frames() {
            let v4 = frame[12..14] == [8, 0];
            let (from, to) = match v4 {
                true => ("10.1.2.3:5", "10.9.8.7:4791"),
                false => {
                    ("[fdfd:fdfd:fdfd:fdfd:fdfd:fdfd:fdfd:fdfd]:5", "[fefe:fefe:fefe:fefe:fefe:fefe:fefe:fefe]:4791")
                }
            };
            let flow = |valid| {
                Some(Flow { transport, source: from.parse().unwrap(), destination: to.parse().unwrap(), valid })
            };
            assert_eq!(Flow::of(&frame, true), flow(true));
            assert_eq!(Flow::of(&frame, false), flow(false));
            let last = frame.len() - 1;
            frame[last] ^= 1;
            assert_eq!(Flow::of(&frame, true).map(|flow| flow.valid), Some(false));
            assert_eq!(Flow::of(&frame[..last], true), None, "cut off");
            frame[last] ^= 1;
            // A datagram without a checksum is not marked as verified.
            let at = if v4 { 34 } else { 54 } + if transport == Transport::Udp { 6 } else { 16 };
            frame[at..at + 2].fill(0);
            assert!(!Flow::of(&frame, true).unwrap().valid);
        }
        assert_eq!(Flow::of(&[0; 60], true), None);
        assert_eq!(Flow::of(&[], true), None);
    }
}
