//! The plan of a measurement: the checked arguments, and the variants that follow from them.

use crate::args::{AllocArg, ConsumerArg, DeviceArg, ModeArg, PerfArgs, PortArg, RingArg, XdpArg};
use crate::placement::Placement;
use crate::xdp::XdpArgs;
use netmem::device::MAX_PAIRS;
use netmem::virtio::{MIN_FRAME, RxMode, Spin};
use netmem_measure::arguments::BadArgument;
use netmem_measure::cpus;
use netmem_netem::LinkOptions;
use std::path::PathBuf;
use std::time::Duration;

/// The place where packets are dropped.
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
    /// Bytes in a frame, if they are known.
    pub(crate) size: Option<usize>,
    pub(crate) name: String,
    pub(crate) alloc: AllocArg,
    pub(crate) consumer: Consumer,
    pub(crate) queues: u16,
    /// Why the variant is not measured.
    pub(crate) skipped: Option<&'static str>,
    /// The shape of frames in buffers, for reports.
    pub(crate) shape: String,
}

impl std::fmt::Display for Variant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} {} x{}", self.name, self.alloc.name(), self.consumer.name(), self.queues)
    }
}

impl Variant {
    /// Whether `other` differs only in the allocator.
    pub(crate) fn is_twin(&self, other: &Self) -> bool {
        (&self.name, self.consumer, self.queues) == (&other.name, other.consumer, other.queues)
            && self.alloc != other.alloc
    }
}

/// Packets per second to a driver that sleeps: from a rate at which it sleeps before each packet to
/// one at which it does not sleep.
const RATES: [u64; 4] = [1000, 10_000, 100_000, 1_000_000];
/// The time of all runs without a number of runs.
const BUDGET: Duration = Duration::from_secs(27);

/// The checked arguments.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) device: DeviceArg,
    pub(crate) port: PortArg,
    /// A bad link before the port, if there is one.
    pub(crate) link: Option<LinkOptions>,
    /// The file of a capture.
    pub(crate) pcap: Option<PathBuf>,
    pub(crate) xdp: XdpArg,
    /// How queues of an interface are opened.
    pub(crate) af_xdp: XdpArgs,
    pub(crate) variants: Vec<Variant>,
    pub(crate) cpus: Placement,
    /// The online CPUs, and those that this process may use.
    pub(crate) allowed: Vec<usize>,
    pub(crate) duration: Duration,
    pub(crate) warmup: Duration,
    pub(crate) runs: u32,
    /// Without a number of runs: how long all of them may take.
    pub(crate) budget: Option<Duration>,
    pub(crate) ring: u16,
    /// Features of rings that the device must have.
    pub(crate) ring_features: u64,
    pub(crate) lock: bool,
    pub(crate) json: bool,
    /// How long the driver polls before it sleeps. `None` if it never sleeps.
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
            pcap: args.pcap.clone(),
            xdp: args.xdp,
            af_xdp: args.af_xdp,
            variants,
            cpus,
            allowed: allowed.to_vec(),
            duration: args.duration.unwrap_or(Duration::from_millis(match (listens, spin) {
                (true, _) => 10_000,
                (_, Some(_)) => 1000,
                _ => 50,
            })),
            // A run that listens to traffic counts every frame, so it has no warm-up.
            warmup: Duration::from_millis(if listens { 0 } else { 20 }),
            // Many short runs in turns: if something disturbs the machine for a second, it disturbs
            // both sides of a pair.
            runs: args.runs.unwrap_or(if listens { 1 } else { 17 }),
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

    /// Whether other programs send the traffic, so that it does not come as fast as it is taken.
    pub(crate) fn listens(&self) -> bool {
        matches!(self.port, PortArg::Tap(_))
    }
}

fn device(args: &PerfArgs) -> DeviceArg {
    args.fd.map_or_else(|| args.device.clone(), DeviceArg::Fd)
}

fn check(args: &PerfArgs, port: &PortArg) -> Result<(), BadArgument> {
    if let PortArg::Xsk(xsk) = port {
        return BadArgument::new(format!(
            "--port {xsk}: use --device {xsk}, which receives without a virtio-net device between"
        ));
    }
    if matches!(port, PortArg::Sink | PortArg::Echo) {
        return BadArgument::new(format!(
            "--port {port}: nothing would be received from it; use gen, tap:NAME or pcap:FILE here, and {port} with \
             `netmem device`"
        ));
    }
    let flows = args.flows.is_some() || args.rr.is_some() || args.search.is_some() || args.interval.is_some();
    if flows || args.addr.is_some() || args.reverse {
        return BadArgument::new(
            "--flows, --rr, --search, --interval, --addr and --reverse are for --proto tcp and --proto udp",
        );
    }
    if args.metrics.is_some() && (args.against.is_some() || args.spin.is_some()) {
        return BadArgument::new(
            "--metrics has the figures of one measurement of frames; leave out --against and --spin",
        );
    }
    let foreign = device(args) != DeviceArg::Embedded;
    if foreign && args.port.is_some() {
        return BadArgument::new(
            "--port is for the embedded device; a vhost-user backend and an interface have ports of their own",
        );
    }
    if foreign && (args.link.is_some() || args.pcap.is_some()) {
        return BadArgument::new(
            "--link and --pcap are before the embedded device's port; `netmem device` has them, too",
        );
    }
    let xsk = matches!(device(args), DeviceArg::Xsk(_));
    args.af_xdp.check(xsk, "give --device xsk:IFACE")?;
    if xsk && !args.size.is_empty() {
        return BadArgument::new(
            "--size is for the generator; frames of an interface are as long as their sender makes them",
        );
    }
    if xsk && (args.mode.is_some() || args.ring_features != [RingArg::Split]) {
        return BadArgument::new("--mode and --ring-features are for virtio-net; AF_XDP has rings of its own");
    }
    let sleeps = args.spin.and_then(Spin::poll_for).is_some();
    if sleeps
        && (foreign || *port != PortArg::Gen || args.against.is_some() || args.link.is_some() || args.pcap.is_some())
    {
        return BadArgument::new(
            "--spin: wake-ups are measured with the embedded device and its generator, without --against, --link and --pcap",
        );
    }
    if sleeps && args.check {
        return BadArgument::new("--check is for goals, and measurements with --spin have none");
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

const OWN_PAGES: &str = "big-packet mode keeps pages of its own, a page per packet, from no pool and in no fragments";

/// The modes that were asked for, or those that suit the source of frames.
fn modes(asked: Option<ModeArg>, xsk: bool, port: &PortArg) -> &'static [RxMode] {
    match asked {
        Some(ModeArg::Small) => &[RxMode::Small],
        Some(ModeArg::Mergeable) => &[RxMode::Mergeable],
        Some(ModeArg::Big) => &[RxMode::Big],
        Some(ModeArg::All) => &[RxMode::Small, RxMode::Mergeable, RxMode::Big],
        // Traffic of other programs can have frames of any size.
        None if xsk || matches!(port, PortArg::Tap(_) | PortArg::Pcap(_)) => &[RxMode::Mergeable],
        None => &[RxMode::Small, RxMode::Mergeable],
    }
}

fn variants(args: &PerfArgs, port: &PortArg) -> Result<Vec<Variant>, BadArgument> {
    let device = device(args);
    let generated = device == DeviceArg::Embedded && *port == PortArg::Gen;
    let xsk = matches!(device, DeviceArg::Xsk(_));
    let named = match (&device, port) {
        (DeviceArg::VhostUser(_) | DeviceArg::Listen(_) | DeviceArg::Fd(_), _) => "vhost-user",
        (DeviceArg::Xsk(_), _) => "xsk",
        (_, PortArg::Tap(_)) => "tap",
        (_, PortArg::Pcap(_)) => "pcap",
        _ => "gen",
    };
    if let Some(size) = args.size.iter().find(|&&size| size < MIN_FRAME) {
        return BadArgument::new(format!("--size {size}: frames have at least {MIN_FRAME} bytes"));
    }
    let modes = modes(args.mode, xsk, port);
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
        None if xsk => named.to_owned(),
        None => format!("{mode}-{named}"),
    };
    let mut rows: Vec<_> = (shapes.iter())
        .flat_map(|&(mode, size)| args.queues.iter().map(move |&queues| (mode, size, consumer, queues)))
        .collect();
    // Without arguments, the rows include packets that another CPU drops.
    let default = generated && args.mode.is_none() && args.size.is_empty() && args.consumer.is_none();
    if default && args.xdp == XdpArg::Pass && args.queues == [1] {
        rows.push((RxMode::Small, Some(64), Consumer::Other, 1));
    }
    let row = |(mode, size, consumer, queues): (RxMode, Option<usize>, Consumer, u16)| {
        args.alloc.iter().map(move |&alloc| Variant {
            mode,
            size,
            name: name(mode, size),
            alloc,
            consumer,
            queues,
            skipped: (mode == RxMode::Big && alloc != AllocArg::Page).then_some(OWN_PAGES),
            shape: if xsk { named.to_owned() } else { mode.to_string() },
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
                "small-64 frags same x1",
                "mergeable-64 pool same x1",
                "mergeable-64 page same x1",
                "mergeable-64 frags same x1",
                "mergeable-1500 pool same x1",
                "mergeable-1500 page same x1",
                "mergeable-1500 frags same x1",
                "small-64 pool other x1",
                "small-64 page other x1",
                "small-64 frags other x1",
            ]
        );
    }

    #[test]
    fn every_combination_that_was_asked_for() {
        assert_eq!(names("--mode small --alloc pool --size 60,1518 --queues 1,2").len(), 4);
        assert_eq!(names("--mode all --alloc pool --size 64,64000").len(), 5);
        let pages = names("--consumer 0 --mode small --alloc frags,pool");
        assert_eq!(pages, ["small-64 frags other x1", "small-64 pool other x1"]);
        assert_eq!(names("--port tap:t --alloc pool"), ["mergeable-tap pool same x1"]);
        assert_eq!(names("--device xsk:eth0:3"), ["xsk pool same x1", "xsk page same x1", "xsk frags same x1"]);
        for device in ["--device vhost-user:/x", "--device vhost-user-listen:/x", "--fd 3 --runs 1"] {
            assert_eq!(names(&format!("{device} --mode small --alloc pool")), ["small-vhost-user pool same x1"]);
        }
    }

    #[test]
    fn big_mode_has_no_pool_to_compare() {
        let plan = plan("--mode big").unwrap();
        assert_eq!(plan.variants.iter().map(|v| v.skipped.is_some()).collect::<Vec<_>>(), [true, false, true]);
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
            ("--rr 1,1", "--proto"),
            ("-i 1", "--proto"),
            ("--link loss", "NAME=VALUE"),
            ("--fd 3 --device vhost-user:/x", "--device"),
            ("--fd 3 --mode small --alloc pool", "--runs 1"),
            ("--fd 3 --mode small --runs 1", "one variant"),
            ("--xdp drop --consumer other", "--xdp pass"),
            ("--consumer 7", "CPU 7"),
            ("--cpus net=7", "CPU 7"),
            ("--cpus web=1", "web"),
            ("--duration 3m", "suffix `m`"),
            ("--device xsk:", "xsk:IFACE"),
            ("--device xsk:eth0:x", "queue's number"),
            ("--device xsk:eth0 --mode small", "--mode"),
            ("--device xsk:eth0 --ring-features packed", "--ring-features"),
            ("--device xsk:eth0 --port gen", "--port"),
            ("--device xsk:eth0 --size 64", "--size"),
            ("--xdp-mode copy", "--device xsk:IFACE"),
            ("--busy-poll", "--device xsk:IFACE"),
            ("--port xsk:eth0", "--device xsk:eth0"),
            ("--alloc pool --mode big", "no pool"),
            ("--spin 50 --port tap:t", "embedded device"),
            ("--spin x", "forever"),
            ("--spin 50 --check", "goals"),
            ("--check --against /x", "--against"),
            ("--rate 1000", "--spin"),
            ("--spin forever --rate 1000", "--spin"),
            ("--spin 50 --rate 0", "--rate"),
        ] {
            let error = plan(args).unwrap_err();
            assert!(error.contains(says), "{args}: {error}");
        }
    }
}
