//! How a socket is to be bound: in which mode, and whether a frame may be in several buffers.
//!
//! Many drivers have zero-copy for frames of one buffer only. A socket that asks for frames of
//! several buffers is then bound in copy mode, and the kernel does not report it. Therefore several
//! buffers are requested only where frames can need them, unless the options decide.

use crate::netlink::{Interface, XdpFeatures};
use crate::options::{Mode, QueueOptions};
use crate::quirks::{Effect, Quirk};
use std::fmt;

/// Bytes of an Ethernet header with two VLAN tags, which the MTU does not count.
const HEADER: usize = 14 + 2 * 4;

/// Why a socket is in copy mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CopyReason {
    /// The options require it ([`QueueOptions::mode`]).
    Requested,
    /// A [known quirk](crate::quirks) of the driver requires it.
    Quirk,
    /// The driver has no zero-copy.
    Driver,
    /// In zero-copy mode, the driver's frames are in one buffer. The options
    /// ([`QueueOptions::multi_buffer`]) or the interface's MTU require several.
    Fragments,
    /// The first socket of the UMEM is in copy mode, and all have the mode of the first.
    First,
    /// The driver has zero-copy, and did not use it for this queue.
    Refused,
    /// The driver's features cannot be read: before Linux 6.3, or because the socket is of another
    /// network namespace.
    Unknown,
}

impl fmt::Display for CopyReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Requested => "as requested",
            Self::Quirk => "because of a quirk of the driver",
            Self::Driver => "the driver has no zero-copy",
            Self::Fragments => "the driver has zero-copy for frames of one buffer, and frames may have several",
            Self::First => "as the first socket of the UMEM",
            Self::Refused => "the driver did not use zero-copy on this queue",
            Self::Unknown => "the driver's features are unknown",
        })
    }
}

/// The limits of an interface, as far as they are known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Limits {
    pub(crate) features: Option<XdpFeatures>,
    pub(crate) mtu: Option<u32>,
}

impl Limits {
    /// Of an interface of this thread's network namespace.
    pub(crate) fn of(ifindex: u32) -> Self {
        let mtu = Interface::by_index(ifindex).ok().map(|interface| interface.mtu);
        Self { features: XdpFeatures::of(ifindex).ok(), mtu }
    }
}

/// How a socket is to be bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Binding {
    /// The mode to request. `None` leaves the choice to the kernel.
    pub(crate) mode: Option<Mode>,
    /// Whether a frame may be in several buffers.
    pub(crate) multi_buffer: bool,
    /// Whether the options leave `multi_buffer` open: a kernel that does not know it is asked again
    /// without it.
    pub(crate) optional: bool,
    /// Why, if the kernel chooses copy mode or is asked for it.
    pub(crate) reason: CopyReason,
}

impl Binding {
    /// For an interface with these limits and quirks, and a UMEM with `room` bytes in a chunk for a
    /// frame. A queue that only sends, and has no chunks, is bound in copy mode.
    pub(crate) fn new(options: &QueueOptions, quirks: &[&Quirk], limits: Limits, room: usize) -> Self {
        let quirk = options.quirks && quirks.iter().any(|quirk| quirk.effect == Effect::CopyMode);
        // A queue without chunks cannot be in zero-copy mode.
        let copy = quirk || options.transmit_only;
        let mode = options.mode.or(copy.then_some(Mode::Copy));
        let zero_copy = limits.features.filter(XdpFeatures::zero_copy);
        let one_buffer = zero_copy.is_some_and(|features| features.zero_copy_fragments <= 1);
        let fits = limits.mtu.is_some_and(|mtu| mtu as usize + HEADER <= room);
        let multi_buffer = options.multi_buffer.unwrap_or(mode == Some(Mode::Copy) || !(one_buffer && fits));
        let reason = match (options.mode, limits.features) {
            (Some(Mode::Copy), _) => CopyReason::Requested,
            _ if quirk && mode == Some(Mode::Copy) => CopyReason::Quirk,
            (_, None) => CopyReason::Unknown,
            _ if zero_copy.is_none() => CopyReason::Driver,
            _ if one_buffer && multi_buffer => CopyReason::Fragments,
            _ => CopyReason::Refused,
        };
        Self { mode, multi_buffer, optional: options.multi_buffer.is_none(), reason }
    }

    /// The values of `multi_buffer` to bind with: the next one if the kernel refuses the one before
    /// as invalid.
    pub(crate) fn attempts(&self) -> impl Iterator<Item = bool> {
        let again = self.multi_buffer && self.optional;
        [Some(self.multi_buffer), again.then_some(false)].into_iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quirks::quirks;

    const ROOM: usize = 2048 - 256;

    fn limits(fragments: u32, mtu: u32) -> Limits {
        Limits { features: Some(XdpFeatures::with_zero_copy(fragments)), mtu: Some(mtu) }
    }

    fn binding(options: &QueueOptions, limits: Limits) -> (Option<Mode>, bool, CopyReason) {
        let binding = Binding::new(options, &[], limits, ROOM);
        (binding.mode, binding.multi_buffer, binding.reason)
    }

    /// A driver that has zero-copy for frames of one buffer keeps it, unless a frame of the MTU
    /// needs two.
    #[test]
    fn several_buffers_are_asked_for_where_frames_need_them() {
        use CopyReason::{Driver, Fragments, Refused, Requested, Unknown};
        let options = QueueOptions::new;
        let of = |limits| binding(&options(), limits);
        assert_eq!(of(limits(1, 1500)), (None, false, Refused));
        assert_eq!(of(limits(1, 1770)), (None, false, Refused));
        assert_eq!(of(limits(1, 1771)), (None, true, Fragments));
        assert_eq!(of(limits(1, 9000)), (None, true, Fragments));
        assert_eq!(of(Limits { mtu: None, ..limits(1, 0) }), (None, true, Fragments));
        assert_eq!(of(limits(17, 1500)), (None, true, Refused));
        assert_eq!(of(limits(0, 1500)), (None, true, Driver));
        assert_eq!(of(Limits::default()), (None, true, Unknown));
        // The options decide, if they are set.
        assert_eq!(binding(&options().multi_buffer(true), limits(1, 1500)), (None, true, Fragments));
        assert_eq!(binding(&options().multi_buffer(false), limits(17, 9000)), (None, false, Refused));
        assert_eq!(binding(&options().mode(Mode::Copy), limits(1, 1500)), (Some(Mode::Copy), true, Requested));
        assert!(!binding(&options().mode(Mode::ZeroCopy), limits(1, 1500)).1);
    }

    /// A queue without chunks is bound in copy mode, whatever its driver has.
    #[test]
    fn a_queue_without_chunks_is_in_copy_mode() {
        let options = || QueueOptions { transmit_only: true, ..QueueOptions::new() };
        assert_eq!(options().required_mode(), Some(Mode::Copy));
        for (fragments, reason) in [(0, CopyReason::Driver), (17, CopyReason::Refused)] {
            assert_eq!(binding(&options(), limits(fragments, 1500)), (Some(Mode::Copy), true, reason));
        }
    }

    /// Before Linux 6.6, the kernel knows no frames of several buffers: sockets are bound without
    /// them, unless the options require them.
    #[test]
    fn an_old_kernel_is_asked_again() {
        let attempts =
            |options: QueueOptions, limits| Binding::new(&options, &[], limits, ROOM).attempts().collect::<Vec<_>>();
        assert_eq!(attempts(QueueOptions::new(), limits(17, 1500)), [true, false]);
        assert_eq!(attempts(QueueOptions::new(), limits(1, 1500)), [false]);
        assert_eq!(attempts(QueueOptions::new().multi_buffer(true), limits(17, 1500)), [true]);
        assert_eq!(attempts(QueueOptions::new().multi_buffer(false), limits(17, 1500)), [false]);
    }

    #[test]
    fn quirks_decide_about_the_mode_unless_the_options_do() {
        let options = QueueOptions::new;
        let copy: Vec<_> = quirks("ice", (4, 18)).collect();
        let warning: Vec<_> = quirks("ice", (6, 0)).collect();
        let of = |options: QueueOptions, quirks: &[&Quirk]| {
            let binding = Binding::new(&options, quirks, limits(17, 1500), ROOM);
            (binding.mode, binding.reason)
        };
        assert_eq!(of(options(), &copy), (Some(Mode::Copy), CopyReason::Quirk));
        assert_eq!(of(options(), &warning), (None, CopyReason::Refused));
        assert_eq!(of(options().ignore_quirks(), &copy), (None, CopyReason::Refused));
        assert_eq!(of(options().mode(Mode::ZeroCopy), &copy).0, Some(Mode::ZeroCopy));
        assert_eq!(of(options().mode(Mode::Copy), &copy).1, CopyReason::Requested);
    }
}
