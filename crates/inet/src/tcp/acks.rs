//! When an acknowledgement is sent.
//!
//! Why not for each segment: acknowledgements would be as many packets as the data. Why not late:
//! the peer's window grows by acknowledgements, and it finds losses by them. RFC 9293, section
//! 3.8.6.3, allows a delay below half a second (MUST-40), and wants one acknowledgement for every
//! second full segment (SHLD-19).

use std::time::Duration;

use crate::time::Time;

/// The number of segments that are acknowledged at once unless the settings say otherwise.
pub(super) const QUICK: u16 = 16;

/// Delayed acknowledgements, counted in segments (RFC 9293, section 3.8.6.3).
#[derive(Clone, Copy, Debug)]
pub(super) struct Acks {
    /// Segments with payload since the last acknowledgement.
    segments: u16,
    /// The number of segments that one acknowledgement covers.
    every: u16,
    delay: Duration,
    due: Option<Time>,
    now: bool,
    /// The number of segments that are still acknowledged at once, and its value at the beginning
    /// and after an idle time.
    quick: u16,
    most_quick: u16,
    last_arrival: Time,
}

/// [`Acks`] when nothing waits for an acknowledgement.
#[derive(Clone, Copy, Debug)]
pub(super) struct IdleAcks {
    every: u16,
    quick: u16,
    last_arrival: Time,
}

impl IdleAcks {
    /// The acknowledgements, with the settings that they had.
    pub(super) fn wake(self, delay: Duration, most_quick: u16) -> Acks {
        Acks { quick: self.quick, ..Acks::new(self.every, delay, most_quick, self.last_arrival) }
    }
}

impl Acks {
    /// `quick` segments are acknowledged at once at the beginning.
    pub(super) fn new(every: u16, delay: Duration, quick: u16, now: Time) -> Self {
        // More than half a second is not allowed (MUST-40).
        let delay = delay.min(Duration::from_millis(500));
        Self { segments: 0, every, delay, due: None, now: false, quick, most_quick: quick, last_arrival: now }
    }

    /// Notes that `segments` with payload arrived in order. `idle`: after a pause of so many
    /// microseconds, segments are acknowledged at once again.
    #[inline]
    pub(super) fn arrived(&mut self, segments: u16, idle: u64, now: Time) {
        if now.micros_since(self.last_arrival) > idle {
            self.quick = self.most_quick;
        }
        self.last_arrival = now;
        self.segments = self.segments.saturating_add(segments);
        if self.quick > 0 {
            self.quick = self.quick.saturating_sub(segments);
            self.now = true;
        }
        if self.segments >= self.every {
            self.now = true;
        } else {
            self.due.get_or_insert(now + self.delay);
        }
    }

    /// Requests that an acknowledgement is sent now.
    pub(super) fn at_once(&mut self) {
        self.now = true;
    }

    /// Acknowledges segments at once for a while if `quick`. Otherwise acknowledgements are delayed
    /// from now on.
    pub(super) fn set_quick(&mut self, quick: bool) {
        self.quick = if quick { self.most_quick.max(QUICK) } else { 0 };
        self.now |= quick && self.segments > 0;
    }

    pub(super) fn set_every(&mut self, every: u16) {
        self.every = every.max(1);
    }

    /// Whether an acknowledgement must be sent now.
    pub(super) fn is_due(&self) -> bool {
        self.now
    }

    /// What is left when nothing waits for an acknowledgement. `None` if something does.
    pub(super) fn idle(&self) -> Option<IdleAcks> {
        let Self { segments, every, now, due, quick, last_arrival, .. } = *self;
        (!now && due.is_none() && segments == 0).then_some(IdleAcks { every, quick, last_arrival })
    }

    /// Notes that a header with ACK was sent. If it had payload, the user answers what it reads,
    /// and further acknowledgements can wait for such an answer.
    pub(super) fn sent(&mut self, payload: bool) {
        if payload && self.segments > 0 {
            self.quick = 0;
        }
        (self.segments, self.now, self.due) = (0, false, None);
    }

    pub(super) fn poll_timeout(&self) -> Option<Time> {
        self.due
    }

    pub(super) fn handle_timeout(&mut self, now: Time) {
        // The deadline is removed. If the ring is full, the acknowledgement waits for room in the
        // ring, and a timer does not help.
        self.now |= self.due.take_if(|due| *due <= now).is_some();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DELAY: Duration = Duration::from_millis(40);
    /// As long, in microseconds.
    const IDLE: u64 = 40_000;

    fn slow() -> Acks {
        let mut acks = Acks::new(2, DELAY, QUICK, Time::ZERO);
        acks.set_quick(false);
        acks
    }

    #[test]
    fn two_segments_share_an_acknowledgement() {
        let mut acks = slow();
        for n in 0..10 {
            acks.arrived(1, IDLE, Time::ZERO);
            assert_eq!(acks.is_due(), n % 2 == 1);
            if acks.is_due() {
                acks.sent(false);
            }
        }
        acks.arrived(2, IDLE, Time::ZERO);
        assert!(acks.is_due(), "a merged segment counts as the segments in it");
    }

    #[test]
    fn one_segment_waits_for_the_delay() {
        let mut acks = slow();
        acks.arrived(1, IDLE, Time::ZERO);
        assert_eq!(acks.poll_timeout(), Some(Time::ZERO + DELAY));
        acks.handle_timeout(Time::from_micros(39_999));
        assert!(!acks.is_due());
        acks.handle_timeout(Time::ZERO + DELAY);
        assert!(acks.is_due() && acks.poll_timeout().is_none(), "with a full ring, the deadline is not in the past");
        acks.sent(false);
        assert!(!acks.is_due() && acks.poll_timeout().is_none());
    }

    #[test]
    fn the_delay_is_half_a_second_at_most() {
        let mut acks = Acks::new(2, Duration::from_secs(3), QUICK, Time::ZERO);
        acks.set_quick(false);
        acks.arrived(1, IDLE, Time::ZERO);
        assert_eq!(acks.poll_timeout(), Some(Time::from_micros(500_000)));
    }

    /// A request is acknowledged by its answer, also after a pause.
    #[test]
    fn without_quick_acknowledgements_the_first_segment_waits() {
        let mut acks = Acks::new(2, DELAY, 0, Time::ZERO);
        for now in [Time::ZERO, Time::from_micros(5_000_000)] {
            acks.arrived(1, IDLE, now);
            assert!(!acks.is_due() && acks.poll_timeout() == Some(now + DELAY));
            acks.sent(true);
        }
        acks.arrived(2, IDLE, Time::from_micros(5_000_000));
        assert!(acks.is_due(), "two segments");
    }

    #[test]
    fn the_first_segments_and_those_after_a_pause_are_acknowledged_at_once() {
        let mut acks = Acks::new(2, DELAY, QUICK, Time::ZERO);
        let at_once = |acks: &mut Acks, now| {
            let arrive = |_: &u16| {
                acks.arrived(1, IDLE, now);
                let due = acks.is_due();
                acks.sent(false);
                due
            };
            (0..100).take_while(arrive).count()
        };
        assert_eq!(at_once(&mut acks, Time::ZERO), 16);
        assert_eq!(at_once(&mut acks, Time::ZERO), 0);
        assert_eq!(at_once(&mut acks, Time::from_micros(50_000)), 16);
    }
}
