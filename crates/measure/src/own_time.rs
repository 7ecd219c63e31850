//! The driver's own time: the time in polls that found packets, while the driver's thread had its
//! CPU.
//!
//! ```text
//!   poll ─ wait ─ poll ─ poll ─ wait ─ poll ─ drain ─ poll          wait: spin or yield; drain: the application's work on this CPU
//!    0             64     12            0              64  packets
//!                 ├───────────┤                       ├────┤        the driver's own time
//! ```
//!
//! Time stamps are taken immediately before and after each poll. Time between two polls is not the
//! driver's: there it waits for the device, or lends its CPU to the device. The scheduler can also
//! take the CPU away in the middle of a poll. Therefore a poll that took longer than `LONG_NS` is
//! compared with the thread's CPU clock, which runs only while the thread does. Reading that clock
//! is a system call, so short polls are not compared.

use crate::load::thread_time;
use quanta::Clock;

/// A poll that takes longer may have lost its CPU. A full poll of 256 packets takes 10 to 50 us.
const LONG_NS: u64 = 50_000;

/// Adds up the driver's own time. `ran` is the CPU time of the driver's thread, in nanoseconds.
pub struct OwnTime<'c, F = fn() -> u64> {
    clock: &'c Clock,
    ran: F,
    /// [`LONG_NS`] in ticks of the clock.
    long: u64,
    ticks: u64,
    /// The time at which the last poll ended.
    end: u64,
    /// When `ran` was read last, and its value then. Since then the thread has lost its CPU for
    /// short times at most.
    seen: (u64, u64),
}

impl<'c> OwnTime<'c> {
    /// Measures this thread, from now on.
    pub fn of_this_thread(clock: &'c Clock) -> Self {
        Self::new(clock, thread_time)
    }
}

impl<'c, F: Fn() -> u64> OwnTime<'c, F> {
    fn new(clock: &'c Clock, ran: F) -> Self {
        let long = (LONG_NS << 20) / clock.delta_as_nanos(0, 1 << 20).max(1);
        let now = clock.raw();
        let seen = (now, ran());
        Self { clock, ran, long, ticks: 0, end: now, seen }
    }

    /// Times a poll, which returns how many packets it found.
    #[inline(always)]
    pub fn poll(&mut self, poll: impl FnOnce() -> usize) -> usize {
        let begin = self.clock.raw();
        if begin - self.end > self.long {
            self.resynchronise();
        }
        let n = poll();
        self.end = self.clock.raw();
        let mut took = self.end - begin;
        if took > self.long {
            took = self.of_long(begin);
        }
        if n > 0 {
            self.ticks += took;
        }
        n
    }

    /// The thread has lent its CPU: from now on, its CPU time and the time differ.
    #[cold]
    pub fn resynchronise(&mut self) {
        self.seen = (self.clock.raw(), (self.ran)());
    }

    /// The ticks in which the thread ran during the poll that began at `begin` and has just ended.
    #[cold]
    fn of_long(&mut self, begin: u64) -> u64 {
        let (at, ran) = self.seen;
        self.resynchronise();
        let before = self.clock.delta_as_nanos(at, begin);
        let took = self.clock.delta_as_nanos(begin, self.end);
        let own = (self.seen.1 - ran).saturating_sub(before).min(took);
        (u128::from(self.end - begin) * u128::from(own) / u128::from(took.max(1))) as u64
    }

    /// The time at which the last poll ended.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// The sum of the driver's own time, in ticks of the clock.
    pub fn ticks(&self) -> u64 {
        self.ticks
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    type Own<'a> = OwnTime<'a, &'a dyn Fn() -> u64>;
    type Pass<'a> = &'a dyn Fn(u64);

    /// The driver's own time in `f`. Of the functions that `f` is called with, the first lets time
    /// pass while the driver's thread runs, and the second while another thread has the CPU.
    fn timed(f: impl for<'a> FnOnce(&mut Own<'a>, Pass<'_>, Pass<'_>)) -> u64 {
        let (clock, mock) = Clock::mock();
        let ran = Cell::new(0);
        let cpu = || ran.get();
        let mut own: Own<'_> = OwnTime::new(&clock, &cpu);
        let runs = |ns: u64| {
            mock.increment(ns);
            ran.set(ran.get() + ns);
        };
        f(&mut own, &runs, &|ns: u64| mock.increment(ns));
        clock.delta_as_nanos(0, own.ticks())
    }

    fn poll(own: &mut Own<'_>, runs: Pass<'_>, packets: usize) {
        own.poll(|| {
            runs(if packets > 0 { 1000 } else { 20 });
            packets
        });
    }

    #[test]
    fn a_device_that_sleeps_does_not_raise_it() {
        let busy = timed(|own, runs, _| {
            for _ in 0..100 {
                poll(own, runs, 64);
            }
        });
        assert_eq!(busy, 100_000);
        // The polls find the same packets. Between the polls the driver spins, yields to a device
        // on its CPU, or does the application's work.
        let sleepy = timed(|own, runs, others| {
            for i in 0..100 {
                poll(own, runs, 0);
                // One wait is shorter and one longer than a poll that is compared with the CPU
                // clock.
                [runs, others][i % 2]([10_000, 3_000_000][i / 2 % 2]);
                own.resynchronise();
                poll(own, runs, 64);
            }
        });
        assert_eq!(sleepy, busy);
    }

    #[test]
    fn a_cpu_that_is_taken_away_in_a_poll_is_not_the_drivers() {
        let own = timed(|own, runs, others| {
            for _ in 0..10 {
                runs(7000);
                own.poll(|| {
                    runs(400);
                    others(4_000_000);
                    runs(600);
                    64
                });
            }
        });
        assert_eq!(own, 10_000);
        // A poll that is long by itself counts in full.
        let long = timed(|own, runs, _| {
            own.poll(|| {
                runs(300_000);
                256
            });
        });
        assert_eq!(long, 300_000);
    }
}
