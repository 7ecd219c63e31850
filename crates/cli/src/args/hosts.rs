//! The arguments of `netmem perf` for flows between hosts.

use clap::Args;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

/// Where an agent listens, if no port is given.
pub(crate) const AGENT_PORT: u16 = 5202;

#[derive(Args, Clone, Debug, Default)]
pub(crate) struct HostsArgs {
    /// Wait on this address, or on this port of the loopback address, for a driver (--to), and do
    /// what it asks for. Flows of this host are on the kernel's sockets, or with --port tap:NAME or
    /// xsk:IFACE, and --addr, on netmem's stack. On an address that other hosts reach, --key is
    /// needed
    #[arg(long, value_name = "ADDR", value_parser = address, conflicts_with = "to")]
    pub(crate) agent: Option<SocketAddr>,
    /// With --agent: end after the first driver
    #[arg(short = '1', long, requires = "agent")]
    pub(crate) one_off: bool,
    /// Measure flows of --proto (tcp if it is left out) from this host to these hosts, on which
    /// agents wait: HOST or HOST:PORT [default of PORT: 5202]
    #[arg(long, value_name = "HOST,..", value_delimiter = ',')]
    pub(crate) to: Vec<String>,
    /// The key that all hosts share: a file of 64 hexadecimal digits that only its owner can read:
    /// (umask 077; openssl rand -hex 32 > FILE). With it, what driver and agents send each other is
    /// authenticated and encrypted; the flows are not
    #[arg(long, value_name = "FILE")]
    pub(crate) key: Option<PathBuf>,
    /// With --to: both directions at once
    #[arg(long, requires = "to")]
    pub(crate) bidir: bool,
    /// With --to: from each host to each other one
    #[arg(long, requires = "to")]
    pub(crate) all: bool,
}

impl HostsArgs {
    /// Whether flows are between hosts, or an argument for that is there.
    pub(crate) fn are_given(&self) -> bool {
        self.agent.is_some() || !self.to.is_empty() || self.key.is_some()
    }
}

/// `IP:PORT`, an address alone, or a port on the loopback address.
fn address(text: &str) -> Result<SocketAddr, String> {
    let ip = text.parse::<IpAddr>().map(|ip| SocketAddr::new(ip, AGENT_PORT));
    ip.or_else(|_| super::values::address(text)).map_err(|_| {
        "an address, an address with a port, or a port of the loopback address: 10.0.0.1, 10.0.0.1:5202, [::]:5202, 5202".into()
    })
}
