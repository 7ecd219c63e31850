//! What can be asked for on the command line. Syntax is checked here, by clap, and meaning in the commands, before they
//! start anything; both end in exit status 2.

use clap::{Args, Parser, Subcommand, ValueEnum};
use netmem::packet::link::LinkOptions;
use netmem::virtio::Spin;
use netmem::virtio::net::feature;
use netmem_inet::Address;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// Network memory in circulation: receive through a page pool, and see what it saves.
#[derive(Debug, Parser)]
#[command(name = "netmem", version, args_conflicts_with_subcommands = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    #[command(flatten)]
    pub(crate) perf: PerfArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Receive traffic and report (the default)
    Perf(PerfArgs),
    /// Be a virtio-net device on a vhost-user socket
    Device(DeviceArgs),
    /// Be a server behind a tap, on netmem's own TCP
    Serve(ServeArgs),
    /// Connect two taps by a bad link, so that kernel meets kernel over it
    Link(LinkArgs),
    /// Measure parts of netmem beside what they replace
    Bench(BenchArgs),
    /// Say what this machine offers
    Info(InfoArgs),
}

/// An argument that can be read and makes no sense: what was asked, what was found, what to do.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct BadArgument(pub(crate) String);

impl BadArgument {
    pub(crate) fn new<T>(why: impl Into<String>) -> Result<T, Self> {
        Err(Self(why.into()))
    }
}

#[derive(Args, Clone, Debug)]
pub(crate) struct PerfArgs {
    /// What to receive from: embedded; vhost-user:SOCKET, where a back end listens; vhost-user-listen:SOCKET, to which a back
    /// end connects
    #[arg(long, value_name = "DEVICE", default_value = "embedded")]
    pub(crate) device: DeviceArg,
    /// Receive from the vhost-user back end at the other end of this inherited descriptor: one run of one variant
    #[arg(long, value_name = "N", conflicts_with_all = ["device", "against"])]
    pub(crate) fd: Option<i32>,
    /// What the embedded device receives from: gen, tap:NAME, pcap:FILE [default: gen]
    #[arg(long, value_name = "PORT")]
    pub(crate) port: Option<PortArg>,
    /// A bad link before the port, such as loss=1%,delay=10ms,jitter=1ms,reorder=1%,duplicate=0.1%,corrupt=0.1%,rate=100M,seed=7
    #[arg(long, value_name = "OPTIONS")]
    pub(crate) link: Option<LinkOptions>,
    /// What to measure: frames that are received, or flows between two ends: both netmem's, or one of them the kernel's behind a tap
    #[arg(long, default_value = "frames")]
    pub(crate) proto: ProtoArg,
    /// Flows, with --proto tcp or udp [default: 1]
    #[arg(long, value_name = "N")]
    pub(crate) flows: Option<u16>,
    /// With --proto and a tap, the address of netmem's end. The kernel has one of the same network on the tap
    #[arg(long, value_name = "ADDR/LEN", value_parser = address)]
    pub(crate) addr: Option<Address>,
    /// With --proto and a tap, the kernel sends
    #[arg(long)]
    pub(crate) reverse: bool,
    /// How frames lie in buffers [default: small and mergeable]
    #[arg(long)]
    pub(crate) mode: Option<ModeArg>,
    /// Where pages come from: a page pool, or a page per packet from a general-purpose allocator
    #[arg(long, default_value = "both")]
    pub(crate) alloc: AllocArg,
    /// Queue pairs, one measurement for each number
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1")]
    pub(crate) queues: Vec<u16>,
    /// Bytes in a frame, without frame check sequence, one measurement for each; with --proto, bytes of a message [default: 65536; udp
    /// 1452]
    #[arg(long, value_name = "BYTES,..", value_delimiter = ',', value_parser = size)]
    pub(crate) size: Vec<usize>,
    /// What the XDP program decides, after a look at the first 16 bytes
    #[arg(long, default_value = "pass")]
    pub(crate) xdp: XdpArg,
    /// Where passed packets are dropped: same (the poll context), other, or a CPU's number
    #[arg(long, value_name = "same|other|CPU")]
    pub(crate) consumer: Option<ConsumerArg>,
    /// Which CPU does what
    #[arg(long, value_name = "net=N,app=N,device=N", default_value = "")]
    pub(crate) cpus: CpusArg,
    /// How long a run is: seconds, or with a suffix (0.3, 300ms, 2s) [default: 0.05; with tap, 10]
    #[arg(long, value_name = "SECS", value_parser = duration)]
    pub(crate) duration: Option<Duration>,
    /// Runs of every variant, interleaved [default: 25; with tap, 1]
    #[arg(long, value_name = "N")]
    pub(crate) runs: Option<u32>,
    /// Entries in each ring: a power of two
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub(crate) ring: u16,
    /// What rings are like, which the device must be able to do: split or packed, and event-idx, indirect, in-order
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "split")]
    pub(crate) ring_features: Vec<RingArg>,
    /// How long the driver polls after the last packet before it sleeps: 0 (it sleeps at once) to forever. If it sleeps,
    /// wake-ups are measured at fixed rates, with the first mode and size [default: forever]
    #[arg(long, value_name = "MICROSECONDS|forever")]
    pub(crate) spin: Option<Spin>,
    /// Packets per second that the generator sends to a driver that sleeps, one measurement for each [default:
    /// 1000,10000,100000,1000000]
    #[arg(long, value_name = "PPS,..", value_delimiter = ',')]
    pub(crate) rate: Vec<u64>,
    /// Lock the memory of pages in RAM
    #[arg(long)]
    pub(crate) lock: bool,
    /// Print one JSON object on standard output, and nothing else there
    #[arg(long)]
    pub(crate) json: bool,
    /// Another build of this command, to be run interleaved with this one and compared with it
    #[arg(long, value_name = "BINARY")]
    pub(crate) against: Option<PathBuf>,
}

#[derive(Args, Clone, Debug)]
#[command(group(clap::ArgGroup::new("front ends").required(true).args(["listen", "connect", "fd"])))]
pub(crate) struct DeviceArgs {
    /// Listen on this socket, and serve front ends one after another
    #[arg(long, value_name = "SOCKET", visible_alias = "socket-path")]
    pub(crate) listen: Option<PathBuf>,
    /// Connect to a front end that listens on this socket (QEMU: `server=on`), again each time that it comes back
    #[arg(long, value_name = "SOCKET")]
    pub(crate) connect: Option<PathBuf>,
    /// An inherited descriptor: a listening socket, or a connected one, which is served until its front end leaves
    #[arg(long, value_name = "N")]
    pub(crate) fd: Option<i32>,
    /// Serve statistics on this socket: one JSON object for each connection
    #[arg(long, value_name = "SOCKET")]
    pub(crate) stats: Option<PathBuf>,
    /// The MAC address that the device offers to the driver
    #[arg(long, value_name = "MAC", value_parser = mac)]
    pub(crate) mac: Option<[u8; 6]>,
    /// The MTU that the device offers to the driver, in bytes
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u16).range(68..))]
    pub(crate) mtu: Option<u16>,
    /// Refuse memory whose file the front end can shorten: only memfds sealed with F_SEAL_SHRINK are accepted
    #[arg(long)]
    pub(crate) require_sealed: bool,
    /// The most bytes of memory that a front end may have mapped here, and so make this process pay for [default: 16 TiB]
    #[arg(long, value_name = "BYTES")]
    pub(crate) max_memory: Option<u64>,
    /// What the queue pairs are plugged into: gen, sink, echo, tap:NAME, pcap:FILE
    #[arg(long, value_name = "PORT")]
    pub(crate) port: PortArg,
    /// A bad link before the port, such as loss=1%,delay=10ms,jitter=1ms,reorder=1%,duplicate=0.1%,corrupt=0.1%,rate=100M,seed=7
    #[arg(long, value_name = "OPTIONS")]
    pub(crate) link: Option<LinkOptions>,
    /// Offer only these features of rings, beside split rings: packed, event-idx, indirect, in-order [default: all]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub(crate) ring_features: Option<Vec<RingArg>>,
    /// Queue pairs
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) queues: u16,
    /// Threads that move frames: queue pair i is served by thread i modulo N
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) threads: u16,
    /// How long a thread polls after the last frame before it sleeps: 0 (it sleeps at once) to forever [default: 50; with the
    /// port gen and a CPU for each thread, forever]
    #[arg(long, value_name = "MICROSECONDS|forever")]
    pub(crate) spin: Option<Spin>,
    /// Bytes in a frame of the generator, without frame check sequence
    #[arg(long, value_name = "BYTES", default_value = "64", value_parser = size)]
    pub(crate) size: usize,
    /// The CPU that the device runs on; with --threads, the first of as many
    #[arg(long, value_name = "N", conflicts_with = "cpus")]
    pub(crate) cpu: Option<usize>,
    /// The same, as `perf` has it
    #[arg(long, value_name = "device=N", default_value = "", hide_default_value = true)]
    pub(crate) cpus: CpusArg,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct ServeArgs {
    /// What to serve
    #[arg(value_name = "SERVICE")]
    pub(crate) service: ServeArg,
    /// The tap that the server is behind: tap:NAME. It is made if there is none
    #[arg(long, value_name = "PORT")]
    pub(crate) port: PortArg,
    /// The server's addresses, with their networks: 10.0.0.2/24, fd00::2/64. They are the user's to choose: there is no DHCP
    #[arg(long, value_name = "ADDR/LEN,..", value_delimiter = ',', required = true, value_parser = address)]
    pub(crate) addr: Vec<Address>,
    /// A bad link before the tap, such as loss=1%,delay=10ms,jitter=1ms,reorder=1%,duplicate=0.1%,corrupt=0.1%,rate=100M,seed=7
    #[arg(long, value_name = "OPTIONS")]
    pub(crate) link: Option<LinkOptions>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ServeArg {
    /// Sends back what comes (port 7)
    Echo,
    /// Takes what comes (port 9)
    Discard,
    /// Sends bytes until the peer closes (port 19)
    Source,
    /// Answers `GET /N` with N bytes (port 80)
    Http,
    /// Keeps values, by memcached's text protocol (port 11211)
    Memcached,
}

impl std::fmt::Display for ServeArg {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Echo => "echo",
            Self::Discard => "discard",
            Self::Source => "source",
            Self::Http => "http",
            Self::Memcached => "memcached",
        })
    }
}

#[derive(Args, Clone, Debug)]
pub(crate) struct LinkArgs {
    /// One end: tap:NAME
    #[arg(value_name = "PORT")]
    pub(crate) first: PortArg,
    /// The other end: tap:NAME
    #[arg(value_name = "PORT")]
    pub(crate) second: PortArg,
    /// What the link does to packets, in both directions, such as
    /// loss=1%,delay=10ms,jitter=1ms,reorder=1%,duplicate=0.1%,corrupt=0.1%,rate=100M,seed=7
    #[arg(long, value_name = "OPTIONS")]
    pub(crate) link: LinkOptions,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct BenchArgs {
    /// What to measure
    #[arg(value_name = "SUITE", required = true)]
    pub(crate) suites: Vec<SuiteArg>,
    /// Threads, each on a CPU of its own, one measurement for each number; in `pool`, one takes pages and all others drop
    /// them; in `tokens`, one receives and all others give back; `devmem` has two whatever is said, if two may be [default: 1,2,4.. up to the CPUs]
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    pub(crate) threads: Vec<usize>,
    /// How long each thread works for one value: seconds, or with a suffix (0.3, 300ms, 2s) [default: 12ms]
    #[arg(long, value_name = "SECS", value_parser = duration)]
    pub(crate) duration: Option<Duration>,
    /// Runs of every variant, interleaved [default: 9]
    #[arg(long, value_name = "N")]
    pub(crate) runs: Option<u32>,
    /// Print one JSON object on standard output, and nothing else there; with several suites, they are its `suites`
    #[arg(long)]
    pub(crate) json: bool,
    /// Write a report with charts, which needs nothing but itself
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum SuiteArg {
    /// Reference counts: what a get and a put cost as threads share more
    Refs,
    /// Pages: what taking one and giving it back costs, here and from other CPUs, beside what others use
    Pool,
    /// Tokens of device memory: what receiving a fragment and giving it back costs, beside ids under a lock and others
    Tokens,
    /// Device memory, end to end: what a gigabyte costs each side, by the binding's count and by tokens, in and out
    Devmem,
    /// Every suite, one after the other
    All,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct InfoArgs {
    /// Print one JSON object on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum DeviceArg {
    Embedded,
    VhostUser(PathBuf),
    Listen(PathBuf),
    Fd(i32),
}

impl std::fmt::Display for DeviceArg {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Embedded => f.write_str("embedded"),
            Self::VhostUser(socket) => write!(f, "vhost-user:{}", socket.display()),
            Self::Listen(socket) => write!(f, "vhost-user-listen:{}", socket.display()),
            Self::Fd(fd) => write!(f, "descriptor {fd}"),
        }
    }
}

impl FromStr for DeviceArg {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s.split_once(':') {
            None if s == "embedded" => Ok(Self::Embedded),
            Some(("vhost-user", path)) if !path.is_empty() => Ok(Self::VhostUser(path.into())),
            Some(("vhost-user-listen", path)) if !path.is_empty() => Ok(Self::Listen(path.into())),
            Some((role @ ("vhost-user" | "vhost-user-listen"), _)) => {
                Err(format!("{role} needs the path of a socket: {role}:SOCKET"))
            }
            Some(("xsk", _)) => Err("AF_XDP (xsk) is not in this version; use embedded or vhost-user:SOCKET".into()),
            _ => Err("there are: embedded, vhost-user:SOCKET, vhost-user-listen:SOCKET".into()),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PortArg {
    Gen,
    Sink,
    Echo,
    Tap(String),
    Pcap(PathBuf),
}

impl FromStr for PortArg {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s.split_once(':') {
            None if s == "gen" => Ok(Self::Gen),
            None if s == "sink" => Ok(Self::Sink),
            None if s == "echo" => Ok(Self::Echo),
            Some(("tap", name)) if !name.is_empty() => Ok(Self::Tap(name.into())),
            Some(("pcap", path)) if !path.is_empty() => Ok(Self::Pcap(path.into())),
            Some(("tap", _)) => Err("tap needs the name of an interface: tap:NAME".into()),
            Some(("pcap", _)) => Err("pcap needs a file: pcap:FILE".into()),
            Some(("xsk", _)) => Err("AF_XDP (xsk) is not in this version".into()),
            _ => Err("there are: gen, tap:NAME, pcap:FILE, and for `device` also sink, echo".into()),
        }
    }
}

impl std::fmt::Display for PortArg {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Gen => f.write_str("gen"),
            Self::Sink => f.write_str("sink"),
            Self::Echo => f.write_str("echo"),
            Self::Tap(name) => write!(f, "tap:{name}"),
            Self::Pcap(path) => write!(f, "pcap:{}", path.display()),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ModeArg {
    Small,
    Mergeable,
    Big,
    All,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum RingArg {
    Split,
    Packed,
    EventIdx,
    Indirect,
    InOrder,
}

impl RingArg {
    /// The features of a list.
    pub(crate) fn features(list: &[Self]) -> u64 {
        let feature = |ring: &Self| match ring {
            Self::Split => 0,
            Self::Packed => feature::RING_PACKED,
            Self::EventIdx => feature::EVENT_IDX,
            Self::Indirect => feature::INDIRECT_DESC,
            Self::InOrder => feature::IN_ORDER,
        };
        list.iter().map(feature).fold(0, |all, one| all | one)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ProtoArg {
    Frames,
    Udp,
    Tcp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum AllocArg {
    Pool,
    Page,
    Both,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum XdpArg {
    Drop,
    Pass,
    Tx,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConsumerArg {
    Same,
    Other,
    Cpu(usize),
}

impl FromStr for ConsumerArg {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "same" => Ok(Self::Same),
            "other" => Ok(Self::Other),
            _ => s.parse().map(Self::Cpu).map_err(|_| "there are: same, other, or a CPU's number".into()),
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CpusArg {
    pub(crate) net: Option<usize>,
    pub(crate) app: Option<usize>,
    pub(crate) device: Option<usize>,
}

impl FromStr for CpusArg {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let mut cpus = Self::default();
        for part in s.split(',').filter(|part| !part.is_empty()) {
            let (role, cpu) = part.split_once('=').ok_or_else(|| format!("`{part}` is not ROLE=CPU"))?;
            let cpu = cpu.parse().map_err(|_| format!("`{cpu}` is not a CPU's number"))?;
            let place = match role {
                "net" => &mut cpus.net,
                "app" => &mut cpus.app,
                "device" => &mut cpus.device,
                _ => return Err(format!("`{role}` is no role; there are net, app, device")),
            };
            if place.replace(cpu).is_some() {
                return Err(format!("`{role}` is given twice"));
            }
        }
        Ok(cpus)
    }
}

/// An address of a host, and the bits of its network's prefix.
fn address(s: &str) -> Result<Address, String> {
    let wrong = || format!("`{s}` is not ADDR/LEN, such as 10.0.0.2/24 or fd00::2/64");
    let (addr, len) = s.split_once('/').ok_or_else(wrong)?;
    let (addr, prefix_len): (IpAddr, u8) = (addr.parse().map_err(|_| wrong())?, len.parse().map_err(|_| wrong())?);
    let most = if addr.is_ipv4() { 32 } else { 128 };
    if prefix_len > most {
        return Err(format!("`{s}`: a prefix has at most {most} bits"));
    }
    if addr.is_unspecified() || addr.is_multicast() || addr.is_loopback() || addr == IpAddr::V4(Ipv4Addr::BROADCAST) {
        return Err(format!("`{s}`: the address of one station is needed"));
    }
    Ok(Address { addr, prefix_len })
}

/// Six bytes in hexadecimal, with colons between them.
fn mac(s: &str) -> Result<[u8; 6], String> {
    let byte = |b: &str| u8::from_str_radix(b, 16).ok().filter(|_| b.len() == 2 && !b.starts_with('+'));
    let bytes: Option<Vec<u8>> = s.split(':').map(byte).collect();
    let mac = bytes.and_then(|bytes| <[u8; 6]>::try_from(bytes).ok());
    let mac = mac.ok_or("a MAC address is six bytes in hexadecimal, such as 02:00:00:00:00:01")?;
    if mac == [0; 6] || mac[0] & 1 != 0 {
        return Err("the address of one interface is needed: neither zero nor a multicast address".into());
    }
    Ok(mac)
}

fn size(s: &str) -> Result<usize, String> {
    s.parse().map_err(|_| "a number of bytes is needed, without a suffix".into())
}

fn duration(s: &str) -> Result<Duration, String> {
    let (number, unit) = match s.find(|c: char| c.is_ascii_alphabetic()) {
        Some(at) => s.split_at(at),
        None => (s, "s"),
    };
    let scale = match unit {
        "s" => 1.0,
        "ms" => 1e-3,
        _ => return Err(format!("unknown suffix `{unit}`; there are s (the default) and ms")),
    };
    let seconds = number.parse::<f64>().map_err(|_| format!("`{number}` is not a number"))? * scale;
    if !(0.001..=86400.0).contains(&seconds) {
        return Err("between 1 ms and 86400 s are possible".into());
    }
    Ok(Duration::from_secs_f64(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn perf_is_the_default() {
        let cli = Cli::parse_from(["netmem", "--size", "64,1500", "--json"]);
        assert!(cli.command.is_none());
        assert_eq!((cli.perf.size, cli.perf.json), (vec![64, 1500], true));
        let cli = Cli::parse_from(["netmem", "perf", "--queues", "1,2"]);
        assert!(matches!(cli.command, Some(Command::Perf(args)) if args.queues == [1, 2]));
    }

    #[test]
    fn durations() {
        assert_eq!(duration("0.3"), Ok(Duration::from_millis(300)));
        assert_eq!(duration("20ms"), Ok(Duration::from_millis(20)));
        assert_eq!(duration("2s"), Ok(Duration::from_secs(2)));
        for bad in ["", "x", "1m", "0", "-1", "1e9", "nan", "inf"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn devices_and_ports() {
        assert_eq!("vhost-user:/a:b".parse(), Ok(DeviceArg::VhostUser("/a:b".into())));
        assert_eq!("vhost-user-listen:/a:b".parse(), Ok(DeviceArg::Listen("/a:b".into())));
        assert_eq!("tap:t0".parse(), Ok(PortArg::Tap("t0".into())));
        let xsk = "xsk:eth0:1".parse::<DeviceArg>().unwrap_err();
        assert!(xsk.contains("AF_XDP"), "{xsk}");
        for bad in ["", "embed", "vhost-user:", "embedded:1"] {
            assert!(bad.parse::<DeviceArg>().is_err(), "{bad}");
        }
        for bad in ["", "tap", "tap:", "pcap:", "gen:1"] {
            assert!(bad.parse::<PortArg>().is_err(), "{bad}");
        }
    }

    #[test]
    fn mac_addresses() {
        assert_eq!(mac("02:00:00:00:00:fE"), Ok([2, 0, 0, 0, 0, 0xfe]));
        let bad = ["", "02:00:00:00:00", "02:00:00:00:00:01:02", "2:0:0:0:0:1", "+2:00:00:00:00:01", "0200.0000.0001"];
        for bad in bad.into_iter().chain(["00:00:00:00:00:00", "01:00:5e:00:00:01", "ff:ff:ff:ff:ff:ff"]) {
            assert!(mac(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_device_has_one_source_of_front_ends() {
        let parse = |args: &[&str]| Cli::try_parse_from([&["netmem", "device", "--port", "gen"], args].concat());
        for alone in [["--listen", "/a"], ["--socket-path", "/a"], ["--connect", "/a"], ["--fd", "3"]] {
            assert!(parse(&alone).is_ok(), "{alone:?}");
        }
        assert!(parse(&[]).is_err() && parse(&["--listen", "/a", "--fd", "3"]).is_err());
        assert!(parse(&["--fd", "3", "--mtu", "67"]).is_err() && parse(&["--fd", "3", "--mtu", "65536"]).is_err());
    }

    #[test]
    fn addresses() {
        let at = |s: &str| address(s).map(|at| (at.addr.to_string(), at.prefix_len));
        assert_eq!(at("10.0.0.2/24"), Ok(("10.0.0.2".into(), 24)));
        assert_eq!(at("fd00::2/64"), Ok(("fd00::2".into(), 64)));
        for bad in
            ["", "10.0.0.2", "10.0.0.2/33", "fd00::2/129", "0.0.0.0/0", "224.0.0.1/4", "::1/128", "a/8", "10.0.0.2/-1"]
        {
            assert!(at(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn links() {
        let parse = |args: &str| Cli::try_parse_from(args.split(' ')).map_err(|e| e.to_string());
        let link = parse("netmem link tap:a tap:b --link loss=1%,delay=2ms,seed=5");
        assert!(matches!(link.unwrap().command, Some(Command::Link(args)) if args.link.loss == 0.01));
        assert!(parse("netmem link tap:a --link loss=1%").is_err() && parse("netmem link tap:a tap:b").is_err());
        assert!(parse("netmem perf --port tap:a --link delay=1ms").unwrap().command.is_some());
        let error = parse("netmem device --fd 3 --port echo --link loss=1").unwrap_err();
        assert!(error.contains("loss=1: a share has a percent sign"), "{error}");
    }

    #[test]
    fn roles() {
        assert_eq!("net=1,device=0".parse(), Ok(CpusArg { net: Some(1), app: None, device: Some(0) }));
        for bad in ["net", "net=", "net=x", "cpu=1", "net=1,net=2", "net=-1"] {
            assert!(bad.parse::<CpusArg>().is_err(), "{bad}");
        }
    }
}
