//! Netmem's receiver for the scripts in `bench/peers` that compare drivers of vhost-user devices.
//! `bench/peers/port/dpdk.c` does the same with virtio_user: both receive bursts, read 16 bytes of
//! each packet, return its buffer to the pool, and report in the same words.
//!
//! It ends when its thread has had its CPU for the time asked for. Time in which `turns.rs` has
//! stopped it does not count, and so packets per second are per second of its turns.

use anyhow::{Context, ensure};
use clap::{Parser, ValueEnum};
use netmem_measure::cpus::pin;
use netmem_measure::load::thread_time;
use netmem_measure::own_time::OwnTime;
use netmem_packet::{Handler, Packet, Poll, RxQueue, Verdict, XdpFrame};
use netmem_pool::PeerShared;
use netmem_virtio::VhostUser;
use netmem_virtio::driver::{NetOptions, RxMode, VirtioNet, VirtioRx};
use netmem_virtio::net::feature;
use quanta::Clock;
use std::hint::black_box;
use std::path::PathBuf;
use std::time::Duration;

#[derive(Parser)]
struct Args {
    /// The socket of the vhost-user device.
    socket: PathBuf,
    features: Set,
    job: Job,
    /// The CPU of the thread that polls.
    #[arg(long)]
    cpu: usize,
    #[arg(long, default_value_t = 1024)]
    ring: u16,
    #[arg(long, default_value_t = 64)]
    burst: usize,
    /// CPU time that is not counted: caches, page tables, the clock of the CPU.
    #[arg(long, value_parser = netmem_measure::arguments::duration, default_value = "0.3")]
    warm_up: Duration,
    #[arg(long, value_parser = netmem_measure::arguments::duration, default_value = "2")]
    duration: Duration,
}

/// The sets of features in `bench/peers/lib.sh`.
#[derive(Clone, Copy, ValueEnum)]
#[value(rename_all = "snake_case")]
enum Set {
    Split,
    Mergeable,
    InOrder,
    Packed,
    PackedInOrder,
}

impl Set {
    fn options(self) -> NetOptions {
        let (mode, bits) = match self {
            Set::Split => (RxMode::Small, 0),
            Set::Mergeable => (RxMode::Mergeable, 0),
            Set::InOrder => (RxMode::Mergeable, feature::IN_ORDER),
            Set::Packed => (RxMode::Small, feature::RING_PACKED),
            Set::PackedInOrder => (RxMode::Small, feature::RING_PACKED | feature::IN_ORDER),
        };
        NetOptions::new(mode).ring_features(feature::INDIRECT_DESC | bits)
    }
}

/// What is done with a frame.
#[derive(Clone, Copy, ValueEnum)]
enum Job {
    /// It becomes a packet, which is read and dropped: the pool is used.
    Pass,
    /// The XDP program drops it: its page stays in the ring, and the pool is not used.
    Drop,
}

struct Read(Verdict);

impl Handler<PeerShared> for Read {
    #[inline]
    fn run(&mut self, frame: &mut XdpFrame<PeerShared>) -> Verdict {
        black_box(frame.read_at::<16>(0).unwrap_or_default());
        self.0
    }

    #[inline]
    fn pass(&mut self, packet: Packet<PeerShared>) {
        drop(packet);
    }
}

/// The values that port/dpdk.c prints, too.
struct Counts {
    packets: u64,
    busy: Duration,
    ran: Duration,
}

/// Polls between two readings of the CPU clock, which are system calls.
const POLLS: usize = 256;

fn receive(rx: &mut VirtioRx, clock: &Clock, program: &mut Read, burst: usize, time: Duration) -> Counts {
    let (begin, mut packets) = (thread_time(), 0);
    let mut own = OwnTime::of_this_thread(clock);
    loop {
        for _ in 0..POLLS {
            packets += own.poll(|| rx.poll(|poll| poll.receive(burst, program))) as u64;
        }
        let ran = Duration::from_nanos(thread_time() - begin);
        // No packet yet: another thread, of the device, had the CPU.
        if ran >= time && packets > 0 {
            let busy = Duration::from_nanos(clock.delta_as_nanos(0, own.ticks()));
            return Counts { packets, busy, ran };
        }
    }
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    pin(args.cpu);
    let backend = VhostUser::connect(&args.socket)?;
    let options = args.features.options().ring_size(args.ring).pages(4 * usize::from(args.ring));
    let (net, mut pairs) = VirtioNet::probe(backend, options.reserved_huge_pages(true))?;
    let pair = pairs.pop().context("there is no queue pair")?;
    let (mut rx, tx) = (pair.rx, pair.tx);
    let clock = Clock::new();
    println!("ready");

    let mut program = Read(match args.job {
        Job::Pass => Verdict::Pass,
        Job::Drop => Verdict::Drop,
    });
    receive(&mut rx, &clock, &mut program, args.burst, args.warm_up);
    let counts = receive(&mut rx, &clock, &mut program, args.burst, args.duration);
    ensure!(rx.stats().stopped.is_none(), "the queue has stopped: {:?}", rx.stats().stopped);
    drop(tx);
    let closed = rx.close().context("the device did not stop the queue")?;
    ensure!(closed.outstanding == 0 && closed.stats.inflight() == 0, "pages are missing: {closed:?}");
    println!("features after negotiate = {:x}", net.features());
    println!("packets {} busy_ns {} ran_ns {}", counts.packets, counts.busy.as_nanos(), counts.ran.as_nanos());
    Ok(())
}
