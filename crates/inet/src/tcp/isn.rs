//! Initial sequence numbers, and initial offsets of timestamps.
//!
//! Why not a counter: an attacker that can compute the numbers of a connection can reset it, or
//! insert data, without seeing a packet of it (RFC 6528).

use std::fmt;
use std::hash::{Hash, Hasher};

use serde::{Deserialize, Serialize};

use siphasher::sip::SipHasher24;

use super::Seq;
use crate::time::Time;

/// A key that only this host knows.
///
/// **Warning:** use random bytes of the system. With a key that can be guessed, an attacker can
/// compute the numbers and cookies of all connections.
///
/// The hash is SipHash-2-4, a keyed function for short inputs: an attacker that sees many of its
/// results cannot compute another one.
#[derive(Clone, Copy)]
pub struct Secret([u8; 16]);

/// The initial numbers of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    /// The sequence number of SYN.
    pub iss: Seq,
    /// The offset that is added to the time in milliseconds.
    pub timestamp_offset: u32,
}

/// The input of the hash. The use is a part of it, so that a flow has unrelated numbers for
/// different uses.
#[derive(Clone, Copy, Hash)]
enum Use {
    Sequence,
    Timestamp,
    Cookie,
}

impl Secret {
    /// A secret made of random bytes.
    #[must_use]
    pub fn new(random: [u8; 16]) -> Self {
        Self(random)
    }

    /// The initial numbers of a connection between the addresses and ports of `flow`, at the time
    /// `now`.
    ///
    /// RFC 6528: the sum of a clock that ticks every 4 microseconds and of a keyed hash of the
    /// flow. Numbers of one flow grow with time, so that segments of an earlier connection are
    /// recognized as old. Numbers of other flows cannot be guessed. RFC 7323, section 5.4, requires
    /// the same of timestamps. The offset does not depend on the time, so that timestamps of a flow
    /// grow from connection to connection.
    #[must_use]
    pub fn start(&self, flow: &impl Hash, now: Time) -> Start {
        let clock = (now.micros() / 4) as u32;
        Start {
            iss: Seq(self.hash(Use::Sequence, flow, 0) as u32) + clock,
            timestamp_offset: self.hash(Use::Timestamp, flow, 0) as u32,
        }
    }

    /// 64 bits of the hash, for a cookie.
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
