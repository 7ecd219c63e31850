//! The commands of the control queue: a class, a command, their argument, and one byte of answer.
//!
//! Netmem speaks two of them: how many queue pairs are in use, and that the driver has announced
//! itself. Its device refuses all others with [`ERR`]; `docs/design/virtio.md` lists them.

/// Class `VIRTIO_NET_CTRL_ANNOUNCE`.
pub const CLASS_ANNOUNCE: u8 = 3;
/// Command `VIRTIO_NET_CTRL_ANNOUNCE_ACK`, without an argument: the driver has announced itself.
pub const ANNOUNCE_ACK: u8 = 0;
/// Class `VIRTIO_NET_CTRL_MQ`.
pub const CLASS_MQ: u8 = 4;
/// Command `VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET`; its argument is the number of pairs, a little-endian
/// `u16`.
pub const MQ_PAIRS_SET: u8 = 0;
/// The device's answer: done.
pub const OK: u8 = 0;
/// The device's answer: refused.
pub const ERR: u8 = 1;

/// All commands of virtio 1.2 for network devices: class, command, and the specification's name.
pub const COMMANDS: [(u8, u8, &str); 17] = [
    (0, 0, "VIRTIO_NET_CTRL_RX_PROMISC"),
    (0, 1, "VIRTIO_NET_CTRL_RX_ALLMULTI"),
    (0, 2, "VIRTIO_NET_CTRL_RX_ALLUNI"),
    (0, 3, "VIRTIO_NET_CTRL_RX_NOMULTI"),
    (0, 4, "VIRTIO_NET_CTRL_RX_NOUNI"),
    (0, 5, "VIRTIO_NET_CTRL_RX_NOBCAST"),
    (1, 0, "VIRTIO_NET_CTRL_MAC_TABLE_SET"),
    (1, 1, "VIRTIO_NET_CTRL_MAC_ADDR_SET"),
    (2, 0, "VIRTIO_NET_CTRL_VLAN_ADD"),
    (2, 1, "VIRTIO_NET_CTRL_VLAN_DEL"),
    (CLASS_ANNOUNCE, ANNOUNCE_ACK, "VIRTIO_NET_CTRL_ANNOUNCE_ACK"),
    (CLASS_MQ, MQ_PAIRS_SET, "VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET"),
    (CLASS_MQ, 1, "VIRTIO_NET_CTRL_MQ_RSS_CONFIG"),
    (CLASS_MQ, 2, "VIRTIO_NET_CTRL_MQ_HASH_CONFIG"),
    (5, 0, "VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET"),
    (6, 0, "VIRTIO_NET_CTRL_NOTF_COAL_TX_SET"),
    (6, 1, "VIRTIO_NET_CTRL_NOTF_COAL_RX_SET"),
];
