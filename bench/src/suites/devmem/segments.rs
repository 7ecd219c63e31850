//! What a segment of a stream costs, by its length.
//!
//! ```text
//!   second CPU               first CPU, in turns with the second
//!   peer ─► device ─► ring ─► driver ─► stack ─► DeviceStream::recv ─► tokens returned
//!   peer ◄─ device ◄─ ring ◄─ driver ◄─ stack ◄─ DeviceStream::send
//! ```
//!
//! A *cost* is the CPU time of `Stack::poll`, which includes the driver, and of the application's
//! calls: receiving and giving tokens back, or sending and asking for ranges that were sent. A
//! *throughput* also includes the device's turns, in which it copies the bytes.
//!
//! The device has a CPU of its own because a network card has no part of the stack's caches either.
//! On the stack's CPU, the copy of 16 long segments would drive the stack's data and code out of
//! the caches of that CPU, and the cost would contain these misses. The device and the stack still
//! take turns, so that each turn has the same number of segments at every length.
//!
//! Pages of device memory are 64 KiB, so each segment is in one page. The last row has the longest
//! segments in pages of 4 KiB.

use super::directions::{MSS, WHOLE_NS};
use super::lane::{Card, Lane, Shape, Turns, bind, late};
use super::rig::{Memory, PAGES};
use crate::error::BenchError;
use crate::harness::Harness;
use crate::report::{Head, Sample};
use crate::rounds::Benchmark;
use netmem::refs::PercpuRef;
use netmem_devmem::Binding;
use netmem_devmem::stream::StreamFragment;
use netmem_measure::load::thread_time;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// Bytes of payload. Up to [`MSS`], a segment is one frame. Longer segments are possible with
/// offloads.
const LENGTHS: [usize; 8] = [64, 256, MSS, 4096, 9000, 16_000, 32_000, 64_000];
/// The shortest segment, the longest that is not cut, and the longest of all: the goals compare
/// them.
pub(super) const JUDGED: [usize; 3] = [LENGTHS[0], MSS, LONG];
const LONG: usize = LENGTHS[7];
/// Page order of the device memory: 64 KiB.
pub(super) const ORDER: u8 = 4;
/// Segments in a turn. The window has room for as many of the longest segments, because it counts
/// each page as one MSS.
const BURST: u64 = 16;
/// Segments of the warm-up: the ring has 256 buffers, and each of them is used several times.
const WARM: u64 = 1024;
/// Pages that ranges are sent from, in turn. The warm-up sends from each of them.
const PLACES: u64 = 256;

/// The rows of a length: cost and throughput of receiving, then of sending.
pub(super) const SECTIONS: [&str; 4] =
    ["segment received", "segment received: throughput", "segment sent", "segment sent: throughput"];

/// The name of a length's rows.
pub(super) fn name(len: usize, order: u8) -> String {
    if order == ORDER { format!("{len} bytes") } else { format!("{len} bytes, pages of {} KiB", 4 << order) }
}

/// What a number of segments took.
#[derive(Clone, Copy, Debug, Default)]
struct Took {
    segments: u64,
    /// CPU time of the stack and the application, in nanoseconds.
    stack_ns: u64,
    /// Elapsed time, with the device's turns.
    all_ns: u64,
    /// The features that the stack's driver and its device have negotiated.
    features: u64,
}

impl Took {
    /// Nanoseconds of a segment, and bits per second with segments of `len` bytes.
    fn each(&self, len: usize) -> [f64; 2] {
        let cost = self.stack_ns as f64 / self.segments.max(1) as f64;
        [cost, (self.segments * len as u64 * 8) as f64 * 1e9 / self.all_ns.max(1) as f64]
    }
}

/// A stack with one stream, and the turns of its device.
struct Rig<'a> {
    lane: Lane<PercpuRef>,
    binding: Binding<PercpuRef>,
    turns: &'a Turns,
    len: usize,
    /// Segments that the peer may have sent in all.
    due: u64,
    /// Ranges that were sent in all.
    sent: u64,
}

impl Rig<'_> {
    /// Receives turns of segments: at least this many, and for `ns` nanoseconds.
    fn receive(&mut self, ns: u64, least: u64) -> Result<Took, BenchError> {
        let (mut took, begin) = (Took::default(), Instant::now());
        let elapsed = || begin.elapsed().as_nanos() as u64;
        let returner = self.lane.streams[0].returner();
        while elapsed() < ns || took.segments < least {
            self.due += BURST;
            let mut left = BURST * self.len as u64;
            while left > 0 {
                self.turns.turn(self.due)?;
                let before = thread_time();
                self.lane.stack.poll(self.lane.now());
                loop {
                    let mut places = [const { StreamFragment::Empty }; BURST as usize];
                    let Ok(n) = self.lane.streams[0].recv(&mut places) else { break };
                    for place in &places[..n] {
                        let StreamFragment::Device { len, tokens, .. } = place else {
                            return Err(BenchError::NoPage("a segment in device memory"));
                        };
                        left = left.saturating_sub(u64::from(*len));
                        // An extent has at most 16 pages, and a call may name more than that.
                        let _ = returner.return_tokens(&[*tokens]);
                    }
                }
                took.stack_ns += thread_time().saturating_sub(before);
                late(begin, "the last segment")?;
            }
            took.segments += BURST;
        }
        took.all_ns = elapsed();
        took.features = self.lane.features();
        Ok(took)
    }

    /// Sends turns of segments, and waits until all ranges may be used again.
    fn send(&mut self, ns: u64, least: u64) -> Result<Took, BenchError> {
        let (mut took, begin) = (Took::default(), Instant::now());
        let elapsed = || begin.elapsed().as_nanos() as u64;
        let (from, mut out) = (self.binding.reference(), 0);
        let mut ended = false;
        while !ended || out > 0 {
            ended = elapsed() >= ns && took.segments >= least;
            let before = thread_time();
            while !ended && out < BURST {
                let offset = self.sent % PLACES * (4096 << ORDER);
                if self.lane.streams[0].send(&from, offset, self.len as u32, false).is_err() {
                    break;
                }
                (self.sent, out) = (self.sent + 1, out + 1);
                self.lane.stack.poll(self.lane.now());
            }
            self.lane.stack.poll(self.lane.now());
            while self.lane.streams[0].sent().is_some() {
                (took.segments, out) = (took.segments + 1, out - 1);
            }
            took.stack_ns += thread_time().saturating_sub(before);
            self.turns.turn(self.due)?;
            late(begin, "the last segment")?;
        }
        took.all_ns = elapsed();
        took.features = self.lane.features();
        Ok(took)
    }
}

/// The benchmark of a length and of a kind of pages.
pub(super) struct Segments {
    memory: Arc<Memory>,
    len: usize,
    order: u8,
}

impl Segments {
    /// All benchmarks: each length, and the longest segments in pages of 4 KiB.
    pub(super) fn benchmarks(memory: &Arc<Memory>) -> Vec<Self> {
        let small = [(LONG, 0)];
        let all = LENGTHS.into_iter().map(|len| (len, ORDER)).chain(small);
        all.map(|(len, order)| Self { memory: memory.clone(), len, order }).collect()
    }

    /// Measures on this thread, while the device works on another one.
    fn measure_with(
        &self,
        harness: &Harness,
        shape: Shape,
        ours: std::os::unix::net::UnixStream,
        turns: &Turns,
    ) -> Measured {
        let ns = harness.duration_ns() / 2;
        let binding = bind::<PercpuRef>(&self.memory, self.order)?;
        let lane = Lane::new(&binding, shape, ours, || turns.turn(0))?;
        let mut rig = Rig { lane, binding, turns, len: self.len, due: 0, sent: 0 };
        // The warm-up: pages are touched for the first time, and the congestion window grows.
        let warm = if ns >= WHOLE_NS { WARM } else { BURST };
        rig.receive(0, warm)?;
        rig.send(0, warm)?;
        Ok([rig.receive(ns, 1)?, rig.send(ns, 1)?])
    }
}

/// Receiving, then sending.
type Measured = Result<[Took; 2], BenchError>;

impl Benchmark for Segments {
    fn heads(&self) -> Vec<Head> {
        let units = [("ns", "segment"), ("b/s", "stream")].into_iter().cycle();
        let head = |(section, (unit, per))| Head {
            name: name(self.len, self.order),
            section,
            threads: 2,
            per,
            unit,
            direction: Some(if section == SECTIONS[0] || section == SECTIONS[1] { "rx" } else { "tx" }),
            ..Head::default()
        };
        SECTIONS.into_iter().zip(units).map(head).collect()
    }

    fn measure(&mut self, harness: &Harness) -> Result<Vec<Sample>, BenchError> {
        let reserve = if self.order == ORDER { 300 } else { 300 * (1 << ORDER) };
        let shape = Shape { flows: 1, len: self.len, order: self.order, large: true, reserve };
        let (mut card, ours) = Card::new(shape)?;
        let turns = &Turns::default();
        let device = move |ended: &AtomicBool| turns.serve(&mut card, ended);
        let this = &*self;
        let (timed, took) =
            harness.served(vec![device], || harness.time(move || this.measure_with(harness, shape, ours, turns)))?;
        let samples = took?.into_iter().flat_map(|took| {
            let sample = |value| Sample {
                value,
                lost_ns: timed.lost_ns,
                elapsed_ns: Some(took.all_ns),
                bytes: Some(took.segments * self.len as u64),
                features: took.features,
                ..Sample::default()
            };
            took.each(self.len).map(sample)
        });
        Ok(samples.collect())
    }

    fn note(&self) -> Option<String> {
        let cut = if self.len > MSS { "; the peer and the device handle it whole" } else { "" };
        let pages = if self.order == ORDER { "in one page of 64 KiB" } else { "in pages of 4 KiB" };
        Some(format!(
            "a segment is {pages}, {BURST} in a turn; the device, on the second CPU, took turns with the stack{cut}"
        ))
    }
}

const _: () = assert!(PLACES <= (PAGES >> ORDER) as u64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_costs_the_stack_its_part_and_throughput_has_all_of_the_time() {
        // 100 segments of 1000 bytes: 50 us of the stack, and 200 us in all. 800,000 bits in 200 us
        // are 4 Gb/s.
        let took = Took { segments: 100, stack_ns: 50_000, all_ns: 200_000, ..Took::default() };
        let [cost, rate] = took.each(1000);
        assert!((cost - 500.0).abs() < 1e-9 && (rate / 4e9 - 1.0).abs() < 1e-9, "{cost} ns, {rate} b/s");
        // Nothing took no time.
        assert_eq!(Took::default().each(1000), [0.0, 0.0]);
    }

    #[test]
    fn rows_are_named_by_length_and_by_pages() {
        assert_eq!(name(LONG, ORDER), "64000 bytes");
        assert_eq!(name(LONG, 0), "64000 bytes, pages of 4 KiB");
    }

    /// All of the time of [`Took`] is the rig's, and every segment is counted once: of each length,
    /// received and sent.
    #[test]
    fn segments_of_each_length_are_received_and_sent() {
        let harness = Harness::for_tests();
        if harness.cpus(2).len() < 2 {
            return;
        }
        for mut benchmark in Segments::benchmarks(&Arc::default()) {
            let samples = benchmark.measure(&harness).unwrap();
            let whole = |sample: &Sample| {
                sample.bytes.unwrap().is_multiple_of(BURST * benchmark.len as u64) && sample.value > 0.0
            };
            assert!(samples.len() == SECTIONS.len() && samples.iter().all(whole), "{samples:?}");
        }
    }
}
