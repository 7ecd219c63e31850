//! The device's counters. Any thread can read them at any time; they are written once per pass, not
//! per frame.
//!
//! A frame counts in a [`Tally`] on the stack of the pass, so that no two threads write to one
//! cache line for each frame.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::DriverFault;
use crate::guest_memory::MemoryTable;

/// Why a frame was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
#[non_exhaustive]
pub enum DropReason {
    /// Towards the driver: it does not fit the buffers that this driver posts.
    TooBig,
    /// From the driver: shorter than an Ethernet header behind the virtio header.
    Runt,
    /// From the driver: longer than any frame.
    TooLong,
    /// From the driver: a header whose offload fields cannot be true.
    BadHeader,
    /// From the driver: a header that asks for an offload that was not negotiated.
    NotNegotiated,
    /// From the driver: on a ring that was disabled.
    Disabled,
    /// From the driver: the port refused it (full, or refused by the kernel), or an offload that
    /// the port lacks is not done in software.
    PortRefused,
    /// Towards the driver: it waited when the front end disconnected, or arrived while no front end
    /// was connected.
    FrontEndLeft,
    /// Towards the driver: it has an offload that the driver did not negotiate, and that is not
    /// done in software.
    Uncut,
    /// In either direction: its bytes could not be copied to or from [imported
    /// memory](crate::guest_memory::import).
    CopyFailed,
}

impl DropReason {
    /// The names under which [`Stats::drops`] counts, in the order of the variants.
    pub const NAMES: [&'static str; 10] = [
        "too_big",
        "runt",
        "too_long",
        "bad_header",
        "not_negotiated",
        "disabled",
        "port_refused",
        "front_end_left",
        "uncut",
        "copy_failed",
    ];
}

/// Counters of one device, in units of frames, bytes and nanoseconds. "Received" and "sent" are
/// meant from the driver's side: a received frame went from the port to the driver.
#[derive(Debug, Default)]
pub struct Stats {
    /// Frames from the port to the driver.
    pub rx_frames: AtomicU64,
    /// Their bytes, virtio headers not counted.
    pub rx_bytes: AtomicU64,
    /// Those of them that the port has put into the driver's buffers itself, without a copy by the
    /// device.
    pub rx_in_place: AtomicU64,
    /// Those of them that were joined to the frame before, of which they are a part then: large
    /// receive offload.
    pub rx_joined: AtomicU64,
    /// Frames from the driver that the port accepted.
    pub tx_frames: AtomicU64,
    /// Their bytes, virtio headers not counted.
    pub tx_bytes: AtomicU64,
    /// Those of them whose payload the port has read from the driver's buffers itself, without a
    /// copy by the device.
    pub tx_in_place: AtomicU64,
    /// Those of them that were copied straight into the buffers of another queue pair.
    pub tx_direct: AtomicU64,
    /// Frames, in either direction, whose checksum was computed because the next hop does not.
    pub checksummed: AtomicU64,
    /// Frames, in either direction, that were cut because the next hop does not. They count as
    /// their segments elsewhere towards the driver, and once from the driver.
    pub segmented: AtomicU64,
    /// Passes over the queues.
    pub polls: AtomicU64,
    /// How often a queue had a frame and the driver had no buffers for it.
    pub out_of_buffers: AtomicU64,
    /// Nanoseconds in passes that moved frames.
    pub busy_ns: AtomicU64,
    /// Interrupts sent.
    pub calls: AtomicU64,
    /// How often a thread in [`super::Worker::run`] went to sleep.
    pub sleeps: AtomicU64,
    /// Sleeps that have ended; `sleeps` less `wakes` is the number of threads that sleep. Several
    /// causes may end a sleep at once.
    pub wakes: AtomicU64,
    /// Sleeps that ended by a driver's notification.
    pub woken_by_kick: AtomicU64,
    /// Sleeps that ended by a port.
    pub woken_by_port: AtomicU64,
    /// Sleeps that ended because a port had work at that time ([`super::port::Port::deadline`]).
    pub woken_by_deadline: AtomicU64,
    /// Sleeps that ended by a front end's message, by [`super::Control::wake`], or by a pair that
    /// sends to one of the thread's pairs, or receives from it.
    pub woken_by_control: AtomicU64,
    /// Control commands answered.
    pub commands: AtomicU64,
    /// Connections that ended in an error.
    pub connection_errors: AtomicU64,
    /// Messages that the device refused, after which the connection continued.
    pub refused: AtomicU64,
    /// Pages that the device wrote and that the front end's dirty log has no bit for.
    pub log_misses: Arc<AtomicU64>,
    /// Announcements (RARP) that the port sent.
    pub announced: AtomicU64,
    /// Accesses that found that a page of a front end's memory was gone. Counted only with the
    /// [handler](netmem_pool::sigbus) of SIGBUS.
    pub memory_lost: AtomicU64,
    /// Regions of the memory table now.
    pub memory_regions: AtomicU64,
    /// Their bytes.
    pub memory_bytes: AtomicU64,
    /// Those of them whose file can be shortened.
    pub memory_unsealed: AtomicU64,
    drops: [AtomicU64; DropReason::NAMES.len()],
    queue_errors: [AtomicU64; DriverFault::NAMES.len()],
    pairs: Box<[OfPair]>,
}

/// The counters of a pair. Only the thread that has the pair's lock writes them, without a
/// read-modify-write. Those of different pairs have no cache line in common.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(super) struct OfPair([AtomicU64; OF_PAIR.len()]);

/// What is counted for each queue pair, too.
const OF_PAIR: [&str; 5] = ["rx_frames", "rx_bytes", "tx_frames", "tx_bytes", "dropped"];

/// Values of [`OF_PAIR`].
pub(super) type PairTally = [u64; OF_PAIR.len()];

impl Stats {
    pub(super) fn new(pairs: usize) -> Self {
        Self { pairs: (0..pairs).map(|_| Default::default()).collect(), ..Self::default() }
    }

    /// For each queue pair, its part of `rx_frames`, `rx_bytes`, `tx_frames`, `tx_bytes`, and of
    /// all [drops](Self::drops) that a pass of the pair has counted, by name.
    pub fn pairs(&self) -> impl ExactSizeIterator<Item = [(&'static str, u64); 5]> {
        self.pairs.iter().map(|pair| std::array::from_fn(|n| (OF_PAIR[n], pair.0[n].load(Relaxed))))
    }

    /// Adds what a pass over a pair counted since `before`. The caller has the pair's lock.
    pub(super) fn add_pair(&self, pair: usize, t: &Tally, before: PairTally) {
        let Some(OfPair(counters)) = self.pairs.get(pair) else { return };
        for ((counter, now), before) in counters.iter().zip(t.of_pair()).zip(before) {
            if now != before {
                counter.store(counter.load(Relaxed).wrapping_add(now - before), Relaxed);
            }
        }
    }

    #[cfg(test)]
    pub(super) fn of_pairs(&self) -> &[OfPair] {
        &self.pairs
    }

    /// Every counter that is a field, by its name.
    pub fn counters(&self) -> impl Iterator<Item = (&'static str, u64)> {
        [
            ("rx_frames", &self.rx_frames),
            ("rx_bytes", &self.rx_bytes),
            ("rx_in_place", &self.rx_in_place),
            ("rx_joined", &self.rx_joined),
            ("tx_frames", &self.tx_frames),
            ("tx_bytes", &self.tx_bytes),
            ("tx_in_place", &self.tx_in_place),
            ("tx_direct", &self.tx_direct),
            ("checksummed", &self.checksummed),
            ("segmented", &self.segmented),
            ("polls", &self.polls),
            ("out_of_buffers", &self.out_of_buffers),
            ("busy_ns", &self.busy_ns),
            ("calls", &self.calls),
            ("sleeps", &self.sleeps),
            ("wakes", &self.wakes),
            ("woken_by_kick", &self.woken_by_kick),
            ("woken_by_port", &self.woken_by_port),
            ("woken_by_deadline", &self.woken_by_deadline),
            ("woken_by_control", &self.woken_by_control),
            ("commands", &self.commands),
            ("connection_errors", &self.connection_errors),
            ("memory_lost", &self.memory_lost),
            ("memory_regions", &self.memory_regions),
            ("memory_bytes", &self.memory_bytes),
            ("memory_unsealed", &self.memory_unsealed),
            ("refused", &self.refused),
            ("log_misses", &*self.log_misses),
            ("announced", &self.announced),
        ]
        .map(|(name, n)| (name, n.load(Relaxed)))
        .into_iter()
    }

    /// Frames dropped for `why`.
    #[must_use]
    pub fn dropped(&self, why: DropReason) -> u64 {
        self.drops[why as usize].load(Relaxed)
    }

    /// All drops, by name.
    pub fn drops(&self) -> impl Iterator<Item = (&'static str, u64)> {
        DropReason::NAMES.into_iter().zip(self.drops.iter().map(|n| n.load(Relaxed)))
    }

    /// Rings stopped by their driver's fault, by name.
    pub fn queue_errors(&self) -> impl Iterator<Item = (&'static str, u64)> {
        DriverFault::NAMES.into_iter().zip(self.queue_errors.iter().map(|n| n.load(Relaxed)))
    }

    /// Rings stopped by the fault called `name` in [`DriverFault::NAMES`].
    #[must_use]
    pub fn queue_error(&self, name: &str) -> u64 {
        self.queue_errors().find(|&(n, _)| n == name).map_or(0, |(_, count)| count)
    }

    /// Sets the counters of the memory table to those of this table.
    pub(super) fn set_memory(&self, table: &MemoryTable) {
        self.memory_regions.store(table.len() as u64, Relaxed);
        self.memory_bytes.store(table.mapped(), Relaxed);
        self.memory_unsealed.store(table.unsealed() as u64, Relaxed);
    }

    /// Counts frames that were dropped outside a pass.
    pub(super) fn add_drops(&self, why: DropReason, frames: u64) {
        self.drops[why as usize].fetch_add(frames, Relaxed);
    }

    pub(super) fn count_queue_error(&self, e: DriverFault) {
        self.queue_errors[e.index()].fetch_add(1, Relaxed);
    }

    /// Adds what one pass counted, the last of `polls`.
    pub(super) fn add(&self, t: &Tally, polls: u64) {
        let add = |to: &AtomicU64, n: u64| {
            if n > 0 {
                to.fetch_add(n, Relaxed);
            }
        };
        add(&self.rx_frames, t.rx_frames);
        add(&self.rx_bytes, t.rx_bytes);
        add(&self.rx_in_place, t.rx_in_place);
        add(&self.rx_joined, t.joined);
        add(&self.tx_frames, t.tx_frames);
        add(&self.tx_bytes, t.tx_bytes);
        add(&self.tx_in_place, t.tx_in_place);
        add(&self.tx_direct, t.tx_direct);
        add(&self.checksummed, t.checksummed);
        add(&self.segmented, t.segmented);
        add(&self.out_of_buffers, t.out_of_buffers);
        add(&self.calls, t.calls);
        add(&self.commands, t.commands);
        add(&self.polls, polls);
        if t.dropped > 0 {
            for (to, n) in self.drops.iter().zip(t.drops) {
                add(to, n);
            }
        }
    }
}

/// One pass's counts, kept in registers and on the stack until it ends.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) rx_frames: u64,
    pub(super) rx_bytes: u64,
    pub(super) rx_in_place: u64,
    pub(super) joined: u64,
    pub(super) tx_frames: u64,
    pub(super) tx_bytes: u64,
    pub(super) tx_in_place: u64,
    pub(super) tx_direct: u64,
    pub(super) checksummed: u64,
    pub(super) segmented: u64,
    pub(super) out_of_buffers: u64,
    pub(super) calls: u64,
    pub(super) commands: u64,
    dropped: u64,
    drops: [u64; DropReason::NAMES.len()],
}

impl Tally {
    #[inline]
    pub(super) fn of_pair(&self) -> PairTally {
        [self.rx_frames, self.rx_bytes, self.tx_frames, self.tx_bytes, self.dropped]
    }

    #[cold]
    pub(super) fn drop(&mut self, why: DropReason) {
        self.dropped += 1;
        self.drops[why as usize] += 1;
    }

    /// Frames dropped.
    #[inline]
    pub(super) fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Frames and commands handled, dropped ones included.
    pub(super) fn moved(&self) -> usize {
        (self.rx_frames + self.tx_frames + self.commands + self.dropped) as usize
    }
}
