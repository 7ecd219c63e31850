//! What the driver and the hosts send each other. Times are nanoseconds of the sender's own clock,
//! which begins anywhere. A change here raises [`super::channel::VERSION`].
//!
//! ```text
//!   driver                                   host
//!   Clock, many times          ──►  ◄──      Clock: how far apart the clocks are
//!   Prepare: flows that come   ──►  ◄──      Ready: the ports of its targets
//!   Begin: where flows go to   ──►  ◄──      Begun: each flow has received something
//!   Start: the moment          ──►  ◄──      Interval .., Measured: what was counted
//!                                   ◄──      Drained: its sources have ended
//!   Close                      ──►  ◄──      Ended: what is known now
//! ```
//!
//! `Close` may come at any time, and ends the run. A host that cannot go on sends `Failed`.

use crate::perf::streams::cookie::Cookie;
use crate::perf::streams::pace::Latencies;
use crate::perf::streams::plan::{MAX_FLOWS, Work};
use crate::perf::streams::watch::Route;
use netmem_measure::load::Share;
use serde::{Deserialize, Serialize};
use std::net::IpAddr;
use std::time::Duration;

#[derive(Debug, Deserialize, Serialize)]
pub(super) enum Ask {
    Clock,
    Prepare(Prepare),
    Begin(Vec<Route>),
    Start(Start),
    Close,
}

/// A run.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct Prepare {
    pub(super) work: Work,
    /// How many flows come to each of the host's targets.
    pub(super) targets: Vec<u16>,
    /// Flows that begin here, and flows of all hosts.
    pub(super) sent: u16,
    pub(super) all: u16,
    /// Messages of all flows in a second.
    pub(super) rate: Option<u64>,
    /// What each flow begins with.
    pub(super) cookie: Cookie,
}

#[derive(Debug, Deserialize, Serialize)]
pub(super) struct Start {
    /// On the host's clock.
    pub(super) at_ns: u64,
    pub(super) duration: Duration,
    pub(super) interval: Option<Duration>,
}

#[derive(Debug, Deserialize, Serialize)]
pub(super) enum Answer {
    Clock {
        now_ns: u64,
        host: Host,
        /// The stack's own address. The kernel has that of the connection to the driver.
        address: Option<IpAddr>,
    },
    Ready {
        ports: Vec<u16>,
    },
    Begun,
    Interval {
        amount: u64,
    },
    Measured(Measured),
    Drained,
    Ended(Ended),
    Failed(String),
}

/// A host, as it describes itself.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Host {
    /// The name of the stack that its flows are on: `kernel`, or `netmem` with its port.
    pub(super) stack: String,
    pub(super) kernel: String,
    /// The machine, until it starts again. Hosts may share one.
    pub(super) boot: String,
    /// CPUs that it may use.
    pub(super) cpus: usize,
}

/// What a host counted in the measured time.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Measured {
    /// When it began and ended, on the host's clock.
    pub(super) window_ns: [u64; 2],
    /// Of each flow that is counted here: bytes, or answers.
    pub(super) amounts: Vec<u64>,
    /// Datagrams that were sent.
    pub(super) sent: u64,
    /// CPUs, and the part of the time that each was busy.
    pub(super) busy: Vec<(u32, f64)>,
    pub(super) cpus: Vec<CpuShare>,
}

/// The most of a flow that is believed of a host, in a second: 800 Gb/s.
const MOST_PER_S: u64 = 100_000_000_000;
/// The most bytes of a run's flows.
const MOST_BYTES: u64 = 1 << 54;

impl Measured {
    /// Whether a host can have counted this in a run of this time. Sums of it do not overflow.
    pub(super) fn is_possible(&self, duration: Duration) -> bool {
        let most = Duration::from_secs(60) + duration;
        let [since, end] = self.window_ns;
        let amount = MOST_PER_S.saturating_mul(most.as_secs()).min(MOST_BYTES);
        let busy = |busy: &f64| (0.0..=1.001).contains(busy);
        end >= since
            && u128::from(end - since) <= most.as_nanos()
            && self.amounts.len() <= MAX_FLOWS.into()
            && self.amounts.iter().chain([&self.sent]).all(|count| *count <= amount)
            && self.busy.iter().all(|(_, part)| busy(part))
    }
}

impl Ended {
    /// Whether sums of it do not overflow.
    pub(super) fn is_possible(&self) -> bool {
        self.datagrams.iter().chain(&self.bytes).all(|count| *count <= MOST_BYTES)
    }
}

/// What CPUs did in the measured time.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct CpuShare {
    /// What they are for.
    pub(super) role: String,
    pub(super) cpus: usize,
    /// Their mean.
    pub(super) share: Share,
}

/// What a host knows when its flows have ended.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(super) struct Ended {
    pub(super) latencies: Latencies,
    /// Datagrams that were sent, and that arrived.
    pub(super) datagrams: [u64; 2],
    /// Bytes of messages that were sent, and that were received, from the first to the last of the
    /// flows.
    pub(super) bytes: [u64; 2],
    /// Why a flow did not end in order.
    pub(super) failed: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_that_no_host_can_have() {
        let second = Duration::from_secs(1);
        let good = || Measured {
            window_ns: [5, 1_000_000_005],
            amounts: vec![1 << 30; 4],
            sent: 0,
            busy: vec![(0, 1.0), (1, 0.0)],
            cpus: Vec::new(),
        };
        assert!(good().is_possible(second) && Ended::default().is_possible());
        let bad: [fn(&mut Measured); 6] = [
            |measured| measured.window_ns = [5, 4],
            |measured| measured.window_ns = [0, u64::MAX],
            |measured| measured.amounts = vec![u64::MAX],
            |measured| measured.amounts = vec![0; 501],
            |measured| measured.busy = vec![(0, f64::NAN)],
            |measured| measured.busy = vec![(0, 1e9)],
        ];
        for (n, change) in bad.into_iter().enumerate() {
            let mut measured = good();
            change(&mut measured);
            assert!(!measured.is_possible(second), "{n}");
        }
        assert!(!Ended { bytes: [0, u64::MAX], ..Ended::default() }.is_possible());
    }
}
