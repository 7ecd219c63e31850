//! Threads that work at the same time, each on a CPU of its own, and what it took them.
//!
//! Every thread warms up, waits for the others in a spin (a futex would wake one after the other), and times a fixed number
//! of blocks by itself. Who is done goes on working, uncounted, until all are: contention is the same over the whole of
//! everybody's time.

use super::error::BenchError;
use super::plan::Plan;
use super::report::Sample;
use crate::cpus::pin;
use quanta::Clock;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::Builder;

/// Blocks between two looks at what others do, and at the clock while it is not known how many fit into a time.
const CHUNK: u64 = 16;

/// What a thread's counted blocks took.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Timed {
    pub(crate) ns: u64,
    /// Ticks of the clock: of the time stamp counter, if there is one.
    pub(crate) ticks: u64,
    /// Of these, how long something else had this thread's CPU.
    pub(crate) lost_ns: u64,
}

/// Where measurements take place.
#[derive(Debug)]
pub(crate) struct Lab {
    clock: Clock,
    cpus: Vec<usize>,
    duration_ns: u64,
    /// Whether the clock is the time stamp counter.
    pub(crate) tsc: bool,
}

/// Counts somebody, however they end: the others would wait for ever.
struct Counted<'a>(&'a AtomicUsize);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }
}

/// Raises a flag, however somebody ends.
struct Raised<'a>(&'a AtomicBool);

impl Drop for Raised<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Who has come, and who has done their counted part.
#[derive(Default)]
struct Meeting {
    arrived: AtomicUsize,
    done: AtomicUsize,
    /// Somebody could not be started: nothing comes of it.
    off: AtomicBool,
}

/// Nanoseconds that this thread has had a CPU.
pub(crate) fn cpu_time() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    (time.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec as u64)
}

impl Lab {
    pub(crate) fn new(plan: &Plan) -> Self {
        let clock = Clock::new();
        // Without a counter that it trusts the clock counts nanoseconds, and a tick is one.
        let tsc = clock.delta_as_nanos(1, 1 + (1 << 40)) != 1 << 40;
        let duration_ns = u64::try_from(plan.duration.as_nanos()).unwrap_or(u64::MAX);
        Self { clock, cpus: plan.cpus.clone(), duration_ns, tsc }
    }

    /// Times `f` on this thread.
    pub(crate) fn time<T>(&self, f: impl FnOnce() -> T) -> (Timed, T) {
        let before = cpu_time();
        let begin = self.clock.raw();
        let done = f();
        let end = self.clock.raw();
        let ns = self.clock.delta_as_nanos(begin, end);
        let lost_ns = ns.saturating_sub(cpu_time().saturating_sub(before));
        (Timed { ns, ticks: end.saturating_sub(begin), lost_ns }, done)
    }

    /// How long each thread is to work for one value.
    pub(crate) fn duration_ns(&self) -> u64 {
        self.duration_ns
    }

    /// Where as many threads run, the first thread first.
    pub(crate) fn cpus(&self, threads: usize) -> &[usize] {
        &self.cpus[..threads.min(self.cpus.len())]
    }

    /// What somebody else timed, who had the CPU for `cpu_ns` of it.
    pub(crate) fn timed_elsewhere(&self, ns: u64, cpu_ns: u64) -> Timed {
        let scale = 1u64 << 40;
        let ticks = ns as f64 * scale as f64 / self.clock.delta_as_nanos(0, scale).max(1) as f64;
        Timed { ns, ticks: ticks as u64, lost_ns: ns.saturating_sub(cpu_ns) }
    }

    /// Runs `f` on a thread of its own, on the first CPU.
    pub(crate) fn alone<T: Send>(&self, f: impl FnOnce() -> T + Send) -> Result<T, BenchError> {
        self.served(Vec::<fn(&AtomicBool)>::new(), f)
    }

    /// Runs `first` on the first CPU while each of `others` runs on the next: from before it begins, until the flag that
    /// they are given says that it has ended.
    pub(crate) fn served<T, O>(&self, others: Vec<O>, first: impl FnOnce() -> T + Send) -> Result<T, BenchError>
    where
        T: Send,
        O: FnOnce(&AtomicBool) + Send,
    {
        self.served_at(others, |thread| thread, first)
    }

    /// The same, where `place` says on which CPU each of `others` runs: 1 is the one after the first's.
    pub(crate) fn served_at<T, O>(
        &self,
        others: Vec<O>,
        place: fn(usize) -> usize,
        first: impl FnOnce() -> T + Send,
    ) -> Result<T, BenchError>
    where
        T: Send,
        O: FnOnce(&AtomicBool) + Send,
    {
        let meeting = Meeting::default();
        let ended = AtomicBool::new(false);
        let crew = others.len();
        std::thread::scope(|scope| {
            let _ends = Raised(&ended);
            for (other, thread) in others.into_iter().zip(1usize..) {
                let (meeting, ended) = (&meeting, &ended);
                let work = move || {
                    self.pin(place(thread));
                    drop(Counted(&meeting.arrived));
                    other(ended);
                };
                let name = format!("netmem-bench-{thread}");
                Builder::new().name(name).spawn_scoped(scope, work).map_err(BenchError::Thread)?;
            }
            let work = || {
                let _ends = Raised(&ended);
                self.pin(0);
                meeting.begin(crew);
                first()
            };
            let thread = Builder::new().name("netmem-bench-0".into()).spawn_scoped(scope, work);
            Ok(thread.map_err(BenchError::Thread)?.join().unwrap_or_else(|panic| resume_unwind(panic)))
        })
    }

    fn pin(&self, thread: usize) {
        // The plan has checked that there are as many CPUs as threads.
        pin(self.cpus[thread % self.cpus.len()]);
    }

    /// Has as many threads as there are numbers in `blocks` call `work(thread, blocks)` at the same time, and times each
    /// for its number. `None` if `work` said, by `false`, that something is broken.
    pub(crate) fn crew<W>(&self, blocks: &[u64], work: &W) -> Result<Option<Vec<Timed>>, BenchError>
    where
        W: Fn(usize, u64) -> bool + Sync,
    {
        self.together(blocks.len(), work, |thread| {
            // Whatever comes first in a thread's life, memory and clock frequency included, comes before it counts.
            let warm = work(thread, blocks[thread] / 16);
            (warm, move || self.time(|| work(thread, blocks[thread])))
        })
    }

    /// How many blocks each of `threads` threads gets done in the planned time, while all of them work.
    pub(crate) fn calibrate<W>(&self, threads: usize, work: &W) -> Result<Option<Vec<u64>>, BenchError>
    where
        W: Fn(usize, u64) -> bool + Sync,
    {
        let limit = self.duration_ns / 2;
        self.together(threads, work, |thread| {
            let measure = move || {
                let begin = self.clock.raw();
                let (mut blocks, mut elapsed, mut ok) = (0, 0, true);
                while ok && elapsed < limit {
                    ok = work(thread, CHUNK);
                    blocks += CHUNK;
                    elapsed = self.clock.delta_as_nanos(begin, self.clock.raw());
                }
                let blocks = blocks as f64 * self.duration_ns as f64 / elapsed.max(1) as f64;
                ((blocks as u64).max(1), ok)
            };
            (true, measure)
        })
    }

    /// `ready` makes a thread's counted part, before all of them start theirs.
    fn together<W, R, F, T>(&self, threads: usize, work: &W, ready: R) -> Result<Option<Vec<T>>, BenchError>
    where
        W: Fn(usize, u64) -> bool + Sync,
        R: Fn(usize) -> (bool, F) + Sync,
        F: FnOnce() -> (T, bool),
        T: Send,
    {
        let meeting = Meeting::default();
        let one = |thread: usize| {
            self.pin(thread);
            let arrived = Counted(&meeting.arrived);
            let (warm, counted) = ready(thread);
            drop(arrived);
            meeting.begin(threads);
            let done = Counted(&meeting.done);
            let (value, mut ok) = counted();
            drop(done);
            ok &= warm;
            while ok && meeting.done.load(Ordering::Acquire) < threads && !meeting.off.load(Ordering::Relaxed) {
                ok = work(thread, CHUNK);
            }
            ok.then_some(value)
        };
        std::thread::scope(|scope| {
            let mut crew = Vec::with_capacity(threads);
            for thread in 0..threads {
                let (name, one) = (format!("netmem-bench-{thread}"), &one);
                match Builder::new().name(name).spawn_scoped(scope, move || one(thread)) {
                    Ok(thread) => crew.push(thread),
                    Err(error) => {
                        meeting.off.store(true, Ordering::Relaxed);
                        return Err(BenchError::Thread(error));
                    }
                }
            }
            Ok(crew.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic))).collect())
        })
    }
}

impl Meeting {
    /// Waits until all have come, or are not going to.
    fn begin(&self, threads: usize) {
        let mut spins = 0u32;
        while self.arrived.load(Ordering::Acquire) < threads && !self.off.load(Ordering::Relaxed) {
            spins += 1;
            // Who has yet to come may need this CPU to get to its own.
            if spins.is_multiple_of(1024) { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
    }
}

/// What one operation took one thread: the mean over threads, `done` operations each.
pub(crate) fn each(lab: &Lab, timed: &[Timed], done: &[u64]) -> Sample {
    let mean = |of: fn(&Timed) -> u64| {
        let each = timed.iter().zip(done).map(|(t, &n)| of(t) as f64 / n.max(1) as f64);
        each.sum::<f64>() / timed.len().max(1) as f64
    };
    Sample {
        value: mean(|t| t.ns),
        tsc: lab.tsc.then(|| mean(|t| t.ticks)),
        lost_ns: timed.iter().map(|t| t.lost_ns).sum(),
    }
}

#[cfg(test)]
impl Lab {
    /// For measurements of which nobody wants the result.
    pub(super) fn for_tests() -> Self {
        let (threads, cpus) = (vec![1], crate::cpus::allowed());
        let duration = std::time::Duration::from_millis(1);
        Self::new(&Plan { suites: Vec::new(), threads, cpus, duration, runs: 1, budget: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn everybody_does_at_least_their_part() {
        let done = [const { AtomicU64::new(0) }; 2];
        let work = |thread: usize, blocks| {
            done[thread].fetch_add(blocks, Ordering::Relaxed);
            true
        };
        assert_eq!(Lab::for_tests().crew(&[1600, 32], &work).unwrap().unwrap().len(), 2);
        assert!(done[0].load(Ordering::Relaxed) >= 1700);
        assert!(done[1].load(Ordering::Relaxed) >= 34);
    }

    #[test]
    fn a_calibration_counts_what_was_done() {
        let work = |_: usize, blocks: u64| {
            std::hint::black_box((0..blocks * 64).map(std::hint::black_box).sum::<u64>());
            true
        };
        let blocks = Lab::for_tests().calibrate(1, &work).unwrap().unwrap();
        assert!(blocks[0] > 0);
    }

    #[test]
    fn an_operation_took_a_thread_the_mean_of_all() {
        let timed = [100, 300].map(|ns| Timed { ns, ticks: 2 * ns, lost_ns: 1 });
        let sample = each(&Lab::for_tests(), &timed, &[10, 10]);
        assert_eq!((sample.value, sample.lost_ns), (20.0, 2));
        assert!(sample.tsc.is_none_or(|ticks| ticks == 40.0));
    }

    #[test]
    fn others_are_there_from_before_the_first_begins_until_it_has_ended() {
        let there = AtomicU64::new(0);
        let other = |ended: &AtomicBool| {
            there.fetch_add(1, Ordering::Relaxed);
            while !ended.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
        };
        let first = || {
            // Ends only if both of them run at the same time as this.
            while there.load(Ordering::Relaxed) < 2 {
                std::thread::yield_now();
            }
            7
        };
        assert_eq!(Lab::for_tests().served(vec![other, other], first).unwrap(), 7);
    }

    #[test]
    fn what_somebody_else_timed_has_ticks() {
        let timed = Lab::for_tests().timed_elsewhere(1_000_000, 900_000);
        assert_eq!((timed.ns, timed.lost_ns), (1_000_000, 100_000));
        assert!(timed.ticks > 0);
    }

    #[test]
    fn what_is_broken_ends_it_for_all() {
        assert!(Lab::for_tests().crew(&[10, 10], &|thread: usize, _| thread == 0).unwrap().is_none());
        assert!(Lab::for_tests().calibrate(2, &|_: usize, _| false).unwrap().is_none());
    }
}
