//! A thread for cleanup that may block.

use crate::faults;
use std::fmt;
use std::io;
use std::sync::mpsc::{self, SendError};
use std::thread::{self, JoinHandle};

type Job = Box<dyn FnOnce() + Send>;

/// A thread to which blocking cleanup is handed.
///
/// The last put of an object may happen anywhere: in a poll loop, in a destructor, on the way out of a critical section.
/// If letting go of the object closes a file or waits for a device, [`defer`](Self::defer) does it elsewhere. Jobs run
/// one after another in the order in which they came. A job that panics is counted in [`faults`](crate::faults()), and
/// the next one runs.
///
/// Dropping the worker finishes what is queued, and joins the thread. Dropped by one of its own jobs, it cannot wait for
/// itself: the queue is finished by then, or will be, and the thread ends by itself.
///
/// ```
/// use netmem_refs::{Owner, RefCount, Worker};
/// use std::sync::Arc;
///
/// let worker = Arc::new(Worker::new("cleanup")?);
/// let to = worker.clone();
/// let release = move |file| to.defer(move || drop(file));
/// let file: Owner<_, RefCount> = Owner::with_release(String::from("log"), release);
/// drop(file);
/// # Ok::<(), std::io::Error>(())
/// ```
pub struct Worker {
    /// `None` only while dropping.
    jobs: Option<mpsc::Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts the thread, under that name.
    ///
    /// # Errors
    ///
    /// The system has no thread to spare.
    pub fn new(name: &str) -> io::Result<Self> {
        let (jobs, queue) = mpsc::channel::<Job>();
        let thread =
            thread::Builder::new().name(name.into()).spawn(move || queue.into_iter().for_each(faults::contain))?;
        Ok(Self { jobs: Some(jobs), thread: Some(thread) })
    }

    /// Has the thread run `job`. Allocates, does not block.
    pub fn defer(&self, job: impl FnOnce() + Send + 'static) {
        let Some(jobs) = &self.jobs else { return };
        // The thread takes jobs as long as there is a sender, so this cannot fail; if it did, late beats never.
        if let Err(SendError(job)) = jobs.send(Box::new(job)) {
            faults::contain(job);
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != thread::current().id()
        {
            // It has no panic to report: jobs are caught.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").field("thread", &self.thread.as_ref().map(JoinHandle::thread)).finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn dropping_finishes_the_queue_past_a_panic() {
        let done = Arc::new(AtomicU32::new(0));
        let worker = Worker::new("test").unwrap();
        for n in 0..100 {
            let done = done.clone();
            worker.defer(move || {
                assert_ne!(n, 50, "this panic is part of the test");
                done.fetch_add(1, Ordering::Relaxed);
            });
        }
        drop(worker);
        assert_eq!(done.load(Ordering::Relaxed), 99);
    }

    #[test]
    fn may_be_dropped_by_its_own_job() {
        let worker = Arc::new(Worker::new("test").unwrap());
        let (tx, rx) = mpsc::channel();
        let (last, done) = (worker.clone(), tx.clone());
        let (held, go) = mpsc::channel::<()>();
        worker.defer(move || {
            go.recv().unwrap();
            drop(last);
            tx.send(1).unwrap();
        });
        worker.defer(move || done.send(2).unwrap());
        drop(worker);
        held.send(()).unwrap();
        assert_eq!(rx.iter().collect::<Vec<_>>(), [1, 2]);
    }
}
