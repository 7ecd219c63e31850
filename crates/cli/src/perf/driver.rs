//! The driver's side of a measurement: one thread that polls its queues round robin, and times the
//! polls that found packets ([`OwnTime`]).

use super::error::PerfError;
use super::live::{Live, QueueFigures};
use super::mailbox::{Mailbox, drain, idle};
use super::plan::Variant;
use super::sample::Counts;
use crate::args::{DeviceArg, XdpArg};
use netmem::net::{Handler, Packet, Poll, RxQueue, TxBulk, TxQueue, Verdict, XdpFrame};
use netmem::pool::PeerShared;
use netmem::virtio::{VirtioNet, VirtioRx, VirtioTx};
use netmem_measure::own_time::OwnTime;
use quanta::Clock;
use rtrb::Producer;
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The largest number of frames of a poll.
const BUDGET: usize = 256;
/// Nanoseconds between two checks of what is not on the fast path.
const CHECK_EVERY: u64 = 10_000_000;
/// Nanoseconds to wait for a packet after the phase's time is over, because a back end may need
/// time to notice its new driver.
const PATIENCE: u64 = 5_000_000_000;

/// The queues of a device, as the driver's loop sees them.
pub(crate) trait Queues {
    /// A receive queue.
    type Rx: RxQueue<Mem = PeerShared>;
    /// A transmit queue.
    type Tx: TxQueue<Mem = PeerShared>;

    /// Each receive queue with its transmit queue, to which frames go in bulk.
    fn pairs(&mut self) -> impl Iterator<Item = &mut (Self::Rx, TxBulk<Self::Tx>)>;

    /// Frames and bytes that were received so far.
    fn totals(&self) -> (u64, u64);

    /// Checks that the device is there and follows the protocol.
    fn check(&mut self, variant: &Variant) -> Result<(), PerfError>;

    /// The counters of each receive queue.
    fn figures(&mut self) -> Vec<QueueFigures>;
}

/// A virtio-net device.
pub(crate) struct Virtio {
    pub(crate) net: VirtioNet,
    pub(crate) pairs: Vec<(VirtioRx, TxBulk<VirtioTx>)>,
    /// The back end's address, if the back end is another process.
    pub(crate) foreign: Option<DeviceArg>,
}

impl Queues for Virtio {
    type Rx = VirtioRx;
    type Tx = VirtioTx;

    fn pairs(&mut self) -> impl Iterator<Item = &mut (VirtioRx, TxBulk<VirtioTx>)> {
        self.pairs.iter_mut()
    }

    fn totals(&self) -> (u64, u64) {
        let stats = self.pairs.iter().map(|(rx, _)| rx.stats());
        stats.fold((0, 0), |(frames, bytes), s| (frames + s.frames, bytes + s.bytes))
    }

    fn figures(&mut self) -> Vec<QueueFigures> {
        let queue = |(rx, _): &mut (VirtioRx, _)| {
            let stats = rx.stats();
            let errors = stats.errors().collect();
            QueueFigures { frames: stats.frames, bytes: stats.bytes, errors, pool: rx.pool_stats() }
        };
        self.pairs.iter_mut().map(queue).collect()
    }

    fn check(&mut self, variant: &Variant) -> Result<(), PerfError> {
        let variant = || variant.to_string();
        let stopped = |(rx, tx): &mut (VirtioRx, TxBulk<VirtioTx>)| rx.stats().stopped.or(tx.target().stats().stopped);
        let stopped = self.pairs.iter_mut().find_map(stopped);
        if let Some(source) = stopped {
            return Err(PerfError::Broken { variant: variant(), source });
        }
        match &self.foreign {
            Some(device) if !self.net.is_connected() => {
                Err(PerfError::BackendGone { variant: variant(), device: device.clone() })
            }
            _ => Ok(()),
        }
    }
}

/// The XDP program, and the actions that follow from its verdict.
struct Program<'a, T: TxQueue> {
    verdict: Verdict,
    tx: &'a mut TxBulk<T>,
    out: Option<&'a mut Producer<Packet<PeerShared>>>,
}

impl<T: TxQueue<Mem = PeerShared>> Handler<PeerShared> for Program<'_, T> {
    #[inline]
    fn run(&mut self, frame: &mut XdpFrame<PeerShared>) -> Verdict {
        // Both addresses, the type, and the first bytes behind them: every program reads them.
        black_box(frame.read_at::<16>(0).unwrap_or_default());
        self.verdict
    }

    #[inline]
    fn pass(&mut self, packet: Packet<PeerShared>) {
        match &mut self.out {
            // There is room, because the budget was limited to the room.
            Some(out) => drop(out.push(packet)),
            None => drop(packet),
        }
    }

    #[inline]
    fn tx(&mut self, packet: Packet<PeerShared>) {
        self.tx.push(packet);
    }

    /// In the poll context, so that pages of sent frames return by the fast path.
    #[inline]
    fn flush(&mut self) {
        if self.verdict == Verdict::Tx {
            self.tx.flush();
        }
    }
}

/// The driver, and the state that its loop uses.
pub(crate) struct Driver<'a, Q: Queues> {
    pub(crate) queues: Q,
    pub(crate) mailbox: Mailbox,
    pub(crate) xdp: XdpArg,
    pub(crate) clock: &'a Clock,
    /// Whether another thread works on this CPU.
    pub(crate) yields: bool,
    /// Set by a signal.
    pub(crate) stop: &'a AtomicBool,
    /// Set when the device has ended by itself.
    pub(crate) over: &'a AtomicBool,
    /// Where the queues' counters are written for `--metrics`.
    pub(crate) live: Option<&'a Live>,
    /// Whether a signal is a normal end of the measurement.
    pub(crate) listens: bool,
    /// Advice for the user if no packet comes.
    pub(crate) hint: &'static str,
}

/// When a phase ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Until {
    /// When the first packet has come.
    First,
    /// When the time is over and a packet has come.
    Time,
}

impl<Q: Queues> Driver<'_, Q> {
    /// Polls for `limit`. If no packet comes for long, that is an error, unless the run only
    /// listens for traffic.
    pub(crate) fn phase(&mut self, variant: &Variant, limit: Duration, until: Until) -> Result<Counts, PerfError> {
        let limit_ns = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        let verdict = verdict(self.xdp);
        let Mailbox { out, own } = &mut self.mailbox;
        let (before, preempted_before) = (self.queues.totals(), preempted());
        let begin = self.clock.raw();
        let mut own_time = OwnTime::of_this_thread(self.clock);
        let (mut next_check, mut seen) = (CHECK_EVERY, false);
        loop {
            let mut moved = 0;
            for (rx, tx) in self.queues.pairs() {
                let budget = out.as_ref().map_or(BUDGET, |out| out.slots().min(BUDGET));
                let mut program = Program { verdict, tx, out: out.as_mut() };
                moved += own_time.poll(|| rx.poll(|poll| poll.receive(budget, &mut program)));
            }
            let mut at = own_time.end();
            if let Some(own) = own {
                drain(own);
                at = self.clock.raw();
            }
            let elapsed = self.clock.delta_as_nanos(begin, at);
            seen |= moved > 0;
            match until {
                Until::First if seen => break,
                // If other threads had the CPU all the time, there is nothing to report yet.
                Until::Time if elapsed >= limit_ns && (seen || self.listens) => break,
                _ if elapsed >= limit_ns + PATIENCE => {
                    return Err(PerfError::Silence {
                        variant: variant.to_string(),
                        waited: Duration::from_nanos(elapsed),
                        hint: self.hint,
                    });
                }
                _ => {}
            }
            if self.stop.load(Ordering::Relaxed) || self.over.load(Ordering::Relaxed) {
                break;
            }
            if moved == 0 {
                idle(self.yields);
                if self.yields {
                    own_time.resynchronise();
                }
            }
            if elapsed >= next_check {
                next_check = elapsed + CHECK_EVERY;
                self.live.iter().for_each(|live| live.write(&mut self.queues));
                own_time.resynchronise();
                self.queues.check(variant)?;
            }
        }
        self.queues.check(variant)?;
        if self.stop.load(Ordering::Relaxed) && !self.listens {
            return Err(PerfError::Interrupted);
        }
        let after = self.queues.totals();
        Ok(Counts {
            frames: after.0 - before.0,
            bytes: after.1 - before.1,
            elapsed_ns: self.clock.delta_as_nanos(begin, self.clock.raw()),
            busy_ns: self.clock.delta_as_nanos(0, own_time.ticks()),
            busy_ticks: own_time.ticks(),
            preempted: preempted().saturating_sub(preempted_before),
        })
    }
}

fn verdict(xdp: XdpArg) -> Verdict {
    match xdp {
        XdpArg::Drop => Verdict::Drop,
        XdpArg::Pass => Verdict::Pass,
        XdpArg::Tx => Verdict::Tx,
    }
}

/// Involuntary context switches of this thread so far.
fn preempted() -> u64 {
    // SAFETY: all zero is a valid `rusage`: integers and pairs of them; the call writes no more
    // than that.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage);
        usage
    };
    usage.ru_nivcsw.try_into().unwrap_or(0)
}
