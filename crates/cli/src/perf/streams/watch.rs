//! What the threads of a run share: when it is measured, and what the flows have received.

use super::cookie::Cookie;
use super::pace::{Latencies, Pace, Window};
use super::plan::Work;
use crate::link::AskedLink;
use crate::metrics::Page;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// What the threads of a run share.
#[derive(Debug)]
pub(super) struct Watch {
    pub(super) work: Work,
    pub(super) flows: Flows,
    /// Messages that all flows send in a second; as many as they can without it.
    pub(super) rate: Option<u64>,
    pub(super) window: Window,
    /// Flows that have begun.
    begun: AtomicUsize,
    received: Vec<Flow>,
    /// Messages that were sent as datagrams, and those of them that arrived.
    datagrams: [AtomicU64; 2],
    /// Messages of the flows that have ended, those before and after the measured time among them.
    messages: AtomicU64,
    /// The times of the requests of the flows that have ended.
    latencies: Mutex<Latencies>,
    /// Nanoseconds that the source's and the target's thread have spent in polls that found
    /// nothing.
    pub(super) empty_ns: [AtomicU64; 2],
    /// Flows whose source has not ended.
    sources: AtomicUsize,
    /// Set while a target has connections, or may receive datagrams. A source on our stack stays
    /// alive until then, because its last frames may get lost with its rings.
    pub(super) target_open: AtomicBool,
}

/// The flows of a run, as this process sees them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flows {
    /// Whose bytes or answers are counted here.
    pub(super) counted: u16,
    /// Whose source is here.
    pub(super) sent: u16,
    /// Of all hosts. They share the rate.
    pub(super) all: u16,
    /// Whether both ends of each flow are in this process, without a driver.
    pub(super) are_local: bool,
    /// What each of them begins with.
    pub(super) cookie: Cookie,
}

impl Flows {
    /// Flows of which both ends are in this process.
    pub(super) fn both(flows: u16, cookie: Cookie) -> Self {
        Self { counted: flows, sent: flows, all: flows, are_local: true, cookie }
    }
}

/// Flows from one end to an address of a target.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub(super) struct Route {
    pub(super) to: SocketAddr,
    pub(super) flows: u16,
}

/// The routes of an end, as soon as they are known: the targets listen before.
pub(super) type Routes = Arc<OnceLock<Vec<Route>>>;

/// What a flow has received.
#[derive(Debug, Default)]
struct Flow {
    has_begun: AtomicBool,
    /// Bytes, or answers to its requests.
    amount: AtomicU64,
}

impl Watch {
    pub(super) fn new(work: Work, flows: Flows, rate: Option<u64>, target_open: bool) -> Self {
        let received = (0..flows.counted).map(|_| Flow::default()).collect();
        let (window, begun, datagrams, messages, latencies, empty_ns) = Default::default();
        let (sources, target_open) = (AtomicUsize::new(flows.sent.into()), AtomicBool::new(target_open));
        Self {
            work,
            flows,
            rate,
            window,
            begun,
            received,
            datagrams,
            messages,
            latencies,
            empty_ns,
            sources,
            target_open,
        }
    }

    /// Whether the measured time has begun: the target knows all flows.
    pub(super) fn has_started(&self) -> bool {
        self.window.since.get().is_some()
    }

    pub(super) fn is_over(&self) -> bool {
        self.window.is_over()
    }

    /// Whether the driver of several hosts has closed the run: the sources of all hosts have ended,
    /// or will not.
    pub(super) fn is_closed(&self) -> bool {
        !self.flows.are_local && !self.target_open.load(Ordering::Acquire)
    }

    /// When the messages of a flow are due, from now on.
    pub(super) fn pace(&self, flow: u16) -> Pace {
        Pace::new(self.rate, flow, self.flows.all)
    }

    /// Flow `flow` has received this: bytes, or answers. It has begun, also if that is nothing.
    pub(super) fn count(&self, flow: usize, amount: usize) {
        let Some(flow) = self.received.get(flow) else { return };
        flow.amount.fetch_add(amount as u64, Ordering::Relaxed);
        if !flow.has_begun.load(Ordering::Relaxed) && !flow.has_begun.swap(true, Ordering::Relaxed) {
            self.begun.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Flows that have begun.
    pub(super) fn begun(&self) -> usize {
        self.begun.load(Ordering::Relaxed)
    }

    /// Whether all flows have begun.
    pub(super) fn have_begun(&self) -> bool {
        self.begun() == self.received.len()
    }

    /// What each flow has received.
    pub(super) fn totals(&self) -> Vec<u64> {
        self.received.iter().map(|flow| flow.amount.load(Ordering::Relaxed)).collect()
    }

    /// Counts a datagram that was sent.
    pub(super) fn sent(&self) {
        self.datagrams[0].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a datagram that has arrived.
    pub(super) fn arrived(&self) {
        self.datagrams[1].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts the messages of a flow that has ended.
    pub(super) fn add_messages(&self, messages: u64) {
        self.messages.fetch_add(messages, Ordering::Relaxed);
    }

    /// The messages of the flows that have ended.
    pub(super) fn messages(&self) -> u64 {
        self.messages.load(Ordering::Relaxed)
    }

    /// Whether each flow whose source is here has ended.
    pub(super) fn sources_ended(&self) -> bool {
        self.sources.load(Ordering::Acquire) == 0
    }

    pub(super) fn datagrams(&self) -> [u64; 2] {
        self.datagrams.each_ref().map(|count| count.load(Ordering::Relaxed))
    }

    /// Whether a target of datagrams has received all that it will: the sources have ended, and
    /// either nothing is missing or nothing came for `quiet`. Where other hosts have sources, the
    /// driver knows when they have ended.
    pub(super) fn has_drained(&self, quiet: Duration) -> bool {
        if !self.flows.are_local {
            return self.is_closed();
        }
        let [sent, arrived] = self.datagrams();
        self.sources_ended() && (sent == arrived || quiet >= self.work.on_way)
    }

    pub(super) fn empty(&self) -> [u64; 2] {
        self.empty_ns.each_ref().map(|ns| ns.load(Ordering::Relaxed))
    }

    /// The times of the requests, when the ends have ended.
    pub(super) fn latencies(&self) -> Latencies {
        std::mem::take(&mut self.latencies.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn add_latencies(&self, latencies: &Latencies) {
        self.latencies.lock().unwrap_or_else(PoisonError::into_inner).add(latencies);
    }
}

/// What the present run's threads share, for `--metrics`.
#[derive(Debug, Default)]
pub(super) struct Current(Mutex<Option<Arc<Watch>>>);

impl Current {
    /// A run begins.
    pub(super) fn set(&self, watch: &Arc<Watch>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(watch));
    }

    /// Fills in an answer. A new run begins at 0.
    pub(super) fn figures(&self, page: &Page, link: Option<&AskedLink>) {
        if let Some(link) = link {
            link.figures(page);
        }
        let watch = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(watch) = watch else { return };
        let (name, help) = match watch.work.answer {
            None => ("netmem_perf_received_bytes_total", "Bytes that a flow has received in this run."),
            Some(_) => ("netmem_perf_answers_total", "Answers that a flow has received in this run."),
        };
        for (flow, amount) in watch.totals().into_iter().enumerate() {
            page.counter(name, help, &[("flow", &flow.to_string())], amount);
        }
        for (event, datagrams) in ["sent", "arrived"].into_iter().zip(watch.datagrams()) {
            let help = "Datagrams of streams in this run.";
            page.counter("netmem_perf_datagrams_total", help, &[("event", event)], datagrams);
        }
        for (end, ns) in ["source", "target"].into_iter().zip(watch.empty()) {
            let help = "Time that an end on netmem's stack has spent in polls that found nothing.";
            page.seconds("netmem_perf_empty_polls_seconds_total", help, &[("end", end)], ns);
        }
    }
}

/// A source that has not ended. It ends when this is dropped, also in a panic.
#[derive(Debug)]
pub(super) struct Source<'w>(pub(super) &'w Watch);

impl Drop for Source<'_> {
    fn drop(&mut self) {
        self.0.sources.fetch_sub(1, Ordering::Release);
    }
}

/// Ends the run when it is dropped, also in a panic.
pub(super) struct Over<'a>(pub(super) &'a Watch);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.window.end.get_or_init(Instant::now);
    }
}

/// Ends a run of several hosts, and closes it, when it is dropped, also in a panic.
pub(super) struct Closing<'a>(pub(super) &'a Watch);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        drop(Over(self.0));
        self.0.target_open.store(false, Ordering::Release);
    }
}
