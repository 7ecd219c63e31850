//! UDP frames that the device is to steer and to vouch for.

use etherparse::{NetSlice, SlicedPacket, TransportSlice};
use netmem_packet::Sum;

/// What a receiver wants to know of a UDP frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Udp {
    pub(super) destination: u16,
    /// There is a checksum, and it is right.
    pub(super) valid: bool,
}

/// Looks at a frame; `sums` says whether its checksum is to be computed. None if it is no UDP, not whole, or a fragment.
pub(super) fn udp(frame: &[u8], sums: bool) -> Option<Udp> {
    let packet = SlicedPacket::from_ethernet(frame).ok()?;
    let Some(TransportSlice::Udp(udp)) = packet.transport else { return None };
    let mut sum = Sum::default();
    match packet.net {
        Some(NetSlice::Ipv4(ip)) => [ip.header().source(), ip.header().destination()].iter().for_each(|a| sum.add(a)),
        Some(NetSlice::Ipv6(ip)) => [ip.header().source(), ip.header().destination()].iter().for_each(|a| sum.add(a)),
        _ => return None,
    }
    // A datagram in an IP packet is shorter than 64 KiB.
    [17, udp.slice().len() as u16].into_iter().for_each(|word| sum.add_word(word));
    let valid = sums && udp.checksum() != 0 && {
        sum.add(udp.slice());
        sum.value() == 0xffff
    };
    Some(Udp { destination: udp.destination_port(), valid })
}

#[cfg(test)]
mod tests {
    use super::*;
    use etherparse::PacketBuilder;

    fn frames() -> Vec<Vec<u8>> {
        let ethernet = || PacketBuilder::ethernet2([2; 6], [4; 6]);
        [0, 1, 2, 63, 64, 1399]
            .into_iter()
            .flat_map(|n| {
                let payload: Vec<u8> = (0..n).map(|i| (i * 7) as u8).collect();
                let (mut v4, mut v6) = (Vec::new(), Vec::new());
                ethernet().ipv4([10, 1, 2, 3], [10, 9, 8, 7], 9).udp(5, 4791).write(&mut v4, &payload).unwrap();
                ethernet().ipv6([0xfd; 16], [0xfe; 16], 9).udp(5, 4791).write(&mut v6, &payload).unwrap();
                [v4, v6]
            })
            .collect()
    }

    /// Proves MEM-10: only what is right is vouched for.
    #[test]
    fn sums_are_looked_at() {
        for mut frame in frames() {
            assert_eq!(udp(&frame, true), Some(Udp { destination: 4791, valid: true }));
            assert_eq!(udp(&frame, false), Some(Udp { destination: 4791, valid: false }));
            let last = frame.len() - 1;
            frame[last] ^= 1;
            assert!(!udp(&frame, true).unwrap().valid);
            assert_eq!(udp(&frame[..last], true), None, "cut off");
            frame[last] ^= 1;
            // No checksum is none to vouch for.
            let at = if frame[12..14] == [8, 0] { 40 } else { 60 };
            frame[at..at + 2].fill(0);
            assert!(!udp(&frame, true).unwrap().valid);
        }
        assert_eq!(udp(&[0; 60], true), None);
        assert_eq!(udp(&[], true), None);
    }
}
