//! The configuration space: the properties that a device reports.
//!
//! ```text
//!  0 mac                  6 bytes   feature MAC
//!  6 status               u16       feature STATUS: 1 = the link is up; with GUEST_ANNOUNCE: 2 = the driver is to announce itself
//!  8 max_virtqueue_pairs  u16       feature MQ
//! 10 mtu                  u16       feature MTU
//! 12 speed                u32       feature SPEED_DUPLEX, Mbit/s; all ones: unknown
//! 16 duplex               u8        feature SPEED_DUPLEX, 0 = half, 1 = full; all ones: unknown
//! ```
//!
//! Integers are little endian. The fields after these are for hashes and RSS, which Netmem does not
//! support.

use super::feature;

/// Bytes of the configuration space that Netmem reads and has.
pub const LEN: usize = 17;

/// In the status: the link is up.
const LINK_UP: u16 = 1;
/// In the status: the driver is to announce itself.
const ANNOUNCE: u16 = 2;
/// The least MTU that a device may have (5.1.4.1).
const MIN_MTU: u16 = 68;

/// The properties of a device in its configuration space.
///
/// A field is `None` (the link: up) if its feature was not negotiated, and if its value is out of
/// the range that the specification allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NetConfig {
    /// The MAC address.
    pub mac: Option<[u8; 6]>,
    /// Whether the link is up.
    pub link_up: bool,
    /// Whether the device asks the driver to announce itself to the network.
    pub announce: bool,
    /// The most queue pairs.
    pub max_pairs: Option<u16>,
    /// The longest packet without its Ethernet header, in bytes.
    pub mtu: Option<u16>,
    /// Mbit/s.
    pub speed: Option<u32>,
    /// Whether both directions have the whole speed at the same time.
    pub full_duplex: Option<bool>,
}

impl Default for NetConfig {
    /// All fields are unknown, and the link is up.
    fn default() -> Self {
        Self { mac: None, link_up: true, announce: false, max_pairs: None, mtu: None, speed: None, full_duplex: None }
    }
}

impl NetConfig {
    /// How many bytes have a meaning with these features.
    #[must_use]
    pub(crate) fn len(features: u64) -> usize {
        let ends = [
            (feature::SPEED_DUPLEX, LEN),
            (feature::MTU, 12),
            (feature::MQ, 10),
            (feature::STATUS, 8),
            (feature::MAC, 6),
        ];
        ends.into_iter().find(|(bit, _)| features & bit != 0).map_or(0, |(_, end)| end)
    }

    /// Reads the bytes of a device. Fields with missing bytes, or without their feature, are
    /// ignored.
    #[must_use]
    pub(crate) fn read(features: u64, bytes: &[u8]) -> Self {
        let mut space = [0; LEN];
        let have = bytes.len().min(LEN);
        space[..have].copy_from_slice(&bytes[..have]);
        let u16_at = |at: usize| u16::from_le_bytes([space[at], space[at + 1]]);
        let has = |bit: u64| features & bit != 0 && Self::len(bit) <= have;
        let [m0, m1, m2, m3, m4, m5, ..] = space;
        let mac = [m0, m1, m2, m3, m4, m5];
        let speed = u32::from_le_bytes([space[12], space[13], space[14], space[15]]);
        let status = if has(feature::STATUS) { u16_at(6) } else { LINK_UP };
        Self {
            // A device cannot have a group address.
            mac: Some(mac).filter(|mac| has(feature::MAC) && mac[0] & 1 == 0 && *mac != [0; 6]),
            link_up: status & LINK_UP != 0,
            announce: has(feature::STATUS) && features & feature::GUEST_ANNOUNCE != 0 && status & ANNOUNCE != 0,
            max_pairs: Some(u16_at(8)).filter(|pairs| has(feature::MQ) && (1..=0x8000).contains(pairs)),
            mtu: Some(u16_at(10)).filter(|mtu| has(feature::MTU) && *mtu >= MIN_MTU),
            speed: Some(speed).filter(|speed| has(feature::SPEED_DUPLEX) && *speed <= i32::MAX as u32),
            full_duplex: match space[16] {
                half_or_full @ 0..=1 if has(feature::SPEED_DUPLEX) => Some(half_or_full == 1),
                _ => None,
            },
        }
    }

    /// The bytes, as a device has them. A field that is `None` is zero; the speed and the duplex
    /// then are "unknown".
    #[must_use]
    pub(crate) fn bytes(&self) -> [u8; LEN] {
        let status = if self.link_up { LINK_UP } else { 0 } | if self.announce { ANNOUNCE } else { 0 };
        let mut space = [0; LEN];
        space[..6].copy_from_slice(&self.mac.unwrap_or_default());
        space[6..8].copy_from_slice(&status.to_le_bytes());
        space[8..10].copy_from_slice(&self.max_pairs.unwrap_or_default().to_le_bytes());
        space[10..12].copy_from_slice(&self.mtu.unwrap_or_default().to_le_bytes());
        space[12..16].copy_from_slice(&self.speed.unwrap_or(u32::MAX).to_le_bytes());
        space[16] = self.full_duplex.map_or(u8::MAX, u8::from);
        space
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: u64 = u64::MAX;

    fn told() -> NetConfig {
        NetConfig {
            mac: Some([2, 1, 2, 3, 4, 5]),
            link_up: false,
            announce: true,
            max_pairs: Some(3),
            mtu: Some(9000),
            speed: Some(25_000),
            full_duplex: Some(true),
        }
    }

    #[test]
    fn it_lies_as_specified() {
        let bytes = told().bytes();
        assert_eq!(bytes, [2, 1, 2, 3, 4, 5, 2, 0, 3, 0, 0x28, 0x23, 0xa8, 0x61, 0, 0, 1]);
        assert_eq!(NetConfig::read(ALL, &bytes), told());
        let unknown = NetConfig::default();
        assert_eq!(NetConfig::read(ALL, &unknown.bytes()), unknown);
    }

    /// Each field needs its feature, and all of its bytes.
    #[test]
    fn what_was_not_negotiated_is_not_read() {
        let bytes = told().bytes();
        let none = NetConfig::default();
        assert_eq!(NetConfig::read(0, &bytes), none);
        let status = feature::STATUS;
        let fields = [
            (feature::MAC, NetConfig { mac: None, ..told() }),
            (status, NetConfig { link_up: true, announce: false, ..told() }),
            (feature::GUEST_ANNOUNCE, NetConfig { announce: false, ..told() }),
            (feature::MQ, NetConfig { max_pairs: None, ..told() }),
            (feature::MTU, NetConfig { mtu: None, ..told() }),
            (feature::SPEED_DUPLEX, NetConfig { speed: None, full_duplex: None, ..told() }),
        ];
        for (bit, without) in fields {
            assert_eq!(NetConfig::read(ALL & !bit, &bytes), without, "{}", feature::name(bit));
            let end = NetConfig::len(bit);
            let cut = NetConfig::read(bit, &bytes[..end.saturating_sub(1)]);
            assert_eq!(cut, none, "{} of which a byte is missing", feature::name(bit));
        }
        assert_eq!([0, ALL, feature::MAC | feature::MQ].map(NetConfig::len), [0, LEN, 10]);
    }

    #[test]
    fn values_out_of_range_are_not_believed() {
        let with = |change: fn(&mut NetConfig)| {
            let mut config = told();
            change(&mut config);
            NetConfig::read(ALL, &config.bytes())
        };
        assert_eq!(with(|c| c.mac = Some([1, 0, 0, 0, 0, 1])).mac, None);
        assert_eq!(with(|c| c.mac = Some([0; 6])).mac, None);
        for pairs in [0, 0x8001, u16::MAX] {
            let mut bytes = told().bytes();
            bytes[8..10].copy_from_slice(&pairs.to_le_bytes());
            assert_eq!(NetConfig::read(ALL, &bytes).max_pairs, None);
        }
        assert_eq!([with(|c| c.mtu = Some(67)).mtu, with(|c| c.mtu = Some(68)).mtu], [None, Some(68)]);
        assert_eq!(with(|c| c.speed = Some(1 << 31)).speed, None);
        let mut bytes = told().bytes();
        bytes[16] = 2;
        assert_eq!(NetConfig::read(ALL, &bytes).full_duplex, None);
    }
}
