//! The constants of `linux/if_xdp.h` that `libc` lacks, and an entry of the RX and TX rings.

/// An entry of the RX and TX rings: `struct xdp_desc`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Desc {
    /// The offset of the first byte in the UMEM.
    pub(crate) addr: u64,
    /// The length in bytes.
    pub(crate) len: u32,
    /// Flags: [`PKT_CONTD`] and [`TX_METADATA`].
    pub(crate) options: u32,
}

/// The kernel has stopped polling the ring, and needs a system call.
pub(crate) const RING_NEED_WAKEUP: u32 = libc::XDP_RING_NEED_WAKEUP;
/// The frame continues in the next descriptor.
pub(crate) const PKT_CONTD: u32 = libc::XDP_PKT_CONTD;
/// Metadata is in front of the frame.
pub(crate) const TX_METADATA: u32 = libc::XDP_TX_METADATA;

/// The length of `struct xsk_tx_metadata` in bytes.
pub(crate) const TX_METADATA_LEN: usize = 24;
/// The device fills in the launch time: `XDP_TXMD_FLAGS_LAUNCH_TIME`, from Linux 6.15 on.
pub(crate) const TXMD_LAUNCH_TIME: u64 = 1 << 2;
/// The device is asked to store the time of transmission.
pub(crate) const TXMD_TIMESTAMP: u64 = libc::XDP_TXMD_FLAGS_TIMESTAMP as u64;
/// The device is asked to compute the checksum.
pub(crate) const TXMD_CHECKSUM: u64 = libc::XDP_TXMD_FLAGS_CHECKSUM as u64;
