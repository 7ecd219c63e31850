//! The values of arguments: devices, ports, CPUs and choices, as the user writes them.

use clap::ValueEnum;
use netmem::virtio::feature;
use std::path::PathBuf;
use std::str::FromStr;

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

#[cfg(test)]
mod tests {
    use super::*;

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
