//! One direction of a link, and the packets on it.
//!
//! The fate of a packet depends on the seed, the number of the link and how many packets were sent
//! before it; not on times and not on lengths. The same seed has the same faults in every run, if
//! the same packets come in the same order. [`Link::fate`] draws the same number of random values
//! for each packet, so that an option that is changed does not change which packets the others hit.

use crate::options::LinkOptions;
use std::collections::VecDeque;
use std::num::NonZeroU64;
use std::time::Duration;

/// The longest time that a packet waits for the packets before it to be sent at the link's rate. A
/// packet that would wait longer is dropped.
pub const MAX_WAIT: Duration = Duration::from_millis(100);
/// The most packets on a link, duplicates included. Further ones are dropped.
pub const MAX_PACKETS: usize = 65536;
/// The most bytes on a link. Further packets are dropped.
pub const MAX_BYTES: usize = 32 << 20;

/// The counters of a link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LinkCounts {
    /// Packets that were sent. Each is lost, overflowed, or arrives.
    pub sent: u64,
    /// Packets that did not arrive.
    pub lost: u64,
    /// Packets that were dropped because too many were waiting or on the link: [`MAX_WAIT`],
    /// [`MAX_PACKETS`], [`MAX_BYTES`].
    pub overflowed: u64,
    /// Packets that arrive twice.
    pub duplicated: u64,
    /// Packets that were not delayed.
    pub reordered: u64,
    /// Packets one bit of which is changed.
    pub corrupted: u64,
    /// Packets that have arrived, duplicates included.
    pub received: u64,
}

impl LinkCounts {
    /// The names of the counters, in the order of [`values`](Self::values).
    pub const NAMES: [&'static str; 7] =
        ["sent", "lost", "overflowed", "duplicated", "reordered", "corrupted", "received"];

    /// Every counter.
    #[must_use]
    pub fn values(self) -> [u64; Self::NAMES.len()] {
        let Self { sent, lost, overflowed, duplicated, reordered, corrupted, received } = self;
        [sent, lost, overflowed, duplicated, reordered, corrupted, received]
    }
}

/// A packet that has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delivery<T> {
    /// The packet, as it was sent.
    pub packet: T,
    /// `Some` if one bit must be changed: a random number that selects the bit ([`flip`]).
    pub corrupt: Option<u64>,
}

/// Changes one bit of `bytes`, if there is one: bit `draw` modulo their number.
pub fn flip(bytes: &mut [u8], draw: u64) {
    if let Some(bit) = draw.checked_rem(8 * bytes.len() as u64) {
        bytes[(bit / 8) as usize] ^= 1 << (bit % 8);
    }
}

/// The fate of one packet.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Fate {
    lost: bool,
    ahead: bool,
    duplicate: bool,
    corrupt: Option<u64>,
    /// The share of the jitter that is added to the delay, from -1 to 1.
    jitter: f64,
}

#[derive(Debug)]
struct Flying<T> {
    at: Duration,
    len: usize,
    delivery: Delivery<T>,
}

/// One direction of a link, and the packets on it. See the [crate's page](crate).
///
/// Memory is bounded: at most [`MAX_PACKETS`] packets and [`MAX_BYTES`] bytes are on a link.
///
/// ```
/// use netmem_netem::{Link, LinkOptions};
/// use std::time::Duration;
///
/// let ms = Duration::from_millis;
/// let mut link = Link::new(LinkOptions { delay: ms(10), ..LinkOptions::default() }, 0);
/// link.send("a packet", 8, ms(1));
/// assert!(link.receive(ms(10)).is_none());
/// assert_eq!(link.deadline(), Some(ms(11)));
/// assert_eq!(link.receive(ms(11)).map(|arrived| arrived.packet), Some("a packet"));
/// ```
#[derive(Debug)]
pub struct Link<T> {
    options: LinkOptions,
    rng: fastrand::Rng,
    /// Packets that are delayed, and those that are not. Each of the two is in the order of
    /// arrival.
    delayed: VecDeque<Flying<T>>,
    ahead: VecDeque<Flying<T>>,
    bytes: usize,
    /// When the last packet has been sent at the link's rate.
    free: Duration,
    counts: LinkCounts,
}

impl<T> Link<T> {
    /// A link without packets. Links with the same seed and different `number`s, such as the two
    /// directions, have different faults.
    #[must_use]
    pub fn new(options: LinkOptions, number: u64) -> Self {
        Self {
            options,
            // Far from the seeds that are next to this one.
            rng: fastrand::Rng::with_seed(options.seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15)),
            delayed: VecDeque::new(),
            ahead: VecDeque::new(),
            bytes: 0,
            free: Duration::ZERO,
            counts: LinkCounts::default(),
        }
    }

    /// The fate of the next packet. Draws the same number of random values for each.
    fn fate(&mut self) -> Fate {
        let Self { options, rng, .. } = self;
        let [lost, ahead, duplicate, corrupt, jitter] = std::array::from_fn(|_| rng.f64());
        let bit = rng.u64(..);
        Fate {
            lost: lost < options.loss,
            ahead: ahead < options.reorder,
            duplicate: duplicate < options.duplicate,
            corrupt: (corrupt < options.corrupt).then_some(bit),
            jitter: 2.0 * jitter - 1.0,
        }
    }

    /// Sends a packet of `len` bytes. `now` is the time since a moment that the caller chooses; it
    /// does not go back.
    pub fn send(&mut self, packet: T, len: usize, now: Duration)
    where
        T: Clone,
    {
        let fate = self.fate();
        self.counts.sent += 1;
        let begin = self.free.max(now);
        let copies = if fate.duplicate { 2 } else { 1 };
        let packets = self.delayed.len() + self.ahead.len() + copies;
        if begin - now > MAX_WAIT || packets > MAX_PACKETS || self.bytes + copies * len > MAX_BYTES {
            self.counts.overflowed += 1;
            return;
        }
        self.free = begin + self.options.rate.map_or(Duration::ZERO, |rate| transmission(len, rate));
        if fate.lost {
            self.counts.lost += 1;
            return;
        }
        self.counts.duplicated += u64::from(fate.duplicate);
        self.counts.reordered += u64::from(fate.ahead);
        self.counts.corrupted += u64::from(fate.corrupt.is_some());
        let (queue, at) = if fate.ahead {
            (&mut self.ahead, self.free)
        } else {
            let LinkOptions { delay, jitter, .. } = self.options;
            let delay = delay.saturating_sub(jitter) + jitter.mul_f64(1.0 + fate.jitter);
            let before = self.delayed.back().map_or(Duration::ZERO, |last| last.at);
            (&mut self.delayed, (self.free + delay).max(before))
        };
        self.bytes += copies * len;
        let delivery = Delivery { packet, corrupt: fate.corrupt };
        if fate.duplicate {
            let packet = delivery.packet.clone();
            queue.push_back(Flying { at, len, delivery: Delivery { packet, corrupt: fate.corrupt } });
        }
        queue.push_back(Flying { at, len, delivery });
    }

    /// The queue whose first packet is the next to arrive, and when.
    fn first(&mut self) -> Option<(Duration, &mut VecDeque<Flying<T>>)> {
        let at = |queue: &VecDeque<Flying<T>>| queue.front().map(|flying| flying.at);
        match (at(&self.delayed), at(&self.ahead)) {
            (Some(delayed), Some(ahead)) if ahead > delayed => Some((delayed, &mut self.delayed)),
            (_, Some(ahead)) => Some((ahead, &mut self.ahead)),
            (Some(delayed), None) => Some((delayed, &mut self.delayed)),
            (None, None) => None,
        }
    }

    /// The next of the packets that have arrived by `now`.
    pub fn receive(&mut self, now: Duration) -> Option<Delivery<T>> {
        let (_, queue) = self.first().filter(|(at, _)| *at <= now)?;
        let Flying { len, delivery, .. } = queue.pop_front()?;
        self.bytes -= len;
        self.counts.received += 1;
        Some(delivery)
    }

    /// When the next packet arrives. `None` if no packet is on the link.
    #[must_use]
    pub fn deadline(&self) -> Option<Duration> {
        [&self.delayed, &self.ahead].into_iter().filter_map(|queue| queue.front()).map(|flying| flying.at).min()
    }

    /// Removes all packets from the link, and returns them.
    pub fn drain(&mut self) -> impl Iterator<Item = T> + use<'_, T> {
        self.bytes = 0;
        self.delayed.drain(..).chain(self.ahead.drain(..)).map(|flying| flying.delivery.packet)
    }

    /// The counters so far.
    #[must_use]
    pub fn counts(&self) -> LinkCounts {
        self.counts
    }
}

/// How long `len` bytes take at `rate` bits in a second.
fn transmission(len: usize, rate: NonZeroU64) -> Duration {
    let nanos = len as u128 * 8_000_000_000 / u128::from(rate.get());
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACKETS: u64 = 100_000;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    fn options(text: &str) -> LinkOptions {
        text.parse().unwrap()
    }

    /// Sends `packets` of 1000 bytes, one each microsecond, and returns those that arrive, with
    /// their times.
    fn run(options: LinkOptions, number: u64, packets: u64) -> (Vec<(Duration, u64, Option<u64>)>, LinkCounts) {
        let (mut link, mut arrived) = (Link::new(options, number), Vec::new());
        let mut take = |link: &mut Link<u64>, until: Option<Duration>| {
            while let Some(at) = link.deadline().filter(|&at| until.is_none_or(|until| at <= until)) {
                let Delivery { packet, corrupt } = link.receive(at).unwrap();
                arrived.push((at, packet, corrupt));
            }
        };
        for n in 0..packets {
            let now = Duration::from_micros(n);
            take(&mut link, Some(now));
            link.send(n, 1000, now);
        }
        take(&mut link, None);
        assert_eq!((link.bytes, link.drain().count()), (0, 0));
        (arrived, link.counts())
    }

    #[test]
    fn a_perfect_link_changes_nothing() {
        let (arrived, counts) = run(LinkOptions::default(), 0, 1000);
        let all: Vec<_> = (0..1000).map(|n| (Duration::from_micros(n), n, None)).collect();
        assert_eq!(arrived, all);
        assert_eq!(counts, LinkCounts { sent: 1000, received: 1000, ..LinkCounts::default() });
    }

    /// Each share is met: the deviation of `n` draws with probability `p` is the root of
    /// `n p (1 - p)`.
    #[test]
    fn shares_are_met() {
        let options = options("loss=1%,delay=10ms,reorder=2%,duplicate=3%,corrupt=4%,seed=7");
        let (arrived, counts) = run(options, 0, PACKETS);
        for (share, count) in [
            (0.01, counts.lost),
            (0.02 * 0.99, counts.reordered),
            (0.03 * 0.99, counts.duplicated),
            (0.04 * 0.99, counts.corrupted),
        ] {
            let (expected, deviation) = (share * PACKETS as f64, (PACKETS as f64 * share * (1.0_f64 - share)).sqrt());
            assert!((count as f64 - expected).abs() < 5.0 * deviation, "{count} of {expected}");
        }
        assert_eq!(counts.received, PACKETS - counts.lost + counts.duplicated);
        assert_eq!(counts.received, arrived.len() as u64);
        let ahead = arrived.iter().filter(|(at, n, _)| *at == Duration::from_micros(*n)).count() as u64;
        assert!(ahead >= counts.reordered, "{ahead} arrived at once");
    }

    /// The same seed has the same faults, at other times and lengths too; another seed and the
    /// other direction have others.
    #[test]
    fn faults_depend_on_the_seed() {
        let fates = |text: &str, number| {
            let mut link = Link::<()>::new(options(text), number);
            (0..1000).map(|_| link.fate()).collect::<Vec<_>>()
        };
        let one = "loss=10%,delay=1ms,jitter=1ms,reorder=10%,duplicate=10%,corrupt=10%,seed=7";
        assert_eq!(fates(one, 0), fates(one, 0));
        assert_ne!(fates(one, 0), fates(one, 1));
        assert_ne!(fates(one, 0), fates(&one.replace("seed=7", "seed=8"), 0));
        // What is lost does not change with the other options.
        let lost = |text: &str| fates(text, 0).iter().map(|fate| fate.lost).collect::<Vec<_>>();
        assert_eq!(lost(one), lost("loss=10%,rate=1M,seed=7"));
        assert_eq!(run(options(one), 3, 1000), run(options(one), 3, 1000));
    }

    /// Packets that are not reordered stay in order, whatever the jitter, and arrive within the
    /// bounds of the delay.
    #[test]
    fn jitter_keeps_the_order() {
        let (arrived, _) = run(options("delay=10ms,jitter=5ms"), 0, 10_000);
        assert!(arrived.is_sorted_by_key(|(_, n, _)| n) && arrived.is_sorted_by_key(|(at, ..)| at));
        let delays = || arrived.iter().map(|(at, n, _)| *at - Duration::from_micros(*n));
        assert!(delays().min() >= Some(ms(5)) && delays().max() <= Some(ms(15)));
        assert!(delays().min() < Some(ms(7)) && delays().max() > Some(ms(14)));
    }

    #[test]
    fn a_reordered_packet_overtakes() {
        let mut link = Link::new(LinkOptions { delay: ms(10), ..LinkOptions::default() }, 0);
        link.send(1, 1, ms(0));
        link.options.reorder = 1.0;
        link.send(2, 1, ms(3));
        assert_eq!(link.deadline(), Some(ms(3)));
        let order = [ms(3), ms(3), ms(9), ms(10)].map(|now| link.receive(now).map(|arrived| arrived.packet));
        assert_eq!(order, [Some(2), None, None, Some(1)]);
    }

    /// 1000 bytes take 80 us at 100 Mbit/s. What would wait for more than 100 ms is dropped.
    #[test]
    fn the_rate_is_kept() {
        let (arrived, counts) = run(options("rate=100M,delay=1ms"), 0, 10_000);
        let step = Duration::from_micros(80);
        assert_eq!(arrived[0].0, step + ms(1));
        assert!(arrived.windows(2).all(|pair| pair[1].0 - pair[0].0 == step));
        assert_eq!(counts.overflowed, 10_000 - arrived.len() as u64);
        // 100 ms of them, and what was sent meanwhile.
        assert!((1250..1400).contains(&arrived.len()), "{}", arrived.len());
    }

    #[test]
    fn what_is_on_the_link_is_bounded() {
        let options = LinkOptions { delay: ms(1000), duplicate: 1.0, ..LinkOptions::default() };
        for (len, fit) in [(1, MAX_PACKETS / 2), (1 << 20, MAX_BYTES >> 21)] {
            let mut link = Link::new(options, 0);
            (0..MAX_PACKETS).for_each(|_| link.send((), len, ms(0)));
            let counts = link.counts();
            assert_eq!((counts.duplicated, counts.overflowed), (fit as u64, (MAX_PACKETS - fit) as u64));
            assert_eq!(link.drain().count(), 2 * fit);
            link.send((), len, ms(1));
            assert_eq!(link.counts().overflowed, counts.overflowed);
        }
    }

    #[test]
    fn one_bit_is_changed() {
        for draw in [0, 1, 17, 23, 24, u64::MAX] {
            let mut bytes = [0u8; 3];
            flip(&mut bytes, draw);
            assert_eq!(bytes.iter().map(|byte| byte.count_ones()).sum::<u32>(), 1);
            assert_eq!(bytes[(draw % 24 / 8) as usize], 1 << (draw % 8));
        }
        flip(&mut [], 5);
    }
}
