//! A sender that has nothing in flight, in little memory.
//!
//! Why: most of a [`Sender`] is lists of what is in flight, which are empty then, and settings that
//! it has in common with others. What was learned from losses is kept only if there was one.
//!
//! No decision is lost: a sender that is woken sends what it would have sent otherwise. The
//! simulation compares both.

use super::clocks::Clocks;
use super::core::{Agreed, Sender};
use super::pacing::Pacing;
use super::path_size::PathSize;
use super::posted::PostedTransmissions;
use super::queue::Queue;
use super::rack::{Rack, Reordering};
use super::recovery_state::{Recovery, RecoveryCounts};
use super::rtt::Rtt;
use super::sacks::Sacks;
use super::scoreboard::Scoreboard;
use super::usage::Usage;
use super::{Negotiated, SendOptions};
use crate::tcp::congestion::{Controller, HyStart, Window};
use crate::tcp::{Carrier, Seq};

/// A [`Sender`] that has nothing to send, nothing in flight, and no timer. SYN is acknowledged, and
/// FIN is not queued.
#[derive(Clone, Debug)]
pub(in crate::tcp) struct IdleSender {
    timestamp_offset: u32,
    agreed: Agreed,
    syn_lost: bool,
    cwr: bool,
    cork: bool,
    more_announced: bool,
    iss: Seq,
    una: Seq,
    peer_window: u32,
    window_seq: Seq,
    window_ack: Seq,
    max_window: u32,
    max_payload: u32,
    mss: u16,
    timestamps: bool,
    window: Window,
    hystart: HyStart,
    pacing: Pacing,
    usage: Usage,
    rtt: Rtt,
    /// The round-trip time that RACK measured last, in microseconds.
    rack_rtt: Option<u64>,
    last_sent: u64,
    clocks: Clocks,
    learned: Option<Box<Learned>>,
}

/// What is as in a new sender until a segment is lost, marked or reordered, or the congestion
/// window leaves slow start.
#[derive(Clone, Debug, PartialEq)]
struct Learned {
    controller: Controller,
    reordering: Reordering,
    counts: RecoveryCounts,
    unusual: Option<Box<Unusual>>,
}

/// What is as in a new sender also after most losses: the size of segments is that of the path, no
/// reduction of the window is under way, and no timeout is counted.
#[derive(Clone, Debug, PartialEq)]
struct Unusual {
    path: PathSize,
    recovery: Recovery,
    retries: u32,
    answered_timeouts: u32,
    unanswered_probes: u32,
    window_probes: u32,
}

impl IdleSender {
    /// What a sender has learned that has met nothing of this.
    fn nothing_learned(&self, options: &SendOptions) -> Learned {
        Learned {
            controller: Controller::new(options.congestion),
            reordering: Reordering::default(),
            counts: Recovery::new(self.iss).counts(),
            unusual: None,
        }
    }

    /// What is usual on the sender's path.
    fn usual(&self, counts: RecoveryCounts, options: &SendOptions) -> Unusual {
        let mut path = PathSize::new(self.max_payload, options.path_floor);
        path.set_peer(u32::from(self.mss), Negotiated::option_bytes(self.timestamps));
        Unusual {
            path,
            recovery: Recovery::open(counts),
            retries: 0,
            answered_timeouts: 0,
            unanswered_probes: 0,
            window_probes: 0,
        }
    }
}

impl<C: Carrier> Sender<C> {
    /// The sender in little memory, and its settings without the offset of its timestamps. `None`
    /// if it waits for anything, or the device has not completed all of its transmissions.
    ///
    /// Drop the sender then: two of them would send the same numbers.
    pub(in crate::tcp) fn idle(&self) -> Option<(IdleSender, SendOptions)> {
        let waits = self.timer.is_some() || self.probe.is_some() || self.waiting_since.is_some() || self.waits_for_ring;
        if waits || self.fin || !self.is_idle() || !self.scoreboard.is_empty() || !self.posted.is_empty() {
            return None;
        }
        let options = SendOptions { timestamp_offset: 0, ..self.options };
        let mut idle = IdleSender {
            timestamp_offset: self.options.timestamp_offset,
            agreed: self.agreed?,
            syn_lost: self.syn_lost,
            cwr: self.cwr,
            cork: self.cork,
            more_announced: self.more_announced,
            iss: self.iss,
            una: self.una,
            peer_window: self.peer_window,
            window_seq: self.window_seq,
            window_ack: self.window_ack,
            max_window: self.max_window,
            max_payload: self.path.path(),
            mss: self.path.peer(),
            timestamps: self.path.has_timestamps(),
            window: self.window,
            hystart: self.hystart,
            pacing: self.pacing,
            usage: self.usage,
            rtt: self.rtt,
            rack_rtt: self.rack.rtt(),
            last_sent: self.last_sent,
            clocks: self.clocks,
            learned: None,
        };
        let unusual = Unusual {
            path: self.path,
            recovery: self.recovery.idle(),
            retries: self.retries,
            answered_timeouts: self.answered_timeouts,
            unanswered_probes: self.unanswered_probes,
            window_probes: self.window_probes,
        };
        let counts = self.recovery.counts();
        let usual = idle.usual(counts, &options);
        let learned = Learned {
            controller: self.controller.clone(),
            reordering: self.rack.reordering(),
            counts,
            unusual: (unusual != usual).then(|| Box::new(unusual)),
        };
        idle.learned = (learned != idle.nothing_learned(&options)).then(|| Box::new(learned));
        Some((idle, options))
    }
}

impl IdleSender {
    /// The sender, with its settings.
    pub(in crate::tcp) fn wake<C: Carrier>(mut self, options: &SendOptions) -> Sender<C> {
        let una = self.una;
        let learned = self.learned.take().map_or_else(|| self.nothing_learned(options), |learned| *learned);
        let Learned { controller, reordering, counts, unusual } = learned;
        let unusual = unusual.map_or_else(|| self.usual(counts, options), |unusual| *unusual);
        Sender {
            options: SendOptions { timestamp_offset: self.timestamp_offset, ..*options },
            agreed: Some(self.agreed),
            iss: self.iss,
            una,
            nxt: una,
            syn_acked: true,
            syn_lost: self.syn_lost,
            fin: false,
            queue: Queue::new(una),
            scoreboard: Scoreboard::new(una),
            posted: PostedTransmissions::new(),
            scratch: Vec::new(),
            waits_for_ring: false,
            peer_window: self.peer_window,
            window_seq: self.window_seq,
            window_ack: self.window_ack,
            max_window: self.max_window,
            path: unusual.path,
            rtt: self.rtt,
            rack: Rack::of(self.rack_rtt, una, reordering),
            recovery: unusual.recovery,
            // All blocks that were reported are before the first number that will be sent.
            sacks: Sacks::default(),
            controller,
            window: self.window,
            hystart: self.hystart,
            pacing: self.pacing,
            usage: self.usage,
            cwr: self.cwr,
            cork: self.cork,
            more_announced: self.more_announced,
            // Neither holds bytes back that come later.
            small_until: una,
            last_small_end: una,
            timer: None,
            probe: None,
            retries: unusual.retries,
            answered_timeouts: unusual.answered_timeouts,
            unanswered_probes: unusual.unanswered_probes,
            window_probes: unusual.window_probes,
            waiting_since: None,
            last_sent: self.last_sent,
            clocks: self.clocks,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tcp::Config;
    use crate::tcp::testing::{Pair, TestCarrier, stream};
    use fastrand::Rng;
    use std::time::Duration;

    /// Compares a sender with what it is after it was idle. Values that do not count any more are
    /// set to those of a new sender first. Returns whether it had learned anything.
    fn check(sender: &mut Sender<TestCarrier>) -> bool {
        let (idle, options) = sender.idle().unwrap();
        let learned = idle.learned.is_some();
        let una = sender.una;
        (sender.queue, sender.scoreboard, sender.posted) =
            (Queue::new(una), Scoreboard::new(una), PostedTransmissions::new());
        (sender.small_until, sender.last_small_end, sender.scratch) = (una, una, Vec::new());
        sender.rack = Rack::of(sender.rack.rtt(), una, sender.rack.reordering());
        (sender.recovery, sender.sacks) = (sender.recovery.idle(), Sacks::default());
        assert_eq!(format!("{sender:?}"), format!("{:?}", idle.wake::<TestCarrier>(&options)));
        learned
    }

    #[test]
    fn a_sender_that_was_idle_has_each_value_that_counts() {
        let (mut learned, mut times) = (0, 0);
        for seed in 0..20 {
            let mut random = Rng::with_seed(seed);
            let config = Config { timestamps: random.bool(), sack: random.bool(), ..Config::default() };
            let mut pair = Pair::connected(&config, &config);
            let loss = if random.bool() { 0 } else { 3 };
            for _ in 0..30 {
                pair.a.tcp.send(stream(0, random.usize(1..60_000)), random.bool()).unwrap();
                while !pair.a.tcp.sender.is_idle() {
                    let out = pair.a.output(pair.now);
                    pair.now += Duration::from_millis(5);
                    out.iter().filter(|_| random.u8(0..100) >= loss).for_each(|sent| pair.b.input(sent, pair.now));
                    pair.b.read(pair.now);
                    let back = pair.b.output(pair.now);
                    back.iter().filter(|_| random.u8(0..100) >= loss).for_each(|sent| pair.a.input(sent, pair.now));
                    pair.a.tcp.handle_timeout(pair.now);
                    pair.b.tcp.handle_timeout(pair.now);
                }
                assert!(pair.a.output(pair.now).is_empty());
                times += 1;
                learned += u32::from(check(&mut pair.a.tcp.sender));
            }
        }
        assert!(0 < learned && learned < times, "{learned} of {times} had learned something");
    }
}
