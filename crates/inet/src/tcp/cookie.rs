//! SYN cookies: the number of the SYN-ACK contains all state of the connection, so this side keeps
//! none (RFC 4987, section 3.6). Why: a flood of SYN with forged addresses must not occupy memory.
//!
//! ```text
//!   number of SYN-ACK   27 bits: hash of flow, peer's number, period, MSS │ 2: period │ 3: MSS
//!   low bits of TSval    1 bit: ECN │ 1 bit: SACK │ 4 bits: window scale, 15 for none
//! ```
//!
//! The peer returns both in its acknowledgement. Without timestamps there is no room for the
//! options, so the SYN-ACK offers none. The options are not part of the hash: a peer can send false
//! options in any case.

use std::hash::Hash;
use std::time::Duration;

use super::{Options, Secret, Seq};
use crate::time::Time;

/// A cookie is valid in the period in which it was made, and in the next one.
const PERIOD: Duration = Duration::from_secs(64);

/// The MSS values that a cookie can express. The largest value that the peer admits is used.
const MSS: [u16; 8] = [88, 536, 1220, 1360, 1440, 1460, 4312, 8960];

const NO_SCALE: u32 = 15;
const STAMP_BITS: u32 = 6;

/// How long after the last cookie was sent an acknowledgement can still contain a valid one.
pub(super) const VALID: Duration = Duration::from_secs(2 * 64);

/// The number of the SYN-ACK that answers a SYN with the number `irs` and the option `mss`.
pub(super) fn make(secret: &Secret, flow: &impl Hash, irs: Seq, mss: u16, now: Time) -> Seq {
    let index = MSS.iter().rposition(|size| *size <= mss).unwrap_or(0) as u32;
    number(secret, flow, irs, period(now), index)
}

/// Returns the peer's MSS, if `iss` is a cookie for `flow` and `irs` that is valid at `now`.
pub(super) fn check(secret: &Secret, flow: &impl Hash, irs: Seq, iss: Seq, now: Time) -> Option<u16> {
    let (now, index) = (period(now), iss.0 & 7);
    let age = (now as u32).wrapping_sub(iss.0 >> 3) & 3;
    let made = now.checked_sub(u64::from(age)).filter(|_| age < 2)?;
    (number(secret, flow, irs, made, index) == iss).then(|| MSS[index as usize])
}

fn period(now: Time) -> u64 {
    now.micros() / PERIOD.as_micros() as u64
}

fn number(secret: &Secret, flow: &impl Hash, irs: Seq, period: u64, index: u32) -> Seq {
    let hash = secret.cookie(&(flow, irs), period << 3 | u64::from(index)) as u32;
    Seq(hash << 5 | (period as u32 & 3) << 3 | index)
}

/// A timestamp at or before `clock`, whose low bits encode the options of the connection.
pub(super) fn stamp(clock: u32, scale: Option<u8>, sack: bool, ecn: bool) -> u32 {
    let scale = scale.map_or(NO_SCALE, |scale| u32::from(scale.min(14)));
    let bits = u32::from(ecn) << 5 | u32::from(sack) << 4 | scale;
    let value = clock >> STAMP_BITS << STAMP_BITS | bits;
    if value > clock { value.wrapping_sub(1 << STAMP_BITS) } else { value }
}

/// What a cookie keeps of the peer's SYN.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CookieOptions {
    pub(super) options: Options,
    /// Whether both ends agreed on ECN.
    pub(super) ecn: bool,
}

/// The options that the timestamp `echo` encodes.
pub(super) fn options(echo: u32) -> CookieOptions {
    let scale = echo & 15;
    let window_scale = (scale != NO_SCALE).then_some(scale as u8);
    let options = Options { window_scale, sack_permitted: echo & 16 != 0, ..Options::default() };
    CookieOptions { options, ecn: echo & 32 != 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cookie_is_valid_for_its_flow_and_its_time() {
        let (secret, other) = (Secret::new([3; 16]), Secret::new([4; 16]));
        for start in (0..2000).map(|n| Time::from_micros(n * 7_777_777)) {
            let cookie = make(&secret, &1, Seq(5), 1400, start);
            let check_at = |now| check(&secret, &1, Seq(5), cookie, now);
            assert_eq!(check_at(start), Some(1360));
            assert_eq!(check_at(start + PERIOD), Some(1360));
            assert_eq!(check_at(start + PERIOD * 2), None);
            assert_eq!(check(&secret, &2, Seq(5), cookie, start), None, "another flow");
            assert_eq!(check(&secret, &1, Seq(6), cookie, start), None, "another number");
            assert_eq!(check(&other, &1, Seq(5), cookie, start), None, "another secret");
            assert_eq!(check(&secret, &1, Seq(5), Seq(cookie.0 ^ 1), start), None, "another MSS");
        }
    }

    #[test]
    fn forged_cookies_are_refused() {
        let mut random = fastrand::Rng::with_seed(1);
        let secret = Secret::new([3; 16]);
        let passed = (0..200_000).filter(|_| check(&secret, &1, Seq(5), Seq(random.u32(..)), Time::ZERO).is_some());
        assert_eq!(passed.count(), 0);
    }

    #[test]
    fn a_timestamp_keeps_the_options_and_does_not_run_ahead() {
        for clock in (0..200).chain(u32::MAX - 200..=u32::MAX) {
            for (scale, sack, ecn) in [(None, true, false), (Some(0), false, true), (Some(14), true, true)] {
                let value = stamp(clock, scale, sack, ecn);
                assert!((0..=64).contains(&(clock.wrapping_sub(value) as i32)), "{clock} {value}");
                let CookieOptions { options, ecn: agreed } = options(value);
                assert_eq!((options.window_scale, options.sack_permitted, agreed), (scale, sack, ecn));
            }
        }
    }
}
