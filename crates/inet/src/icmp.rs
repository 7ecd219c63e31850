//! ICMP: which packets are answered, and how often. The messages are in [`wire`](crate::wire).
//!
//! A received error is a value with the packet that it quotes
//! ([`IcmpError`](crate::wire::IcmpError)). This module does not act on it: the connection that it
//! names first checks the sequence number. An echo request is answered, and an error is sent,
//! within a rate that all of a station's messages share.

use crate::interface::Cast;
use crate::time::Time;
use crate::wire::{Icmp, Ip, Transport};
use std::time::Duration;

/// The most messages that may be sent at once.
pub const BURST: u32 = 50;
/// Messages in a second, in the long run.
pub const RATE: u32 = 1000;

/// How many messages may be sent: a bucket of tokens (RFC 4443, 2.4 f).
#[derive(Clone, Copy, Debug)]
pub struct Limiter {
    tokens: u32,
    /// The time up to which tokens were added.
    filled: Time,
}

impl Limiter {
    /// A full bucket.
    #[must_use]
    pub fn new(now: Time) -> Self {
        Self { tokens: BURST, filled: now }
    }

    /// Whether a message may be sent now. If so, it is counted.
    #[must_use]
    pub fn allow(&mut self, now: Time) -> bool {
        const INTERVAL: u64 = 1_000_000 / RATE as u64;
        let earned = now.since(self.filled).as_micros() as u64 / INTERVAL;
        if earned > 0 {
            self.tokens = u64::from(self.tokens).saturating_add(earned).min(BURST.into()) as u32;
            // The rest of an interval counts for the next token.
            self.filled += Duration::from_micros(earned.saturating_mul(INTERVAL));
        }
        let allowed = self.tokens > 0;
        self.tokens -= u32::from(allowed);
        allowed
    }
}

/// Whether an error may be sent about a packet (RFC 1122, 3.2.2; RFC 4443, 2.4 e). No error is sent
/// about ICMP, so that errors do not answer errors; about a packet to a group, which all its
/// members would answer; or about a fragment.
///
/// So errors are sent for unknown ports and protocols. No error is sent when fragments of a
/// datagram were missing.
#[must_use]
pub fn may_answer(cast: Cast, ip: &Ip, transport: &Transport) -> bool {
    cast == Cast::Unicast
        && ip.fragment.is_none()
        && !ip.source.is_unspecified()
        && matches!(transport, Transport::Tcp(_) | Transport::Udp(_) | Transport::Unknown)
}

/// Whether an echo request is answered: if it is to this station alone, and from a station.
#[must_use]
pub fn may_echo(cast: Cast, ip: &Ip, icmp: &Icmp) -> bool {
    cast == Cast::Unicast && !ip.source.is_unspecified() && matches!(icmp, Icmp::EchoRequest { .. })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{ByteRange, FragmentHeader};

    /// Proves that messages are limited to a burst, and then to the rate.
    #[test]
    fn messages_are_limited() {
        let start = Time::from_micros(5_000_000);
        let mut limiter = Limiter::new(start);
        assert_eq!((0..1000).filter(|_| limiter.allow(start)).count(), BURST as usize);
        // At any times in 10 seconds, a thousand each.
        let mut now = start;
        let mut rng = fastrand::Rng::with_seed(1);
        let mut sent = 0;
        while now < start + Duration::from_secs(10) {
            sent += u32::from(limiter.allow(now));
            now += Duration::from_micros(rng.u64(..700));
        }
        assert!((10 * RATE - BURST..=10 * RATE + 1).contains(&sent), "{sent}");
        // After a pause, no more than a burst.
        now += Duration::from_secs(1 << 40);
        assert_eq!((0..1000).filter(|_| limiter.allow(now)).count(), BURST as usize);
    }

    #[test]
    fn errors_answer_no_errors_groups_and_fragments() {
        let addr = std::net::IpAddr::from([192, 0, 2, 1]);
        let content = ByteRange::default();
        let ip = Ip {
            source: addr,
            destination: addr,
            traffic_class: 0,
            hop_limit: 1,
            protocol: 9,
            content,
            fragment: None,
        };
        let may = |cast, ip: &Ip, transport| may_answer(cast, ip, &transport);
        assert!(may(Cast::Unicast, &ip, Transport::Unknown));
        assert!(!may(Cast::Group, &ip, Transport::Unknown));
        assert!(!may(Cast::Unicast, &ip, Transport::Icmp(Icmp::Unknown)));
        let fragment = Some(FragmentHeader { id: 1, offset: 0, more: true });
        assert!(!may(Cast::Unicast, &Ip { fragment, ..ip }, Transport::Unknown));
        let unspecified = Ip { source: std::net::Ipv4Addr::UNSPECIFIED.into(), ..ip };
        assert!(!may(Cast::Unicast, &unspecified, Transport::Unknown));
        let request = Icmp::EchoRequest { id: [0; 4], payload: content };
        assert!(may_echo(Cast::Unicast, &ip, &request) && !may_echo(Cast::Group, &ip, &request));
        assert!(!may_echo(Cast::Unicast, &unspecified, &request) && !may_echo(Cast::Unicast, &ip, &Icmp::Unknown));
    }
}
