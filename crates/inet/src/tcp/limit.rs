//! A limit for the number of answers to unacceptable segments.
//!
//! Why: two peers that both answer the other's unacceptable acknowledgements would never stop, and
//! an attacker could make this side send (RFC 5961, section 7).

use std::time::Duration;

use crate::time::Time;

const WINDOW: Duration = Duration::from_secs(1);
const MOST: u8 = 8;

/// At most 8 answers a second to segments that are not acceptable (RFC 5961, section 7). Two peers
/// that both answer the other's unacceptable acknowledgements would otherwise never stop.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Limit {
    since: Time,
    answers: u8,
}

impl Limit {
    /// Whether one more answer is allowed at `now`. If so, it is counted.
    pub(super) fn allows(&mut self, now: Time) -> bool {
        if now.since(self.since) >= WINDOW {
            *self = Self { since: now, answers: 0 };
        }
        self.answers += u8::from(self.answers <= MOST);
        self.answers <= MOST
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_has_eight_answers() {
        let mut limit = Limit::default();
        let answers = |limit: &mut Limit, now| (0..1000).filter(|_| limit.allows(now)).count();
        assert_eq!(answers(&mut limit, Time::ZERO), 8);
        assert_eq!(answers(&mut limit, Time::from_micros(999_999)), 0);
        assert_eq!(answers(&mut limit, Time::from_micros(1_000_000)), 8);
    }
}
