//! The virtio specification's definitions for network devices: [feature] bits, the header in front
//! of every frame, the [configuration space](config), and the commands of the
//! [control queue](ctrl). These are numbers and layouts only, without state or I/O.

pub mod config;
pub mod ctrl;
pub mod feature;

pub use netmem_packet::MAX_SEGMENTS;
use netmem_packet::{Checksum, Gso, GsoKind, Meta};

/// The longest Ethernet frame of a standard network: 1500 bytes of payload, a VLAN tag, two
/// addresses and a type.
pub const STANDARD_FRAME: usize = 1518;
/// The longest frame that segmentation offload produces: a maximal IP packet behind an Ethernet
/// header.
pub const OFFLOAD_FRAME: usize = 65535 + 14;
/// The shortest Ethernet frame, without its frame check sequence.
pub const MIN_FRAME: usize = 60;

/// `struct virtio_net_hdr_v1`: 12 bytes in front of every frame, little endian, in both directions.
///
/// ```text
///  0 flags      u8     1 = checksum still to be computed, 2 = checksum verified
///  1 gso_type   u8     0 = a plain frame, else the kind of segment to cut
///  2 hdr_len    u16    bytes of headers in front of a segment's payload
///  4 gso_size   u16    bytes of payload per segment
///  6 csum_start u16    where the checksum begins, from the frame's first byte
///  8 csum_offset u16   where it is stored, from csum_start
/// 10 num_buffers u16   buffers that the frame spans (mergeable buffers), else 1
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct VnetHdr {
    /// [`Self::NEEDS_CSUM`], [`Self::DATA_VALID`].
    pub flags: u8,
    /// One of the `GSO_*` values, possibly with [`Self::GSO_ECN`].
    pub gso_type: u8,
    /// Bytes of headers in front of a segment's payload.
    pub hdr_len: u16,
    /// Bytes of payload per segment.
    pub gso_size: u16,
    /// Where the checksum begins, in bytes from the frame's first.
    pub csum_start: u16,
    /// Where the checksum is stored, in bytes from `csum_start`.
    pub csum_offset: u16,
    /// Buffers that the frame spans.
    pub num_buffers: u16,
}

impl VnetHdr {
    /// Bytes on the wire.
    pub const LEN: usize = 12;
    /// Bytes of the header of a legacy driver without mergeable buffers: the last field is missing.
    pub const LEGACY_LEN: usize = 10;
    /// The checksum at `csum_start + csum_offset` is still to be computed.
    pub const NEEDS_CSUM: u8 = 1;
    /// The device has verified the checksum.
    pub const DATA_VALID: u8 = 2;
    /// A plain frame.
    pub const GSO_NONE: u8 = 0;
    /// TCP over IPv4.
    pub const GSO_TCPV4: u8 = 1;
    /// UDP (fragmentation).
    pub const GSO_UDP: u8 = 3;
    /// TCP over IPv6.
    pub const GSO_TCPV6: u8 = 4;
    /// UDP (segmentation).
    pub const GSO_UDP_L4: u8 = 5;
    /// Or-ed to a type: the segment carries explicit congestion notification.
    pub const GSO_ECN: u8 = 0x80;

    /// The header of a plain frame in one buffer.
    pub const PLAIN: Self =
        Self { flags: 0, gso_type: 0, hdr_len: 0, gso_size: 0, csum_start: 0, csum_offset: 0, num_buffers: 1 };

    /// Reads the wire form.
    #[inline]
    #[must_use]
    pub fn from_bytes(b: [u8; Self::LEN]) -> Self {
        let u16_at = |i: usize| u16::from_le_bytes([b[i], b[i + 1]]);
        Self {
            flags: b[0],
            gso_type: b[1],
            hdr_len: u16_at(2),
            gso_size: u16_at(4),
            csum_start: u16_at(6),
            csum_offset: u16_at(8),
            num_buffers: u16_at(10),
        }
    }

    /// The wire form.
    #[inline]
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        b[0] = self.flags;
        b[1] = self.gso_type;
        for (i, v) in
            [self.hdr_len, self.gso_size, self.csum_start, self.csum_offset, self.num_buffers].into_iter().enumerate()
        {
            b[2 + 2 * i..4 + 2 * i].copy_from_slice(&v.to_le_bytes());
        }
        b
    }

    /// The offload information in the header. A header that the other side wrote must be
    /// [checked](Offloads::check) before.
    #[must_use]
    pub fn meta(&self) -> Meta {
        let checksum = if self.flags & Self::NEEDS_CSUM != 0 {
            Checksum::Partial { start: self.csum_start, offset: self.csum_offset }
        } else if self.flags & Self::DATA_VALID != 0 {
            Checksum::Verified
        } else {
            Checksum::Unknown
        };
        let kind = match self.gso_type & !Self::GSO_ECN {
            Self::GSO_TCPV4 => Some(GsoKind::TcpV4),
            Self::GSO_TCPV6 => Some(GsoKind::TcpV6),
            Self::GSO_UDP => Some(GsoKind::UdpFragment),
            Self::GSO_UDP_L4 => Some(GsoKind::UdpSegment),
            _ => None,
        };
        let ecn = self.gso_type & Self::GSO_ECN != 0;
        let gso = kind.map(|kind| Gso { kind, size: self.gso_size, headers: self.hdr_len, ecn });
        Meta { checksum, gso }
    }

    /// The header of a frame that is sent. It counts no buffers, and never has the flag of a
    /// verified checksum: only received frames have that flag.
    #[must_use]
    pub fn of(meta: Meta) -> Self {
        let mut h = Self { num_buffers: 0, ..Self::PLAIN };
        if let Checksum::Partial { start, offset } = meta.checksum {
            h.flags = Self::NEEDS_CSUM;
            (h.csum_start, h.csum_offset) = (start, offset);
        }
        if let Some(gso) = meta.gso {
            h.gso_type = match gso.kind {
                GsoKind::TcpV4 => Self::GSO_TCPV4,
                GsoKind::TcpV6 => Self::GSO_TCPV6,
                GsoKind::UdpFragment => Self::GSO_UDP,
                GsoKind::UdpSegment => Self::GSO_UDP_L4,
            } | if gso.ecn { Self::GSO_ECN } else { 0 };
            (h.gso_size, h.hdr_len) = (gso.size, gso.headers);
        }
        h
    }

    /// Whether the header asks for neither a checksum nor segmentation.
    #[inline]
    #[must_use]
    pub fn is_plain(&self) -> bool {
        self.flags == 0 && self.gso_type == 0
    }

    /// Whether the offload fields are possible for a frame of `len` bytes.
    fn possible(&self, len: usize) -> bool {
        let csum_end = usize::from(self.csum_start) + usize::from(self.csum_offset) + 2;
        if self.flags & Self::NEEDS_CSUM != 0 && csum_end > len {
            return false;
        }
        if self.gso_type == Self::GSO_NONE {
            return true;
        }
        // `hdr_len` is a hint. The Ethernet header is in no segment's payload, whatever the hint
        // is.
        let segments = len.saturating_sub(14).checked_div(self.gso_size.into());
        usize::from(self.hdr_len) <= len && segments.is_some_and(|n| n <= MAX_SEGMENTS)
    }
}

/// The offloads that a header may use: a mask of the negotiated features, computed once for a
/// queue.
///
/// Offloads that were not negotiated are not used:
///
/// | in the header | not negotiated | why |
/// | --- | --- | --- |
/// | [`VnetHdr::DATA_VALID`], unnamed flags | ignored | a receiver ignores flags that it does not know (5.1.6.4.2), and Linux's tap reports this to every driver; the frame is whole, and its checksum [`Unknown`](netmem_packet::Checksum::Unknown) |
/// | [`VnetHdr::NEEDS_CSUM`] | the frame is dropped | its checksum is not there, and without the flag it is a frame with a wrong checksum |
/// | a segment, or one with [`VnetHdr::GSO_ECN`] | the frame is dropped | it is longer than the receiver's frames, and without the header it would be sent on uncut |
///
/// ```
/// use netmem_virtio::net::{HeaderFault, Offloads, VnetHdr, feature};
///
/// let verified = VnetHdr { flags: VnetHdr::DATA_VALID, ..VnetHdr::PLAIN };
/// assert_eq!(Offloads::received(feature::GUEST_CSUM).check(verified, 60), Ok(verified));
/// assert_eq!(Offloads::received(0).check(verified, 60), Ok(VnetHdr::PLAIN));
///
/// let partial = VnetHdr { flags: VnetHdr::NEEDS_CSUM, csum_start: 34, csum_offset: 6, ..VnetHdr::PLAIN };
/// assert_eq!(Offloads::sent(0).check(partial, 60), Err(HeaderFault::NotNegotiated));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offloads {
    /// Flags that are used.
    flags: u8,
    /// Kinds of segments: bit `GSO_*` of each.
    kinds: u8,
    /// [`VnetHdr::GSO_ECN`], or 0.
    ecn: u8,
}

/// Why a header's frame is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderFault {
    /// The header asks for an offload that was not negotiated.
    #[error("the header asks for an offload that was not negotiated")]
    NotNegotiated,
    /// The header's values are impossible for its frame.
    #[error("the header makes no sense for its frame")]
    Nonsense,
}

impl Offloads {
    /// The offloads that a device may use in frames to the driver.
    #[must_use]
    pub const fn received(features: u64) -> Self {
        let flags = VnetHdr::NEEDS_CSUM | VnetHdr::DATA_VALID;
        Self {
            flags: if features & feature::GUEST_CSUM != 0 { flags } else { 0 },
            kinds: Self::kind(VnetHdr::GSO_TCPV4, features, feature::GUEST_TSO4)
                | Self::kind(VnetHdr::GSO_TCPV6, features, feature::GUEST_TSO6)
                | Self::kind(VnetHdr::GSO_UDP, features, feature::GUEST_UFO)
                // The header does not say which version of IP it is.
                | Self::kind(VnetHdr::GSO_UDP_L4, features, feature::GUEST_USO4 | feature::GUEST_USO6),
            ecn: if features & feature::GUEST_ECN != 0 { VnetHdr::GSO_ECN } else { 0 },
        }
    }

    /// The offloads that a driver may ask of the device. A driver cannot mark checksums as
    /// verified.
    #[must_use]
    pub const fn sent(features: u64) -> Self {
        Self {
            flags: if features & feature::CSUM != 0 { VnetHdr::NEEDS_CSUM } else { 0 },
            kinds: Self::kind(VnetHdr::GSO_TCPV4, features, feature::HOST_TSO4)
                | Self::kind(VnetHdr::GSO_TCPV6, features, feature::HOST_TSO6)
                | Self::kind(VnetHdr::GSO_UDP, features, feature::HOST_UFO)
                | Self::kind(VnetHdr::GSO_UDP_L4, features, feature::HOST_USO),
            ecn: if features & feature::HOST_ECN != 0 { VnetHdr::GSO_ECN } else { 0 },
        }
    }

    const fn kind(gso: u8, features: u64, needed: u64) -> u8 {
        if features & needed == needed { 1 << gso } else { 0 }
    }

    /// Whether these flags mark the frame's checksum as verified, and that feature was negotiated.
    #[inline]
    pub(crate) fn verifies(self, flags: u8) -> bool {
        flags & self.flags & VnetHdr::DATA_VALID != 0
    }

    /// Checks a header, all of whose bytes the other side wrote, against a frame of `len` bytes.
    /// Returns it without the fields that are ignored. `num_buffers` is not checked. A plain header
    /// costs one comparison.
    ///
    /// # Errors
    ///
    /// [`HeaderFault`]: the frame must be dropped.
    #[inline]
    pub fn check(self, header: VnetHdr, len: usize) -> Result<VnetHdr, HeaderFault> {
        if header.is_plain() { Ok(header) } else { self.check_offloads(header, len) }
    }

    #[cold]
    fn check_offloads(self, mut header: VnetHdr, len: usize) -> Result<VnetHdr, HeaderFault> {
        if header.flags & VnetHdr::NEEDS_CSUM & !self.flags != 0 {
            return Err(HeaderFault::NotNegotiated);
        }
        header.flags &= self.flags;
        match header.gso_type & !VnetHdr::GSO_ECN {
            VnetHdr::GSO_NONE if header.gso_type == 0 => {}
            kind @ (VnetHdr::GSO_TCPV4 | VnetHdr::GSO_TCPV6 | VnetHdr::GSO_UDP | VnetHdr::GSO_UDP_L4) => {
                if self.kinds & 1 << kind == 0 || header.gso_type & VnetHdr::GSO_ECN & !self.ecn != 0 {
                    return Err(HeaderFault::NotNegotiated);
                }
            }
            _ => return Err(HeaderFault::Nonsense),
        }
        if header.possible(len) { Ok(header) } else { Err(HeaderFault::Nonsense) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_survives_the_wire() {
        let h = VnetHdr {
            flags: 1,
            gso_type: 4,
            hdr_len: 0x102,
            gso_size: 0x304,
            csum_start: 0x506,
            csum_offset: 0x708,
            num_buffers: 0x90a,
        };
        assert_eq!(VnetHdr::from_bytes(h.to_bytes()), h);
        assert_eq!(&h.to_bytes()[..4], &[1, 4, 2, 1]);
    }

    const SEGMENT: VnetHdr = VnetHdr { gso_type: VnetHdr::GSO_TCPV4, gso_size: 1448, ..VnetHdr::PLAIN };

    #[test]
    fn nonsense_is_refused() {
        let all = Offloads::received(u64::MAX);
        let nonsense = Err(HeaderFault::Nonsense);
        assert_eq!(all.check(VnetHdr::PLAIN, 60), Ok(VnetHdr::PLAIN));
        let csum = VnetHdr { flags: VnetHdr::NEEDS_CSUM, csum_start: 34, csum_offset: 16, ..VnetHdr::PLAIN };
        assert_eq!(all.check(csum, 52), Ok(csum));
        assert_eq!(all.check(csum, 51), nonsense);
        assert_eq!(all.check(VnetHdr { gso_type: 9, ..VnetHdr::PLAIN }, 60), nonsense);
        assert_eq!(all.check(VnetHdr { gso_size: 0, ..SEGMENT }, 60), nonsense);
        assert_eq!(all.check(VnetHdr { hdr_len: 61, ..SEGMENT }, 60), nonsense);
        assert_eq!(all.check(VnetHdr { gso_type: VnetHdr::GSO_ECN, ..VnetHdr::PLAIN }, 60), nonsense);
    }

    /// One frame does not become thousands.
    #[test]
    fn segments_are_bounded() {
        let all = Offloads::sent(u64::MAX);
        for (gso_size, len, ok) in [(1, 1514, false), (1, 270, true), (1, 271, false), (256, OFFLOAD_FRAME, true)] {
            let header = VnetHdr { gso_size, ..SEGMENT };
            assert_eq!(all.check(header, len).is_ok(), ok, "{len} bytes in segments of {gso_size}");
        }
    }

    /// Each offload needs its own feature, in each direction.
    #[test]
    fn what_was_not_negotiated_is_not_believed() {
        let csum = VnetHdr { flags: VnetHdr::NEEDS_CSUM, ..VnetHdr::PLAIN };
        let of = |gso_type| VnetHdr { gso_type, ..SEGMENT };
        let (tcp4, ecn) = (of(VnetHdr::GSO_TCPV4), of(VnetHdr::GSO_TCPV4 | VnetHdr::GSO_ECN));
        let (tcp6, udp, cut) = (of(VnetHdr::GSO_TCPV6), of(VnetHdr::GSO_UDP), of(VnetHdr::GSO_UDP_L4));
        use feature::*;
        let received = [
            (csum, GUEST_CSUM),
            (tcp4, GUEST_TSO4),
            (ecn, GUEST_TSO4 | GUEST_ECN),
            (tcp6, GUEST_TSO6),
            (udp, GUEST_UFO),
            (cut, GUEST_USO4 | GUEST_USO6),
        ];
        let sent = [
            (csum, CSUM),
            (tcp4, HOST_TSO4),
            (ecn, HOST_TSO4 | HOST_ECN),
            (tcp6, HOST_TSO6),
            (udp, HOST_UFO),
            (cut, HOST_USO),
        ];
        type Mask = fn(u64) -> Offloads;
        let directions: [(Mask, &[_]); 2] = [(Offloads::received, &received), (Offloads::sent, &sent)];
        for (mask, headers) in directions {
            for &(header, needed) in headers {
                assert_eq!(mask(needed).check(header, 1514), Ok(header), "{header:?}");
                // Without any one of them, whichever others there are.
                for bit in (0..64).map(|i| 1 << i).filter(|bit| needed & bit != 0) {
                    assert_eq!(mask(!bit).check(header, 1514), Err(HeaderFault::NotNegotiated), "{header:?}");
                }
            }
        }
    }

    #[test]
    fn flags_that_nobody_negotiated_are_ignored() {
        let flags = |flags| VnetHdr { flags, ..VnetHdr::PLAIN };
        let guest = Offloads::received(feature::GUEST_CSUM);
        assert_eq!(guest.check(flags(0xfe), 60), Ok(flags(VnetHdr::DATA_VALID)));
        assert_eq!(Offloads::received(!feature::GUEST_CSUM).check(flags(0xfe), 60), Ok(VnetHdr::PLAIN));
        assert_eq!(Offloads::sent(u64::MAX).check(flags(0xfe), 60), Ok(VnetHdr::PLAIN));
    }
}
