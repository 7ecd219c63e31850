//! The frames that a receive queue lost, by cause.

use crate::stats::{KernelStats, RxStats};

/// The frames that a receive queue lost, by cause: the kernel's counters of the socket together
/// with the queue's own ([`XskRx::drops`](crate::XskRx::drops)).
///
/// In copy mode, each frame for the socket that the queue was polled for is either delivered with
/// the verdict pass, transmit or redirect, or counted once in [`frames`](Self::frames). In
/// zero-copy mode, the device itself drops frames for which it has no chunk, and only the driver's
/// own counters have them (`ethtool -S`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RxDrops {
    /// Frames that the kernel dropped because the RX ring was full: the queue is polled too rarely,
    /// or its ring is too small.
    pub ring_full: u64,
    /// Frames that the kernel dropped because the fill ring had no chunk: the program holds too
    /// many pages, or the fill level is too low. In copy mode, also frames that were longer than a
    /// chunk, if the socket does not accept frames of several buffers.
    pub no_buffer: u64,
    /// Frames that the queue dropped because of their shape: too short, in too many buffers, or in
    /// several buffers for a handler that needs one.
    pub shape: u64,
    /// Frames that the handler's program dropped.
    pub program: u64,
    /// Frames that the handler's program failed to process.
    pub aborted: u64,
    /// Frames that were in the RX ring when the queue was closed, to be
    /// [opened again](crate::ClosedQueue) or [for good](crate::XskRx::close_counted).
    pub unpolled: u64,
    /// Entries of the fill ring that the kernel refused. They are chunks, not frames, and are not
    /// in [`frames`](Self::frames).
    pub invalid_descriptor: u64,
}

impl RxDrops {
    pub(crate) fn new(queue: &RxStats, kernel: &KernelStats) -> Self {
        Self {
            ring_full: kernel.rx_ring_full,
            no_buffer: kernel.rx_dropped,
            shape: queue.short + queue.not_linear + queue.too_many,
            program: queue.dropped,
            aborted: queue.aborted,
            unpolled: queue.unpolled,
            invalid_descriptor: kernel.rx_invalid,
        }
    }

    /// The number of frames that were dropped, for all causes.
    #[must_use]
    pub fn frames(&self) -> u64 {
        self.ring_full + self.no_buffer + self.shape + self.program + self.aborted + self.unpolled
    }

    /// The causes by name, without those that did not occur.
    pub fn causes(&self) -> impl Iterator<Item = (&'static str, u64)> {
        [
            ("ring_full", self.ring_full),
            ("no_buffer", self.no_buffer),
            ("shape", self.shape),
            ("program", self.program),
            ("aborted", self.aborted),
            ("unpolled", self.unpolled),
            ("invalid_descriptor", self.invalid_descriptor),
        ]
        .into_iter()
        .filter(|&(_, n)| n > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each counter of the kernel and of the queue has its cause. Chunks are not counted as frames.
    #[test]
    fn each_counter_has_its_cause() {
        let kernel = KernelStats {
            rx_dropped: 1,
            rx_invalid: 2,
            tx_invalid: 1 << 32,
            rx_ring_full: 4,
            rx_fill_empty: 1 << 33,
            tx_ring_empty: 1 << 34,
        };
        let queue = RxStats {
            frames: 1 << 35,
            passed: 1 << 36,
            dropped: 8,
            aborted: 16,
            not_linear: 32,
            short: 64,
            too_many: 128,
            unpolled: 256,
            out_of_buffers: 1 << 37,
            ..RxStats::default()
        };
        let drops = RxDrops::new(&queue, &kernel);
        let causes: Vec<_> = drops.causes().collect();
        let expected = [
            ("ring_full", 4),
            ("no_buffer", 1),
            ("shape", 32 + 64 + 128),
            ("program", 8),
            ("aborted", 16),
            ("unpolled", 256),
            ("invalid_descriptor", 2),
        ];
        assert_eq!((causes.as_slice(), drops.frames()), (expected.as_slice(), 253 + 256));
        assert_eq!(RxDrops::default().causes().count(), 0);
    }
}
