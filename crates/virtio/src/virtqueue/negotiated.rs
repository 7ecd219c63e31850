//! The features that driver and device have negotiated.
//!
//! What a side may use follows from this value and from nothing else: a feature that was not
//! negotiated is neither used nor believed.

use crate::net::{Offloads, VnetHdr, feature};
use std::fmt;

/// The features that driver and device have negotiated, as a value with a method for each question.
///
/// ```
/// use netmem_virtio::net::feature;
/// use netmem_virtio::virtqueue::Negotiated;
///
/// let negotiated = Negotiated::new(feature::VERSION_1 | feature::RING_PACKED);
/// assert!(negotiated.packed() && !negotiated.event_idx());
/// assert_eq!(negotiated.header_len(), 12);
/// ```
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Negotiated(u64);

impl Negotiated {
    /// Features that concern rings alone.
    pub const RING: u64 = feature::INDIRECT_DESC | feature::EVENT_IDX | feature::RING_PACKED | feature::IN_ORDER;

    /// The features ([`feature`]) that the driver has accepted, of those that the device offers.
    #[must_use]
    pub const fn new(bits: u64) -> Self {
        Self(bits)
    }

    /// The features as a mask.
    #[must_use]
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Whether all features of `mask` may be used.
    #[inline]
    #[must_use]
    pub const fn has(self, mask: u64) -> bool {
        self.0 & mask == mask
    }

    /// Whether rings are packed.
    #[inline]
    #[must_use]
    pub const fn packed(self) -> bool {
        self.has(feature::RING_PACKED)
    }

    /// Whether notifications are asked for by position.
    #[inline]
    #[must_use]
    pub const fn event_idx(self) -> bool {
        self.has(feature::EVENT_IDX)
    }

    /// Whether a buffer may be described by a table of descriptors.
    #[inline]
    #[must_use]
    pub const fn indirect(self) -> bool {
        self.has(feature::INDIRECT_DESC)
    }

    /// Whether the device uses buffers in the order in which they were made available. One used
    /// entry may then stand for several buffers.
    #[inline]
    #[must_use]
    pub const fn in_order(self) -> bool {
        self.has(feature::IN_ORDER)
    }

    /// Whether a received frame may span several buffers.
    #[inline]
    #[must_use]
    pub const fn mergeable(self) -> bool {
        self.has(feature::MRG_RXBUF)
    }

    /// Bytes of the header in front of each frame. That of a legacy driver without mergeable
    /// buffers lacks the number of buffers.
    #[must_use]
    pub const fn header_len(self) -> usize {
        if self.0 & (feature::VERSION_1 | feature::MRG_RXBUF) != 0 { VnetHdr::LEN } else { VnetHdr::LEGACY_LEN }
    }

    /// The offloads that the header of a frame from the device may use.
    #[must_use]
    pub const fn received(self) -> Offloads {
        Offloads::received(self.0)
    }

    /// The offloads that the header of a frame from the driver may use.
    #[must_use]
    pub const fn sent(self) -> Offloads {
        Offloads::sent(self.0)
    }
}

impl fmt::Debug for Negotiated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Negotiated({:#x})", self.0)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn each_answer_has_its_bit() {
        let of = Negotiated::new;
        let answers = |n: Negotiated| [n.packed(), n.event_idx(), n.indirect(), n.in_order(), n.mergeable()];
        let bits =
            [feature::RING_PACKED, feature::EVENT_IDX, feature::INDIRECT_DESC, feature::IN_ORDER, feature::MRG_RXBUF];
        for (i, bit) in bits.into_iter().enumerate() {
            let mut want = [false; 5];
            want[i] = true;
            assert_eq!(answers(of(bit)), want);
            assert_eq!(answers(of(!bit)), want.map(|w| !w));
        }
        assert!(of(6).has(2) && !of(6).has(3));
        assert_eq!([0, feature::VERSION_1, feature::MRG_RXBUF].map(|b| of(b).header_len()), [10, 12, 12]);
        assert_eq!(of(feature::CSUM).sent(), Offloads::sent(feature::CSUM));
        assert_eq!(of(feature::GUEST_CSUM).received(), Offloads::received(feature::GUEST_CSUM));
    }
}
