//! What the virtio specification says about network devices: feature bits, the header in front of every frame,
//! and the commands of the control queue. Numbers and layouts only; no state, no I/O.

/// Feature bits (virtio 1.2, sections 5.1.3 and 6), as masks.
pub mod feature {
    /// The device computes checksums of transmitted frames.
    pub const CSUM: u64 = 1 << 0;
    /// The driver accepts frames whose checksum is still to be computed.
    pub const GUEST_CSUM: u64 = 1 << 1;
    /// The device tells its MTU.
    pub const MTU: u64 = 1 << 3;
    /// The device has a MAC address of its own.
    pub const MAC: u64 = 1 << 5;
    /// The driver accepts TCP segments over IPv4 that were never cut to the MTU.
    pub const GUEST_TSO4: u64 = 1 << 7;
    /// The driver accepts TCP segments over IPv6 that were never cut to the MTU.
    pub const GUEST_TSO6: u64 = 1 << 8;
    /// The driver accepts unfragmented UDP datagrams.
    pub const GUEST_UFO: u64 = 1 << 10;
    /// The device cuts TCP segments over IPv4 to the MTU.
    pub const HOST_TSO4: u64 = 1 << 11;
    /// The device cuts TCP segments over IPv6 to the MTU.
    pub const HOST_TSO6: u64 = 1 << 12;
    /// The device cuts TCP segments with congestion notification.
    pub const HOST_ECN: u64 = 1 << 13;
    /// The device fragments UDP datagrams.
    pub const HOST_UFO: u64 = 1 << 14;
    /// A received frame may span several buffers.
    pub const MRG_RXBUF: u64 = 1 << 15;
    /// The link state can be read.
    pub const STATUS: u64 = 1 << 16;
    /// There is a control queue.
    pub const CTRL_VQ: u64 = 1 << 17;
    /// There are several queue pairs, and the control queue says how many are in use.
    pub const MQ: u64 = 1 << 22;
    /// vhost only: the device notes in a log which pages it writes.
    pub const LOG_ALL: u64 = 1 << 26;
    /// vhost-user only: protocol features can be negotiated.
    pub const VHOST_USER_PROTOCOL: u64 = 1 << 30;
    /// The device follows virtio 1.0 or later.
    pub const VERSION_1: u64 = 1 << 32;
    /// The device cuts UDP datagrams into smaller ones.
    pub const HOST_USO: u64 = 1 << 56;

    /// The specification's name of the lowest bit in `mask`, for error messages.
    #[must_use]
    pub fn name(mask: u64) -> &'static str {
        match mask & mask.wrapping_neg() {
            CSUM => "VIRTIO_NET_F_CSUM",
            GUEST_CSUM => "VIRTIO_NET_F_GUEST_CSUM",
            MTU => "VIRTIO_NET_F_MTU",
            MAC => "VIRTIO_NET_F_MAC",
            GUEST_TSO4 => "VIRTIO_NET_F_GUEST_TSO4",
            GUEST_TSO6 => "VIRTIO_NET_F_GUEST_TSO6",
            GUEST_UFO => "VIRTIO_NET_F_GUEST_UFO",
            HOST_TSO4 => "VIRTIO_NET_F_HOST_TSO4",
            HOST_TSO6 => "VIRTIO_NET_F_HOST_TSO6",
            HOST_ECN => "VIRTIO_NET_F_HOST_ECN",
            HOST_UFO => "VIRTIO_NET_F_HOST_UFO",
            HOST_USO => "VIRTIO_NET_F_HOST_USO",
            MRG_RXBUF => "VIRTIO_NET_F_MRG_RXBUF",
            STATUS => "VIRTIO_NET_F_STATUS",
            CTRL_VQ => "VIRTIO_NET_F_CTRL_VQ",
            MQ => "VIRTIO_NET_F_MQ",
            LOG_ALL => "VHOST_F_LOG_ALL",
            VHOST_USER_PROTOCOL => "VHOST_USER_F_PROTOCOL_FEATURES",
            VERSION_1 => "VIRTIO_F_VERSION_1",
            _ => "an unnamed feature",
        }
    }
}

/// The longest Ethernet frame of a standard network: 1500 bytes of payload, a VLAN tag, two addresses and a type.
pub const STANDARD_FRAME: usize = 1518;
/// The longest frame that segmentation offload produces: a maximal IP packet behind an Ethernet header.
pub const OFFLOAD_FRAME: usize = 65535 + 14;
/// The shortest Ethernet frame, without its frame check sequence.
pub const MIN_FRAME: usize = 60;

/// `struct virtio_net_hdr_v1`: 12 bytes in front of every frame, little endian, in both directions.
///
/// ```text
///  0 flags      u8     1 = checksum still to be computed, 2 = checksum vouched for
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
    /// The device vouches for the checksum.
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

    /// Whether the header asks for nothing: neither checksum nor segmentation.
    #[inline]
    #[must_use]
    pub fn is_plain(&self) -> bool {
        self.flags == 0 && self.gso_type == 0
    }

    /// Whether the offload fields can be true of a frame of `len` bytes. `num_buffers` is not looked at.
    #[inline]
    #[must_use]
    pub fn plausible(&self, len: usize) -> bool {
        self.is_plain() || self.offloads_plausible(len)
    }

    #[cold]
    fn offloads_plausible(&self, len: usize) -> bool {
        let csum_end = usize::from(self.csum_start) + usize::from(self.csum_offset) + 2;
        let csum_ok = self.flags & Self::NEEDS_CSUM == 0 || csum_end <= len;
        let gso_ok = match self.gso_type & !Self::GSO_ECN {
            Self::GSO_NONE => self.gso_type == 0,
            Self::GSO_TCPV4 | Self::GSO_TCPV6 | Self::GSO_UDP | Self::GSO_UDP_L4 => {
                self.gso_size > 0 && usize::from(self.hdr_len) <= len
            }
            _ => false,
        };
        csum_ok && gso_ok
    }
}

/// The control queue's one command that Netmem speaks: how many queue pairs are in use.
pub mod ctrl {
    /// Class `VIRTIO_NET_CTRL_MQ`.
    pub const CLASS_MQ: u8 = 4;
    /// Command `VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET`; its argument is the number of pairs, a little-endian `u16`.
    pub const MQ_PAIRS_SET: u8 = 0;
    /// The device's answer: done.
    pub const OK: u8 = 0;
    /// The device's answer: refused.
    pub const ERR: u8 = 1;
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

    #[test]
    fn nonsense_is_implausible() {
        assert!(VnetHdr::PLAIN.plausible(60));
        let csum = VnetHdr { flags: VnetHdr::NEEDS_CSUM, csum_start: 34, csum_offset: 16, ..VnetHdr::PLAIN };
        assert!(csum.plausible(60));
        assert!(!csum.plausible(51));
        assert!(!VnetHdr { gso_type: 9, ..VnetHdr::PLAIN }.plausible(60));
        assert!(!VnetHdr { gso_type: VnetHdr::GSO_TCPV4, gso_size: 0, ..VnetHdr::PLAIN }.plausible(60));
        assert!(!VnetHdr { gso_type: VnetHdr::GSO_ECN, ..VnetHdr::PLAIN }.plausible(60));
    }
}
