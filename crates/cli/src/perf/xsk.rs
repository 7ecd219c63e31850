//! The queues of an interface, through AF_XDP, as [`Queues`] that can be measured.

use super::driver::Queues;
use super::error::PerfError;
use super::live::QueueFigures;
use super::memory::Baseline;
use super::plan::{Plan, Variant};
use super::sample::{Counts, Sample, SocketMode};
use crate::args::{DeviceArg, XskArg};
use netmem::net::{TxBulk, TxQueue};
use netmem::pool::{Backing, PeerShared, PoolStats, Provider, RegionOptions, RegionProvider};
use netmem::xdp::{AttachError, Interface, Program, ProgramOptions, Umem, UmemOptions, XskError, XskRx, XskTx};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Pages of a queue in addition to its rings: twice the kernel's default for receiving, the caches,
/// and packets in flight to the application.
const PAGES: usize = 6144;
/// How long the socket of the last run may still occupy a queue. The kernel releases the queue some
/// time after the socket was closed.
const SETTLES: Duration = Duration::from_secs(1);

/// An interface whose queues are being measured.
pub(crate) struct Opened {
    /// Dropped first: the interface returns to the kernel before the sockets are closed.
    program: Program,
    pairs: Vec<(XskRx<PeerShared>, TxBulk<XskTx<PeerShared>>)>,
    baseline: Option<Baseline>,
    backing: Backing,
}

impl Opened {
    /// Opens as many queues as the variant has, beginning with the first queue that the user chose.
    pub(crate) fn new(plan: &Plan, v: &Variant, arg: &XskArg) -> Result<Self, PerfError> {
        let pages = usize::from(v.queues) * (2 * usize::from(plan.ring) + PAGES);
        let baseline = Baseline::new(v.alloc, pages, plan.lock, false)?;
        let (memory, provider): (_, Arc<dyn Provider<PeerShared>>) = match &baseline {
            None => {
                let provider = RegionProvider::new(
                    RegionOptions::new(pages).lock(plan.lock).reserved_huge_pages(true).build::<PeerShared>()?,
                );
                (provider.region().clone(), provider)
            }
            Some(baseline) => (baseline.region().clone(), baseline.provider()),
        };
        let backing = memory.backing();
        let open = || {
            let no_interface = |_| AttachError::NoInterface(arg.interface.clone());
            let ifindex = Interface::by_name(&arg.interface).map_err(no_interface)?.index;
            let umem = Umem::new(memory, &UmemOptions::new())?;
            // Attached first, because some drivers make the queues for zero-copy at that moment.
            let program = Program::attach(ifindex, &plan.af_xdp.program(ProgramOptions::default()))?;
            let mut pairs = Vec::new();
            for queue in arg.queues(v.queues) {
                let options = || {
                    let options = plan.af_xdp.queue().rx_ring(plan.ring.into()).tx_ring(plan.ring.into());
                    if baseline.is_some() { options.cache(0) } else { options }
                };
                let begin = Instant::now();
                let pair: (XskRx<PeerShared>, _) = loop {
                    match umem.open(ifindex, queue, provider.clone(), options()) {
                        Err(XskError::Busy { .. }) if begin.elapsed() < SETTLES => sleep(Duration::from_millis(1)),
                        pair => break pair?,
                    }
                };
                program.insert(queue, pair.0.socket().as_fd())?;
                pairs.push((pair.0, TxBulk::new(pair.1)));
            }
            Ok(Self { program, pairs, baseline, backing })
        };
        open().map_err(|source: XskError| PerfError::Xsk {
            device: DeviceArg::Xsk(arg.clone()),
            source: Box::new(source),
        })
    }

    /// Detaches from the interface, closes the queues and checks that all pages were returned. All
    /// other threads have ended.
    ///
    /// Chunks that the kernel holds for receiving are quarantined by the pool until the memory is
    /// freed: they are not lost.
    pub(crate) fn finish(mut self, v: &Variant, counts: Counts) -> Result<Sample, PerfError> {
        self.check(v)?;
        let Self { program, pairs, baseline, backing } = self;
        drop(program);
        let (mut pool, mut leaked) = (PoolStats::default(), 0);
        let sockets = pairs.iter().map(|(rx, _)| SocketMode::of(rx.socket(), rx.stats().frames > 0)).collect();
        let mut errors = BTreeMap::new();
        let mut count = |name, n| {
            if n > 0 {
                *errors.entry(name).or_default() += n;
            }
        };
        for (rx, tx) in pairs {
            let mut tx = tx.into_target();
            tx.complete();
            rx.stats().errors().for_each(|(name, n)| count(name, n));
            tx.stats().errors().for_each(|(name, n)| count(name, n));
            count("tx_full", tx.stats().full);
            if let Ok(kernel) = rx.socket().kernel_stats() {
                count("kernel_dropped", kernel.rx_dropped);
                count("kernel_ring_full", kernel.rx_ring_full);
                count("kernel_fill_empty", kernel.rx_fill_empty);
            }
            drop(tx);
            if let Some(closed) = rx.close() {
                pool += closed.stats;
                leaked += closed.outstanding;
            }
        }
        if let Some(baseline) = baseline {
            leaked = leaked.max(baseline.out().saturating_sub(pool.quarantined));
        }
        let cpus = BTreeSet::new();
        Ok(Sample { counts, device: None, pool, leaked, errors, backing, features: 0, sockets, cpus })
    }
}

impl Queues for Opened {
    type Rx = XskRx<PeerShared>;
    type Tx = XskTx<PeerShared>;

    fn pairs(&mut self) -> impl Iterator<Item = &mut (Self::Rx, TxBulk<Self::Tx>)> {
        self.pairs.iter_mut()
    }

    fn totals(&self) -> (u64, u64) {
        let stats = self.pairs.iter().map(|(rx, _)| rx.stats());
        stats.fold((0, 0), |(frames, bytes), s| (frames + s.frames, bytes + s.bytes))
    }

    fn figures(&mut self) -> Vec<QueueFigures> {
        let queue = |(rx, _): &mut (XskRx<PeerShared>, _)| {
            let stats = rx.stats();
            let errors = stats.errors().collect();
            QueueFigures { frames: stats.frames, bytes: stats.bytes, errors, pool: rx.pool_stats() }
        };
        self.pairs.iter_mut().map(queue).collect()
    }

    fn check(&mut self, variant: &Variant) -> Result<(), PerfError> {
        let stopped = self.pairs.iter_mut().find_map(|(rx, tx)| rx.stats().stopped.or(tx.target().stats().stopped));
        stopped.map_or(Ok(()), |source| Err(PerfError::Stopped { variant: variant.to_string(), source }))
    }
}
