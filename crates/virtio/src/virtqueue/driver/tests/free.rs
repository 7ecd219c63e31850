//! Random traffic of queues whose buffers each have their own segments.

use super::*;

type Chains = Vec<Vec<(u64, u32, bool)>>;

/// A queue whose buffers each have their own segments, with a device.
struct Traffic<'m> {
    rng: fastrand::Rng,
    device: Device<'m>,
    queue: AnyDriverQueue<Vec<(u64, u32, bool)>>,
    /// The address of the last segment.
    last: u64,
    /// How often there was no room for a buffer.
    full: usize,
    /// Buffers that were taken back in runs, and how often user code has panicked over one.
    run: usize,
    panicked: usize,
}

impl<'m> Traffic<'m> {
    fn new(memory: &'m Memory, negotiated: Negotiated) -> Self {
        let queue = AnyDriverQueue::new(memory.ring(negotiated), negotiated, memory.tables(negotiated));
        let rng = fastrand::Rng::with_seed(negotiated.bits());
        let device = Device::new(memory, negotiated);
        Self { rng, device, queue, last: 0, full: 0, run: 0, panicked: 0 }
    }

    /// Posts buffers of one segment each in runs, as far as there is room, up to five, or up to one
    /// that is not filled. Returns how many.
    fn post_runs(&mut self) -> usize {
        let (most, refused) = (self.rng.usize(..6), self.rng.usize(..9));
        let (mut posted, last) = (0, &mut self.last);
        with_queue!(&mut self.queue, queue => loop {
            let fits = queue.fits(1);
            let mut at = posted;
            let run = queue.post_run(
                most - posted,
                |buffer: &mut Vec<_>| {
                    assert!(buffer.is_empty());
                    if at == refused {
                        return false;
                    }
                    (at, *last) = (at + 1, *last + 0x1000);
                    buffer.push((*last, at as u32, false));
                    true
                },
                |buffer| (buffer[0].0, buffer[0].1),
            );
            posted += run;
            if run == 0 {
                assert!(!fits || posted == most || posted == refused);
                return posted;
            }
        })
    }

    /// Takes used buffers back in runs, as far as there are any. Now and then user code panics over
    /// a buffer. Returns how many were taken.
    fn take_runs(&mut self, used: &Chains) -> usize {
        let (mut taken, panics) = (0, self.rng.usize(..40));
        with_queue!(&mut self.queue, queue => loop {
            let before = taken;
            let run = catch_unwind(AssertUnwindSafe(|| {
                queue.take_run(|_, buffer| {
                    assert_eq!(&std::mem::take(buffer), &used[taken]);
                    taken += 1;
                    panics_if(taken - 1 == panics);
                })
            }));
            self.run += taken - before;
            match run {
                Ok(run) => {
                    assert_eq!(run.buffers, taken - before);
                    assert!(run.more || taken == used.len());
                }
                Err(_) => self.panicked += 1,
            }
            if taken == before {
                return taken;
            }
        })
    }

    /// Posts up to five buffers of random segments, as far as there is room. Returns how many.
    fn post(&mut self) -> usize {
        let mut posted = 0;
        for _ in 0..self.rng.usize(..6) {
            let n = self.rng.usize(1..=usize::from(PER_TABLE));
            let segments: Vec<_> = (0..n)
                .map(|_| {
                    self.last += 0x1000;
                    (self.last, self.rng.u32(1..5000), self.rng.bool())
                })
                .collect();
            posted += with_queue!(&mut self.queue, queue => {
                let (fits, vacant) = (queue.fits(n), queue.vacant(n));
                self.full += usize::from(!fits);
                assert_eq!(vacant.is_some(), fits);
                if let Some(vacant) = vacant {
                    assert!(queue.buffer(vacant.slot()).is_empty());
                    *queue.buffer(vacant.slot()) = segments.clone();
                    queue.post(vacant, |buffer| buffer.iter().map(|&(addr, len, writable)| Segment { addr, len, writable }));
                }
                usize::from(fits)
            });
        }
        posted
    }

    /// The device uses some of the buffers that it has, in an order that is allowed. Returns them.
    fn use_some(&mut self) -> Chains {
        let orderly = self.rng.bool();
        let used = self.device.use_some(&mut self.rng, 4, orderly, 7, |_| 7);
        used.into_iter().map(|(chain, _)| chain.segments).collect()
    }

    /// The driver gets the buffers that the device has used, in this order, and no others.
    fn take(&mut self, used: &Chains, context: &str) {
        let taken = if self.rng.bool() { self.take_runs(used) } else { 0 };
        let used = &used[taken..];
        with_queue!(&mut self.queue, queue => {
            let pending = queue.pending().expect("no fault");
            assert_eq!(usize::from(pending), used.len());
            for (i, segments) in (0..).zip(used) {
                assert_eq!(queue.peek(i), segments, "{context}");
            }
            for segments in used {
                let (_, buffer) = queue.take().expect("it is pending");
                assert_eq!(&std::mem::take(buffer), segments);
            }
            assert_eq!(queue.pending(), Ok(0));
        });
    }
}

/// Buffers of random segments go out and come back, in any order that is allowed, and notifications
/// are wanted and not. The device sees each buffer as it was posted, and the driver gets the buffer
/// back that the device used.
#[test]
fn random_traffic_of_free_queues() {
    for negotiated in combinations() {
        let memory = Memory::new();
        let mut traffic = Traffic::new(&memory, negotiated);
        let (mut sent, mut back) = (0, 0);
        for round in 0..3000 {
            let context = format!("{negotiated:?}, round {round}");
            let sleeps = traffic.rng.bool();
            traffic.device.want_kicks(sleeps);
            let posted = if traffic.rng.bool() { traffic.post() } else { traffic.post_runs() };
            let before = traffic.device.taken.len();
            traffic.device.poll();
            assert_eq!(traffic.device.taken.len(), before, "nothing is seen before it is published");
            let notify = with_queue!(&mut traffic.queue, queue => { queue.publish(); queue.should_notify() });
            assert_eq!(notify, sleeps && posted > 0, "{context}");
            traffic.device.poll();
            assert_eq!(traffic.device.taken.len(), before + posted);
            sent += posted;

            let arm = traffic.rng.bool();
            if arm {
                assert_eq!(traffic.queue.arm(), Armed::Waits);
            }
            traffic.device.wants_call();
            let used = traffic.use_some();
            assert_eq!(traffic.device.wants_call(), arm && !used.is_empty(), "{context}");
            if !used.is_empty() {
                assert_eq!(traffic.queue.arm(), Armed::Work, "what came is not slept over");
            }
            traffic.queue.disarm();
            traffic.take(&used, &context);
            back += used.len();
            assert_eq!(traffic.queue.posted(), sent - back);
        }
        let Traffic { full, run, panicked, .. } = traffic;
        assert!(run >= 100 && panicked > 0, "{negotiated:?}: {run}, {panicked} panics");
        assert!(sent > 2000 && full > 0, "{negotiated:?}: {sent} sent, {full} times full");
    }
}
