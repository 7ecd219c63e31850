//! The driver's side of a measurement: one thread that polls its queues round robin, and times the polls that found
//! packets.

use super::engine::{Mailbox, drain};
use super::error::PerfError;
use super::plan::Variant;
use crate::args::{DeviceArg, XdpArg};
use netmem::packet::{Handler, Packet, Poll, RxQueue, TxQueue, Verdict, XdpFrame};
use netmem::{PeerShared, QueuePair, VirtioNet, VirtioTx};
use quanta::Clock;
use rtrb::{Consumer, Producer};
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Frames a poll takes at most.
const BUDGET: usize = 256;
/// Nanoseconds between two looks at what is not on the fast path.
const LOOK_EVERY: u64 = 10_000_000;
/// Nanoseconds to wait for a packet beyond the phase's time: a backend may only now begin to look at its new driver.
const PATIENCE: u64 = 5_000_000_000;

/// What a phase counted.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) frames: u64,
    pub(crate) bytes: u64,
    pub(crate) elapsed_ns: u64,
    /// In polls that found packets.
    pub(crate) busy_ns: u64,
    /// The same in ticks of the time stamp counter, where the clock has one.
    pub(crate) busy_ticks: u64,
    /// Times that something else was given this thread's CPU.
    pub(crate) preempted: u64,
}

/// The XDP program and what follows from its verdict.
struct Program<'a> {
    verdict: Verdict,
    tx: &'a mut VirtioTx,
    out: Option<&'a mut Producer<Packet<PeerShared>>>,
}

impl Handler<PeerShared> for Program<'_> {
    #[inline]
    fn run(&mut self, frame: &mut XdpFrame<PeerShared>) -> Verdict {
        // Addresses and type, and the first bytes behind them: what every program reads.
        black_box(frame.read_at::<16>(0).unwrap_or_default());
        self.verdict
    }

    #[inline]
    fn pass(&mut self, packet: Packet<PeerShared>) {
        match &mut self.out {
            // There is room: the budget was made for it.
            Some(out) => drop(out.push(packet)),
            None => drop(packet),
        }
    }

    #[inline]
    fn tx(&mut self, packet: Packet<PeerShared>) {
        if let Err(packet) = self.tx.send(packet) {
            // Full: perhaps the device has moved on. The queue counts what it refuses.
            self.tx.flush();
            self.tx.complete();
            drop(self.tx.send(packet));
        }
    }
}

/// The driver, and all that its loop looks at.
pub(crate) struct Driver<'a> {
    pub(crate) net: VirtioNet,
    pub(crate) pairs: Vec<QueuePair>,
    pub(crate) mailbox: Mailbox,
    pub(crate) xdp: XdpArg,
    pub(crate) clock: &'a Clock,
    /// Whether somebody else works on this CPU.
    pub(crate) yields: bool,
    /// A signal came.
    pub(crate) stop: &'a AtomicBool,
    /// The device ended by itself.
    pub(crate) over: &'a AtomicBool,
    /// Whether a signal is a way to end like any other.
    pub(crate) listens: bool,
    /// Where the backend is, if it is not ours.
    pub(crate) foreign: Option<DeviceArg>,
}

/// When a phase ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Until {
    /// At the first packet.
    First,
    /// When its time is over and there was a packet.
    Time,
}

impl Driver<'_> {
    /// Polls for `limit`. Long silence is an error, unless traffic is only listened for.
    pub(crate) fn phase(&mut self, variant: &Variant, limit: Duration, until: Until) -> Result<Counts, PerfError> {
        let limit_ns = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        let verdict = match self.xdp {
            XdpArg::Drop => Verdict::Drop,
            XdpArg::Pass => Verdict::Pass,
            XdpArg::Tx => Verdict::Tx,
        };
        let transmits = verdict == Verdict::Tx;
        let Mailbox { out, own } = &mut self.mailbox;
        let (before, preempted_before) = (totals(&self.pairs), preempted());
        let begin = self.clock.raw();
        let (mut at, mut busy_ticks, mut look, mut seen) = (begin, 0, LOOK_EVERY, false);
        loop {
            let mut moved = 0;
            for QueuePair { rx, tx } in &mut self.pairs {
                let budget = out.as_ref().map_or(BUDGET, |out| out.slots().min(BUDGET));
                let mut program = Program { verdict, tx, out: out.as_mut() };
                let n = rx.poll(|poll| {
                    if transmits {
                        // In the poll context, so that the pages of what was sent take the fast way home.
                        program.tx.complete();
                    }
                    let n = poll.receive(budget, &mut program);
                    if transmits {
                        program.tx.flush();
                    }
                    n
                });
                let now = self.clock.raw();
                if n > 0 {
                    busy_ticks += now - at;
                    moved += n;
                }
                at = now;
            }
            if let Some(own) = own {
                drain(own);
                at = self.clock.raw();
            }
            let elapsed = self.clock.delta_as_nanos(begin, at);
            seen |= moved > 0;
            match until {
                Until::First if seen => break,
                // Where others got all of the CPU's time there is nothing to tell yet.
                Until::Time if elapsed >= limit_ns && (seen || self.listens) => break,
                _ if elapsed >= limit_ns + PATIENCE => {
                    return Err(silence(variant, Duration::from_nanos(elapsed), self.foreign.is_some()));
                }
                _ => {}
            }
            if self.stop.load(Ordering::Relaxed) || self.over.load(Ordering::Relaxed) {
                break;
            }
            if moved == 0 {
                idle(self.yields);
            }
            if elapsed >= look {
                look = elapsed + LOOK_EVERY;
                healthy(variant, &self.net, &self.pairs, self.foreign.as_ref())?;
            }
        }
        healthy(variant, &self.net, &self.pairs, self.foreign.as_ref())?;
        if self.stop.load(Ordering::Relaxed) && !self.listens {
            return Err(PerfError::Interrupted);
        }
        let after = totals(&self.pairs);
        Ok(Counts {
            frames: after.0 - before.0,
            bytes: after.1 - before.1,
            elapsed_ns: self.clock.delta_as_nanos(begin, at),
            busy_ns: self.clock.delta_as_nanos(0, busy_ticks),
            busy_ticks,
            preempted: preempted().saturating_sub(preempted_before),
        })
    }
}

/// Involuntary context switches of this thread so far.
fn preempted() -> u64 {
    // SAFETY: all zero is a valid `rusage`: integers and pairs of them; the call writes no more than that.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage);
        usage
    };
    usage.ru_nivcsw.try_into().unwrap_or(0)
}

/// Frames and bytes so far.
fn totals(pairs: &[QueuePair]) -> (u64, u64) {
    pairs.iter().map(|pair| pair.rx.stats()).fold((0, 0), |(frames, bytes), s| (frames + s.frames, bytes + s.bytes))
}

/// Whether the device is there and keeps the rules.
#[cold]
fn healthy(
    variant: &Variant,
    net: &VirtioNet,
    pairs: &[QueuePair],
    foreign: Option<&DeviceArg>,
) -> Result<(), PerfError> {
    let variant = || variant.to_string();
    let stopped = pairs.iter().find_map(|pair| pair.rx.stats().stopped.or(pair.tx.stats().stopped));
    if let Some(source) = stopped {
        return Err(PerfError::Broken { variant: variant(), source });
    }
    match foreign {
        Some(device) if !net.is_connected() => {
            Err(PerfError::BackendGone { variant: variant(), device: device.clone() })
        }
        _ => Ok(()),
    }
}

fn silence(variant: &Variant, waited: Duration, foreign: bool) -> PerfError {
    let hint = if foreign { "is the backend told to send?" } else { "the embedded device got no time to run" };
    PerfError::Silence { variant: variant.to_string(), waited, hint }
}

/// There is nothing to do right now.
#[inline]
pub(crate) fn idle(yields: bool) {
    if yields { std::thread::yield_now() } else { std::hint::spin_loop() }
}

/// The receiving end of a mailbox, emptied until the other end is `halt`ed.
pub(crate) fn consume(mut mail: Consumer<Packet<PeerShared>>, halt: &AtomicBool, yields: bool) {
    loop {
        let halted = halt.load(Ordering::Acquire);
        if drain(&mut mail) == 0 {
            if halted {
                return;
            }
            idle(yields);
        }
    }
}
