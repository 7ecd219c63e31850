//! When a queue that only polls checks its connection. See `disconnect.rs`.
//!
//! A poll makes no system call, so the end of the connection is not visible to it. A counter in the
//! queue spreads the cost of a check over many polls.

/// Polls of a queue without a result between two checks of the socket. A check is a system call;
/// spread over so many polls, it costs less than a hundredth of a nanosecond a poll. A queue that
/// is polled without pause checks about every millisecond.
pub(super) const POLLS_PER_CHECK: u32 = 1 << 16;

/// Counts the polls of a queue that found nothing, until the next check.
#[derive(Debug, Default)]
pub(super) struct IdleCounter(u32);

impl IdleCounter {
    /// Counts a poll that found `found` used buffers. Only polls that found none count.
    #[inline]
    pub(super) fn count(&mut self, found: usize) {
        self.0 += u32::from(found == 0);
    }

    /// Whether the socket is to be checked now. True once for each interval.
    #[inline]
    pub(super) fn is_due(&mut self) -> bool {
        let due = self.0 >= POLLS_PER_CHECK;
        if due {
            self.0 = 0;
        }
        due
    }
}
