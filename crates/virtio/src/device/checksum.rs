//! The Internet checksum (RFC 1071): of frames whose sender left it to the device, and of those that the device is to vouch for.

use etherparse::{NetSlice, SlicedPacket, TransportSlice};

/// The sum of `bytes` as big-endian words, an odd one filled up with zero.
fn sum(bytes: &[u8]) -> u64 {
    let (words, odd) = bytes.as_chunks();
    let last = odd.first().map_or(0, |&b| u64::from(b) << 8);
    words.iter().map(|&w| u64::from(u16::from_be_bytes(w))).sum::<u64>() + last
}

fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// Computes the checksum that is still to be computed: from `start` to the frame's end, stored at `start + offset`, where the
/// sum of the pseudo header is. Nothing if they lie outside of the frame.
pub(super) fn complete(frame: &mut [u8], start: u16, offset: u16) {
    let (start, at) = (usize::from(start), usize::from(start) + usize::from(offset));
    if at + 2 > frame.len() {
        return;
    }
    let checksum = match !fold(sum(&frame[start..])) {
        // Zero would say that there is none.
        0 => 0xffff,
        checksum => checksum,
    };
    frame[at..at + 2].copy_from_slice(&checksum.to_be_bytes());
}

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
    let pseudo = || match packet.net {
        Some(NetSlice::Ipv4(ip)) => Some(sum(&ip.header().source()) + sum(&ip.header().destination())),
        Some(NetSlice::Ipv6(ip)) => Some(sum(&ip.header().source()) + sum(&ip.header().destination())),
        _ => None,
    };
    let whole = |pseudo| fold(pseudo + 17 + udp.slice().len() as u64 + sum(udp.slice()));
    let valid = sums && udp.checksum() != 0 && pseudo().map(whole) == Some(0xffff);
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

    #[test]
    fn partial_sums_are_completed() {
        for whole in frames() {
            let mut frame = whole.clone();
            let (start, addresses) = if frame[12..14] == [8, 0] { (34, 26..34) } else { (54, 22..54) };
            let pseudo = fold(sum(&frame[addresses]) + 17 + (frame.len() - start) as u64);
            frame[start + 6..start + 8].copy_from_slice(&pseudo.to_be_bytes());
            complete(&mut frame, start as u16, 6);
            assert_eq!(frame, whole);
            complete(&mut frame, u16::MAX, u16::MAX);
            assert_eq!(frame, whole);
        }
    }
}
