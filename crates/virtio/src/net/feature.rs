//! Feature bits (virtio 1.2, sections 5.1.3 and 6), as masks. `docs/design/virtio.md` states what
//! the driver and the device do with each of them.

macro_rules! features {
    ($($name:ident = $bit:literal, $specified:literal, $what:literal;)+) => {
        $(#[doc = $what] pub const $name: u64 = 1 << $bit;)+

        /// The specification's name of the lowest bit in `mask`, for error messages.
        #[must_use]
        pub const fn name(mask: u64) -> &'static str {
            match mask & mask.wrapping_neg() {
                $($name => $specified,)+
                _ => UNNAMED,
            }
        }
    };
}

/// What [`name`] returns for a bit that the specification does not define.
pub const UNNAMED: &str = "an unnamed feature";

features! {
    CSUM = 0, "VIRTIO_NET_F_CSUM", "The device computes checksums of transmitted frames.";
    GUEST_CSUM = 1, "VIRTIO_NET_F_GUEST_CSUM", "The driver accepts frames whose checksum is still to be computed.";
    CTRL_GUEST_OFFLOADS = 2, "VIRTIO_NET_F_CTRL_GUEST_OFFLOADS",
        "The driver can switch the offloads of received frames off and on by the control queue.";
    MTU = 3, "VIRTIO_NET_F_MTU", "The device tells its MTU.";
    MAC = 5, "VIRTIO_NET_F_MAC", "The device has a MAC address of its own.";
    GSO = 6, "VIRTIO_NET_F_GSO", "Legacy: the device cuts segments of every kind.";
    GUEST_TSO4 = 7, "VIRTIO_NET_F_GUEST_TSO4",
        "The driver accepts TCP segments over IPv4 that were never cut to the MTU.";
    GUEST_TSO6 = 8, "VIRTIO_NET_F_GUEST_TSO6",
        "The driver accepts TCP segments over IPv6 that were never cut to the MTU.";
    GUEST_ECN = 9, "VIRTIO_NET_F_GUEST_ECN", "The driver accepts TCP segments with congestion notification.";
    GUEST_UFO = 10, "VIRTIO_NET_F_GUEST_UFO", "The driver accepts unfragmented UDP datagrams.";
    HOST_TSO4 = 11, "VIRTIO_NET_F_HOST_TSO4", "The device cuts TCP segments over IPv4 to the MTU.";
    HOST_TSO6 = 12, "VIRTIO_NET_F_HOST_TSO6", "The device cuts TCP segments over IPv6 to the MTU.";
    HOST_ECN = 13, "VIRTIO_NET_F_HOST_ECN", "The device cuts TCP segments with congestion notification.";
    HOST_UFO = 14, "VIRTIO_NET_F_HOST_UFO", "The device fragments UDP datagrams.";
    MRG_RXBUF = 15, "VIRTIO_NET_F_MRG_RXBUF", "A received frame may span several buffers.";
    STATUS = 16, "VIRTIO_NET_F_STATUS", "The link state can be read.";
    CTRL_VQ = 17, "VIRTIO_NET_F_CTRL_VQ", "There is a control queue.";
    CTRL_RX = 18, "VIRTIO_NET_F_CTRL_RX", "The control queue switches promiscuous and all-multicast reception.";
    CTRL_VLAN = 19, "VIRTIO_NET_F_CTRL_VLAN", "The control queue filters by VLAN.";
    CTRL_RX_EXTRA = 20, "VIRTIO_NET_F_CTRL_RX_EXTRA",
        "The control queue switches the reception of unicast, multicast and broadcast frames off.";
    GUEST_ANNOUNCE = 21, "VIRTIO_NET_F_GUEST_ANNOUNCE", "The driver announces itself to the network when asked.";
    MQ = 22, "VIRTIO_NET_F_MQ", "There are several queue pairs, and the control queue says how many are in use.";
    CTRL_MAC_ADDR = 23, "VIRTIO_NET_F_CTRL_MAC_ADDR", "The control queue sets the MAC address.";
    NOTIFY_ON_EMPTY = 24, "VIRTIO_F_NOTIFY_ON_EMPTY",
        "Legacy: the device notifies the driver when a ring has become empty, wanted or not.";
    LOG_ALL = 26, "VHOST_F_LOG_ALL", "vhost only: the device notes in a log which pages it writes.";
    ANY_LAYOUT = 27, "VIRTIO_F_ANY_LAYOUT", "Legacy: the header may share a descriptor with the frame.";
    INDIRECT_DESC = 28, "VIRTIO_F_INDIRECT_DESC", "A buffer may be described by a table of descriptors.";
    EVENT_IDX = 29, "VIRTIO_F_EVENT_IDX",
        "Each side asks for a notification by the position in the ring at which it wants one.";
    VHOST_USER_PROTOCOL = 30, "VHOST_USER_F_PROTOCOL_FEATURES",
        "vhost-user only: protocol features can be negotiated.";
    VERSION_1 = 32, "VIRTIO_F_VERSION_1", "The device follows virtio 1.0 or later.";
    ACCESS_PLATFORM = 33, "VIRTIO_F_ACCESS_PLATFORM", "The device reaches memory through an IOMMU.";
    RING_PACKED = 34, "VIRTIO_F_RING_PACKED", "Rings are packed.";
    IN_ORDER = 35, "VIRTIO_F_IN_ORDER", "The device uses buffers in the order in which they were made available.";
    ORDER_PLATFORM = 36, "VIRTIO_F_ORDER_PLATFORM", "The driver orders its accesses as for a device of hardware.";
    SR_IOV = 37, "VIRTIO_F_SR_IOV", "The device has virtual functions on a PCI bus.";
    NOTIFICATION_DATA = 38, "VIRTIO_F_NOTIFICATION_DATA", "A notification says how far the driver has got.";
    NOTIF_CONFIG_DATA = 39, "VIRTIO_F_NOTIF_CONFIG_DATA", "The device says what a notification is to contain.";
    RING_RESET = 40, "VIRTIO_F_RING_RESET", "The driver can reset a queue by itself.";
    NOTF_COAL = 53, "VIRTIO_NET_F_NOTF_COAL", "The control queue sets how notifications are delayed.";
    GUEST_USO4 = 54, "VIRTIO_NET_F_GUEST_USO4",
        "The driver accepts UDP datagrams over IPv4 that were never cut into smaller ones.";
    GUEST_USO6 = 55, "VIRTIO_NET_F_GUEST_USO6",
        "The driver accepts UDP datagrams over IPv6 that were never cut into smaller ones.";
    HOST_USO = 56, "VIRTIO_NET_F_HOST_USO", "The device cuts UDP datagrams into smaller ones.";
    HASH_REPORT = 57, "VIRTIO_NET_F_HASH_REPORT", "The device tells the hash of each received frame.";
    GUEST_HDRLEN = 59, "VIRTIO_NET_F_GUEST_HDRLEN", "The driver states the exact length of a segment's headers.";
    RSS = 60, "VIRTIO_NET_F_RSS", "The device spreads received frames over the queues by a hash that the driver sets.";
    RSC_EXT = 61, "VIRTIO_NET_F_RSC_EXT", "The device tells how many segments and acknowledgements it has joined.";
    STANDBY = 62, "VIRTIO_NET_F_STANDBY", "The device stands by for another one of the same MAC address.";
    SPEED_DUPLEX = 63, "VIRTIO_NET_F_SPEED_DUPLEX", "The device tells its speed and duplex.";
}

/// Offloads of frames from the device.
pub const GUEST_OFFLOADS: u64 = GUEST_CSUM | GUEST_TSO4 | GUEST_TSO6 | GUEST_ECN | GUEST_UFO | GUEST_USO4 | GUEST_USO6;
/// Offloads of frames from the driver.
pub const HOST_OFFLOADS: u64 = CSUM | HOST_TSO4 | HOST_TSO6 | HOST_ECN | HOST_UFO | HOST_USO;

/// Removes from `mask` the offloads that need others which it lacks (5.1.3.1): segments need
/// checksums, and congestion notification needs TCP segments. The two bits of UDP segments from the
/// device are used together or not at all, because the header of a frame does not tell which of the
/// two it is.
#[must_use]
pub const fn with_needs(mask: u64) -> u64 {
    let uso = GUEST_USO4 | GUEST_USO6;
    let mut mask = mask;
    if mask & CSUM == 0 {
        mask &= !HOST_OFFLOADS;
    }
    if mask & GUEST_CSUM == 0 {
        mask &= !GUEST_OFFLOADS;
    }
    if mask & (HOST_TSO4 | HOST_TSO6) == 0 {
        mask &= !HOST_ECN;
    }
    if mask & (GUEST_TSO4 | GUEST_TSO6) == 0 {
        mask &= !GUEST_ECN;
    }
    if mask & uso != uso {
        mask &= !uso;
    }
    mask
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        assert_eq!(name(CSUM | MRG_RXBUF), "VIRTIO_NET_F_CSUM");
        assert_eq!(name(SPEED_DUPLEX), "VIRTIO_NET_F_SPEED_DUPLEX");
        assert_eq!([name(1 << 4), name(1 << 31), name(0)], [UNNAMED; 3]);
    }
    /// An offload is there only with those that it needs.
    #[test]
    fn offloads_need_each_other() {
        let needs = [
            (HOST_TSO4, CSUM),
            (HOST_TSO6, CSUM),
            (HOST_UFO, CSUM),
            (HOST_USO, CSUM),
            (HOST_ECN, CSUM | HOST_TSO6),
            (GUEST_TSO4, GUEST_CSUM),
            (GUEST_TSO6, GUEST_CSUM),
            (GUEST_UFO, GUEST_CSUM),
            (GUEST_USO4, GUEST_CSUM | GUEST_USO6),
            (GUEST_USO6, GUEST_CSUM | GUEST_USO4),
            (GUEST_ECN, GUEST_CSUM | GUEST_TSO4),
        ];
        for (bit, needed) in needs {
            assert_eq!(with_needs(bit | needed), bit | needed, "{}", name(bit));
            for one in (0..64).map(|i| 1 << i).filter(|one| needed & one != 0) {
                let without = with_needs((bit | needed) & !one);
                assert_eq!(without & bit, 0, "{} without {}", name(bit), name(one));
            }
        }
        let rest = !(GUEST_OFFLOADS | HOST_OFFLOADS);
        assert_eq!((with_needs(rest), with_needs(u64::MAX)), (rest, u64::MAX));
    }
}
