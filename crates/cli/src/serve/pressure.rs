//! Connections that keep pages of the store's pool, and the values that wait for such pages.
//!
//! A value that was sent keeps its pages until the peer acknowledges it, also if the store has
//! another value by then. A value that is received in part keeps pages, too. If such a peer stops,
//! these pages stay in use, and the store would have to evict items in their place. So a value that
//! has no page begins a round, in which each connection of each stack reports what it keeps:
//!
//! ```text
//!   the connection that needs a page               each connection that keeps pages
//!   ask(): a round begins            ── wakes ──►  remembers what it keeps now; it must be gone
//!   waits until all stacks answer    ◄── keep() ─  within PATIENCE, else the connection is reset
//!   a page is free: stores the value
//!   no page, and some are kept: asks again
//!   no page, and none are kept: evicts items
//! ```
//!
//! A connection that waits for pages does not report its own half value: two of them would wait for
//! each other. While the pool has pages, a connection loads one shared counter in each wait.

use netmem_inet::{StackWaker, Time};
use netmem_measure::endpoint::Mem;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// For so long, a connection may keep pages that another connection waits for.
const PATIENCE: Duration = Duration::from_secs(1);

/// See the module. The stacks of a server share it.
#[derive(Debug)]
pub(super) struct Pressure {
    /// The number of the last round. 0: no page was ever missing.
    round: AtomicU64,
    /// The last round in which a connection kept pages.
    kept: AtomicU64,
    stacks: Vec<Answerer>,
}

#[derive(Debug, Default)]
struct Answerer {
    waker: OnceLock<StackWaker<Mem>>,
    /// The last round in which all tasks of the stack have examined their connections.
    answered: AtomicU64,
}

impl Pressure {
    pub(super) fn new(stacks: u16) -> Self {
        let stacks = (0..stacks).map(|_| Answerer::default()).collect();
        Self { round: AtomicU64::new(0), kept: AtomicU64::new(0), stacks }
    }

    /// Registers stack `n`, which answers rounds from now on. Drop the returned value when it does
    /// no more.
    pub(super) fn join(&self, n: usize, waker: StackWaker<Mem>) -> Member<'_> {
        let _ = self.stacks[n].waker.set(waker);
        Member { pressure: self, n }
    }

    /// The number of the last round.
    pub(super) fn round(&self) -> u64 {
        self.round.load(Ordering::Acquire)
    }

    /// Begins a round, unless one is under way. Returns its number.
    pub(super) fn ask(&self) -> u64 {
        let last = self.round();
        if !self.is_answered(last) {
            return last;
        }
        let round = match self.round.compare_exchange(last, last + 1, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => last + 1,
            // Another connection has just begun this round.
            Err(round) => round,
        };
        self.stacks.iter().filter_map(|stack| stack.waker.get()).for_each(StackWaker::wake);
        round
    }

    /// Whether all stacks have answered this round.
    pub(super) fn is_answered(&self, round: u64) -> bool {
        self.stacks.iter().all(|stack| stack.answered.load(Ordering::Acquire) >= round)
    }

    /// Reports that a connection keeps pages in this round.
    pub(super) fn keep(&self, round: u64) {
        self.kept.fetch_max(round, Ordering::AcqRel);
    }

    /// Whether a connection kept pages in this round, or in a later one.
    pub(super) fn were_kept(&self, round: u64) -> bool {
        self.kept.load(Ordering::Acquire) >= round
    }
}

/// A stack that answers rounds.
pub(super) struct Member<'a> {
    pressure: &'a Pressure,
    n: usize,
}

impl Member<'_> {
    /// The number of the last round.
    pub(super) fn asked(&self) -> u64 {
        self.pressure.round()
    }

    /// All tasks have examined their connections since this round began.
    pub(super) fn answer(&self, round: u64) {
        let answered = &self.pressure.stacks[self.n].answered;
        if answered.load(Ordering::Relaxed) != round {
            answered.store(round, Ordering::Release);
        }
    }
}

impl Drop for Member<'_> {
    fn drop(&mut self) {
        self.answer(u64::MAX);
    }
}

/// What a connection keeps, by its own counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kept {
    /// It keeps no pages.
    Nothing,
    /// It keeps pages, for less than [`PATIENCE`].
    Moving,
    /// What it kept [`PATIENCE`] ago is still there.
    Stopped,
}

/// Whether what a connection keeps moves on. It knows nothing before the first round, so it costs
/// nothing before.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Progress {
    /// When it was examined, and the number of segments that will be delivered when all that was
    /// kept then is gone.
    sent: Option<(Time, u32)>,
    /// When a value that is received in part was examined.
    value: Option<Time>,
}

impl Progress {
    /// Examines what was sent: `delivered` segments are acknowledged since the connection began,
    /// and `out` are not.
    pub(super) fn sent(&mut self, now: Time, delivered: u32, out: u32) -> Kept {
        if out == 0 {
            self.sent = None;
            return Kept::Nothing;
        }
        match self.sent {
            // The counter wraps around.
            Some((since, end)) if (delivered.wrapping_sub(end) as i32) < 0 => Self::kept(since, now),
            _ => {
                self.sent = Some((now, delivered.wrapping_add(out)));
                Kept::Moving
            }
        }
    }

    /// Examines a value, of which a part was received.
    pub(super) fn value(&mut self, now: Time) -> Kept {
        Self::kept(*self.value.get_or_insert(now), now)
    }

    /// The value is complete, or waits for pages itself.
    pub(super) fn value_ends(&mut self) {
        self.value = None;
    }

    fn kept(since: Time, now: Time) -> Kept {
        if now.since(since) >= PATIENCE { Kept::Stopped } else { Kept::Moving }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(n: u64) -> Time {
        Time::from_micros(n * 1000)
    }

    /// A reader that stops is found after a second. One that reads all that was sent before is not,
    /// however much follows.
    #[test]
    fn only_what_stops_is_reset() {
        let mut stopped = Progress::default();
        assert_eq!(stopped.sent(ms(5), 7, 100), Kept::Moving);
        assert_eq!(stopped.sent(ms(500), 90, 17), Kept::Moving, "it trickles");
        assert_eq!(stopped.sent(ms(1005), 106, 1), Kept::Stopped);
        let mut reads = Progress::default();
        for n in 0..50_u32 {
            let delivered = (n * 100).wrapping_sub(1000);
            assert_eq!(reads.sent(ms(u64::from(n) * 100), delivered, 700), Kept::Moving, "{n}: the counter wraps");
        }
        assert_eq!(reads.sent(ms(6000), 4000, 0), Kept::Nothing);
        assert_eq!(reads.sent(ms(9000), 4000, 5), Kept::Moving, "the time begins anew");
        let mut value = Progress::default();
        assert_eq!(
            (value.value(ms(0)), value.value(ms(999)), value.value(ms(1000))),
            (Kept::Moving, Kept::Moving, Kept::Stopped)
        );
        value.value_ends();
        assert_eq!(value.value(ms(1001)), Kept::Moving);
    }

    #[test]
    fn a_round_is_over_when_all_stacks_have_answered() {
        let pressure = Pressure::new(2);
        let members = [0, 1].map(|n| Member { pressure: &pressure, n });
        assert_eq!(members[0].asked(), 0);
        assert_eq!((pressure.ask(), pressure.ask()), (1, 1), "one round at a time");
        assert_eq!(members[0].asked(), 1);
        members[0].answer(1);
        assert!(!pressure.is_answered(1));
        pressure.keep(1);
        members[1].answer(1);
        assert!(pressure.is_answered(1) && pressure.were_kept(1));
        assert_eq!(pressure.ask(), 2);
        let [first, second] = members;
        second.answer(2);
        drop(first);
        assert!(pressure.is_answered(2) && !pressure.were_kept(2), "a stack that has ended is not waited for");
    }
}
