//! Known defects and limits of drivers that affect users of AF_XDP: a small table with sources.
//!
//! When the first socket of an interface is opened, each entry of its driver is logged as a
//! warning. An entry can also change a default. The options of the queue override this.

/// The default that an entry changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Effect {
    /// None: the user gets a warning.
    Warning,
    /// Sockets are opened in copy mode, unless [`QueueOptions::mode`](crate::QueueOptions::mode) or
    /// [`QueueOptions::ignore_quirks`](crate::QueueOptions::ignore_quirks) is set.
    CopyMode,
}

/// A known defect or limit of a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Quirk {
    /// The driver's name, as reported by ethtool.
    pub driver: &'static str,
    /// The first kernel version without the quirk, as (major, minor).
    pub until: Option<(u32, u32)>,
    /// The effect on defaults.
    pub effect: Effect,
    /// The text of the warning.
    pub text: &'static str,
    /// The source of the description, or the test of this repository that shows the quirk.
    pub source: &'static str,
}

const PROGRAM_FIRST: &str = "zero-copy needs an XDP program on the interface before the socket is bound, because the driver makes the \
     queues for it when a program is attached; without one the socket is bound in copy mode";

/// Defects that the crate always works around are not in this table. For instance, the drivers
/// `i40e` and `ice` leak buffers when they find fewer chunks in the fill ring than their own ring
/// has entries, even with programs that only send (<https://github.com/anza-xyz/agave/pull/6836>).
/// So every queue is filled before it is bound.
const TABLE: &[Quirk] = &[
    Quirk {
        driver: "ice",
        until: Some((4, 19)),
        effect: Effect::CopyMode,
        text: "in zero-copy mode the interface receives nothing at all with this kernel; the socket is opened in copy mode",
        source: "https://github.com/firedancer-io/firedancer/issues/273",
    },
    Quirk {
        driver: "ice",
        until: None,
        effect: Effect::Warning,
        text: PROGRAM_FIRST,
        source: "https://github.com/xdp-project/xdp-project/issues/100",
    },
    Quirk {
        driver: "i40e",
        until: None,
        effect: Effect::Warning,
        text: PROGRAM_FIRST,
        source: "https://github.com/xdp-project/xdp-project/issues/100",
    },
    Quirk {
        driver: "ixgbe",
        until: None,
        effect: Effect::Warning,
        text: PROGRAM_FIRST,
        source: "https://github.com/xdp-project/xdp-project/issues/100",
    },
    Quirk {
        driver: "gve",
        until: None,
        effect: Effect::Warning,
        text: "with queues of the format GQI-QPL the driver copies each frame even in the mode that it calls zero-copy",
        source: "https://github.com/torvalds/linux/commit/fd8e40321a12391e6f554cc637d0c4b6109682a9",
    },
    Quirk {
        driver: "mlx5_core",
        until: Some((6, 1)),
        effect: Effect::Warning,
        text: "with this kernel the driver has zero-copy only on queues of its own, whose numbers follow those of the ordinary queues; on the \
             ordinary ones the socket is bound in copy mode",
        source: "https://github.com/torvalds/linux/commit/3db4c85cde7a514a5277070b32e776dbefcaa838",
    },
    Quirk {
        driver: "virtio_net",
        until: Some((6, 13)),
        effect: Effect::Warning,
        text: "with this kernel the driver has no zero-copy; the socket is bound in copy mode",
        source: "tests/peers/README.md",
    },
    Quirk {
        driver: "virtio_net",
        until: None,
        effect: Effect::Warning,
        text: "zero-copy needs a device that uses the DMA API (iommu_platform=on of QEMU) and frames of one buffer: an MTU that fits into a chunk, \
             or QueueOptions::multi_buffer; otherwise the socket is bound in copy mode",
        source: "crates/xsk/tests/quirks.rs",
    },
    Quirk {
        driver: "veth",
        until: None,
        effect: Effect::Warning,
        text: "frames of the kernel at the other end arrive as it left them to its device: without their checksum, or larger than the MTU. \
             Switch that off at the other end: ethtool -K PEER tx off gso off tso off",
        source: "https://github.com/xdp-project/xdp-tutorial/issues/160",
    },
];

/// The known quirks of a driver with a kernel of this version.
pub fn quirks(driver: &str, kernel: (u32, u32)) -> impl Iterator<Item = &'static Quirk> {
    TABLE.iter().filter(move |quirk| quirk.driver == driver && quirk.until.is_none_or(|fixed| kernel < fixed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quirk_ends_with_the_kernel_that_has_none() {
        let of = |driver, kernel| quirks(driver, kernel).map(|quirk| quirk.effect).collect::<Vec<_>>();
        assert_eq!(of("ice", (4, 18)), [Effect::CopyMode, Effect::Warning]);
        assert_eq!(of("ice", (4, 19)), [Effect::Warning]);
        assert_eq!((of("virtio_net", (6, 12)).len(), of("virtio_net", (6, 13)).len()), (2, 1));
        assert!(of("lo", (4, 18)).is_empty());
    }
}
