//! The command line. Clap checks the syntax here. Each command checks the meaning of its arguments
//! before it starts anything. Both kinds of errors end with exit status 2.

mod hosts;
mod serve;
mod values;

pub(crate) use hosts::{AGENT_PORT, HostsArgs};
pub(crate) use serve::{ServeArg, ServeArgs};
pub(crate) use values::{
    AllocArg, ConsumerArg, CpusArg, DeviceArg, ModeArg, PortArg, ProtoArg, RingArg, SearchArg, SortArg, XdpArg, XskArg,
};

use crate::xdp::XdpArgs;
use clap::{Args, Parser, Subcommand};
use netmem::virtio::Spin;
use netmem_inet::Address;
use netmem_measure::arguments::duration;
use netmem_netem::LinkOptions;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;
use values::{address, mac, requests, size};

/// Network memory for user space: receive through a page pool, and measure what the pool saves.
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
    Perf(Box<PerfArgs>),
    /// Be a virtio-net device on a vhost-user socket
    Device(DeviceArgs),
    /// Be a server behind a tap or an interface, on netmem's own TCP: a demonstration
    ///
    /// The services show and test the TCP/IP stack. They are a demonstration, and not made for
    /// production: nothing is encrypted, no client is authenticated, and each service has only a
    /// part of its protocol.
    Serve(ServeArgs),
    /// Connect two taps by a bad link, for traffic between two of the kernel's network stacks
    Link(LinkArgs),
    /// Open AF_XDP sockets for processes without privileges
    Grant(GrantArgs),
    /// Report what this machine offers: restartable sequences, huge pages, AF_XDP, taps, limits
    Info(InfoArgs),
    /// Show the figures of a running command that has --metrics, and how fast they grow
    Top(TopArgs),
    /// List the connections of a running `serve` that has --metrics: states, rates, windows, round
    /// trips, pages
    Ss(SsArgs),
    /// Write man pages and shell completions, for packages of the command
    #[command(hide = true)]
    Pages(PagesArgs),
}

#[derive(Args, Clone, Debug)]
pub(crate) struct PerfArgs {
    /// The device to receive from: embedded, a device in this process; vhost-user:SOCKET, a back
    /// end that listens there; vhost-user-listen:SOCKET, a back end that connects there; xsk:IFACE
    /// or xsk:IFACE:QUEUE, queues of an interface by AF_XDP, from this queue on (0 if it is left
    /// out). The kernel gets no frames of these queues
    #[arg(long, value_name = "DEVICE", default_value = "embedded")]
    pub(crate) device: DeviceArg,
    /// Receive from the vhost-user back end at the other end of this inherited descriptor. It
    /// serves one run of one variant
    #[arg(long, value_name = "N", conflicts_with_all = ["device", "against"])]
    pub(crate) fd: Option<i32>,
    #[command(flatten)]
    pub(crate) af_xdp: XdpArgs,
    /// The embedded device's source of frames: gen, a generator; tap:NAME, a tap; pcap:FILE, a
    /// capture [default: gen]
    #[arg(long, value_name = "PORT")]
    pub(crate) port: Option<PortArg>,
    /// A bad link before the port, such as
    /// loss=1%,delay=10ms,jitter=1ms,reorder=1%,duplicate=0.1%,corrupt=0.1%,rate=100M,seed=7
    #[arg(long, value_name = "OPTIONS")]
    pub(crate) link: Option<LinkOptions>,
    /// Write the packets between the port and the driver to this file, as pcapng. What is dropped
    /// is there, too, with the reason as a comment. Large segments are cut before it, and each
    /// packet is copied
    #[arg(long, value_name = "FILE", conflicts_with = "against")]
    pub(crate) pcap: Option<PathBuf>,
    /// What to measure: frames that are received, or flows of tcp or udp between two stacks.
    /// Without --port both stacks are netmem's; with --port tap:NAME one is netmem's and one the
    /// kernel's
    #[arg(long, default_value = "frames")]
    pub(crate) proto: ProtoArg,
    #[command(flatten)]
    pub(crate) hosts: HostsArgs,
    /// With --proto tcp or udp: the number of flows; with --to, from a host to another one
    /// [default: 1]
    #[arg(short = 'P', long, value_name = "N")]
    pub(crate) flows: Option<u16>,
    /// With --proto: requests of REQUEST bytes, each answered by RESPONSE bytes, instead of a
    /// stream. A flow has one request at a time. Without --rate it sends the next when the last is
    /// answered; with --rate requests are due at fixed times, and the time of each counts from then
    #[arg(long, value_name = "REQUEST,RESPONSE", value_parser = requests)]
    pub(crate) rr: Option<[usize; 2]>,
    /// With --proto or --to: find the highest rate, by bisection. lossless, with udp: that loses no
    /// datagram (RFC 2544); PERCENT%=TIME, such as 99%=200us, with --rr: at which so many requests
    /// are answered within this time
    #[arg(long, value_name = "GOAL")]
    pub(crate) search: Option<SearchArg>,
    /// With --proto: print what is received each time that so many seconds are over
    #[arg(short, long, value_name = "SECS", value_parser = duration)]
    pub(crate) interval: Option<Duration>,
    /// Answer on this port of the loopback address, or on an address and port, with the figures of
    /// the present run as Prometheus text: http://ADDR/metrics
    #[arg(long, value_name = "ADDR", value_parser = address)]
    pub(crate) metrics: Option<SocketAddr>,
    /// With --proto and a tap: the address of netmem's stack, in the network of the kernel's
    /// address on the tap
    #[arg(long, value_name = "ADDR/LEN")]
    pub(crate) addr: Option<Address>,
    /// With --proto and a tap: the kernel sends and netmem receives. Without it, netmem sends. With
    /// --to: the other hosts send and this one receives
    #[arg(short = 'R', long)]
    pub(crate) reverse: bool,
    /// The driver's receive mode: how frames lie in buffers
    /// [default: small and mergeable; with tap, pcap and xsk, mergeable]
    #[arg(long)]
    pub(crate) mode: Option<ModeArg>,
    /// Where pages come from, one measurement for each: pool, a page pool; page, a page per packet
    /// from a general-purpose allocator; frags, fragments of blocks of 16 pages from such an
    /// allocator
    #[arg(long, value_delimiter = ',', default_value = "pool,page,frags")]
    pub(crate) alloc: Vec<AllocArg>,
    /// The number of queue pairs, one measurement for each number
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1")]
    pub(crate) queues: Vec<u16>,
    /// Bytes in a generated frame, without frame check sequence, one measurement for each; with
    /// --proto, bytes in a message [default: small 64; mergeable 64,1500; big 64000; tcp 65536; udp
    /// 1452]
    #[arg(long, value_name = "BYTES,..", value_delimiter = ',', value_parser = size)]
    pub(crate) size: Vec<usize>,
    /// The verdict of the XDP program, which reads the first 16 bytes of each frame
    #[arg(long, default_value = "pass")]
    pub(crate) xdp: XdpArg,
    /// Where passed packets are dropped: same, in the poll context; other, on another CPU; or a
    /// CPU's number [default: same]
    #[arg(long, value_name = "same|other|CPU")]
    pub(crate) consumer: Option<ConsumerArg>,
    /// CPUs of the threads: net, the driver; app, the thread that drops packets; device, the
    /// embedded device. Roles that are left out get free CPUs
    #[arg(long, value_name = "net=N,app=N,device=N", default_value = "")]
    pub(crate) cpus: CpusArg,
    /// How long a run lasts: seconds, or with a suffix (0.3, 300ms, 2s)
    /// [default: 0.05; with tap, 10; with --spin, --proto or --to, 1]
    #[arg(short = 't', long, value_name = "SECS", value_parser = duration)]
    pub(crate) duration: Option<Duration>,
    /// Runs of each variant, interleaved; with --against, pairs of runs [default: 17, or as many as
    /// fit into 27 s; with tap, 1; with --proto or --to, 3, with --search 1, and with --against 17]
    #[arg(long, value_name = "N")]
    pub(crate) runs: Option<u32>,
    /// Entries in each ring, a power of two
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub(crate) ring: u16,
    /// The format and features of rings, which the device must offer: split or packed, and
    /// event-idx, indirect, in-order
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "split")]
    pub(crate) ring_features: Vec<RingArg>,
    /// How long the driver polls after the last packet before it sleeps, in microseconds: 0 (it
    /// sleeps at once) to forever. If it sleeps, wake-ups are measured at the rates of --rate, with
    /// the first mode and size [default: forever; with --proto, 0 if threads share a CPU]
    #[arg(long, value_name = "MICROSECONDS|forever")]
    pub(crate) spin: Option<Spin>,
    /// With --spin: packets per second that the generator sends, one measurement for each
    /// [default: 1000,10000,100000,1000000]. With --proto: messages or requests per second of all
    /// flows, one measurement for each [default: as many as possible]
    #[arg(long, value_name = "PPS,..", value_delimiter = ',')]
    pub(crate) rate: Vec<u64>,
    /// Lock the memory of pages in RAM (mlock)
    #[arg(long)]
    pub(crate) lock: bool,
    /// Print one JSON object on standard output, and nothing else there, instead of the table
    #[arg(short = 'J', long)]
    pub(crate) json: bool,
    /// Fail (exit status 1) if a goal of the pool against the old ways is missed or a row is
    /// skipped
    #[arg(long, conflicts_with = "against")]
    pub(crate) check: bool,
    /// Another build of this command. Its runs are interleaved with those of this one, and each row
    /// of the two is compared. With --proto, also at matched throughput: a rate that both reach
    #[arg(long, value_name = "BINARY")]
    pub(crate) against: Option<PathBuf>,
}

impl PerfArgs {
    /// Whether an option is given that flows do not have.
    pub(crate) fn are_for_frames(&self) -> bool {
        self.mode.is_some()
            || self.alloc != [AllocArg::Pool, AllocArg::Page, AllocArg::Frags]
            || self.xdp != XdpArg::Pass
            || self.consumer.is_some()
            || self.queues != [1]
    }
}

#[derive(Args, Clone, Debug)]
#[command(group(clap::ArgGroup::new("front ends").required(true).args(["listen", "connect", "fd"])))]
pub(crate) struct DeviceArgs {
    /// Listen on this socket, and serve front ends one after another
    #[arg(long, value_name = "SOCKET", visible_alias = "socket-path")]
    pub(crate) listen: Option<PathBuf>,
    /// Connect to a front end that listens on this socket (QEMU: `server=on`), and reconnect each
    /// time that it leaves
    #[arg(long, value_name = "SOCKET")]
    pub(crate) connect: Option<PathBuf>,
    /// Serve an inherited descriptor: a listening socket, or a connection, which is served until
    /// its front end leaves
    #[arg(long, value_name = "N")]
    pub(crate) fd: Option<i32>,
    /// Listen on this socket, and send each client the statistics as one JSON object
    #[arg(long, value_name = "SOCKET")]
    pub(crate) stats: Option<PathBuf>,
    /// Answer on this port of the loopback address, or on an address and port, with the figures as
    /// Prometheus text: http://ADDR/metrics
    #[arg(long, value_name = "ADDR", value_parser = address)]
    pub(crate) metrics: Option<SocketAddr>,
    /// The MAC address that the device offers to the driver [default: none is offered]
    #[arg(long, value_name = "MAC", value_parser = mac)]
    pub(crate) mac: Option<[u8; 6]>,
    /// The MTU that the device offers to the driver, in bytes [default: none is offered]
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u16).range(68..))]
    pub(crate) mtu: Option<u16>,
    /// Accept only memory that the front end cannot shorten: memfds that are sealed with
    /// F_SEAL_SHRINK
    #[arg(long)]
    pub(crate) require_sealed: bool,
    /// Accept memory in files of any kind, and not only memfds and files on tmpfs and hugetlbfs.
    /// Warning: a front end that serves the file system of its memory (FUSE) can then block this
    /// device for itself and all later front ends
    #[arg(long)]
    pub(crate) any_memory_file: bool,
    /// The most bytes of memory that a front end may have mapped here, and so the most that it can
    /// make this process allocate [default: 16 TiB]
    #[arg(long, value_name = "BYTES")]
    pub(crate) max_memory: Option<u64>,
    /// Import memory that a front end has exported from the NVIDIA GPU of this number, from 0 on,
    /// and reach it by copies of the GPU's driver
    #[cfg(feature = "cuda")]
    #[arg(long, value_name = "GPU")]
    pub(crate) cuda: Option<u32>,
    /// What the queue pairs are connected to: gen, a generator; sink, which drops all frames; echo,
    /// which sends them back; tap:NAME, a tap; pcap:FILE, a capture; xsk:IFACE or xsk:IFACE:QUEUE,
    /// as many queues of an interface by AF_XDP, from this queue on (0 if it is left out). The
    /// kernel gets no frames of these queues
    #[arg(long, value_name = "PORT")]
    pub(crate) port: PortArg,
    #[command(flatten)]
    pub(crate) af_xdp: XdpArgs,
    /// A bad link before the port, such as
    /// loss=1%,delay=10ms,jitter=1ms,reorder=1%,duplicate=0.1%,corrupt=0.1%,rate=100M,seed=7
    #[arg(long, value_name = "OPTIONS")]
    pub(crate) link: Option<LinkOptions>,
    /// Write the packets between the port and the driver to this file, as pcapng. What is dropped
    /// is there, too, with the reason as a comment. Large segments are cut before it, and each
    /// packet is copied
    #[arg(long, value_name = "FILE")]
    pub(crate) pcap: Option<PathBuf>,
    /// Offer only these features of rings: packed, event-idx, indirect, in-order. Split rings are
    /// always offered [default: all]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub(crate) ring_features: Option<Vec<RingArg>>,
    /// Queue pairs
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) queues: u16,
    /// Threads that move frames. Thread i modulo N serves queue pair i
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) threads: u16,
    /// How long a thread polls after the last frame before it sleeps, in microseconds: 0 (it sleeps
    /// at once) to forever [default: 50; with --port gen and more CPUs than threads, forever]
    #[arg(long, value_name = "MICROSECONDS|forever")]
    pub(crate) spin: Option<Spin>,
    /// Bytes in a frame of --port gen, without frame check sequence
    #[arg(long, value_name = "BYTES", default_value = "64", value_parser = size)]
    pub(crate) size: usize,
    /// The CPU of the device's first thread; the next threads get the next CPUs [default: any]
    #[arg(long, value_name = "N", conflicts_with = "cpus")]
    pub(crate) cpu: Option<usize>,
    /// The same as --cpu, in the form that `perf` takes
    #[arg(long, value_name = "device=N", default_value = "", hide_default_value = true)]
    pub(crate) cpus: CpusArg,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct GrantArgs {
    /// The interface, and the first of its queues that a worker gets (0 if it is left out)
    #[arg(value_name = "IFACE[:QUEUE]")]
    pub(crate) interface: XskArg,
    /// Listen on this socket. A process that may connect to it is a worker and gets the queues. One
    /// worker at a time can have them
    #[arg(long, value_name = "SOCKET")]
    pub(crate) listen: PathBuf,
    /// The number of queues that a worker gets. A worker locks 8192 pages (33554432 bytes) for each
    /// queue by default, for which it needs a limit of locked memory (RLIMIT_MEMLOCK) or
    /// CAP_IPC_LOCK
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) queues: u16,
    /// Take from the kernel only the frames that are sent to these addresses [default: all frames
    /// of the queues]
    #[arg(long, value_name = "ADDR,..", value_delimiter = ',')]
    pub(crate) addr: Vec<IpAddr>,
    /// The permissions of the socket, in octal, such as 660. A process needs write permission to
    /// connect [default: what the umask leaves]
    #[arg(long, value_name = "MODE", value_parser = mode)]
    pub(crate) mode: Option<u32>,
    /// The group of the socket: a name or a number [default: this process's group]
    #[arg(long, value_name = "GROUP")]
    pub(crate) group: Option<String>,
    /// Users that get queues, by name or number, and root. Other users are refused [default: each
    /// user that may connect]
    #[arg(long, value_name = "USER,..", value_delimiter = ',')]
    pub(crate) user: Vec<String>,
}

/// Permissions of a file, in octal.
fn mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o777 => Ok(mode),
        _ => Err("permissions are an octal number up to 777".into()),
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
    /// loss=1%,delay=10ms,jitter=1ms,reorder=1%,duplicate=0.1%,corrupt=0.1%,rate=100M,seed=7. The
    /// rate is in bits per second
    #[arg(long, value_name = "OPTIONS")]
    pub(crate) link: LinkOptions,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct InfoArgs {
    /// Print one JSON object on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct TopArgs {
    /// The address of --metrics: a port of the loopback address, or an address and port
    #[arg(value_name = "ADDR", value_parser = address)]
    pub(crate) address: SocketAddr,
    /// The time between two questions: seconds, or with a suffix (0.3, 300ms, 2s)
    #[arg(short, long, value_name = "SECS", default_value = "1", value_parser = duration)]
    pub(crate) interval: Duration,
    /// The order of the figures
    #[arg(long, default_value = "rate")]
    pub(crate) sort: SortArg,
    /// Print the figures once, with their growth in one interval, and end
    #[arg(long)]
    pub(crate) once: bool,
    /// With --once: print one JSON object
    #[arg(long, requires = "once")]
    pub(crate) json: bool,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct SsArgs {
    /// The address of --metrics: a port of the loopback address, or an address and port
    #[arg(value_name = "ADDR", value_parser = address)]
    pub(crate) address: SocketAddr,
    /// The time in which rates are measured: seconds, or with a suffix (0.3, 300ms, 2s)
    #[arg(short, long, value_name = "SECS", default_value = "1", value_parser = duration)]
    pub(crate) interval: Duration,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct PagesArgs {
    /// The directory: man pages go to DIR/man1, completions to DIR/completions
    #[arg(value_name = "DIR")]
    pub(crate) dir: PathBuf,
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
    fn a_device_has_one_source_of_front_ends() {
        let parse = |args: &[&str]| Cli::try_parse_from([&["netmem", "device", "--port", "gen"], args].concat());
        for alone in [["--listen", "/a"], ["--socket-path", "/a"], ["--connect", "/a"], ["--fd", "3"]] {
            assert!(parse(&alone).is_ok(), "{alone:?}");
        }
        assert!(parse(&[]).is_err() && parse(&["--listen", "/a", "--fd", "3"]).is_err());
        assert!(parse(&["--fd", "3", "--mtu", "67"]).is_err() && parse(&["--fd", "3", "--mtu", "65536"]).is_err());
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
}
