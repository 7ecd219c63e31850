//! Where a connection begins in the sequence space and in the space of timestamps.

use std::fmt;
use std::hash::{Hash, Hasher};

use serde::{Deserialize, Serialize};

use siphasher::sip::SipHasher24;

use super::Seq;
use crate::Time;

/// A key that only this host knows. Draw it from the system's random numbers at the start.
///
/// The hash is SipHash-2-4, a keyed function for short inputs: an attacker who sees many of its results cannot compute another one.
#[derive(Clone, Copy)]
pub struct Secret([u8; 16]);

/// The first numbers of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    /// The number of SYN.
    pub iss: Seq,
    /// Is added to the milliseconds of the time.
    pub timestamp_offset: u32,
}

/// What is hashed. The same flow has unrelated numbers for different uses.
#[derive(Clone, Copy, Hash)]
enum Use {
    Sequence,
    Timestamp,
    Cookie,
}

impl Secret {
    /// A secret of random bytes.
    #[must_use]
    pub fn new(random: [u8; 16]) -> Self {
        Self(random)
    }

    /// The first numbers of a connection between the addresses and ports of `flow`, at the time `now`.
    ///
    /// RFC 6528: a clock that ticks every 4 microseconds, plus a keyed hash of the flow. Numbers of a flow grow with time, so that
    /// segments of an earlier connection are old; those of other flows cannot be guessed. RFC 7323, section 5.4, asks for the same
    /// of timestamps. The offset does not depend on the time, so that timestamps of a flow grow from connection to connection.
    #[must_use]
    pub fn start(&self, flow: &impl Hash, now: Time) -> Start {
        let clock = (now.micros() / 4) as u32;
        Start {
            iss: Seq(self.hash(Use::Sequence, flow, 0) as u32) + clock,
            timestamp_offset: self.hash(Use::Timestamp, flow, 0) as u32,
        }
    }

    /// 64 bits for a cookie.
    pub(super) fn cookie(&self, flow: &impl Hash, context: u64) -> u64 {
        self.hash(Use::Cookie, flow, context)
    }

    fn hash(&self, purpose: Use, flow: &impl Hash, context: u64) -> u64 {
        let mut hasher = SipHasher24::new_with_key(&self.0);
        (purpose, context).hash(&mut hasher);
        flow.hash(&mut hasher);
        hasher.finish()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn numbers_grow_with_time_and_depend_on_flow_and_key() {
        let (one, two) = (Secret::new([1; 16]), Secret::new([2; 16]));
        let (now, later) = (Time::from_micros(1_000_000), Time::from_micros(1_000_000) + Duration::from_millis(8));
        assert_eq!(one.start(&("a", 1), later).iss - one.start(&("a", 1), now).iss, 2000);
        assert_eq!(one.start(&("a", 1), later).timestamp_offset, one.start(&("a", 1), now).timestamp_offset);
        assert_ne!(one.start(&("a", 1), now), one.start(&("a", 2), now));
        assert_ne!(one.start(&("a", 1), now), two.start(&("a", 1), now));
        assert_ne!(one.start(&("a", 1), Time::ZERO).iss.0, one.start(&("a", 1), Time::ZERO).timestamp_offset);
        assert_eq!(format!("{one:?}"), "Secret");
    }
}
