//! Streams: messages of 4 MB received into device memory, and sent from it.
//!
//! ```text
//!   receive   first CPU: peer, device ─► stack ─► DeviceStream::recv      second CPU: tokens of a message, returned
//!   transmit  each CPU: DeviceStream::send ─► stack ─► device, peer      one binding, counted by both
//! ```
//!
//! Receiving: the network's CPU time is that of the stack and of receiving, the application's is
//! that of giving tokens back. Sending: each CPU has a lane of its own with half of the flows,
//! because a stream is sent from its stack's thread. The lanes share only the binding. The device
//! and the peer take turns with the stack, and are left out of all CPU time. A segment has 1448
//! bytes, because counts and tokens are taken per segment: large segments would hide their cost.
//!
//! The streams of all variants are connected and warmed up once, and outlive the measurements. A
//! measurement consists of slices, a quarter of a message of each flow. The variants take turns
//! slice by slice, so that all of them see the same minutes of the machine. CPU time is the
//! thread's CPU clock around turns in which there was something to do.

use super::benchmark::{Outcome, Pace, STEP};
use super::directions::{Direction, FLOWS, MSS, UNIT, VARIANTS, WHOLE_NS};
use super::lane::{Card, Lane, Shape, bind, late, pause, wait};
use super::receive::due;
use super::resident::Resident;
use super::rig::Memory;
use super::ways::{StreamBack, StreamWay};
use crate::error::BenchError;
use crate::harness::Harness;
use crate::report::{Head, Sample};
use crate::rounds::Benchmark;
use netmem_devmem::{Binding, BindingCount, BindingRef, MAX_RANGES, TokenRange};
use netmem_measure::load::thread_time;
use rtrb::{Consumer, Producer, RingBuffer};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Units of a message: 4 MB, and a multiple of 4.
pub(super) const MESSAGE: u64 = (4_000_000u64.div_ceil(UNIT)).next_multiple_of(4);
/// Units of a slice, of each flow.
const SLICE: u64 = MESSAGE / 4;
/// The same in a run that is only a test.
const SHORT_SLICE: u64 = STEP;
/// Slices of a variant that move a message of each flow.
const WHOLE: u64 = MESSAGE / SLICE;
/// The most slices of a variant in a measurement.
const MOST: u64 = 256;
/// Bytes that are sent by one call.
const RANGE: u64 = STEP * UNIT;
/// Flows of a lane that sends.
const HALF: usize = FLOWS / 2;
/// Fragments on their way to the application.
const RING: usize = 65536;
/// Pages that are reserved for the ring and for data that is in flight.
const RESERVE: usize = 2048;

fn shape(flows: usize) -> Shape {
    Shape { flows, len: MSS, order: 0, large: false, reserve: RESERVE }
}

/// What moves the slices of a variant on its thread.
trait Slices {
    /// Moves this many units of each flow: as fast as it goes, or one unit of any flow every
    /// `pace_ns`.
    fn slice(&mut self, units: u64, pace_ns: Option<f64>) -> Result<Outcome, BenchError>;
}

/// Measures `f`, which returns the number of units that arrived, and its CPU time in turns with
/// work.
fn timed(f: impl FnOnce(Instant) -> Result<(u64, u64), BenchError>) -> Result<Outcome, BenchError> {
    let (begin, before) = (Instant::now(), thread_time());
    let (arrived, network_ns) = f(begin)?;
    let elapsed_ns = begin.elapsed().as_nanos() as u64;
    let lost_ns = elapsed_ns.saturating_sub(thread_time().saturating_sub(before));
    Ok(Outcome { elapsed_ns, arrived, network_ns, lost_ns, ..Outcome::default() })
}

/// A fragment that was received from a flow, for the application.
struct Came {
    flow: usize,
    tokens: TokenRange,
}

/// What the application's thread reports.
#[derive(Default)]
struct Progress {
    /// Fragments that were dealt with.
    seen: AtomicU64,
    /// Fragments whose tokens were returned.
    freed: AtomicU64,
    busy_ns: AtomicU64,
}

/// A variant that receives: the network's side.
struct Receiving<C: BindingCount, W> {
    ways: Vec<W>,
    lane: Lane<C>,
    card: Card,
    _binding: Binding<C>,
    out: Producer<Came>,
    progress: Arc<Progress>,
    /// Units of a message.
    message: u64,
    /// Units that the peer has sent of each flow, and fragments that were received.
    sent: u64,
    received: u64,
}

/// The application's side: tokens that are held, of each flow, and how to return them.
struct Application {
    flows: Vec<(Box<dyn StreamBack>, Vec<TokenRange>)>,
    came: Consumer<Came>,
    progress: Arc<Progress>,
    message: u64,
}

/// Connects a variant that receives messages of this many units.
fn receiving<C: BindingCount, W: StreamWay<C> + 'static>(
    memory: &Memory,
    message: u64,
) -> Result<(Box<dyn Slices>, Application), BenchError> {
    let (binding, shape) = (bind::<C>(memory, 0)?, shape(FLOWS));
    let (mut card, ours) = Card::new(shape)?;
    let lane = Lane::new(&binding, shape, ours, || {
        card.turn(0);
        Ok(())
    })?;
    let ways: Vec<W> = lane.streams.iter().map(|stream| W::new(stream, &binding.reference())).collect();
    let flows = ways.iter().map(|way| (Box::new(way.back()) as Box<dyn StreamBack>, Vec::new())).collect();
    let (out, came) = RingBuffer::new(RING);
    let progress = Arc::<Progress>::default();
    let application = Application { flows, came, progress: progress.clone(), message };
    let network = Receiving { ways, lane, card, _binding: binding, out, progress, message, sent: 0, received: 0 };
    Ok((Box::new(network), application))
}

impl<C: BindingCount, W: StreamWay<C>> Slices for Receiving<C, W> {
    fn slice(&mut self, units: u64, pace_ns: Option<f64>) -> Result<Outcome, BenchError> {
        let Self { ways, lane, card, out, progress, message, sent, received, .. } = self;
        let (base, all, busy_before) = (*received, units * FLOWS as u64, progress.busy_ns.load(Ordering::Relaxed));
        let mut outcome = timed(|begin| {
            let mut busy = 0;
            while *received - base < all {
                let now = begin.elapsed().as_nanos() as u64;
                card.turn(*sent + each(due(all, now, pace_ns), FLOWS, units));
                let (before, mut found) = (thread_time(), lane.stack.poll(lane.now()));
                for (flow, (way, stream)) in ways.iter_mut().zip(&mut lane.streams).enumerate() {
                    // One call receives up to 16 fragments, so there must be room for as many.
                    while out.slots() >= 16 {
                        let got = way.receive(stream, |_, tokens| {
                            *received += u64::from(tokens.count);
                            let _ = out.push(Came { flow, tokens });
                        });
                        found += got;
                        if got < 16 {
                            break;
                        }
                    }
                }
                if found > 0 {
                    busy += thread_time().saturating_sub(before);
                }
                late(begin, "a segment")?;
            }
            Ok((*received - base, busy))
        })?;
        *sent += units;
        // The application must not be at work in the slice of the next variant.
        wait(|| progress.seen.load(Ordering::Acquire) >= *received, "the end of the application's work")?;
        let freed = progress.freed.load(Ordering::Acquire);
        if *received != *sent * FLOWS as u64 || sent.is_multiple_of(*message) && freed != *received {
            let (variant, sent) = (String::new(), *sent * FLOWS as u64);
            return Err(BenchError::Devmem { variant, sent, arrived: *received, held: *received, freed });
        }
        outcome.features = lane.features();
        outcome.application_ns = progress.busy_ns.load(Ordering::Relaxed) - busy_before;
        Ok(outcome)
    }
}

/// The units of each flow that are due, if `due` units are due in all. There are no more than
/// `units` of each.
fn each(due: u64, flows: usize, units: u64) -> u64 {
    due.div_ceil(flows as u64).min(units)
}

impl Application {
    /// Receives what has come. When a message is complete, its tokens are returned. Returns how
    /// much came.
    fn work(&mut self) -> usize {
        let Self { flows, came, progress, message } = self;
        let n = came.slots();
        for _ in 0..n {
            let Ok(Came { flow, tokens }) = came.pop() else { break };
            let (back, held) = &mut flows[flow];
            held.push(tokens);
            if held.len() as u64 == *message {
                let before = thread_time();
                let freed: usize = held.chunks(MAX_RANGES).map(|tokens| back.return_tokens(tokens)).sum();
                held.clear();
                progress.busy_ns.fetch_add(thread_time().saturating_sub(before), Ordering::Relaxed);
                progress.freed.fetch_add(freed as u64, Ordering::Release);
            }
            progress.seen.fetch_add(1, Ordering::Release);
        }
        n
    }
}

/// A variant that sends: one of its two lanes.
struct Transmitting<C: BindingCount> {
    lane: Lane<C>,
    card: Card,
    from: BindingRef<C>,
    /// Bytes that were sent of each flow.
    sent: u64,
    _binding: Arc<Binding<C>>,
}

/// Connects a lane that sends from this binding.
fn transmitting<C: BindingCount>(binding: Arc<Binding<C>>) -> Result<Box<dyn Slices>, BenchError> {
    let (mut card, ours) = Card::new(shape(HALF))?;
    let lane = Lane::new(&binding, shape(HALF), ours, || {
        card.turn(0);
        Ok(())
    })?;
    let from = binding.reference();
    Ok(Box::new(Transmitting { lane, card, from, sent: 0, _binding: binding }))
}

impl<C: BindingCount> Slices for Transmitting<C> {
    fn slice(&mut self, units: u64, pace_ns: Option<f64>) -> Result<Outcome, BenchError> {
        let Self { lane, card, from, sent: base, .. } = self;
        let all = units * HALF as u64;
        let mut outcome = timed(|begin| {
            let (mut sent, mut out, mut busy) = ([0; HALF], 0u64, 0);
            while sent.iter().any(|&sent| sent < units * UNIT) || out > 0 {
                let now = begin.elapsed().as_nanos() as u64;
                let due = each(due(all, now, pace_ns), HALF, units) * UNIT;
                let (before, mut found) = (thread_time(), 0);
                for (flow, (sent, stream)) in sent.iter_mut().zip(&mut lane.streams).enumerate() {
                    while *sent < due {
                        let n = (due - *sent).min(RANGE);
                        if stream.send(from, place(flow, *base + *sent), n as u32, *sent + n < due).is_err() {
                            break;
                        }
                        (*sent, out, found) = (*sent + n, out + 1, found + 1);
                    }
                }
                found += lane.stack.poll(lane.now());
                for stream in &mut lane.streams {
                    while stream.sent().is_some() {
                        (out, found) = (out - 1, found + 1);
                    }
                }
                if found > 0 {
                    busy += thread_time().saturating_sub(before);
                }
                card.turn(0);
                late(begin, "the acknowledgement of a segment")?;
            }
            Ok((all, busy))
        })?;
        *base += units * UNIT;
        outcome.features = lane.features();
        Ok(outcome)
    }
}

/// The offset in the binding of byte `at` of a flow. The messages of a flow lie in a part of the
/// memory of its own, and a range of up to [`RANGE`] bytes stays in it.
fn place(flow: usize, at: u64) -> u64 {
    flow as u64 * MESSAGE * UNIT + at % (MESSAGE * UNIT - RANGE)
}

/// Two threads meet, again and again.
#[derive(Default)]
struct Meeting(AtomicUsize);

impl Meeting {
    fn wait(&self) -> Result<(), BenchError> {
        let came = self.0.fetch_add(1, Ordering::AcqRel) + 1;
        wait(|| self.0.load(Ordering::Acquire) >= came.next_multiple_of(2), "the other lane")
    }
}

/// Slices of these variants, one after another.
#[derive(Clone)]
struct Job {
    order: Vec<usize>,
    units: u64,
    pace_ns: Option<f64>,
}

impl Job {
    /// Forwards and backwards, so that a change of the machine's speed reaches all variants.
    fn new(slices: u64, units: u64, pace_ns: Option<f64>) -> Self {
        let forwards = (0..VARIANTS.len()).collect::<Vec<_>>();
        let backwards = forwards.iter().rev().copied().collect::<Vec<_>>();
        let order = (0..slices).flat_map(|n| if n.is_multiple_of(2) { forwards.clone() } else { backwards.clone() });
        Self { order: order.collect(), units, pace_ns }
    }

    /// The sums for each variant, of the outcomes of all slices.
    fn sums(&self, outcomes: &[Outcome]) -> [Outcome; VARIANTS.len()] {
        let mut sums = [Outcome::default(); VARIANTS.len()];
        self.order.iter().zip(outcomes).for_each(|(&variant, outcome)| sums[variant].add(outcome));
        sums
    }
}

type Variants = Vec<Box<dyn Slices>>;
type Network = Resident<Job, Vec<Outcome>>;

/// The threads of a direction, with the streams of all variants.
enum Threads {
    Receive { network: Network, application: Resident<Arc<AtomicBool>, ()> },
    Transmit { lanes: [Network; 2] },
}

impl Threads {
    fn receive(memory: &Arc<Memory>, cpus: &[usize], message: u64) -> Result<Self, BenchError> {
        use super::ways::{StreamLocked, StreamRanges};
        use netmem::refs::{PercpuRef, RefCount};
        let (give, applications) = mpsc::channel();
        let memory = memory.clone();
        let make = move || {
            // In the order of VARIANTS.
            let all = [
                receiving::<RefCount, StreamLocked<_>>(&memory, message)?,
                receiving::<PercpuRef, StreamLocked<_>>(&memory, message)?,
                receiving::<RefCount, StreamRanges<_>>(&memory, message)?,
                receiving::<PercpuRef, StreamRanges<_>>(&memory, message)?,
            ];
            let variants = all.into_iter().map(|(network, application)| {
                // If nothing receives this, the suite has ended.
                let _ = give.send(application);
                network
            });
            Ok(variants.collect::<Variants>())
        };
        let network = Resident::spawn(cpus[0], make, |variants: &mut Variants, job: Job| {
            let slice = |&variant: &usize| variants[variant].slice(job.units, job.pace_ns);
            job.order.iter().map(slice).collect()
        })?;
        let make = move || Ok(applications.iter().collect::<Vec<Application>>());
        let application = Resident::spawn(cpus[1], make, |applications, ended: Arc<AtomicBool>| {
            let mut idle = 0;
            loop {
                let last = ended.load(Ordering::Acquire);
                if applications.iter_mut().map(Application::work).sum::<usize>() == 0 {
                    if last {
                        break Ok(());
                    }
                    pause(&mut idle);
                }
            }
        })?;
        Ok(Self::Receive { network, application })
    }

    fn transmit(memory: &Memory, cpus: &[usize]) -> Result<Self, BenchError> {
        use netmem::refs::{PercpuRef, RefCount};
        // A variant that differs from another one only in its tokens does the same work.
        let old = [Arc::new(bind::<RefCount>(memory, 0)?), Arc::new(bind::<RefCount>(memory, 0)?)];
        let new = [Arc::new(bind::<PercpuRef>(memory, 0)?), Arc::new(bind::<PercpuRef>(memory, 0)?)];
        let meeting = Arc::<Meeting>::default();
        let lane = |cpu: usize| {
            let ([a, c], [b, d], meeting) = (old.clone(), new.clone(), meeting.clone());
            let make = move || -> Result<Variants, BenchError> {
                Ok(vec![transmitting(a)?, transmitting(b)?, transmitting(c)?, transmitting(d)?])
            };
            Resident::spawn(cpu, make, move |variants, job: Job| {
                let slice = |&variant: &usize| {
                    meeting.wait()?;
                    variants[variant].slice(job.units, job.pace_ns.map(|ns| 2.0 * ns))
                };
                job.order.iter().map(slice).collect()
            })
        };
        Ok(Self::Transmit { lanes: [lane(cpus[0])?, lane(cpus[1])?] })
    }

    fn run(&self, job: &Job) -> Result<[Outcome; VARIANTS.len()], BenchError> {
        match self {
            Self::Receive { network, application } => {
                let ended = Arc::<AtomicBool>::default();
                application.begin(ended.clone());
                network.begin(job.clone());
                let outcomes = network.end();
                ended.store(true, Ordering::Release);
                application.end()?;
                Ok(job.sums(&outcomes?))
            }
            Self::Transmit { lanes } => {
                lanes.iter().for_each(|lane| lane.begin(job.clone()));
                let [first, second] = [0, 1].map(|lane| lanes[lane].end());
                let both = first?
                    .iter()
                    .zip(&second?)
                    .map(|(first, second)| first.in_parallel_with(second))
                    .collect::<Vec<_>>();
                Ok(job.sums(&both))
            }
        }
    }
}

/// The benchmark of a direction: all its variants.
pub(super) struct StreamBenchmark {
    direction: Direction,
    memory: Arc<Memory>,
    threads: Option<Threads>,
    pace: Pace,
    /// Slices of a variant, and units of a flow in a slice.
    slices: u64,
    units: u64,
}

impl StreamBenchmark {
    pub(super) fn new(direction: Direction, memory: &Arc<Memory>) -> Self {
        let (memory, pace) = (memory.clone(), Pace::default());
        Self { direction, memory, threads: None, pace, slices: WHOLE, units: SHORT_SLICE }
    }

    fn connect(&self, cpus: &[usize]) -> Result<Threads, BenchError> {
        match self.direction {
            Direction::StreamTransmit => Threads::transmit(&self.memory, cpus),
            _ => Threads::receive(&self.memory, cpus, WHOLE * self.units),
        }
    }
}

/// Slices of a variant that take half of `duration_ns`, if a slice of all flows takes `slice_ns`:
/// whole messages.
fn slices(duration_ns: u64, slice_ns: f64) -> u64 {
    ((duration_ns as f64 / 2.0 / slice_ns.max(1.0)) as u64).clamp(1, MOST).next_multiple_of(WHOLE)
}

impl Benchmark for StreamBenchmark {
    fn heads(&self) -> Vec<Head> {
        VARIANTS.iter().flat_map(|variant| self.direction.heads(variant)).collect()
    }

    fn prepare(&mut self, harness: &Harness) -> Result<(), BenchError> {
        let whole = harness.duration_ns() >= WHOLE_NS;
        let (warm, best_of) = if whole { (2 * WHOLE, WHOLE) } else { (1, 1) };
        self.units = if whole { SLICE } else { SHORT_SLICE };
        let threads = self.connect(harness.cpus(2))?;
        // This is not measured: pages are touched for the first time, and congestion windows grow.
        threads.run(&Job::new(warm, self.units, None))?;
        // Something else may slow a slice down, so the best one counts.
        let mut best = [u64::MAX; VARIANTS.len()];
        for _ in 0..best_of {
            let outcomes = threads.run(&Job::new(1, self.units, None))?;
            best.iter_mut().zip(outcomes).for_each(|(best, outcome)| {
                *best = (*best).min(outcome.elapsed_ns / outcome.arrived.max(1));
            });
        }
        best.into_iter().for_each(|ns| self.pace.saw(ns));
        if whole {
            self.slices = slices(harness.duration_ns(), self.pace.ns() * (self.units * FLOWS as u64) as f64);
        }
        self.threads = Some(threads);
        Ok(())
    }

    fn measure(&mut self, _: &Harness) -> Result<Vec<Sample>, BenchError> {
        let Some(threads) = &self.threads else { return Ok(Vec::new()) };
        let fast = threads.run(&Job::new(self.slices, self.units, None))?;
        let paced = threads.run(&Job::new(self.slices, self.units, Some(self.pace.ns())))?;
        let sample = |value, of: &Outcome| Sample {
            value,
            lost_ns: of.lost_ns,
            elapsed_ns: Some(of.elapsed_ns),
            bytes: Some(of.arrived * UNIT),
            features: of.features,
            ..Sample::default()
        };
        let samples = fast.iter().zip(&paced).flat_map(|(fast, paced)| {
            let [network, application] = paced.each(self.direction);
            let cpu = |ns| sample(ns, paced);
            let rate = sample(fast.bits_per_s(self.direction), fast);
            [rate, cpu(network), cpu(application), cpu(network + application)]
        });
        Ok(samples.collect())
    }

    /// Each variant runs for half of the time as fast as it goes, and for half at the pace.
    fn takes(&self, duration: Duration) -> Duration {
        VARIANTS.len() as u32 * duration
    }

    fn note(&self) -> Option<String> {
        self.threads.as_ref()?;
        let pace = UNIT as f64 * 8.0 / self.pace.ns();
        let what = match self.direction {
            Direction::StreamTransmit => "no token takes part: rows that differ in tokens alone do the same",
            _ => "a page for each segment",
        };
        Some(format!(
            "CPU time at {pace:.1} Gb/s; the device and the peer took turns with the stack on its CPU; a segment is {MSS} bytes; {what}; the \
             streams were connected once, and the variants took turns every {} segments",
            self.units * FLOWS as u64
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_due_is_due_of_each_flow_in_equal_parts() {
        assert_eq!([0, 1, 4, 64, 400, 404].map(|units| each(units, 4, 100)), [0, 1, 1, 16, 100, 100]);
        // At a pace, the last step is not longer than what is left of the slice.
        assert_eq!(each(due(400, u64::MAX, Some(10.0)), 4, 100), 100);
        assert_eq!(each(due(400, 0, Some(10.0)), 4, 100), STEP / 4);
    }

    #[test]
    fn slices_are_whole_messages_and_take_half_of_the_time() {
        assert_eq!((MESSAGE * UNIT) / 1_000_000, 4);
        assert_eq!((SLICE * WHOLE, MESSAGE % 4), (MESSAGE, 0));
        assert_eq!(slices(80_000_000, 5e6), 8);
        assert_eq!(slices(90_000_000, 5e6), 12);
        assert_eq!(slices(1, 5e6), WHOLE);
        assert_eq!(slices(u64::MAX, 1.0), MOST);
    }

    #[test]
    fn variants_take_turns_and_their_slices_add_up() {
        let job = Job::new(2, 10, None);
        assert_eq!(job.order, [0, 1, 2, 3, 3, 2, 1, 0]);
        let slice = |n: usize| Outcome { elapsed_ns: n as u64, arrived: 10, ..Outcome::default() };
        let sums = job.sums(&(0..8).map(slice).collect::<Vec<_>>());
        assert!(sums.iter().all(|sum| (sum.elapsed_ns, sum.arrived) == (7, 20)), "{sums:?}");
    }

    #[test]
    fn ranges_of_flows_do_not_overlap() {
        let all = [0, 1, MESSAGE * UNIT - RANGE - 1, MESSAGE * UNIT - 1, 7 * MESSAGE * UNIT + 13];
        for flow in 0..HALF {
            let part = flow as u64 * MESSAGE * UNIT..(flow as u64 + 1) * MESSAGE * UNIT;
            assert!(all.iter().all(|&at| part.contains(&place(flow, at)) && place(flow, at) + RANGE <= part.end));
        }
    }

    /// Both directions: every unit arrives, and what a message held is freed ([`Receiving::slice`]
    /// checks that).
    #[test]
    fn streams_outlive_their_measurements() {
        let harness = Harness::for_tests();
        if harness.cpus(2).len() < 2 {
            return;
        }
        for direction in [Direction::StreamReceive, Direction::StreamTransmit] {
            let mut benchmark = StreamBenchmark::new(direction, &Arc::default());
            benchmark.prepare(&harness).unwrap();
            for _ in 0..2 {
                let samples = benchmark.measure(&harness).unwrap();
                let units = SHORT_SLICE * FLOWS as u64 * benchmark.slices;
                let moved = |sample: &Sample| sample.bytes == Some(units * UNIT) && sample.value > 0.0;
                assert!(samples.len() == benchmark.heads().len() && samples.iter().all(moved), "{samples:?}");
            }
        }
    }
}
