//! Receiving: the network's thread polls device and queue, the application's thread its sockets.

use super::benchmark::{Outcome, STEP, Traffic};
use super::directions::{FLOWS, MESSAGE};
use super::rig::{Memory, Rig, unavailable};
use super::source::{FIRST_PORT, Flows, OURS};
use super::ways::Way;
use crate::accounting::Accounting;
use crate::error::BenchError;
use crate::harness::Harness;
use netmem::device::{Connection, NetDevice};
use netmem::virtio::{EitherRx, RxClosed, SplitOptions, VirtioNet, VirtioRxQueues};
use netmem_devmem::{
    Address, Binding, BindingCount, FlowQueue, FlowTable, Interface, MAX_RANGES, Netdev, SocketOptions, TokenRange,
};
use netmem_measure::load::thread_time;
use quanta::Clock;
use std::hint::spin_loop;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The largest number of frames of a poll.
const BUDGET: usize = 64;
/// Nanoseconds to wait for datagrams that do not come.
const PATIENCE: u64 = 20_000_000_000;
/// Polls that find nothing before the missing datagrams are counted as lost.
const IDLE: u32 = 256;

/// A flow on the application's side.
struct Flow<W> {
    way: W,
    /// Tokens of the message that is being received.
    held: Vec<TokenRange>,
}

/// The variant.
pub(super) struct Receiving<C: BindingCount, W> {
    flows: Vec<Flow<W>>,
    queue: FlowQueue<C>,
    queues: Netdev<VirtioRxQueues>,
    device: NetDevice<Flows>,
    clock: Clock,
    accounting: Accounting,
    net: VirtioNet,
    _connection: Connection,
    _binding: Binding<C>,
}

impl<C: BindingCount, W: Way<C>> Receiving<C, W> {
    pub(super) fn new(memory: &Memory, accounting: &Accounting) -> Result<Self, BenchError> {
        let Rig { pair, net, device, connection, binding, .. } = Rig::<C>::new(memory)?;
        let mut queues = Netdev::new(VirtioRxQueues::new([pair.rx]).header_bytes(SplitOptions::UDP_V4));
        queues.attach(&binding, &[0]).map_err(unavailable)?;
        let address = Address { addr: OURS.1.into(), prefix_len: 24 };
        let table = FlowTable::<C>::counted(Interface { mac: OURS.0, mtu: 1500, addresses: vec![address] });
        let mut flows = Vec::with_capacity(FLOWS);
        for flow in 0..FLOWS {
            let socket =
                table.bind((OURS.1, FIRST_PORT + flow as u16).into(), &SocketOptions::new()).map_err(unavailable)?;
            let way = W::new(socket, &binding.reference());
            flows.push(Flow { way, held: Vec::with_capacity(MESSAGE as usize) });
        }
        let (queue, clock) = (table.queue(&binding), Clock::new());
        let (accounting, _connection, _binding) = (accounting.clone(), connection, binding);
        Ok(Self { flows, queue, queues, device, clock, accounting, net, _connection, _binding })
    }
}

/// What the application's thread reports.
#[derive(Default)]
struct Progress {
    /// Datagrams that were received, and datagrams that were dropped because a mailbox was full.
    /// When nothing is in flight, these are all.
    accounted: AtomicU64,
    received: AtomicU64,
    freed: AtomicU64,
    busy_ns: AtomicU64,
}

impl<C: BindingCount, W: Way<C>> Traffic for Receiving<C, W> {
    fn run(&mut self, harness: &Harness, datagrams: u64, pace_ns: Option<f64>) -> Result<Outcome, BenchError> {
        let Self { flows, queue, queues, device, clock, .. } = self;
        // The queue is locked once, because nothing restarts it during a run.
        let mut rx = queues.queues_mut().get(0);
        let Some(rx) = rx.as_mut().and_then(|rx| rx.split()) else {
            return Err(BenchError::NoPage("a queue in device memory"));
        };
        let clock = &*clock;
        let progress = Progress::default();
        let network = || {
            device.ports()[0].sent = 0;
            let (begin, mut busy) = (clock.raw(), 0);
            let elapsed = loop {
                let now = clock.delta_as_nanos(begin, clock.raw());
                device.ports()[0].due = due(datagrams, now, pace_ns);
                device.poll();
                let before = thread_time();
                if rx.poll(|poll| poll.receive(BUDGET, queue)) > 0 {
                    busy += thread_time().saturating_sub(before);
                } else if progress.accounted.load(Ordering::Acquire) >= datagrams || now > PATIENCE {
                    break now;
                }
            };
            (elapsed, busy)
        };
        let application = |ended: &AtomicBool| serve(flows, &progress, ended);
        let (timed, (elapsed_ns, network_ns)) = harness.served(vec![application], || harness.time(network))?;
        let (received, freed) = (progress.received.into_inner(), progress.freed.into_inner());
        let accounted = progress.accounted.into_inner();
        if accounted != datagrams || freed != received {
            let variant = String::new();
            return Err(BenchError::Devmem { variant, sent: datagrams, arrived: accounted, held: received, freed });
        }
        Ok(Outcome {
            elapsed_ns,
            arrived: received,
            lost: datagrams - received,
            network_ns,
            application_ns: progress.busy_ns.into_inner(),
            lost_ns: timed.lost_ns,
            features: self.net.features(),
        })
    }
}

/// The number of datagrams that may have been sent by now.
pub(super) fn due(datagrams: u64, now_ns: u64, pace_ns: Option<f64>) -> u64 {
    let steps = |pace| (now_ns as f64 / pace) as u64 / STEP + 1;
    pace_ns.map_or(datagrams, |pace| datagrams.min(steps(pace) * STEP))
}

/// The application: receives from each flow in turn. When a message is complete, its tokens are
/// returned; at the end, also those of an incomplete message.
fn serve<C: BindingCount, W: Way<C>>(flows: &mut [Flow<W>], progress: &Progress, ended: &AtomicBool) {
    let dropped = |flows: &[Flow<W>]| flows.iter().map(|f| f.way.socket().stats().queue_full).sum::<u64>();
    let dropped_before = dropped(flows);
    let (mut busy, mut received, mut freed, mut idle) = (0, 0, 0, 0);
    loop {
        let last = ended.load(Ordering::Acquire);
        let (before, mut found) = (thread_time(), 0);
        for Flow { way, held } in flows.iter_mut() {
            found += way.receive(held);
            if held.len() as u64 >= MESSAGE {
                freed += return_tokens(way, held);
            }
        }
        if found > 0 {
            busy += thread_time().saturating_sub(before);
        }
        received += found as u64;
        idle = if found > 0 { 0 } else { idle + 1 };
        if found == 0 && last {
            break;
        }
        if idle == IDLE {
            idle = 0;
            progress.accounted.store(received + dropped(flows) - dropped_before, Ordering::Release);
        } else if found == 0 {
            spin_loop();
        }
    }
    let before = thread_time();
    freed += flows.iter_mut().map(|Flow { way, held }| return_tokens(way, held)).sum::<u64>();
    busy += thread_time().saturating_sub(before);
    progress.received.store(received, Ordering::Relaxed);
    progress.freed.store(freed, Ordering::Relaxed);
    progress.busy_ns.store(busy, Ordering::Relaxed);
}

fn return_tokens<C: BindingCount, W: Way<C>>(way: &W, held: &mut Vec<TokenRange>) -> u64 {
    let freed = held.chunks(MAX_RANGES).map(|tokens| way.return_tokens(tokens) as u64).sum();
    held.clear();
    freed
}

impl<C: BindingCount, W> Drop for Receiving<C, W> {
    fn drop(&mut self) {
        let rx = self.queues.queues_mut().get(0).map(|mut rx| std::mem::take(&mut *rx));
        if let Some(RxClosed::Split(closed)) = rx.and_then(EitherRx::close) {
            self.accounting.add(&closed.host);
            self.accounting.add(&closed.device);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::ways::{LockedMap, Ranges};
    use super::*;
    use netmem::refs::{PercpuRef, RefCount};

    fn books_balance<C: BindingCount, W: Way<C>>() {
        let accounting = Accounting::default();
        let mut traffic = Receiving::<C, W>::new(&Memory::default(), &accounting).unwrap();
        let memory = traffic._binding.reference();
        for pace in [None, Some(100.0)] {
            let outcome = traffic.run(&Harness::for_tests(), 3000, pace).unwrap();
            assert_eq!(outcome.arrived + outcome.lost, 3000);
            assert!(outcome.arrived > 0 && outcome.network_ns > 0 && outcome.application_ns > 0);
        }
        drop(traffic);
        assert_eq!((memory.stats().in_use, accounting.outstanding(), accounting.stats().inflight()), (0, 0, 0));
    }

    /// Proves MEM-3 and POOL-5 as far as counters can: with tokens of either kind, all pages are
    /// returned.
    #[test]
    fn what_comes_is_given_back() {
        books_balance::<RefCount, LockedMap<_>>();
        books_balance::<PercpuRef, Ranges<_>>();
    }

    #[test]
    fn datagrams_are_due_in_steps() {
        assert_eq!(due(1000, 5, None), 1000);
        assert_eq!(due(1000, 0, Some(10.0)), STEP);
        assert_eq!(due(1000, 640, Some(10.0)), 2 * STEP);
        assert_eq!(due(100, 640, Some(10.0)), 100);
    }
}
