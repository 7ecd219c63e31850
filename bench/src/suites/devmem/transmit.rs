//! Sending: the application makes datagrams of parts of the binding, and the network's thread hands
//! them to the device.
//!
//! Each datagram holds the binding from the moment the application makes it. A frame that the
//! device has holds the binding by itself: that hold begins and ends on the network's CPU.

use super::benchmark::{Outcome, STEP, Traffic};
use super::directions::{FLOWS, MESSAGE, PAYLOAD};
use super::receive::due;
use super::rig::{Memory, Rig, unavailable};
use super::source::Flows;
use crate::accounting::Accounting;
use crate::error::BenchError;
use crate::harness::Harness;
use netmem::device::{Connection, NetDevice};
use netmem::net::TxQueue;
use netmem::pool::PoolOptions;
use netmem::virtio::{QueuePair, VirtioNet, VirtioRx, VirtioSplitTx};
use netmem_devmem::{Binding, BindingCount, BindingRef, Endpoint, Message, SendError, Sender};
use netmem_measure::load::thread_time;
use quanta::Clock;
use rtrb::{Consumer, Producer, RingBuffer};
use std::hint::spin_loop;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The largest number of datagrams in flight from the application to the network.
const RING: usize = 1024;
/// Nanoseconds to wait for datagrams that are not sent.
const PATIENCE: u64 = 20_000_000_000;

/// The number of a flow, and a datagram of it.
type Datagram<C> = (usize, Message<C>);

/// The variant.
pub(super) struct Transmitting<C: BindingCount> {
    tx: VirtioSplitTx<BindingRef<C>>,
    /// For each flow, one sender of the application and one of the network.
    makers: Vec<Sender<C>>,
    senders: Vec<Sender<C>>,
    device: NetDevice<Flows>,
    clock: Clock,
    /// The receive half of the queue pair. It receives nothing.
    rx: Option<VirtioRx>,
    accounting: Accounting,
    net: VirtioNet,
    _connection: Connection,
    _binding: Binding<C>,
}

impl<C: BindingCount> Transmitting<C> {
    pub(super) fn new(memory: &Memory, accounting: &Accounting) -> Result<Self, BenchError> {
        let Rig { pair: QueuePair { rx, tx, .. }, net, device, connection, binding } = Rig::<C>::new(memory)?;
        let domain = net.domain().ok_or(BenchError::NoPage("a domain"))?;
        let end = |last, port| Endpoint {
            mac: [2, 0, 0, 0, 0, last],
            addr: SocketAddr::from((Ipv4Addr::new(198, 18, 0, last), port)),
        };
        let sender = |flow: u16| {
            let pages = net.tx_pool(PoolOptions::new("tx-headers")).map_err(unavailable)?;
            Sender::new(&binding, domain, pages, end(1, 8000 + flow), end(2, 9000 + flow)).map_err(unavailable)
        };
        let senders = || (0..FLOWS as u16).map(sender).collect::<Result<Vec<_>, _>>();
        let (makers, senders) = (senders()?, senders()?);
        let (tx, rx, clock) = (tx.into_split(), Some(rx), Clock::new());
        let (accounting, _connection, _binding) = (accounting.clone(), connection, binding);
        Ok(Self { tx, makers, senders, device, clock, rx, accounting, net, _connection, _binding })
    }
}

impl<C: BindingCount> Traffic for Transmitting<C> {
    fn run(&mut self, harness: &Harness, datagrams: u64, pace_ns: Option<f64>) -> Result<Outcome, BenchError> {
        let Self { tx, makers, senders, device, clock, .. } = self;
        let clock = &*clock;
        let (out, mut mail) = RingBuffer::new(RING);
        let busy_ns = AtomicU64::new(0);
        let stats = device.stats();
        let taken = || stats.tx_frames.load(Ordering::Relaxed);
        let taken_before = taken();
        let network = || {
            let (begin, mut busy, mut completed, mut waiting) = (clock.raw(), 0, 0, None);
            let elapsed = loop {
                let now = clock.delta_as_nanos(begin, clock.raw());
                if completed == datagrams || now > PATIENCE {
                    break now;
                }
                let before = thread_time();
                let sent = send(tx, senders, &mut mail, &mut waiting);
                let done = tx.complete() as u64;
                if sent + done > 0 {
                    busy += thread_time().saturating_sub(before);
                    completed += done;
                }
                device.poll();
            };
            (elapsed, completed, busy)
        };
        let busy_of = &busy_ns;
        let application = move |ended: &AtomicBool| {
            let busy = make(makers, out, clock, datagrams, pace_ns, ended);
            busy_of.store(busy, Ordering::Relaxed);
        };
        let (timed, (elapsed_ns, completed, network_ns)) =
            harness.served(vec![application], || harness.time(network))?;
        let arrived = taken() - taken_before;
        if completed != datagrams {
            let (variant, held, freed) = (String::new(), datagrams, completed);
            return Err(BenchError::Devmem { variant, sent: datagrams, arrived, held, freed });
        }
        Ok(Outcome {
            elapsed_ns,
            arrived,
            lost: datagrams.saturating_sub(arrived),
            network_ns,
            application_ns: busy_ns.into_inner(),
            lost_ns: timed.lost_ns,
            features: self.net.features(),
        })
    }
}

/// Sends the datagrams that the application has made, up to [`STEP`] of them, and notifies the
/// device. Returns how many there were. A datagram that found no room is sent by the next call.
fn send<C: BindingCount>(
    tx: &mut VirtioSplitTx<BindingRef<C>>,
    senders: &mut [Sender<C>],
    mail: &mut Consumer<Datagram<C>>,
    waiting: &mut Option<Datagram<C>>,
) -> u64 {
    let mut sent = 0;
    while sent < STEP
        && let Some((flow, message)) = waiting.take().or_else(|| mail.pop().ok())
    {
        match senders[flow].send_again(tx, &message) {
            Ok(()) => sent += 1,
            Err(SendError::Queue | SendError::NoPage) => {
                *waiting = Some((flow, message));
                break;
            }
            // The datagram is lost, and the count at the end shows that.
            Err(_) => break,
        }
    }
    if sent > 0 {
        tx.flush();
    }
    sent
}

/// The application: makes datagrams of messages that lie one after another, from each flow in turn,
/// half a step at a time. Returns the nanoseconds of CPU time that this took.
fn make<C: BindingCount>(
    makers: &mut [Sender<C>],
    mut out: Producer<Datagram<C>>,
    clock: &Clock,
    datagrams: u64,
    pace_ns: Option<f64>,
    ended: &AtomicBool,
) -> u64 {
    const TURN: u64 = STEP / 2;
    let (begin, mut busy, mut made) = (clock.raw(), 0, 0);
    while made < datagrams && !ended.load(Ordering::Acquire) {
        let (turn, now) = (TURN.min(datagrams - made), clock.delta_as_nanos(begin, clock.raw()));
        if made + turn > due(datagrams, now, pace_ns) || (out.slots() as u64) < turn {
            spin_loop();
            continue;
        }
        let before = thread_time();
        let flow = (made / TURN) as usize % FLOWS;
        for at in made..made + turn {
            let first = flow as u64 * MESSAGE * PAYLOAD;
            let offset = first + (at / FLOWS as u64 % MESSAGE) * PAYLOAD;
            // The binding's owner is alive and the ring has room, so this does not fail. If it did,
            // the count at the end would show that.
            if let Ok(message) = makers[flow].message(&[(offset, PAYLOAD as u32)]) {
                let _ = out.push((flow, message));
            }
        }
        made += turn;
        busy += thread_time().saturating_sub(before);
    }
    busy
}

impl<C: BindingCount> Drop for Transmitting<C> {
    fn drop(&mut self) {
        if let Some(closed) = self.rx.take().and_then(VirtioRx::close) {
            self.accounting.add(&closed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use netmem::refs::{PercpuRef, RefCount};

    fn all_go<C: BindingCount>() {
        let accounting = Accounting::default();
        let mut traffic = Transmitting::<C>::new(&Memory::default(), &accounting).unwrap();
        let memory = traffic._binding.reference();
        for pace in [None, Some(100.0)] {
            let outcome = traffic.run(&Harness::for_tests(), 1000, pace).unwrap();
            assert_eq!((outcome.arrived, outcome.lost), (1000, 0));
            assert!(outcome.network_ns > 0 && outcome.application_ns > 0);
            assert_eq!(traffic.tx.held(), 0);
        }
        drop(traffic);
        assert_eq!((memory.stats().in_use, accounting.outstanding()), (0, 0));
    }

    /// Proves MEM-8 as far as counters can: every datagram that is made is sent, and nothing holds
    /// the binding afterwards.
    #[test]
    fn what_is_made_is_sent() {
        all_go::<RefCount>();
        all_go::<PercpuRef>();
    }
}
