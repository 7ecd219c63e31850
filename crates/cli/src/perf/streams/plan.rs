//! The checked arguments for the ends.

use crate::args::{DeviceArg, PerfArgs, PortArg, ProtoArg, SearchArg};
use crate::placement::Placement;
use netmem::virtio::Spin;
use netmem_inet::Address;
use netmem_measure::against::PAIRS;
use netmem_measure::arguments::BadArgument;
use netmem_measure::cpus;
use netmem_measure::load::Share;
use netmem_netem::LinkOptions;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::path::PathBuf;
use std::time::Duration;

/// Pages that a source sends from.
pub(super) const PAGES: usize = 16;
const MTU: u16 = 1500;
/// The most flows of a measurement.
pub(super) const MAX_FLOWS: u16 = 500;
const MAX_MESSAGE: usize = 1 << 20;
/// Headers of IPv6 and UDP.
const DATAGRAM_HEADERS: usize = 48;
/// Bytes of the number in a request's datagram.
pub(super) const NUMBER: usize = 8;
/// How long datagrams may be on their way without a link's delay.
const ON_WAY: Duration = Duration::from_millis(200);
/// The longest time in which requests are sent that were due when the run ended.
const LONGEST_DRAIN: Duration = Duration::from_secs(10);
pub(super) const DURATION: Duration = Duration::from_secs(1);
/// The most messages in a second.
pub(super) const MAX_RATE: u64 = 1_000_000_000;
/// A flow sends at least one message in this time.
pub(super) const LEAST_EVERY: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub(super) enum Proto {
    #[default]
    Tcp,
    Udp,
}

/// What a flow does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub(super) struct Work {
    pub(super) proto: Proto,
    /// Bytes of a message, or of a request.
    pub(super) size: usize,
    /// Bytes of the answer to each request; none are answered without it.
    pub(super) answer: Option<usize>,
    /// How long datagrams may be on their way.
    pub(super) on_way: Duration,
    /// How long messages are still sent after the run's end that were due before.
    pub(super) drain: Duration,
}

/// The stacks of the two ends.
#[derive(Clone, Debug)]
pub(super) enum Between {
    Ours,
    /// Our stack has `address`, and the kernel's sockets `kernel`. The kernel is the target, or the
    /// source if `reverse` is set.
    Tap {
        name: String,
        address: Address,
        kernel: IpAddr,
        reverse: bool,
    },
}

#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) work: Work,
    pub(super) between: Between,
    pub(super) flows: u16,
    /// Messages of all flows in a second, one measurement for each. `None`: as many as possible.
    pub(super) rates: Vec<Option<u64>>,
    pub(super) search: Option<SearchArg>,
    pub(super) mtu: u16,
    pub(super) duration: Duration,
    pub(super) runs: u32,
    /// How often a line is printed during a run.
    pub(super) interval: Option<Duration>,
    pub(super) link: Option<LinkOptions>,
    /// The file of a capture.
    pub(super) pcap: Option<PathBuf>,
    /// Source on `net` and target on `app`; our end on `net` and the kernel's on `app`.
    pub(super) cpus: Placement,
    /// How long a stack polls before it sleeps.
    pub(super) spin: Duration,
    pub(super) json: bool,
}

/// A CPU of the measurement.
#[derive(Clone, Debug, Serialize)]
pub(super) struct CpuRow {
    pub(super) cpu: usize,
    pub(super) roles: Vec<&'static str>,
    #[serde(flatten)]
    pub(super) share: Share,
}

impl Plan {
    pub(super) fn new(args: &PerfArgs) -> Result<Self, BadArgument> {
        let proto = if args.proto == ProtoArg::Udp { Proto::Udp } else { Proto::Tcp };
        if args.are_for_frames() {
            return BadArgument::new(
                "--mode, --alloc, --xdp, --consumer and --queues are for frames; leave out --proto",
            );
        }
        if args.check {
            return BadArgument::new("--check is for goals, and measurements with --proto have none");
        }
        args.af_xdp.check(false, "leave out --proto, and give --device xsk:IFACE")?;
        if args.device != DeviceArg::Embedded || args.fd.is_some() {
            return BadArgument::new("--proto: the stacks are on the embedded device; leave out --device and --fd");
        }
        let flows = args.flows.unwrap_or(1);
        if !(1..=MAX_FLOWS).contains(&flows) {
            return BadArgument::new(format!("--flows {flows}: 1 to {MAX_FLOWS} are possible"));
        }
        let work = work(args, proto)?;
        let rates = rates(args, flows)?;
        check_search(args, work)?;
        if args.runs == Some(0) {
            return BadArgument::new("--runs 0: at least one run is needed");
        }
        let between = match (&args.port, args.addr) {
            (None, None) if args.reverse => {
                return BadArgument::new("--reverse has the kernel send; it needs --port tap:NAME");
            }
            (None, None) => Between::Ours,
            (Some(PortArg::Tap(name)), Some(address)) => {
                let kernel = neighbor(address)?;
                Between::Tap { name: name.clone(), address, kernel, reverse: args.reverse }
            }
            (Some(PortArg::Tap(_)), None) => {
                return BadArgument::new("--port tap:NAME needs --addr ADDR/LEN, the address of netmem's end");
            }
            (Some(port), _) => {
                return BadArgument::new(format!("--port {port}: use tap:NAME, or no port for two ends of netmem's"));
            }
            (None, Some(_)) => return BadArgument::new("--addr is the address of netmem's end behind --port tap:NAME"),
        };
        let cpus = Placement::new(args.cpus, None, &cpus::online(), &cpus::allowed())?;
        Ok(Self {
            work,
            between,
            flows,
            rates,
            search: args.search,
            mtu: MTU,
            duration: args.duration.unwrap_or(DURATION),
            runs: args.runs.unwrap_or(match (args.search, &args.against) {
                (Some(_), _) => 1,
                (None, Some(_)) => PAIRS,
                (None, None) => 3,
            }),
            interval: args.interval,
            link: args.link,
            pcap: args.pcap.clone(),
            cpus,
            spin: spin(args.spin, cpus),
            json: args.json,
        })
    }

    /// The names of the source's and the target's stack.
    pub(super) fn ends(&self) -> [&'static str; 2] {
        match self.between {
            Between::Ours => ["netmem", "netmem"],
            Between::Tap { reverse: false, .. } => ["netmem", "kernel"],
            Between::Tap { reverse: true, .. } => ["kernel", "netmem"],
        }
    }

    /// The CPUs of source and target.
    fn places(&self) -> [usize; 2] {
        let Placement { net, app, .. } = self.cpus;
        if let Between::Tap { reverse: true, .. } = self.between { [app, net] } else { [net, app] }
    }

    /// The CPUs that take part, and their shares. `idle` is the part of the time that source and
    /// target spent in empty polls.
    pub(super) fn shares(&self, shares: &BTreeMap<usize, Share>, idle: [f64; 2]) -> Vec<CpuRow> {
        let [source, target] = self.places();
        let mut rows: BTreeMap<usize, (Vec<&'static str>, f64)> = BTreeMap::new();
        for (cpu, role, idle) in
            [(source, "source", idle[0]), (target, "target", idle[1]), (self.cpus.device, "device", 0.0)]
        {
            let row = rows.entry(cpu).or_default();
            row.0.push(role);
            row.1 += idle;
        }
        let row = |(cpu, (roles, idle)): (usize, (Vec<_>, f64))| {
            let share = shares.get(&cpu).copied().unwrap_or_default().with_idle(idle);
            CpuRow { cpu, roles, share }
        };
        rows.into_iter().map(row).collect()
    }
}

/// The bytes of messages, requests and answers.
pub(super) fn work(args: &PerfArgs, proto: Proto) -> Result<Work, BadArgument> {
    let most = proto.max_message();
    let (size, answer) = match (args.rr, &args.size[..]) {
        (None, []) => (most.min(65536), None),
        (None, &[size]) => (size, None),
        (Some([request, answer]), []) => (request, Some(answer)),
        (None, _) => return BadArgument::new("--size: messages have one size; give one"),
        (Some(_), _) => return BadArgument::new("--rr has the sizes of requests and answers; leave out --size"),
    };
    let least = proto.min_message(answer);
    if let Some(bad) = [Some(size), answer].into_iter().flatten().find(|size| !(least..=most).contains(size)) {
        let option = if answer.is_some() { "rr" } else { "size" };
        return BadArgument::new(format!("--{option} {bad}: messages of {least} to {most} bytes are possible"));
    }
    let link = args.link.unwrap_or_default();
    let drain = args.duration.unwrap_or(DURATION).min(LONGEST_DRAIN);
    let drain = if answer.is_some() { drain } else { Duration::ZERO };
    Ok(Work { proto, size, answer, on_way: ON_WAY + link.delay + link.jitter, drain })
}

/// Whether the goal of a search, if there is one, suits the rest.
pub(super) fn check_search(args: &PerfArgs, work: Work) -> Result<(), BadArgument> {
    match (args.search, work.proto, work.answer) {
        (None, ..) | (Some(SearchArg::Lossless), Proto::Udp, None) | (Some(SearchArg::Within { .. }), _, Some(_)) => {}
        (Some(SearchArg::Lossless), ..) => {
            return BadArgument::new("--search lossless is for datagrams: --proto udp, without --rr");
        }
        (Some(SearchArg::Within { .. }), ..) => {
            return BadArgument::new("--search PERCENT%=TIME is for the times of requests; add --rr REQUEST,RESPONSE");
        }
    }
    if args.search.is_some() && args.against.is_some() {
        return BadArgument::new("--against compares builds at rates; leave out --search");
    }
    if args.search.is_some() && !args.rate.is_empty() {
        return BadArgument::new("--search looks for a rate; leave out --rate");
    }
    Ok(())
}

/// The lowest rate of all flows together: a flow begins with its first message.
pub(super) fn least_rate(flows: u16) -> u64 {
    u64::from(flows).div_ceil(LEAST_EVERY.as_secs())
}

/// The rates of all flows together.
pub(super) fn rates(args: &PerfArgs, flows: u16) -> Result<Vec<Option<u64>>, BadArgument> {
    let least = least_rate(flows);
    if let Some(rate) = args.rate.iter().find(|rate| **rate < least) {
        return BadArgument::new(format!(
            "--rate {rate}: {flows} flow(s) need at least {least} messages in a second, one for each flow in {} s",
            LEAST_EVERY.as_secs()
        ));
    }
    if let Some(rate) = args.rate.iter().find(|rate| **rate > MAX_RATE) {
        return BadArgument::new(format!("--rate {rate}: at most {MAX_RATE} messages in a second are possible"));
    }
    let rates: Vec<_> = args.rate.iter().copied().map(Some).collect();
    Ok(if rates.is_empty() { vec![None] } else { rates })
}

/// How long a stack polls. If the user did not set it, a stack that shares its CPU with another
/// thread sleeps at once: otherwise it would keep the CPU until the scheduler preempts it.
pub(super) fn spin(asked: Option<Spin>, cpus: Placement) -> Duration {
    let alone = cpus.net != cpus.app && cpus.net != cpus.device && cpus.app != cpus.device;
    let spin = asked.unwrap_or(if alone { Spin::Forever } else { Spin::NONE });
    spin.poll_for().unwrap_or(Duration::MAX)
}

/// The kernel's address next to ours: the address that the kernel would send from.
fn neighbor(address: Address) -> Result<IpAddr, BadArgument> {
    let to = SocketAddr::new(address.addr, 9);
    let any = if address.addr.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket = UdpSocket::bind(any).and_then(|socket| socket.connect(to).map(|()| socket));
    let kernel = socket.and_then(|socket| socket.local_addr()).ok().map(|at| at.ip());
    let (addr, len) = (address.addr, address.prefix_len);
    kernel.filter(|kernel| address.has(*kernel) && *kernel != addr).ok_or_else(|| {
        BadArgument(format!(
            "--addr {addr}/{len}: the kernel has no address in this network; give the tap one: ip tuntap add NAME mode tap vnet_hdr, \
             ip address add .. dev NAME, ip link set NAME up"
        ))
    })
}

impl Proto {
    /// The most bytes of a message.
    pub(super) fn max_message(self) -> usize {
        match self {
            Self::Tcp => MAX_MESSAGE,
            Self::Udp => usize::from(MTU) - DATAGRAM_HEADERS,
        }
    }

    /// The fewest bytes of a message. The number of a request is in its datagram.
    pub(super) fn min_message(self, answer: Option<usize>) -> usize {
        if self == Self::Udp && answer.is_some() { NUMBER } else { 1 }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Cli;
    use clap::Parser;

    fn plan(args: &str) -> Result<Plan, String> {
        let args = ["netmem", "perf", "--proto"].into_iter().chain(args.split_whitespace());
        match Cli::try_parse_from(args).map_err(|e| e.to_string())?.command {
            Some(crate::args::Command::Perf(args)) => Plan::new(&args).map_err(|e| e.to_string()),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_stack_polls_where_it_is_alone() {
        let alone = Placement { net: 0, app: 1, device: 2 };
        assert_eq!(spin(None, alone), Duration::MAX);
        assert_eq!(spin(None, Placement { device: 1, ..alone }), Duration::ZERO);
        assert_eq!(spin(Some(Spin::Forever), Placement { device: 1, ..alone }), Duration::MAX);
    }

    #[test]
    fn defaults_and_bounds() {
        let tcp = plan("tcp").unwrap();
        assert_eq!((tcp.flows, tcp.work.size, tcp.runs, tcp.duration), (1, 65536, 3, Duration::from_secs(1)));
        assert_eq!((tcp.work.answer, &tcp.rates[..]), (None, &[None][..]));
        assert_eq!(plan("udp --flows 7").map(|udp| (udp.flows, udp.work.size)), Ok((7, 1452)));
        let rr = plan("tcp --rr 64,1048576 --rate 10,20 --interval 0.5").unwrap();
        assert_eq!((rr.work.size, rr.work.answer, rr.interval), (64, Some(1 << 20), Some(Duration::from_millis(500))));
        assert_eq!(rr.rates, [Some(10), Some(20)]);
        assert_eq!(plan("udp --search lossless").map(|udp| udp.runs), Ok(1));
        assert_eq!(
            plan("udp --link delay=1s,jitter=100ms").map(|udp| udp.work.on_way),
            Ok(Duration::from_millis(1300))
        );
        for (args, says) in [
            ("sctp", "tcp"),
            ("tcp --flows 0", "1 to 500"),
            ("tcp --size 0", "1 to 1048576"),
            ("udp --size 1453", "1 to 1452"),
            ("tcp --size 1,2", "one size"),
            ("tcp --rr 64", "REQUEST,RESPONSE"),
            ("tcp --rr 64,0", "1 to 1048576"),
            ("udp --rr 64,7", "8 to 1452"),
            ("tcp --rr 1,1 --size 5", "leave out --size"),
            ("tcp --flows 11 --rate 5,1", "at least 2 messages"),
            ("tcp --search lossless", "--proto udp"),
            ("udp --rr 64,64 --search lossless", "without --rr"),
            ("tcp --search 99%=1ms", "--rr"),
            ("tcp --rr 1,1 --search 99%=1ms --rate 9", "leave out --rate"),
            ("udp --search lossless --against /bin/true", "leave out --search"),
            ("tcp --mode small", "are for frames"),
            ("tcp --queues 2", "are for frames"),
            ("tcp --device vhost-user:/x", "embedded"),
            ("tcp --port gen", "tap:NAME"),
            ("tcp --port tap:x", "--addr"),
            ("tcp --addr 10.0.0.2/24", "--port tap:NAME"),
            ("tcp --check", "goals"),
            ("tcp --reverse", "tap:NAME"),
            ("tcp --runs 0", "at least one run"),
            ("tcp --port tap:x --addr 192.0.2.77/30", "no address in this network"),
        ] {
            let error = plan(args).unwrap_err();
            assert!(error.contains(says), "{args}: {error}");
        }
    }
}
