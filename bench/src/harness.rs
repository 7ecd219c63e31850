//! Threads that work at the same time, each on a CPU of its own, and the time that their work
//! takes.
//!
//! Every thread warms up and waits for the others in a spin, because a futex would wake the threads
//! one after another. It then times a fixed number of blocks. A thread that has done its counted
//! blocks goes on working, uncounted, until all threads are done: so contention stays the same
//! while any thread is timed.

use crate::error::BenchError;
use crate::plan::Plan;
use crate::report::Sample;
use netmem_measure::cpus::pin;
use netmem_measure::load::thread_time;
use netmem_measure::threads::{propagate, spawn};
use quanta::Clock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// The number of blocks after which a thread checks the other threads, and the clock while
/// calibrating.
const CHUNK: u64 = 16;

/// The measured time of a thread's counted blocks.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Timed {
    pub(crate) ns: u64,
    /// Ticks of the clock: of the time stamp counter, if there is one.
    pub(crate) ticks: u64,
    /// Of these, nanoseconds in which this thread did not have its CPU.
    pub(crate) lost_ns: u64,
}

/// Where measurements take place.
#[derive(Debug)]
pub(crate) struct Harness {
    clock: Clock,
    cpus: Vec<usize>,
    duration_ns: u64,
    /// Whether the clock is the time stamp counter.
    pub(crate) tsc: bool,
}

/// The work of a thread next to the measured one, until the flag is set.
type Other<'a> = Box<dyn FnOnce(&AtomicBool) + Send + 'a>;

/// Adds 1 when it is dropped, also in a panic: otherwise the other threads would wait for ever.
struct Counted<'a>(&'a AtomicUsize);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }
}

/// Sets the flag when it is dropped, also in a panic.
struct Raised<'a>(&'a AtomicBool);

impl Drop for Raised<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// The numbers of threads that have arrived, and that have done their counted part.
#[derive(Default)]
struct Meeting {
    arrived: AtomicUsize,
    done: AtomicUsize,
    /// A thread could not be started: the measurement is given up.
    off: AtomicBool,
}

impl Harness {
    pub(crate) fn new(plan: &Plan) -> Self {
        let clock = Clock::new();
        // If the clock has no time stamp counter that it trusts, it counts nanoseconds, and a tick
        // is one nanosecond.
        let tsc = clock.delta_as_nanos(1, 1 + (1 << 40)) != 1 << 40;
        let duration_ns = u64::try_from(plan.duration.as_nanos()).unwrap_or(u64::MAX);
        Self { clock, cpus: plan.cpus.clone(), duration_ns, tsc }
    }

    /// Times `f` on this thread.
    pub(crate) fn time<T>(&self, f: impl FnOnce() -> T) -> (Timed, T) {
        let before = thread_time();
        let begin = self.clock.raw();
        let done = f();
        let end = self.clock.raw();
        let ns = self.clock.delta_as_nanos(begin, end);
        let lost_ns = ns.saturating_sub(thread_time().saturating_sub(before));
        (Timed { ns, ticks: end.saturating_sub(begin), lost_ns }, done)
    }

    /// How long each thread is to work for one value.
    pub(crate) fn duration_ns(&self) -> u64 {
        self.duration_ns
    }

    /// The CPUs of a measurement with this number of threads, the first thread's first.
    pub(crate) fn cpus(&self, threads: usize) -> &[usize] {
        &self.cpus[..threads.min(self.cpus.len())]
    }

    /// A time that another process measured, while it had the CPU for `cpu_ns` of it.
    pub(crate) fn timed_elsewhere(&self, ns: u64, cpu_ns: u64) -> Timed {
        let scale = 1u64 << 40;
        let ticks = ns as f64 * scale as f64 / self.clock.delta_as_nanos(0, scale).max(1) as f64;
        Timed { ns, ticks: ticks as u64, lost_ns: ns.saturating_sub(cpu_ns) }
    }

    /// Runs `f` on a thread of its own, on the first CPU.
    pub(crate) fn alone<T: Send>(&self, f: impl FnOnce() -> T + Send) -> Result<T, BenchError> {
        self.served(Vec::<fn(&AtomicBool)>::new(), f)
    }

    /// Runs `first` on the first CPU, and each of `others` on the next. The others start before
    /// `first` begins. They get a flag that is set when `first` has ended.
    pub(crate) fn served<T, O>(&self, others: Vec<O>, first: impl FnOnce() -> T + Send) -> Result<T, BenchError>
    where
        T: Send,
        O: FnOnce(&AtomicBool) + Send,
    {
        self.served_at(others, |thread| thread, first)
    }

    /// Like [`served`](Self::served). `place` returns the CPU of each of `others`; 1 is the CPU
    /// after that of `first`.
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
        let mut value = None;
        let others = others.into_iter().map(|other| Box::new(other) as Other<'_>).collect();
        self.start(others, place, Box::new(|| value = Some(first())))?;
        Ok(value.unwrap_or_else(|| unreachable!("the thread has ended, and not by a panic")))
    }

    /// See [`served_at`](Self::served_at). Has no type parameters: a copy of all that starts
    /// threads for each measurement would be a tenth of the command's code.
    fn start(
        &self,
        others: Vec<Other<'_>>,
        place: fn(usize) -> usize,
        first: Box<dyn FnOnce() + Send + '_>,
    ) -> Result<(), BenchError> {
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
                spawn(scope, name, work).map_err(BenchError::Thread)?;
            }
            let work = || {
                let _ends = Raised(&ended);
                self.pin(0);
                meeting.begin(crew);
                first()
            };
            propagate(spawn(scope, "netmem-bench-0", work).map_err(BenchError::Thread)?.join());
            Ok(())
        })
    }

    fn pin(&self, thread: usize) {
        // The plan has checked that there are as many CPUs as threads.
        pin(self.cpus[thread % self.cpus.len()]);
    }

    /// Runs `work(thread, blocks)` on one thread for each number in `blocks`, all at the same time,
    /// and times each thread. `None` if `work` returned `false`: something is broken.
    pub(crate) fn crew<W>(&self, blocks: &[u64], work: &W) -> Result<Option<Vec<Timed>>, BenchError>
    where
        W: Fn(usize, u64) -> bool + Sync,
    {
        self.together(blocks.len(), work, |thread| {
            // The first pages of memory and the first change of the clock frequency belong to the
            // warm-up, which is not counted.
            let warm = work(thread, blocks[thread] / 16);
            (warm, move || self.time(|| work(thread, blocks[thread])))
        })
    }

    /// The number of blocks that each of `threads` threads does in the planned time, while all of
    /// them work.
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

    /// `ready` warms a thread up and returns its counted part. No thread starts its counted part
    /// before all of them are ready.
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
        Self::start_all(threads, &meeting.off, &one)
    }

    /// Calls `one` with the number of each thread, on that thread. One copy for all work: see
    /// [`start`](Self::start).
    fn start_all<T: Send>(
        threads: usize,
        off: &AtomicBool,
        one: &(dyn Fn(usize) -> Option<T> + Sync),
    ) -> Result<Option<Vec<T>>, BenchError> {
        std::thread::scope(|scope| {
            let mut crew = Vec::with_capacity(threads);
            for thread in 0..threads {
                let name = format!("netmem-bench-{thread}");
                match spawn(scope, name, move || one(thread)) {
                    Ok(thread) => crew.push(thread),
                    Err(error) => {
                        off.store(true, Ordering::Relaxed);
                        return Err(BenchError::Thread(error));
                    }
                }
            }
            Ok(crew.into_iter().map(|thread| propagate(thread.join())).collect())
        })
    }
}

impl Meeting {
    /// Waits until all threads have arrived, or one could not be started.
    fn begin(&self, threads: usize) {
        let mut spins = 0u32;
        while self.arrived.load(Ordering::Acquire) < threads && !self.off.load(Ordering::Relaxed) {
            spins += 1;
            // A thread that has not arrived may need this CPU before it moves to its own.
            if spins.is_multiple_of(1024) { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
    }
}

/// The time of one operation on one thread: the mean over all threads. `done` has the operations of
/// each thread.
pub(crate) fn each(harness: &Harness, timed: &[Timed], done: &[u64]) -> Sample {
    let mean = |of: fn(&Timed) -> u64| {
        let each = timed.iter().zip(done).map(|(t, &n)| of(t) as f64 / n.max(1) as f64);
        each.sum::<f64>() / timed.len().max(1) as f64
    };
    Sample {
        value: mean(|t| t.ns),
        tsc: harness.tsc.then(|| mean(|t| t.ticks)),
        lost_ns: timed.iter().map(|t| t.lost_ns).sum(),
        elapsed_ns: timed.iter().map(|t| t.ns).max(),
        operations: Some(done.iter().sum()),
        ..Sample::default()
    }
}

#[cfg(test)]
impl Harness {
    /// For tests that do not compare the measured values.
    pub(super) fn for_tests() -> Self {
        let (threads, cpus) = (vec![1], netmem_measure::cpus::allowed());
        let duration = std::time::Duration::from_millis(1);
        Self::new(&Plan {
            suites: Vec::new(),
            threads,
            cpus,
            duration,
            asked: true,
            runs: 1,
            budget: None,
            rows: crate::rows::Rows::default(),
            long: false,
        })
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
        assert_eq!(Harness::for_tests().crew(&[1600, 32], &work).unwrap().unwrap().len(), 2);
        assert!(done[0].load(Ordering::Relaxed) >= 1700);
        assert!(done[1].load(Ordering::Relaxed) >= 34);
    }

    #[test]
    fn a_calibration_counts_what_was_done() {
        let work = |_: usize, blocks: u64| {
            std::hint::black_box((0..blocks * 64).map(std::hint::black_box).sum::<u64>());
            true
        };
        let blocks = Harness::for_tests().calibrate(1, &work).unwrap().unwrap();
        assert!(blocks[0] > 0);
    }

    #[test]
    fn an_operation_took_a_thread_the_mean_of_all() {
        let timed = [100, 300].map(|ns| Timed { ns, ticks: 2 * ns, lost_ns: 1 });
        let sample = each(&Harness::for_tests(), &timed, &[10, 10]);
        assert_eq!((sample.value, sample.lost_ns), (20.0, 2));
        assert_eq!((sample.elapsed_ns, sample.operations), (Some(300), Some(20)));
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
            // Ends only if both threads run at the same time as this one.
            while there.load(Ordering::Relaxed) < 2 {
                std::thread::yield_now();
            }
            7
        };
        assert_eq!(Harness::for_tests().served(vec![other, other], first).unwrap(), 7);
    }

    #[test]
    fn what_somebody_else_timed_has_ticks() {
        let timed = Harness::for_tests().timed_elsewhere(1_000_000, 900_000);
        assert_eq!((timed.ns, timed.lost_ns), (1_000_000, 100_000));
        assert!(timed.ticks > 0);
    }

    #[test]
    fn what_is_broken_ends_it_for_all() {
        assert!(Harness::for_tests().crew(&[10, 10], &|thread: usize, _| thread == 0).unwrap().is_none());
        assert!(Harness::for_tests().calibrate(2, &|_: usize, _| false).unwrap().is_none());
    }
}
