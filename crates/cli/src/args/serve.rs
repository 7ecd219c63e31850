//! The arguments of `netmem serve`.

use super::{CpusArg, PortArg, duration};
use crate::xdp::XdpArgs;
use clap::builder::PossibleValue;
use clap::{Args, ValueEnum};
use netmem::host::kernel_has;
use netmem_inet::{Address, StackOptions};
use netmem_measure::arguments::BadArgument;
use netmem_measure::cpus;
use netmem_netem::LinkOptions;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

#[derive(Args, Clone, Debug)]
pub(crate) struct ServeArgs {
    /// The service
    #[arg(value_name = "SERVICE")]
    pub(crate) service: ServeArg,
    /// Where the server is reached: tap:NAME, a tap, which is made if it does not exist; xsk:IFACE
    /// or xsk:IFACE:QUEUE, queues of an interface by AF_XDP, from this queue on (0 if it is left
    /// out). The kernel keeps all frames that are not for the server's addresses
    #[arg(long, value_name = "PORT")]
    pub(crate) port: PortArg,
    #[command(flatten)]
    pub(crate) af_xdp: XdpArgs,
    /// Queues of the tap or interface. Each has a stack and a thread. With more than 1, a tap that
    /// exists already must have been made with several queues (ip tuntap add NAME mode tap vnet_hdr
    /// multi_queue)
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) queues: u16,
    /// The server's addresses, with the lengths of their networks' prefixes, such as
    /// 10.0.0.2/24,fd00::2/64. There is no DHCP
    #[arg(long, value_name = "ADDR/LEN,..", value_delimiter = ',', required = true)]
    pub(crate) addr: Vec<Address>,
    /// The TCP port of the service [default: the one that the list of services names]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) tcp_port: Option<u16>,
    /// The most connections that are served at a time. Further ones are reset
    #[arg(long, value_name = "N", default_value_t = 65536, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_connections: u32,
    /// The most connections of one peer address, or of one IPv6 network of 64 bits. Further ones
    /// are reset [default: half of --max-connections]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_connections_per_peer: Option<u32>,
    /// How long a connection may be idle, or its peer read nothing of what was sent to it, before
    /// it is closed: seconds, or with a suffix (0.3, 300ms, 2s)
    #[arg(long, value_name = "SECS", default_value = "300", value_parser = duration)]
    pub(crate) idle_timeout: Duration,
    /// http and memcached: how long the server waits in total for the rest of a request that has
    /// begun, before the connection is closed
    #[arg(long, value_name = "SECS", default_value = "30", value_parser = duration)]
    pub(crate) request_timeout: Duration,
    /// memcached: the most bytes of all items: keys, values, and 128 bytes for each item. Half as
    /// much again is reserved for pages that are used in part, and for values that are being sent
    /// [default: 67108864]
    #[arg(long, value_name = "BYTES", value_parser = store)]
    pub(crate) store: Option<usize>,
    /// The CPU of the first queue's thread; the threads of further queues get the next CPUs
    /// [default: any]
    #[arg(long, value_name = "net=N", default_value = "", hide_default_value = true)]
    pub(crate) cpus: CpusArg,
    /// At the end, save all connections to this file. At the start, restore the connections in it
    /// and remove it [default: connections end with the server]
    #[arg(long, value_name = "FILE")]
    pub(crate) state: Option<PathBuf>,
    /// Answer on this port of the loopback address, or on an address and port, with the figures as
    /// Prometheus text: http://ADDR/metrics
    #[arg(long, value_name = "ADDR", value_parser = super::values::address)]
    pub(crate) metrics: Option<SocketAddr>,
    /// A bad link before the port, such as
    /// loss=1%,delay=10ms,jitter=1ms,reorder=1%,duplicate=0.1%,corrupt=0.1%,rate=100M,seed=7
    #[arg(long, value_name = "OPTIONS")]
    pub(crate) link: Option<LinkOptions>,
    /// Write the packets between the port and the driver to this file, as pcapng. What is dropped
    /// is there, too, with the reason as a comment. Large segments are cut before it, and each
    /// packet is copied
    #[arg(long, value_name = "FILE")]
    pub(crate) pcap: Option<PathBuf>,
}

impl ServeArgs {
    /// Checks the meaning of the arguments.
    pub(crate) fn check(&self) -> Result<(), BadArgument> {
        self.af_xdp.check(matches!(self.port, PortArg::Xsk(_)), "give --port xsk:IFACE")?;
        // Both would answer.
        if let Some(Address { addr, .. }) = self.addr.iter().find(|own| kernel_has(own.addr)) {
            return BadArgument::new(format!(
                "--addr {addr}: the kernel has this address; give the server another one of the network, which no other \
                 station has"
            ));
        }
        if self.store.is_some() && self.service != ServeArg::Memcached {
            return BadArgument::new(format!("--store: {} stores nothing; only memcached does", self.service));
        }
        let (most, of_peer) = (self.max_connections, self.most_of_peer());
        let possible = StackOptions::default().connections.saturating_mul(self.queues.into());
        if most as usize > possible {
            return BadArgument::new(format!(
                "--max-connections {most}: {} queues have {possible} connections at most; give more --queues, too",
                self.queues
            ));
        }
        if of_peer > most {
            return BadArgument::new(format!(
                "--max-connections-per-peer {of_peer}: one peer cannot have more than all, which are {most}; give a larger \
                 --max-connections, too"
            ));
        }
        if self.cpus.app.or(self.cpus.device).is_some() {
            return BadArgument::new("--cpus: a server has no app and no device of its own; give net=N");
        }
        let (online, allowed) = (cpus::online(), cpus::allowed());
        let mut cpus = (0..self.queues.into()).filter_map(|queue| self.cpu(queue));
        cpus.try_for_each(|cpu| cpus::check("--cpus net", cpu, &online, &allowed))
    }

    /// The CPU of a queue's thread, if the user named one.
    pub(crate) fn cpu(&self, queue: usize) -> Option<usize> {
        self.cpus.net.map(|first| first.saturating_add(queue))
    }

    /// The most connections of one peer.
    pub(crate) fn most_of_peer(&self) -> u32 {
        self.max_connections_per_peer.unwrap_or(self.max_connections.div_ceil(2))
    }
}

/// Bytes of a store of items.
fn store(s: &str) -> Result<usize, String> {
    const RANGE: std::ops::RangeInclusive<usize> = 1 << 20..=1 << 40;
    let bytes = s.parse().map_err(|_| "a number of bytes is needed, without a suffix")?;
    if !RANGE.contains(&bytes) {
        return Err(format!("between {} and {} bytes are possible", RANGE.start(), RANGE.end()));
    }
    Ok(bytes)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ServeArg {
    /// Sends received bytes back (port 7)
    Echo,
    /// Drops received bytes (port 9)
    Discard,
    /// Sends bytes until the peer closes (port 19)
    Source,
    /// Answers `GET /N` with N bytes (port 80)
    Http,
    /// Stores values, by memcached's text protocol (port 11211)
    Memcached,
}

impl std::fmt::Display for ServeArg {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.to_possible_value().as_ref().map_or("", PossibleValue::get_name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_manual_says_that_servers_are_a_demonstration() {
        let command = crate::args::Cli::command();
        let serve = command.find_subcommand("serve").unwrap();
        for about in [serve.get_about(), serve.get_long_about()] {
            assert!(about.unwrap().to_string().contains("demonstration"));
        }
    }

    #[test]
    fn sizes_of_a_store() {
        assert_eq!((store("1048576"), store("1099511627776")), (Ok(1 << 20), Ok(1 << 40)));
        for bad in ["", "0", "-1", "64M", "1048575", "1099511627777", "99999999999999999999"] {
            assert!(store(bad).is_err(), "{bad}");
        }
    }
}
