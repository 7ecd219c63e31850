//! A thread that keeps what it measures with from one job to the next.
//!
//! Stacks and their streams stay on the thread that made them. Here they outlive a measurement:
//! they are connected and warmed up once. Between jobs the thread sleeps.

use super::rig::unavailable;
use crate::error::BenchError;
use netmem_measure::cpus::pin;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, JoinHandle};

/// A thread that answers jobs `J` with results `R`.
pub(super) struct Resident<J, R> {
    /// `None` only while the value is dropped.
    jobs: Option<Sender<J>>,
    results: Receiver<Result<R, BenchError>>,
    thread: Option<JoinHandle<()>>,
}

impl<J: Send + 'static, R: Send + 'static> Resident<J, R> {
    /// Starts the thread on this CPU. The thread makes its state, and then does one job after
    /// another.
    pub(super) fn spawn<S>(
        cpu: usize,
        make: impl FnOnce() -> Result<S, BenchError> + Send + 'static,
        mut work: impl FnMut(&mut S, J) -> Result<R, BenchError> + Send + 'static,
    ) -> Result<Self, BenchError> {
        let (jobs, orders) = channel::<J>();
        let (done, results) = channel();
        let body = move || {
            pin(cpu);
            let mut state = match make() {
                Ok(state) => state,
                // If nothing receives this, the suite has ended.
                Err(error) => return drop(done.send(Err(error))),
            };
            while let Ok(job) = orders.recv() {
                // The report lists the CPUs that threads were moved to since the job began.
                pin(cpu);
                if done.send(work(&mut state, job)).is_err() {
                    break;
                }
            }
        };
        let thread = Builder::new().name(format!("netmem-bench-{cpu}")).spawn(body).map_err(BenchError::Thread)?;
        Ok(Self { jobs: Some(jobs), results, thread: Some(thread) })
    }

    /// Begins a job.
    pub(super) fn begin(&self, job: J) {
        // If the thread has ended, `end` returns why.
        let _ = self.jobs.as_ref().map(|jobs| jobs.send(job));
    }

    /// Waits for the end of the job that was begun first.
    pub(super) fn end(&self) -> Result<R, BenchError> {
        self.results.recv().map_err(unavailable)?
    }
}

impl<J, R> Drop for Resident<J, R> {
    fn drop(&mut self) {
        self.jobs = None;
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::rc::Rc;

    #[test]
    fn a_thread_keeps_its_state_and_a_failure_is_reported() {
        let add = |sum: &mut Rc<u32>, n: u32| {
            *Rc::get_mut(sum).unwrap() += n;
            if **sum > 5 { Err(BenchError::NoPage("too much")) } else { Ok(**sum) }
        };
        let thread = Resident::spawn(netmem_measure::cpus::allowed()[0], || Ok(Rc::new(1)), add).unwrap();
        [1, 2, 3].into_iter().for_each(|n| thread.begin(n));
        assert_eq!((thread.end().unwrap(), thread.end().unwrap()), (2, 4));
        assert!(matches!(thread.end(), Err(BenchError::NoPage(_))));
        // A thread that could not make its state reports that first, and no more.
        let broken = Resident::spawn(0, || Err::<(), _>(BenchError::NoPage("none")), |(), ()| Ok(())).unwrap();
        assert!(matches!(broken.end(), Err(BenchError::NoPage(_))));
        assert!(matches!(broken.end(), Err(BenchError::Unavailable { .. })));
    }
}
