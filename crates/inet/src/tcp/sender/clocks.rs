//! For how long the sender was busy, and limited by the peer's window. Only statistics use it.

/// The durations of the sender's situations, and counters.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Clocks {
    since: u64,
    is_busy: bool,
    is_limited: bool,
    busy: u64,
    limited: u64,
    pub(super) delivered: u32,
    pub(super) duplicates: u32,
}

impl Clocks {
    /// Sets the sender's situation from `now` on.
    pub(super) fn note(&mut self, now: u64, busy: bool, limited: bool) {
        let (busy_time, limited_time) = self.until(now);
        *self =
            Self { since: now, is_busy: busy, is_limited: limited, busy: busy_time, limited: limited_time, ..*self };
    }

    pub(super) fn until(&self, now: u64) -> (u64, u64) {
        let passed = now.saturating_sub(self.since);
        let time = |counts: bool| if counts { passed } else { 0 };
        (self.busy + time(self.is_busy), self.limited + time(self.is_limited))
    }

    /// Counts delivered segments.
    pub(super) fn delivered(&mut self, segments: u32) {
        self.delivered = self.delivered.wrapping_add(segments);
    }
}
