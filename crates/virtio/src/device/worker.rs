//! One thread's part of the data side: the pairs that it serves, and a pass over them.
//!
//! A pass is bounded ([`budget`](super::budget)) and waits for nothing: a pair that the control
//! side has locked is left out. Counts are kept on the stack and added once for each pass.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use netmem_pool::sigbus;

use super::budget::Budget;
use super::pair::Pair;
use super::pair_handle::PairHandle;
use super::port::{Port, PortError};
use super::rx::Scratch;
use super::shared::{Shared, Waker};
use super::software::SoftwareOffloads;
use super::stats::Tally;
use super::{DropReason, Stats, ctrl, direct, rarp, rx, tx};
use crate::net::ctrl as answer;
use crate::virtqueue::Negotiated;

/// Passes that moved nothing are added to [`Stats::polls`] so many at a time, so that idle workers
/// do not write to one cache line without pause.
const IDLE: u64 = 64;

/// The part of a device's data side that one thread serves: every `n`th queue pair, with its port.
/// See [`NetDevice::workers`](super::NetDevice::workers).
///
/// A worker waits for no other worker, and for no message: a pair that the control side is changing
/// is left out of a pass.
///
/// Workers have no cache line in common, wherever they are stored: each is written in every pass.
#[derive(Debug)]
#[repr(align(128))]
pub struct Worker<P> {
    pub(super) shared: Arc<Shared>,
    /// The wakers of all workers.
    pub(super) wakers: Arc<[Waker]>,
    /// The number of this worker.
    pub(super) index: usize,
    /// The ports of pairs `index`, `index` + workers, and so on.
    pub(super) ports: Vec<P>,
    /// The state of each port.
    pub(super) states: Vec<PortState>,
    /// Whether the ports may be at other places than in the last pass.
    pub(super) ports_lent: bool,
    /// Whether a ring of the worker ran in its last pass.
    pub(super) rings_run: bool,
    /// Whether its last pass has left a pair out, so that what has changed there, and whether it is
    /// served, was not reported to its port.
    pub(super) left_out: bool,
    /// The value of [`sigbus::faults`] when the worker last checked for lost memory.
    pub(super) faults: u64,
    /// Passes that are not in [`Stats::polls`] yet.
    pub(super) idle: u64,
    /// The first [turn](Worker::turn) without work since the last one with work or the last sleep,
    /// and the turns since then. Modulo a number if they are many.
    pub(super) idle_since: Instant,
    pub(super) idle_rounds: u32,
    scratch: Scratch,
}

impl<P: Port> Worker<P> {
    /// Worker `index`, without ports.
    pub(super) fn new(shared: Arc<Shared>, wakers: Arc<[Waker]>, index: usize) -> Self {
        Self {
            shared,
            wakers,
            index,
            states: Vec::new(),
            ports: Vec::new(),
            ports_lent: true,
            rings_run: false,
            left_out: false,
            faults: sigbus::faults(),
            idle: 0,
            idle_since: Instant::now(),
            idle_rounds: 0,
            scratch: Scratch::default(),
        }
    }

    /// Adds the port of the next pair. Its next pass reports to it what has changed since `state`.
    pub(super) fn serve(&mut self, port: P, state: PortState) {
        self.ports.push(port);
        self.states.push(state);
    }

    /// The ports of the worker's pairs, in the order of the pairs.
    ///
    /// They may be exchanged, also with those of other workers. Meanwhile they have no pair
    /// ([`Port::attach`]), so that no frame goes to the pair of an earlier place; the next pass
    /// attaches each to the pair at its place. Frames that wait in a port move with it.
    ///
    /// **Warning**: what drivers have negotiated is not reported again ([`Port::negotiated`]).
    /// Ports that depend on it may be exchanged only while no front end is connected.
    pub fn ports(&mut self) -> &mut [P] {
        self.ports_lent = true;
        self.ports.iter_mut().for_each(|port| port.attach(None));
        &mut self.ports
    }

    /// The error of a port that does not work any more, once ([`Port::take_error`]). The ports stay
    /// with their pairs. Cost: a call for each port.
    pub fn take_error(&mut self) -> Option<PortError> {
        self.ports.iter_mut().find_map(Port::take_error)
    }

    /// Attaches each port to the pair at its place.
    #[cold]
    fn attach_ports(&mut self) {
        self.ports_lent = false;
        for (pair, port) in (self.index..).step_by(self.wakers.len()).zip(&mut self.ports) {
            port.attach(Some(PairHandle::new(&self.shared, pair)));
        }
    }

    /// One bounded pass over all rings of the worker; returns how many frames (and commands) it
    /// moved. Never blocks: a pair that the control side is changing is left out.
    ///
    /// Cost: two clock readings a pass; two atomic read-modify-writes for each pair; one barrier
    /// per ring that moved, and a system call where the driver wants an interrupt.
    pub fn poll(&mut self) -> usize {
        let start = Instant::now();
        if self.ports_lent {
            self.attach_ports();
        }
        let mut tally = Tally::default();
        let Self { shared, wakers, index, ports, states, scratch, rings_run, left_out, .. } = self;
        (*rings_run, *left_out) = (false, false);
        for (n, (port, state)) in (*index..).step_by(wakers.len()).zip(ports.iter_mut().zip(states)) {
            let Some(mut pair) = shared.try_pair(n) else {
                *left_out = true;
                continue;
            };
            if pair.changed {
                state.catch_up(&mut pair, port, &shared.stats);
            }
            *rings_run |= pair.runs();
            let deliver = pair.enabled(0) && !shared.unused(n, pair.features);
            let mut port = state.software.port(port, pair.received);
            let direct = shared.copies_directly();
            let before = tally.of_pair();
            let mut pass = Pass { scratch, direct, stats: &shared.stats, tally: &mut tally };
            pass.over(&mut pair, 2 * n, deliver, &mut port);
            state.software.settle(&mut tally);
            shared.stats.add_pair(n, &tally, before);
        }
        if shared.options.serve_control && *index == 0 {
            match shared.try_pair(shared.options.max_pairs) {
                Some(mut control) => command(&mut control, shared, &mut tally),
                None => *left_out = true,
            }
        }
        if sigbus::faults() != self.faults {
            self.check_lost_memory();
        }
        let moved = tally.moved();
        if moved > 0 || tally.out_of_buffers > 0 || self.idle == IDLE {
            self.shared.stats.add(&tally, 1 + std::mem::take(&mut self.idle));
        } else {
            self.idle += 1;
        }
        if moved > 0 {
            let ns = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
            self.shared.stats.busy_ns.fetch_add(ns, Ordering::Relaxed);
        } else if self.left_out {
            std::thread::yield_now();
        }
        moved
    }

    /// Stops the rings of pairs whose memory is gone, and wakes the other workers, so that they
    /// check theirs.
    #[cold]
    fn check_lost_memory(&mut self) {
        let (faults, shared) = (sigbus::faults(), &self.shared);
        let control = (shared.options.serve_control && self.index == 0).then_some(shared.options.max_pairs);
        let mut found = 0;
        for n in (self.index..shared.options.max_pairs).step_by(self.wakers.len()).chain(control) {
            // The next pass checks again.
            let Some(mut pair) = shared.try_pair(n) else { return };
            let lost = pair.memory.count_lost();
            shared.stats.memory_lost.fetch_add(lost, Ordering::Relaxed);
            found += lost;
            pair.stop_if_memory_is_lost(2 * n, &shared.stats);
        }
        self.faults = faults;
        if found > 0 {
            shared.wake();
        }
    }
}

/// What was reported to a port about the front end, and the offloads that the device does in
/// software for it. States of different workers have no cache line in common.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(super) struct PortState {
    features: Negotiated,
    departures: u64,
    software: SoftwareOffloads,
}

impl PortState {
    /// Reports to the port what the control side has changed, and announces a guest that has moved
    /// here.
    #[cold]
    fn catch_up<P: Port>(&mut self, pair: &mut Pair, port: &mut P, stats: &Stats) {
        pair.changed = false;
        if pair.departures != self.departures {
            self.departures = pair.departures;
            self.software.reset();
            stats.add_drops(DropReason::FrontEndLeft, port.drop_waiting());
        }
        if pair.features != self.features {
            self.features = pair.features;
            self.software.reset();
            if let Err(e) = port.negotiated(self.features.bits()) {
                netmem_pool::trace::warn!("offloads not set: {e}");
            }
        }
        if let Some(mac) = pair.announce.take()
            && port.send(&rarp::request(mac))
        {
            stats.announced.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// What the passes over the pairs of a worker share.
struct Pass<'a> {
    scratch: &'a mut Scratch,
    /// Whether the device may copy to other pairs.
    direct: bool,
    stats: &'a Stats,
    tally: &'a mut Tally,
}

impl Pass<'_> {
    /// Both rings of one pair. `first` is the number of the receive ring, and `deliver` whether it
    /// is filled.
    #[inline]
    fn over<P: Port>(&mut self, pair: &mut Pair, first: usize, deliver: bool, port: &mut P) {
        let Self { scratch, stats, tally, .. } = self;
        if pair.armed {
            pair.disarm();
        }
        let accepts = pair.enabled(1).then_some(pair.offloads);
        let Pair { rings: [receive, transmit], memory, .. } = pair;
        port.served(deliver && receive.queue.is_some());
        if let (true, Some(q)) = (deliver, &mut receive.queue) {
            let result = rx::receive(q, memory, port, scratch, tally);
            receive.finish(memory, first, result, stats, tally);
        }
        if let Some(q) = &mut transmit.queue {
            // A frame that comes later is one for the next pass, and must not miss the direct copy.
            let direct = match (q.refresh(), accepts.filter(|_| self.direct)) {
                (Ok(false), _) => Ok(None),
                (Ok(true), Some(offloads)) => direct::transmit(q, memory, port, offloads, scratch, tally),
                (Ok(true), None) => Ok(Some(Budget::new(tally))),
                (Err(e), _) => Err(e),
            };
            // After frames that were copied directly, the next one waits for the next pass,
            // whatever its form: a pass is bounded by one budget.
            let result = match direct {
                Ok(Some(budget)) => tx::transmit(q, memory, port, accepts, scratch, (budget, tally)),
                ended => ended.map(drop),
            };
            transmit.finish(memory, first + 1, result, stats, tally);
        }
    }
}

/// The control queue.
fn command(control: &mut Pair, shared: &Shared, tally: &mut Tally) {
    if control.armed {
        control.disarm();
    }
    if !control.enabled(0) {
        return;
    }
    let Pair { rings: [ring, _], memory, features, .. } = control;
    if let Some(q) = &mut ring.queue {
        let set_pairs = |asked: u16| {
            let possible = (1..=shared.options.max_pairs).contains(&usize::from(asked));
            if !possible {
                return Some(answer::ERR);
            }
            shared.use_pairs(asked).then_some(answer::OK)
        };
        let result = ctrl::command(q, memory, set_pairs, *features, &shared.config, tally);
        ring.finish(memory, 2 * shared.options.max_pairs, result, &shared.stats, tally);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;
    use std::sync::mpsc::channel;
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::device::port::Cross;
    use crate::device::{NetDevice, Options};

    /// Counts the passes over its pair.
    struct Passes(Arc<AtomicU64>);

    impl Port for Passes {
        const WANTS_BYTES: bool = false;
        const FEATURES: u64 = 0;

        fn peek(&mut self) -> Option<&[u8]> {
            None
        }

        fn consume(&mut self) {}

        fn send(&mut self, _: &[u8]) -> bool {
            true
        }

        fn served(&mut self, _: bool) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The cache lines of a value, in pairs, because the CPU also fetches the line beside.
    fn lines<T>(value: &T) -> std::ops::Range<usize> {
        let from = std::ptr::from_ref(value).addr();
        from / 128..(from + size_of::<T>()).div_ceil(128)
    }

    /// Workers, their ports, the states of these, and the counters of pairs have no cache line in
    /// common. The totals of the device are shared, and not compared here.
    #[test]
    fn workers_have_no_line_in_common() {
        let mut ends = Cross::cable().into_iter().chain(Cross::cable());
        let options = Options { max_pairs: 4, ..Options::default() };
        let device = NetDevice::new(options, |_| Ok(ends.next().unwrap())).unwrap();
        let stats = device.stats();
        let workers = device.workers(2).unwrap();
        let mut all: Vec<_> = workers.iter().map(lines).collect();
        for worker in &workers {
            all.extend(worker.ports.iter().map(lines).chain(worker.states.iter().map(lines)));
        }
        all.extend(stats.of_pairs().iter().map(lines));
        all.sort_by_key(|lines| lines.start);
        assert_eq!(all.len(), 2 + 4 + 4 + 4);
        assert!(all.is_sorted_by(|one, next| one.end <= next.start), "{all:?}");
    }

    /// While a message changes one pair, the thread that serves it continues with the others.
    #[test]
    fn passes_beside_a_message() {
        let passes = [0; 3].map(|_| Arc::new(AtomicU64::new(0)));
        let port = |pair: usize| Ok(Passes(Arc::clone(&passes[pair])));
        let mut device = NetDevice::new(Options { max_pairs: 3, ..Options::default() }, port).unwrap();
        let shared = Arc::clone(&device.worker.shared);
        let ((entered, in_change), (let_go, go_on)) = (channel(), channel::<()>());
        let message = thread::spawn(move || {
            shared.ring(2, |_| {
                entered.send(()).unwrap();
                go_on.recv_timeout(Duration::from_secs(60)).unwrap();
            })
        });
        in_change.recv_timeout(Duration::from_secs(60)).unwrap();
        let count = || [0, 1, 2].map(|pair: usize| passes[pair].load(Ordering::Relaxed));
        for n in 1..10 {
            device.poll();
            assert_eq!(count(), [n, 0, n]);
        }
        let_go.send(()).unwrap();
        message.join().unwrap().unwrap();
        device.poll();
        assert_eq!(count(), [10, 1, 10]);
    }
}
