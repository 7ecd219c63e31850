//! A thread for cleanup that may block: the last put can be on a hot path, where nothing may block.

use crate::faults;
use std::fmt;
use std::io;
use std::mem;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{self, SendError};
use std::thread::{self, JoinHandle};

type Job = Box<dyn FnOnce() + Send>;

/// A thread that runs cleanup jobs, which may block.
///
/// The last put of an object may happen anywhere: in a poll loop, in a destructor, on the way out
/// of a critical section. If the release of the object closes a file or waits for a device,
/// [`defer`](Self::defer) does it on the worker's thread. Jobs run one after another in the order
/// in which they came. A job that panics is counted in [`faults`](crate::faults()), and the next
/// one runs.
///
/// The drop of the worker waits until all queued jobs are done, and joins the thread. If one of the
/// worker's own jobs drops it, that drop does not wait: the thread finishes the queue and ends by
/// itself.
///
/// **After a fork** the thread exists in the parent only, and the parent runs the jobs that were
/// queued. In the child, `defer` runs the job itself, before it returns, and the drop of the worker
/// does nothing. A child that wants a thread makes a worker of its own.
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
    /// [`FORKS`] in the process that has the thread.
    process: u32,
}

// A panic interrupts neither a job in the queue nor the queue: what is sent is whole, and a job's
// own panic is contained.
impl UnwindSafe for Worker {}
impl RefUnwindSafe for Worker {}

/// Differs between a process and its children, from the first worker on: each child adds to it. A
/// process id would not do: a child in a PID namespace of its own may have its parent's.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// Counts forks from now on. Acquires no lock, because a child that is forked meanwhile would wait
/// for ever for the thread that holds it. Two threads may therefore both register the handler, and
/// then a fork counts twice.
fn count_forks() -> io::Result<()> {
    static COUNTED: AtomicBool = AtomicBool::new(false);
    extern "C" fn in_child() {
        FORKS.fetch_add(1, Ordering::Relaxed);
    }
    if COUNTED.load(Ordering::Relaxed) {
        return Ok(());
    }
    // SAFETY: `in_child` may be called in the child of a process with threads: it is one atomic
    // addition.
    match unsafe { libc::pthread_atfork(None, None, Some(in_child)) } {
        0 => {
            COUNTED.store(true, Ordering::Relaxed);
            Ok(())
        }
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

impl Worker {
    /// Starts the thread, under that name.
    ///
    /// # Errors
    ///
    /// The system has no thread to spare.
    pub fn new(name: &str) -> io::Result<Self> {
        count_forks()?;
        let process = FORKS.load(Ordering::Relaxed);
        let (jobs, queue) = mpsc::channel::<Job>();
        let run = move || queue.into_iter().for_each(faults::contain);
        let thread = thread::Builder::new().name(name.into()).spawn(run)?;
        Ok(Self { jobs: Some(jobs), thread: Some(thread), process })
    }

    /// Whether the thread is another process's, of which this one is a child.
    fn is_inherited(&self) -> bool {
        self.process != FORKS.load(Ordering::Relaxed)
    }

    /// Queues `job` for the thread. Allocates, does not block. In the child of a fork, `job` runs
    /// before this returns.
    pub fn defer(&self, job: impl FnOnce() + Send + 'static) {
        let Some(jobs) = &self.jobs else { return };
        if self.is_inherited() {
            return faults::contain(job);
        }
        // The thread receives jobs as long as there is a sender, so this cannot fail. If it did,
        // the job is not lost.
        if let Err(SendError(job)) = jobs.send(Box::new(job)) {
            faults::contain(job);
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let (jobs, thread) = (self.jobs.take(), self.thread.take());
        if self.is_inherited() {
            // The thread may have held a lock of the channel at the fork, and cannot be joined.
            return mem::forget((jobs, thread));
        }
        drop(jobs);
        if let Some(thread) = thread
            && thread.thread().id() != thread::current().id()
        {
            // It has no panic to report: jobs are contained.
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
