//! The checked arguments of `--agent` and `--to`.

use super::super::plan::{self, MAX_FLOWS, Proto, Work};
use super::channel::Key;
use crate::args::{AGENT_PORT, DeviceArg, PerfArgs, PortArg, ProtoArg, SearchArg, XskArg};
use crate::placement::Placement;
use crate::xdp::XdpArgs;
use netmem::host::kernel_has;
use netmem_inet::Address;
use netmem_measure::arguments::BadArgument;
use netmem_measure::cpus;
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

/// The longest run.
pub(super) const MAX_DURATION: Duration = Duration::from_secs(24 * 3600);
/// The most hosts that take part.
const MAX_HOSTS: usize = 256;

/// The end of flows on this host.
#[derive(Clone, Debug)]
pub(super) struct Own {
    pub(super) stack: OwnStack,
    pub(super) af_xdp: XdpArgs,
    /// Of our stack on `net`, and its device on `device`.
    pub(super) cpus: Placement,
    /// The CPU of the kernel's sockets, if the user named one.
    pub(super) kernel_cpu: Option<usize>,
    /// How long our stack polls before it sleeps.
    pub(super) spin: Duration,
    pub(super) key: Option<Key>,
}

/// The stack that this host's flows are on.
#[derive(Clone, Debug)]
pub(super) enum OwnStack {
    Kernel,
    Tap(String, Address),
    Xsk(XskArg, Address),
}

/// Which hosts send to which. Host 0 drives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pattern {
    /// Host 0 to each other one.
    Out,
    /// Each other one to host 0.
    In,
    /// Both.
    Both,
    /// Each host to each other one.
    All,
}

/// What a driver measures.
#[derive(Clone, Debug)]
pub(super) struct Drive {
    /// The agents: as the user named them, and their addresses.
    pub(super) agents: Vec<(String, Vec<SocketAddr>)>,
    pub(super) pattern: Pattern,
    pub(super) work: Work,
    /// From a host to another one.
    pub(super) flows: u16,
    pub(super) rates: Vec<Option<u64>>,
    /// The goal of a search for the highest rate; `rates` is not used then.
    pub(super) search: Option<SearchArg>,
    pub(super) duration: Duration,
    pub(super) runs: u32,
    pub(super) interval: Option<Duration>,
    pub(super) json: bool,
}

impl Pattern {
    /// The pairs of hosts, of those that are there: from, to.
    pub(super) fn pairs(self, hosts: &[usize]) -> Vec<(usize, usize)> {
        let all = hosts.iter().flat_map(|&from| hosts.iter().map(move |&to| (from, to)));
        all.filter(|(from, to)| from != to)
            .filter(|(from, to)| match self {
                Self::Out => *from == 0,
                Self::In => *to == 0,
                Self::Both => *from == 0 || *to == 0,
                Self::All => true,
            })
            .collect()
    }
}

impl Own {
    pub(super) fn new(args: &PerfArgs) -> Result<Self, BadArgument> {
        let stack = match (&args.port, args.addr) {
            (None, None) => OwnStack::Kernel,
            (Some(PortArg::Tap(name)), Some(address)) => OwnStack::Tap(name.clone(), address),
            (Some(PortArg::Xsk(xsk)), Some(address)) => OwnStack::Xsk(xsk.clone(), address),
            (Some(PortArg::Tap(_) | PortArg::Xsk(_)), None) => {
                return BadArgument::new("--port needs --addr ADDR/LEN, the address of netmem's stack there");
            }
            (Some(port), _) => {
                return BadArgument::new(format!(
                    "--port {port}: flows of this host are on netmem's stack at tap:NAME or xsk:IFACE, or without --port on \
                     the kernel's"
                ));
            }
            (None, Some(_)) => {
                return BadArgument::new("--addr is the address of netmem's stack; give its --port, too");
            }
        };
        if let Some(Address { addr, .. }) = args.addr.filter(|own| kernel_has(own.addr)) {
            return BadArgument::new(format!(
                "--addr {addr}: the kernel has this address; use another one of the network, which no other station has"
            ));
        }
        args.af_xdp.check(matches!(stack, OwnStack::Xsk(..)), "give --port xsk:IFACE")?;
        let cpus = Placement::new(args.cpus, None, &cpus::online(), &cpus::allowed())?;
        let key = args.hosts.key.as_deref().map(|path| Key::read(path).map_err(BadArgument)).transpose()?;
        let spin = plan::spin(args.spin, cpus);
        Ok(Self { stack, af_xdp: args.af_xdp, cpus, kernel_cpu: args.cpus.app, spin, key })
    }
}

/// Refuses options that have no meaning between hosts.
fn check(args: &PerfArgs, what: &str) -> Result<(), BadArgument> {
    if args.are_for_frames() || args.device != DeviceArg::Embedded || args.fd.is_some() {
        return BadArgument::new(format!(
            "{what}: flows between hosts have no --mode, --alloc, --xdp, --consumer, --queues, --device and --fd"
        ));
    }
    if args.against.is_some() {
        return BadArgument::new(format!(
            "{what}: --against runs another build on this host, and the agents keep their build; start agents of each build, and \
             compare the reports"
        ));
    }
    if args.check {
        return BadArgument::new(format!("{what}: leave out --check"));
    }
    if args.link.is_some() || args.pcap.is_some() || args.metrics.is_some() {
        return BadArgument::new(format!("{what}: leave out --link, --pcap and --metrics"));
    }
    Ok(())
}

/// The address on which an agent listens.
pub(super) fn agent(args: &PerfArgs, at: SocketAddr, own: &Own) -> Result<(), BadArgument> {
    check(args, "--agent")?;
    let hosts = &args.hosts;
    let driver = hosts.bidir || hosts.all || args.reverse || args.rr.is_some() || !args.rate.is_empty() || args.json;
    let driver = driver || args.search.is_some();
    let times = args.duration.is_some() || args.runs.is_some() || args.interval.is_some();
    if driver || times || args.flows.is_some() || !args.size.is_empty() || args.proto != ProtoArg::Frames {
        return BadArgument::new(
            "--agent waits for a driver, which decides what is measured: --proto, --flows, --size, --rr, --rate, --search, --duration, \
             --runs, --interval, --reverse, --bidir, --all and --json are for --to",
        );
    }
    if own.key.is_none() && !at.ip().is_loopback() {
        return BadArgument::new(format!(
            "--agent {at}: other hosts reach this address, so it needs --key FILE with the key that the driver has: \
             (umask 077; openssl rand -hex 32 > FILE)"
        ));
    }
    Ok(())
}

impl Drive {
    pub(super) fn new(args: &PerfArgs) -> Result<Self, BadArgument> {
        check(args, "--to")?;
        let proto = if args.proto == ProtoArg::Udp { Proto::Udp } else { Proto::Tcp };
        let (hosts, flows) = (&args.hosts, args.flows.unwrap_or(1));
        let agents: Result<Vec<_>, BadArgument> = hosts.to.iter().map(|name| resolve(name)).collect();
        let agents = agents?;
        if agents.len() >= MAX_HOSTS {
            return BadArgument::new(format!("--to: {MAX_HOSTS} hosts at most can take part, with this one"));
        }
        let loopback = |at: &&SocketAddr| at.ip().is_loopback();
        let addresses = || agents.iter().flat_map(|(_, at)| at);
        if hosts.key.is_none() && !addresses().all(|at| at.ip().is_loopback()) {
            return BadArgument::new(
                "--to: a host on another machine needs --key FILE with the key that its agent has: (umask 077; openssl rand -hex 32 > FILE)",
            );
        }
        if hosts.all && ![0, addresses().count()].contains(&addresses().filter(loopback).count()) {
            return BadArgument::new(
                "--all: the other hosts cannot reach a loopback address of this one; give its other address",
            );
        }
        let pattern = match (args.reverse, hosts.bidir, hosts.all) {
            (false, false, false) => Pattern::Out,
            (true, false, false) => Pattern::In,
            (false, true, false) => Pattern::Both,
            (false, false, true) => Pattern::All,
            _ => return BadArgument::new("--reverse, --bidir and --all say who sends; give one"),
        };
        let everyone: Vec<usize> = (0..=agents.len()).collect();
        let all = pattern.pairs(&everyone).len() * usize::from(flows);
        if flows == 0 || all > MAX_FLOWS.into() {
            return BadArgument::new(format!(
                "--flows {flows}: {all} flows between all hosts; 1 to {MAX_FLOWS} are possible"
            ));
        }
        if args.runs == Some(0) {
            return BadArgument::new("--runs 0: at least one run is needed");
        }
        let duration = args.duration.unwrap_or(plan::DURATION);
        if duration > MAX_DURATION {
            return BadArgument::new(format!("--duration: a run takes {} h at most", MAX_DURATION.as_secs() / 3600));
        }
        let work = plan::work(args, proto)?;
        plan::check_search(args, work)?;
        Ok(Self {
            agents,
            pattern,
            work,
            flows,
            rates: plan::rates(args, all as u16)?,
            search: args.search,
            duration,
            runs: args.runs.unwrap_or(if args.search.is_some() { 1 } else { 3 }),
            interval: args.interval,
            json: args.json,
        })
    }
}

/// `HOST`, `HOST:PORT`, or an address of IPv6 in brackets or alone.
fn resolve(name: &str) -> Result<(String, Vec<SocketAddr>), BadArgument> {
    let parsed = name.parse().ok().or_else(|| Some(SocketAddr::new(name.parse().ok()?, AGENT_PORT)));
    if let Some(at) = parsed {
        return Ok((name.into(), vec![at]));
    }
    let at = if name.contains(':') { name.to_socket_addrs() } else { (name, AGENT_PORT).to_socket_addrs() };
    match at.map(Iterator::collect::<Vec<_>>) {
        Ok(at) if !at.is_empty() => Ok((name.into(), at)),
        Ok(_) => BadArgument::new(format!("--to {name}: the host has no address")),
        Err(e) => BadArgument::new(format!("--to {name}: {e}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns() {
        assert_eq!(Pattern::Out.pairs(&[0, 1, 3]), [(0, 1), (0, 3)]);
        assert_eq!(Pattern::In.pairs(&[0, 1, 3]), [(1, 0), (3, 0)]);
        assert_eq!(Pattern::Both.pairs(&[0, 1]), [(0, 1), (1, 0)]);
        assert_eq!(Pattern::All.pairs(&[0, 1, 2]).len(), 6);
    }

    #[test]
    fn names_of_hosts() {
        let at = |name| resolve(name).map(|(_, at)| at[0].to_string()).map_err(|e| e.to_string());
        assert_eq!(at("10.0.0.1").as_deref(), Ok("10.0.0.1:5202"));
        assert_eq!(at("10.0.0.1:7").as_deref(), Ok("10.0.0.1:7"));
        assert_eq!(at("::1").as_deref(), Ok("[::1]:5202"));
        assert_eq!(at("[::1]:9").as_deref(), Ok("[::1]:9"));
        assert!(at("localhost").unwrap().ends_with(":5202") && at("localhost:9").unwrap().ends_with(":9"));
        assert!(at("").is_err() && at("a:b:c").is_err());
    }
}
