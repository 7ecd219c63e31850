//! The figures of received frames, for `--metrics`: a snapshot of each queue's counters, which the
//! driver's thread writes when it checks its queues, every 10 ms. The loop has no other cost.

use super::driver::Queues;
use super::mailbox::Halt;
use crate::metrics::{Page, Server};
use netmem::pool::PoolStats;
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, PoisonError};

/// A receive queue's counters in this run.
#[derive(Clone, Debug, Default)]
pub(crate) struct QueueFigures {
    pub(crate) frames: u64,
    pub(crate) bytes: u64,
    /// What went wrong, by name.
    pub(crate) errors: Vec<(&'static str, u64)>,
    pub(crate) pool: PoolStats,
}

/// The counters of the present run. A new run begins at 0.
#[derive(Debug, Default)]
pub(crate) struct Live(Mutex<Vec<QueueFigures>>);

impl Live {
    /// The driver's thread writes its queues' counters.
    pub(super) fn write(&self, queues: &mut impl Queues) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = queues.figures();
    }

    /// Fills in an answer.
    pub(super) fn figures(&self, page: &Page) {
        let queues = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for (number, queue) in queues.iter().enumerate() {
            let number = number.to_string();
            let labels = [("queue", number.as_str())];
            let QueueFigures { frames, bytes, errors, pool } = queue;
            page.counter(
                "netmem_perf_received_frames_total",
                "Frames that a queue has received in this run.",
                &labels,
                *frames,
            );
            page.counter(
                "netmem_perf_received_bytes_total",
                "Bytes that a queue has received in this run.",
                &labels,
                *bytes,
            );
            for (error, count) in errors {
                let help = "What went wrong with frames of a queue in this run, by what it was.";
                page.counter("netmem_perf_errors_total", help, &[labels[0], ("error", error)], *count);
            }
            page.pool(&labels, &[("in_flight", pool.inflight())], pool.alloc_failed);
        }
    }
}

/// Runs `run`, and meanwhile answers with the figures, if there is a server.
pub(super) fn answering<T>(
    server: Option<&Server>,
    figures: impl Fn(&Page) + Send,
    run: impl FnOnce() -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _ends = Halt(&over);
        server.map(|server| server.start(scope, &over, figures)).transpose()?;
        run()
    })
}
