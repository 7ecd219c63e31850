//! The checked arguments for the ends.

use super::report::CpuRow;
use crate::args::{AllocArg, DeviceArg, PerfArgs, PortArg, ProtoArg, XdpArg};
use crate::placement::Placement;
use netmem::virtio::Spin;
use netmem_inet::Address;
use netmem_measure::arguments::BadArgument;
use netmem_measure::cpus;
use netmem_measure::load::Share;
use netmem_netem::LinkOptions;
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

/// Pages that a source sends from.
pub(super) const PAGES: usize = 16;
const MTU: u16 = 1500;
const MAX_FLOWS: u16 = 500;
const MAX_MESSAGE: usize = 1 << 20;
/// Headers of IPv6 and UDP.
const DATAGRAM_HEADERS: usize = 48;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Proto {
    Tcp,
    Udp,
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
    pub(super) proto: Proto,
    pub(super) between: Between,
    pub(super) flows: u16,
    /// Bytes of a message.
    pub(super) size: usize,
    pub(super) mtu: u16,
    pub(super) duration: Duration,
    pub(super) runs: u32,
    pub(super) link: Option<LinkOptions>,
    /// Source on `net` and target on `app`; our end on `net` and the kernel's on `app`.
    pub(super) cpus: Placement,
    /// How long a stack polls before it sleeps.
    pub(super) spin: Duration,
    pub(super) json: bool,
}

impl Plan {
    pub(super) fn new(args: &PerfArgs) -> Result<Self, BadArgument> {
        let proto = if args.proto == ProtoArg::Udp { Proto::Udp } else { Proto::Tcp };
        let frames = args.mode.is_some()
            || args.alloc != [AllocArg::Pool, AllocArg::Page, AllocArg::Frags]
            || args.xdp != XdpArg::Pass;
        if frames || args.consumer.is_some() || args.queues != [1] || !args.rate.is_empty() || args.against.is_some() {
            return BadArgument::new(
                "--mode, --alloc, --xdp, --consumer, --queues, --rate and --against are for frames; leave out --proto",
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
        let most = match proto {
            Proto::Tcp => MAX_MESSAGE,
            Proto::Udp => usize::from(MTU) - DATAGRAM_HEADERS,
        };
        let size = match args.size[..] {
            [] => most.min(65536),
            [size] => size,
            _ => return BadArgument::new("--size: messages have one size; give one"),
        };
        if !(1..=most).contains(&size) {
            return BadArgument::new(format!("--size {size}: messages of 1 to {most} bytes are possible"));
        }
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
            proto,
            between,
            flows,
            size,
            mtu: MTU,
            duration: args.duration.unwrap_or(Duration::from_secs(1)),
            runs: args.runs.unwrap_or(3),
            link: args.link,
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

/// How long a stack polls. If the user did not set it, a stack that shares its CPU with another
/// thread sleeps at once: otherwise it would keep the CPU until the scheduler preempts it.
fn spin(asked: Option<Spin>, cpus: Placement) -> Duration {
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

impl std::fmt::Display for Proto {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        })
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
        assert_eq!((tcp.flows, tcp.size, tcp.runs, tcp.duration), (1, 65536, 3, Duration::from_secs(1)));
        assert_eq!(plan("udp --flows 7").map(|udp| (udp.flows, udp.size)), Ok((7, 1452)));
        for (args, says) in [
            ("sctp", "tcp"),
            ("tcp --flows 0", "1 to 500"),
            ("tcp --size 0", "1 to 1048576"),
            ("udp --size 1453", "1 to 1452"),
            ("tcp --size 1,2", "one size"),
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
