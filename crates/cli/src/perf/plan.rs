//! What is to be measured: the arguments, checked, and the variants that follow from them.

use crate::args::{AllocArg, BadArgument, ConsumerArg, DeviceArg, ModeArg, PerfArgs, PortArg, RingArg, XdpArg};
use crate::cpus::{self, Placement};
use netmem::RxMode;
use netmem::device::MAX_PAIRS;
use netmem::packet::link::LinkOptions;
use netmem::virtio::Spin;
use netmem::virtio::net::MIN_FRAME;
use std::time::Duration;

/// Where pages come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Alloc {
    Pool,
    Page,
}

impl Alloc {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Pool => "pool",
            Self::Page => "page",
        }
    }
}

/// Where packets are dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Consumer {
    /// In the poll context.
    Same,
    /// On the application's CPU.
    Other,
}

impl Consumer {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Same => "same",
            Self::Other => "other",
        }
    }
}

/// What is measured with each allocator, and shown as a row.
#[derive(Clone, Debug)]
pub(crate) struct Variant {
    pub(crate) mode: RxMode,
    /// Bytes in a frame, where they are known.
    pub(crate) size: Option<usize>,
    pub(crate) name: String,
    pub(crate) alloc: Alloc,
    pub(crate) consumer: Consumer,
    pub(crate) queues: u16,
    /// Why it is not measured.
    pub(crate) skipped: Option<&'static str>,
}

impl std::fmt::Display for Variant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} {} x{}", self.name, self.alloc.name(), self.consumer.name(), self.queues)
    }
}

impl Variant {
    /// Whether `other` differs in nothing but the allocator.
    pub(crate) fn is_twin(&self, other: &Self) -> bool {
        (&self.name, self.consumer, self.queues) == (&other.name, other.consumer, other.queues)
            && self.alloc != other.alloc
    }
}

/// Packets per second to a driver that sleeps: from one that sleeps before each to one that does not get to it.
const RATES: [u64; 4] = [1000, 10_000, 100_000, 1_000_000];
/// How long a person waits who only wants to see it.
const BUDGET: Duration = Duration::from_secs(27);

/// All that is to be done.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) device: DeviceArg,
    pub(crate) port: PortArg,
    /// A bad link before the port.
    pub(crate) link: Option<LinkOptions>,
    pub(crate) xdp: XdpArg,
    pub(crate) variants: Vec<Variant>,
    pub(crate) cpus: Placement,
    /// CPUs that there are, and those that we may use.
    pub(crate) allowed: Vec<usize>,
    pub(crate) duration: Duration,
    pub(crate) warmup: Duration,
    pub(crate) runs: u32,
    /// Where nobody said how many runs: how long all of them may take.
    pub(crate) budget: Option<Duration>,
    pub(crate) ring: u16,
    /// Features of rings that the device must have.
    pub(crate) ring_features: u64,
    pub(crate) lock: bool,
    pub(crate) json: bool,
    /// How long the driver polls before it sleeps; None: it polls only.
    pub(crate) spin: Option<Duration>,
    /// Packets per second to a driver that sleeps.
    pub(crate) rates: Vec<u64>,
}

impl Plan {
    pub(crate) fn new(args: &PerfArgs) -> Result<Self, BadArgument> {
        Self::on(args, &cpus::online(), &cpus::allowed())
    }

    fn on(args: &PerfArgs, online: &[usize], allowed: &[usize]) -> Result<Self, BadArgument> {
        let port = args.port.clone().unwrap_or(PortArg::Gen);
        check(args, &port)?;
        let cpus = Placement::new(args.cpus, args.consumer, online, allowed)?;
        let variants = variants(args, &port)?;
        if variants.iter().all(|v| v.skipped.is_some()) {
            let why = variants.first().and_then(|v| v.skipped).unwrap_or("no variants");
            return BadArgument::new(format!("nothing to measure: {why}"));
        }
        if args.fd.is_some() && (variants.len() > 1 || args.runs != Some(1)) {
            return BadArgument::new(
                "--fd: a connection serves one run of one variant; give --runs 1, one --mode, one --alloc and one --queues",
            );
        }
        let listens = matches!(port, PortArg::Tap(_));
        let spin = args.spin.and_then(Spin::poll_for);
        Ok(Self {
            device: device(args),
            link: args.link,
            xdp: args.xdp,
            variants,
            cpus,
            allowed: allowed.to_vec(),
            duration: args.duration.unwrap_or(Duration::from_millis(match (listens, spin) {
                (true, _) => 10_000,
                (_, Some(_)) => 1000,
                _ => 50,
            })),
            // Where every frame counts, all of them are counted.
            warmup: Duration::from_millis(if listens { 0 } else { 20 }),
            // Many short runs, taken in turns: what disturbs the machine for a second then disturbs both sides of a pair.
            runs: args.runs.unwrap_or(if listens { 1 } else { 25 }),
            budget: (args.runs.is_none() && args.duration.is_none() && !listens).then_some(BUDGET),
            ring: args.ring,
            ring_features: RingArg::features(&args.ring_features),
            lock: args.lock,
            json: args.json,
            spin,
            rates: if args.rate.is_empty() { RATES.to_vec() } else { args.rate.clone() },
            port,
        })
    }

    /// Whether traffic comes when others send it, and not as fast as it is taken.
    pub(crate) fn listens(&self) -> bool {
        matches!(self.port, PortArg::Tap(_))
    }
}

fn device(args: &PerfArgs) -> DeviceArg {
    args.fd.map_or_else(|| args.device.clone(), DeviceArg::Fd)
}

fn check(args: &PerfArgs, port: &PortArg) -> Result<(), BadArgument> {
    if matches!(port, PortArg::Sink | PortArg::Echo) {
        return BadArgument::new(format!(
            "--port {port}: nothing would be received from it; use gen, tap:NAME or pcap:FILE here, and {port} with \
             `netmem device`"
        ));
    }
    if args.flows.is_some() || args.addr.is_some() || args.reverse {
        return BadArgument::new("--flows, --addr and --reverse are for --proto tcp and --proto udp");
    }
    let foreign = device(args) != DeviceArg::Embedded;
    if foreign && args.port.is_some() {
        return BadArgument::new("--port is for the embedded device; a vhost-user backend has ports of its own");
    }
    if foreign && args.link.is_some() {
        return BadArgument::new("--link is before the embedded device's port; `netmem device` has a --link, too");
    }
    let sleeps = args.spin.and_then(Spin::poll_for).is_some();
    if sleeps && (foreign || *port != PortArg::Gen || args.against.is_some() || args.link.is_some()) {
        return BadArgument::new(
            "--spin: wake-ups are measured with the embedded device and its generator, without --against and --link",
        );
    }
    if !args.rate.is_empty() && !sleeps {
        return BadArgument::new("--rate is for a driver that sleeps; say after how long, with --spin MICROSECONDS");
    }
    if args.rate.iter().any(|rate| !(1..=100_000_000).contains(rate)) {
        return BadArgument::new("--rate: 1 to 100000000 packets per second are possible");
    }
    if args.runs == Some(0) {
        return BadArgument::new("--runs 0: at least one run is needed");
    }
    if !args.ring.is_power_of_two() || !(32..=32768).contains(&args.ring) {
        return BadArgument::new(format!("--ring {}: a power of two from 32 to 32768 is needed", args.ring));
    }
    if [RingArg::Split, RingArg::Packed].iter().all(|format| args.ring_features.contains(format)) {
        return BadArgument::new("--ring-features: rings are either split or packed");
    }
    let most = if foreign { u16::MAX / 2 } else { MAX_PAIRS as u16 };
    if let Some(queues) = args.queues.iter().find(|&&queues| queues == 0 || queues > most) {
        return BadArgument::new(format!("--queues {queues}: 1 to {most} queue pairs are possible"));
    }
    if args.xdp != XdpArg::Pass && !matches!(args.consumer, None | Some(ConsumerArg::Same)) {
        return BadArgument::new("--consumer says where passed packets are dropped; it needs --xdp pass");
    }
    Ok(())
}

const OWN_PAGES: &str = "big-packet mode keeps pages of its own, a page per packet and from no pool";

fn variants(args: &PerfArgs, port: &PortArg) -> Result<Vec<Variant>, BadArgument> {
    let device = device(args);
    let generated = device == DeviceArg::Embedded && *port == PortArg::Gen;
    let named = match (&device, port) {
        (DeviceArg::VhostUser(_) | DeviceArg::Listen(_) | DeviceArg::Fd(_), _) => "vhost-user",
        (_, PortArg::Tap(_)) => "tap",
        (_, PortArg::Pcap(_)) => "pcap",
        _ => "gen",
    };
    if let Some(size) = args.size.iter().find(|&&size| size < MIN_FRAME) {
        return BadArgument::new(format!("--size {size}: frames have at least {MIN_FRAME} bytes"));
    }
    let modes: &[RxMode] = match args.mode {
        Some(ModeArg::Small) => &[RxMode::Small],
        Some(ModeArg::Mergeable) => &[RxMode::Mergeable],
        Some(ModeArg::Big) => &[RxMode::Big],
        Some(ModeArg::All) => &[RxMode::Small, RxMode::Mergeable, RxMode::Big],
        // Traffic of others can have any size.
        None if matches!(port, PortArg::Tap(_) | PortArg::Pcap(_)) => &[RxMode::Mergeable],
        None => &[RxMode::Small, RxMode::Mergeable],
    };
    let given = args.mode.is_some_and(|mode| mode != ModeArg::All);
    let mut shapes = Vec::new();
    for &mode in modes {
        let defaults: &[usize] = match mode {
            _ if !generated => &[],
            RxMode::Small => &[64],
            RxMode::Mergeable => &[64, 1500],
            RxMode::Big => &[64000],
        };
        let sizes = if args.size.is_empty() { defaults } else { &args.size };
        let too_long = sizes.iter().find(|&&size| size > mode.max_frame());
        if let (true, Some(size)) = (given, too_long) {
            let max = mode.max_frame();
            return BadArgument::new(format!("--size {size}: {mode} mode receives frames of up to {max} bytes"));
        }
        shapes.extend(sizes.iter().filter(|&&size| size <= mode.max_frame()).map(|&size| (mode, Some(size))));
        if sizes.is_empty() {
            shapes.push((mode, None));
        }
    }
    let fits = |size: usize| shapes.iter().any(|shape| shape.1 == Some(size));
    if let Some(size) = args.size.iter().find(|&&size| !fits(size)) {
        let max = modes.iter().map(|mode| mode.max_frame()).max().unwrap_or(0);
        return BadArgument::new(format!("--size {size}: frames of up to {max} bytes are possible in these modes"));
    }
    let consumer = match args.consumer {
        None | Some(ConsumerArg::Same) => Consumer::Same,
        Some(_) => Consumer::Other,
    };
    let name = |mode, size: Option<usize>| match size {
        Some(size) => format!("{mode}-{size}"),
        None => format!("{mode}-{named}"),
    };
    let mut rows: Vec<_> = (shapes.iter())
        .flat_map(|&(mode, size)| args.queues.iter().map(move |&queues| (mode, size, consumer, queues)))
        .collect();
    // What is shown to who asks for nothing in particular includes the way home from another CPU.
    let default = generated && args.mode.is_none() && args.size.is_empty() && args.consumer.is_none();
    if default && args.xdp == XdpArg::Pass && args.queues == [1] {
        rows.push((RxMode::Small, Some(64), Consumer::Other, 1));
    }
    let allocs: &[Alloc] = match args.alloc {
        AllocArg::Pool => &[Alloc::Pool],
        AllocArg::Page => &[Alloc::Page],
        AllocArg::Both => &[Alloc::Pool, Alloc::Page],
    };
    let row = |(mode, size, consumer, queues): (RxMode, Option<usize>, Consumer, u16)| {
        allocs.iter().map(move |&alloc| Variant {
            mode,
            size,
            name: name(mode, size),
            alloc,
            consumer,
            queues,
            skipped: (mode == RxMode::Big && alloc == Alloc::Pool).then_some(OWN_PAGES),
        })
    };
    Ok(rows.into_iter().flat_map(row).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Cli;
    use clap::Parser;

    fn plan(args: &str) -> Result<Plan, String> {
        let args = std::iter::once("netmem").chain(args.split_whitespace());
        let cli = Cli::try_parse_from(args).map_err(|e| e.to_string())?;
        Plan::on(&cli.perf, &[0, 1], &[0, 1]).map_err(|e| e.to_string())
    }

    fn names(args: &str) -> Vec<String> {
        plan(args).unwrap().variants.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn what_is_measured_by_default() {
        assert_eq!(
            names(""),
            [
                "small-64 pool same x1",
                "small-64 page same x1",
                "mergeable-64 pool same x1",
                "mergeable-64 page same x1",
                "mergeable-1500 pool same x1",
                "mergeable-1500 page same x1",
                "small-64 pool other x1",
                "small-64 page other x1",
            ]
        );
    }

    #[test]
    fn every_combination_that_was_asked_for() {
        assert_eq!(names("--mode small --alloc pool --size 60,1518 --queues 1,2").len(), 4);
        assert_eq!(names("--mode all --alloc pool --size 64,64000").len(), 5);
        assert_eq!(names("--consumer 0 --mode small"), ["small-64 pool other x1", "small-64 page other x1"]);
        assert_eq!(names("--port tap:t --alloc pool"), ["mergeable-tap pool same x1"]);
        for device in ["--device vhost-user:/x", "--device vhost-user-listen:/x", "--fd 3 --runs 1"] {
            assert_eq!(names(&format!("{device} --mode small --alloc pool")), ["small-vhost-user pool same x1"]);
        }
    }

    #[test]
    fn big_mode_has_no_pool_to_compare() {
        let plan = plan("--mode big").unwrap();
        assert_eq!(plan.variants.iter().map(|v| v.skipped.is_some()).collect::<Vec<_>>(), [true, false]);
    }

    #[test]
    fn bad_arguments_say_what_is_wrong() {
        for (args, says) in [
            ("--size 59", "59"),
            ("--size 64k", "64k"),
            ("--mode small --size 1519", "1518"),
            ("--mode mergeable --size 65550", "65549"),
            ("--mode all --size 65550", "65549"),
            ("--size 65550", "65549"),
            ("--queues 0", "--queues 0"),
            ("--queues 128", "127"),
            ("--queues x", "--queues"),
            ("--runs 0", "--runs"),
            ("--ring 100", "power of two"),
            ("--ring 16", "32"),
            ("--ring-features split,packed", "either"),
            ("--ring-features round", "packed"),
            ("--port sink", "sink"),
            ("--port gen --device vhost-user:/x", "--port"),
            ("--link loss=1% --device vhost-user:/x", "--link"),
            ("--link loss=1% --spin 50", "--link"),
            ("--flows 2", "--proto"),
            ("--link loss", "NAME=VALUE"),
            ("--fd 3 --device vhost-user:/x", "--device"),
            ("--fd 3 --mode small --alloc pool", "--runs 1"),
            ("--fd 3 --mode small --runs 1", "one variant"),
            ("--xdp drop --consumer other", "--xdp pass"),
            ("--consumer 7", "CPU 7"),
            ("--cpus net=7", "CPU 7"),
            ("--cpus web=1", "web"),
            ("--duration 3m", "suffix `m`"),
            ("--device xsk:eth0", "AF_XDP"),
            ("--alloc pool --mode big", "no pool"),
            ("--spin 50 --port tap:t", "embedded device"),
            ("--spin x", "forever"),
            ("--rate 1000", "--spin"),
            ("--spin forever --rate 1000", "--spin"),
            ("--spin 50 --rate 0", "--rate"),
        ] {
            let error = plan(args).unwrap_err();
            assert!(error.contains(says), "{args}: {error}");
        }
    }
}
