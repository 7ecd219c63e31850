//! The figures and the list of connections of `serve --metrics`.
//!
//! A stack's counters are its thread's alone. So the thread of the metrics asks, and wakes the
//! stacks; each writes a snapshot in its next round, and the answer is made of the snapshots. A
//! stack that does not answer in time is reported as it was last; its connections are left out.
//!
//! ```text
//!   metrics' thread   ask: number n ── wakes ──► each stack's thread: snapshot, answered n
//!                     waits for all, at most PATIENCE ◄──┘
//! ```

use super::client::Counts;
use crate::metrics::Page;
use crate::ss::{Connection, Connections};
use netmem::pool::{PoolStats, SharedPool, SharedPoolStats};
use netmem_inet::{ConnectionInfo, ListenerStats, StackStats, StackWaker, TcpListener};
use netmem_measure::endpoint::{Mem, OwnStack};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// How long an answer waits for the stacks.
const PATIENCE: Duration = Duration::from_millis(500);

/// A stack's figures at a moment.
#[derive(Clone, Debug)]
struct Snapshot {
    counts: Counts,
    connections: usize,
    time_wait: usize,
    stack: StackStats,
    listener: ListenerStats,
    /// Of the pool that the stack receives into, and its pages in the ring.
    pool: PoolStats,
    posted: usize,
}

/// An answer of a stack.
#[derive(Debug, Default)]
struct Answer {
    /// The last question that was answered.
    asked: u64,
    snapshot: Option<Snapshot>,
    /// If the question was for them.
    connections: Vec<ConnectionInfo>,
}

/// See the module. The stacks of a server share it.
#[derive(Debug)]
pub(super) struct Board {
    /// The number of the last question.
    asked: AtomicU64,
    /// The number of the last question for connections.
    asked_connections: AtomicU64,
    stacks: Vec<Slot>,
}

#[derive(Debug, Default)]
struct Slot {
    waker: OnceLock<StackWaker<Mem>>,
    answer: Mutex<Answer>,
    answered: Condvar,
}

impl Board {
    pub(super) fn new(stacks: u16) -> Self {
        let stacks = (0..stacks).map(|_| Slot::default()).collect();
        Self { asked: AtomicU64::new(0), asked_connections: AtomicU64::new(0), stacks }
    }

    /// Stack `n` answers from now on, by the returned value.
    pub(super) fn join(&self, n: usize, waker: StackWaker<Mem>) -> Reporter<'_> {
        let _ = self.stacks[n].waker.set(waker);
        Reporter { board: self, n, answered: 0 }
    }

    /// Asks all stacks, waits for their answers, and reads each, also if it is an old one. Only one
    /// thread asks.
    fn ask<T>(&self, connections: bool, read: impl Fn(u64, &mut Answer) -> T) -> Vec<T> {
        let asked = self.asked.load(Ordering::Relaxed) + 1;
        if connections {
            self.asked_connections.store(asked, Ordering::Relaxed);
        }
        self.asked.store(asked, Ordering::Release);
        self.stacks.iter().filter_map(|slot| slot.waker.get()).for_each(StackWaker::wake);
        let until = Instant::now() + PATIENCE;
        let answer = |slot: &Slot| {
            let answer = slot.answer.lock().unwrap_or_else(PoisonError::into_inner);
            let left = until.saturating_duration_since(Instant::now());
            let waited = slot.answered.wait_timeout_while(answer, left, |answer| answer.asked < asked);
            read(asked, &mut waited.unwrap_or_else(PoisonError::into_inner).0)
        };
        self.stacks.iter().map(answer).collect()
    }
}

/// A stack that answers.
#[derive(Debug)]
pub(super) struct Reporter<'a> {
    board: &'a Board,
    n: usize,
    /// The last question that was answered.
    answered: u64,
}

impl Reporter<'_> {
    /// Answers the last question, if this stack has not. Cost: a load, most often.
    pub(super) fn answer(&mut self, stack: &mut OwnStack, listener: &TcpListener<Mem>, counts: &Counts) {
        let asked = self.board.asked.load(Ordering::Acquire);
        if self.answered == asked {
            return;
        }
        self.answered = asked;
        let (connections, time_wait, stats) = (stack.connections(), stack.connections_in_time_wait(), stack.stats());
        let (rx, _) = stack.queues();
        let snapshot = Snapshot {
            counts: *counts,
            connections,
            time_wait,
            stack: stats,
            listener: listener.stats().unwrap_or_default(),
            pool: rx.pool_stats(),
            posted: rx.posted(),
        };
        let lists = self.board.asked_connections.load(Ordering::Relaxed) == asked;
        let connections = if lists { stack.list_connections() } else { Vec::new() };
        let slot = &self.board.stacks[self.n];
        let answer = Answer { asked, snapshot: Some(snapshot), connections };
        *slot.answer.lock().unwrap_or_else(PoisonError::into_inner) = answer;
        slot.answered.notify_all();
    }
}

/// Pools to send from: a name, the queue (without it, all have the pool in common), and the pool.
pub(super) type Pools = Vec<(&'static str, Option<usize>, Arc<SharedPool<Mem>>)>;

/// What a server answers.
pub(super) struct Figures<'a> {
    pub(super) board: &'a Board,
    pub(super) pools: &'a Pools,
}

impl crate::metrics::Pages for Figures<'_> {
    fn figures(&self, page: &Page) {
        for (n, snapshot) in self.board.ask(false, |_, answer| answer.snapshot.clone()).iter().enumerate() {
            if let Some(snapshot) = snapshot {
                stack(page, &n.to_string(), snapshot);
            }
        }
        for (name, queue, pool) in self.pools {
            // Metrics of one name have the same labels.
            let queue = queue.map_or_else(|| "all".into(), |queue| queue.to_string());
            let labels = [("pool", *name), ("queue", queue.as_str())];
            let SharedPoolStats { idle, inflight, alloc_failed, .. } = pool.stats();
            page.pool(&labels, &[("idle", idle), ("in_flight", inflight)], alloc_failed);
        }
    }

    fn has_connections(&self) -> bool {
        true
    }

    fn connections(&self) -> Connections {
        let answers =
            self.board.ask(true, |asked, answer| (answer.asked == asked, std::mem::take(&mut answer.connections)));
        let mut all = Connections::default();
        for (queue, (answered, connections)) in answers.iter().enumerate() {
            if *answered {
                all.connections.extend(connections.iter().map(|info| Connection::new(queue, info)));
            } else {
                all.silent_queues.push(queue);
            }
        }
        all
    }
}

/// The figures of a stack.
fn stack(page: &Page, queue: &str, snapshot: &Snapshot) {
    let Snapshot { counts, connections, time_wait, stack, listener, pool, posted } = snapshot;
    let queue = ("queue", queue);
    let gauge = |name, help, value: usize| page.gauge(name, help, &[queue], value as f64);
    gauge("netmem_serve_connections", "Connections, those that are closing included.", *connections);
    gauge("netmem_serve_connections_in_time_wait", "Connections in TIME-WAIT.", *time_wait);
    gauge("netmem_serve_half_open_connections", "Handshakes that are under way.", listener.half_open);
    let counter = |name, help, value| page.counter(name, help, &[queue], value);
    counter("netmem_serve_connections_total", "Connections that were served.", counts.connections);
    counter("netmem_serve_received_bytes_total", "Bytes received from clients.", counts.received);
    counter("netmem_serve_sent_bytes_total", "Bytes sent to clients.", counts.sent);
    let by = |name, help, label, values: &[(&str, u64)]| {
        for (value, n) in values {
            page.counter(name, help, &[queue, (label, *value)], *n);
        }
    };
    let Counts { broken, refused, idle, late, stopped, .. } = *counts;
    by(
        "netmem_serve_ended_connections_total",
        "Connections that did not end in order, by why.",
        "reason",
        &[("broken", broken), ("refused", refused), ("idle", idle), ("late", late), ("stopped", stopped)],
    );
    by(
        "netmem_stack_frames_total",
        "Frames of a stack.",
        "direction",
        &[("received", stack.received), ("sent", stack.sent)],
    );
    by(
        "netmem_stack_dropped_total",
        "What a stack received and dropped, by why.",
        "reason",
        &[
            ("malformed", stack.malformed),
            ("wrong_checksum", stack.wrong_checksum),
            ("no_buffer", stack.short),
            ("over_budget", stack.over_budget),
            ("evicted", stack.evicted),
            ("no_connection", stack.no_room),
            ("accept_queue_full", listener.overflows),
        ],
    );
    by(
        "netmem_stack_unsent_total",
        "Frames that a stack did not send, by why.",
        "reason",
        &[("no_page", stack.no_page), ("unresolved", stack.unresolved), ("queue_stopped", stack.refused)],
    );
    counter("netmem_stack_resets_total", "Resets sent for segments of no connection.", stack.resets);
    counter("netmem_stack_cookies_total", "SYNs answered by a cookie.", listener.cookies);
    let labels = [("pool", "receive"), queue];
    page.pool(&labels, &[("in_flight", pool.inflight()), ("posted", *posted as u64)], pool.alloc_failed);
}
