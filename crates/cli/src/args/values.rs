//! The values of arguments: devices, ports, CPUs and choices, as the user writes them.

use clap::ValueEnum;
use netmem::virtio::feature;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum DeviceArg {
    Embedded,
    VhostUser(PathBuf),
    Listen(PathBuf),
    Fd(i32),
    Xsk(XskArg),
}

/// An interface, and the first of its queues that are used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct XskArg {
    pub(crate) interface: String,
    pub(crate) first: u32,
}

impl XskArg {
    /// One queue for each queue pair, from the first on.
    pub(crate) fn queues(&self, pairs: u16) -> std::ops::Range<u32> {
        self.first..self.first.saturating_add(pairs.into())
    }
}

impl FromStr for XskArg {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let (interface, first) = match s.rsplit_once(':') {
            Some((interface, first)) => {
                (interface, first.parse().map_err(|_| format!("`{first}` is not a queue's number"))?)
            }
            None => (s, 0),
        };
        if interface.is_empty() {
            return Err("xsk needs the name of an interface: xsk:IFACE or xsk:IFACE:QUEUE".into());
        }
        Ok(Self { interface: interface.into(), first })
    }
}

impl std::fmt::Display for XskArg {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.first {
            0 => write!(f, "xsk:{}", self.interface),
            first => write!(f, "xsk:{}:{first}", self.interface),
        }
    }
}

impl std::fmt::Display for DeviceArg {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Embedded => f.write_str("embedded"),
            Self::VhostUser(socket) => write!(f, "vhost-user:{}", socket.display()),
            Self::Listen(socket) => write!(f, "vhost-user-listen:{}", socket.display()),
            Self::Fd(fd) => write!(f, "descriptor {fd}"),
            Self::Xsk(xsk) => xsk.fmt(f),
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
            Some(("xsk", interface)) => interface.parse().map(Self::Xsk),
            _ => Err("there are: embedded, vhost-user:SOCKET, vhost-user-listen:SOCKET, xsk:IFACE[:QUEUE]".into()),
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
    Xsk(XskArg),
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
            Some(("xsk", interface)) => interface.parse().map(Self::Xsk),
            _ => Err("there are: gen, tap:NAME, pcap:FILE, and for `device` also sink, echo, xsk:IFACE[:QUEUE]".into()),
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
            Self::Xsk(xsk) => xsk.fmt(f),
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

/// What the highest rate is looked for with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum SearchArg {
    /// No datagram is lost.
    Lossless,
    /// So many percent of the requests are answered within this time.
    Within { percent: f64, limit: Duration },
}

impl FromStr for SearchArg {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        if s == "lossless" {
            return Ok(Self::Lossless);
        }
        let (percent, time) = s.split_once("%=").ok_or("there are: lossless, and PERCENT%=TIME such as 99%=200us")?;
        let percent = percent.parse().ok().filter(|percent| *percent > 0.0 && *percent <= 100.0);
        let percent = percent.ok_or("the share of requests is more than 0 % and at most 100 %")?;
        let units = [("us", 1e-6), ("ms", 1e-3), ("s", 1.0)];
        let seconds =
            units.iter().find_map(|(unit, scale)| Some(time.strip_suffix(unit)?.parse::<f64>().ok()? * scale));
        let seconds = seconds.filter(|seconds| (1e-6..=10.0).contains(seconds));
        let limit = Duration::from_secs_f64(seconds.ok_or("the time is 1us to 10s, with its unit: us, ms or s")?);
        Ok(Self::Within { percent, limit })
    }
}

impl std::fmt::Display for SearchArg {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Lossless => f.write_str("lossless"),
            Self::Within { percent, limit } => {
                let us = limit.as_nanos() as f64 / 1e3;
                let (time, unit) = if us < 1e3 { (us, "us") } else { (us / 1e3, "ms") };
                write!(f, "{percent}%={time}{unit}")
            }
        }
    }
}

/// The order of the figures of `top`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum SortArg {
    /// The fastest counters first, then gauges by their values
    Rate,
    /// By name and labels
    Name,
    /// The largest values first
    Value,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum AllocArg {
    Pool,
    Page,
    Frags,
}

impl AllocArg {
    /// As the user writes it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Pool => "pool",
            Self::Page => "page",
            Self::Frags => "frags",
        }
    }
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

/// Parses a MAC address: six bytes in hexadecimal, with colons between them.
pub(super) fn mac(s: &str) -> Result<[u8; 6], String> {
    let byte = |b: &str| u8::from_str_radix(b, 16).ok().filter(|_| b.len() == 2 && !b.starts_with('+'));
    let bytes: Option<Vec<u8>> = s.split(':').map(byte).collect();
    let mac = bytes.and_then(|bytes| <[u8; 6]>::try_from(bytes).ok());
    let mac = mac.ok_or("a MAC address is six bytes in hexadecimal, such as 02:00:00:00:00:01")?;
    if mac == [0; 6] || mac[0] & 1 != 0 {
        return Err("the address of one interface is needed: neither zero nor a multicast address".into());
    }
    Ok(mac)
}

pub(super) fn size(s: &str) -> Result<usize, String> {
    s.parse().map_err(|_| "a number of bytes is needed, without a suffix".into())
}

/// The bytes of a request and of its answer.
pub(super) fn requests(s: &str) -> Result<[usize; 2], String> {
    let (request, answer) = s.split_once(',').ok_or("two sizes are needed: REQUEST,RESPONSE")?;
    Ok([size(request)?, size(answer)?])
}

/// Parses the address of `--metrics`: `IP:PORT`, or a port on the loopback address.
pub(super) fn address(text: &str) -> Result<SocketAddr, String> {
    let loopback = |port| SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port);
    let address = text.parse().ok().or_else(|| text.parse().ok().map(loopback));
    address
        .ok_or_else(|| "a port (of the loopback address), or an address with a port: 127.0.0.1:9000, [::1]:9000".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        assert_eq!(address("9000"), Ok("127.0.0.1:9000".parse().unwrap()));
        assert_eq!(address("[::1]:9000"), Ok("[::1]:9000".parse().unwrap()));
        assert!(["", "localhost:1", "70000", "1.2.3.4"].into_iter().all(|bad| address(bad).is_err()));
    }

    #[test]
    fn devices_and_ports() {
        assert_eq!("vhost-user:/a:b".parse(), Ok(DeviceArg::VhostUser("/a:b".into())));
        assert_eq!("vhost-user-listen:/a:b".parse(), Ok(DeviceArg::Listen("/a:b".into())));
        assert_eq!("tap:t0".parse(), Ok(PortArg::Tap("t0".into())));
        let xsk = |interface: &str, first| Ok(DeviceArg::Xsk(XskArg { interface: interface.into(), first }));
        assert_eq!(("xsk:eth0".parse(), "xsk:eth0:1".parse()), (xsk("eth0", 0), xsk("eth0", 1)));
        for bad in ["", "embed", "vhost-user:", "embedded:1", "xsk:", "xsk::1", "xsk:eth0:x"] {
            assert!(bad.parse::<DeviceArg>().is_err(), "{bad}");
        }
        for bad in ["", "tap", "tap:", "pcap:", "gen:1"] {
            assert!(bad.parse::<PortArg>().is_err(), "{bad}");
        }
    }

    #[test]
    fn goals_of_a_search() {
        assert_eq!("lossless".parse(), Ok(SearchArg::Lossless));
        for (text, percent, us) in
            [("99%=200us", 99.0, 200), ("99.99%=1.5ms", 99.99, 1500), ("100%=1s", 100.0, 1_000_000)]
        {
            let search = SearchArg::Within { percent, limit: Duration::from_micros(us) };
            assert_eq!((text.parse(), search.to_string().parse()), (Ok(search), Ok(search)));
        }
        for bad in ["", "loss", "99=1ms", "0%=1ms", "101%=1ms", "x%=1ms", "99%=1", "99%=0us", "99%=11s", "99%=nans"] {
            assert!(bad.parse::<SearchArg>().is_err(), "{bad}");
        }
        assert_eq!(requests("64,1"), Ok([64, 1]));
        assert!(requests("64").is_err() && requests("64,1k").is_err() && requests("1,2,3").is_err());
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
    fn roles() {
        assert_eq!("net=1,device=0".parse(), Ok(CpusArg { net: Some(1), app: None, device: Some(0) }));
        for bad in ["net", "net=", "net=x", "cpu=1", "net=1,net=2", "net=-1"] {
            assert!(bad.parse::<CpusArg>().is_err(), "{bad}");
        }
    }
}
