//! Networks of the kernel: namespaces that end with the suite, pairs of virtual interfaces, their
//! offloads, and the congestion control of sockets in them.
//!
//! A namespace has no name. It exists as long as its descriptor and the sockets in it, so it also
//! ends when the suite is killed.
//!
//! The congestion control is an attribute of the route, and not a sysctl of the namespace: a kernel
//! whose `net.ipv4.tcp_allowed_congestion_control` does not list an algorithm refuses it as the
//! default of a namespace (EPERM), also for root. That list is one for the whole machine. A route
//! may name any algorithm that is available, and applies to all programs.

use super::rig::{Link, Offloads};
use netmem::device::port::Tap;
use netmem_measure::threads::propagate;
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};
use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::{Command, Stdio};

/// A network namespace.
#[derive(Debug)]
pub(super) struct Namespace(OwnedFd);

/// A result whose error is a text.
pub(super) type Outcome<T> = Result<T, String>;

impl Namespace {
    /// Makes an empty namespace.
    pub(super) fn new() -> Outcome<Self> {
        let made = std::thread::spawn(|| {
            // SAFETY: only this thread gets the new network namespace. Neither descriptors nor
            // memory are unshared.
            unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.map_err(io::Error::from)?;
            std::fs::File::open("/proc/thread-self/ns/net").map(OwnedFd::from)
        });
        let made = propagate(made.join());
        made.map(Self).map_err(|e| format!("a network namespace (needs root): {e}"))
    }

    /// Runs `f` in the namespace, on a thread of its own. Sockets and processes that `f` makes stay
    /// in the namespace.
    pub(super) fn run<T: Send>(&self, f: impl FnOnce() -> Outcome<T> + Send) -> Outcome<T> {
        let inside = || {
            move_into_link_name_space(self.0.as_fd(), Some(LinkNameSpaceType::Network))
                .map_err(|e| format!("entering a network namespace: {e}"))?;
            f()
        };
        std::thread::scope(|scope| propagate(scope.spawn(inside).join()))
    }

    /// Runs `ip` in the namespace, with these words as arguments.
    pub(super) fn ip(&self, words: &str) -> Outcome<()> {
        self.run(|| {
            let ip = Command::new("ip").args(words.split(' ')).stdin(Stdio::null()).output();
            let ip = ip.map_err(|e| format!("the program ip (package iproute2): {e}"))?;
            let errors = String::from_utf8_lossy(&ip.stderr);
            if ip.status.success() { Ok(()) } else { Err(format!("ip {words}: {}", errors.trim())) }
        })
    }

    /// Sets an interface's MTU, its address and its offloads, and sets it up. The kernel's
    /// connections over it use [`CONGESTION`].
    fn set_up(&self, interface: &str, address: Ipv4Addr, link: Link) -> Outcome<()> {
        self.ip(&format!("address add {address}/24 dev {interface}"))?;
        self.ip(&format!("link set {interface} mtu {} up", link.mtu))?;
        let route = format!("{NETWORK} dev {interface} proto kernel scope link src {address}");
        self.ip(&format!("route replace {route} congctl {CONGESTION}"))?;
        self.run(|| offload(interface, link.offloads))
    }

    /// Checks by `ss` that there are `connections` established connections of the kernel in this
    /// namespace, and that all of them use [`CONGESTION`]: also those of other programs.
    pub(super) fn check_congestion(&self, connections: usize) -> Outcome<()> {
        self.run(|| {
            let ss = Command::new("ss").args(["-tinHO", "state", "established"]).stdin(Stdio::null()).output();
            let ss = ss.map_err(|e| format!("the program ss (package iproute2): {e}"))?;
            all_use(&String::from_utf8_lossy(&ss.stdout), connections)
        })
    }
}

/// Whether `ss` lists so many connections, a line each, and all with [`CONGESTION`].
fn all_use(list: &str, connections: usize) -> Outcome<()> {
    let other = list.lines().find(|line| !line.split_whitespace().any(|word| word == CONGESTION));
    match (other, list.lines().count()) {
        (Some(line), _) => Err(format!("a connection does not use {CONGESTION}: {line}")),
        (None, found) if found != connections => Err(format!("ss lists {found} of {connections} connections")),
        (None, _) => Ok(()),
    }
}

/// The congestion control of the kernel's connections, as that of our stack. The system may have
/// another default, also for new namespaces.
pub(super) const CONGESTION: &str = "cubic";
/// The network of [`ADDRESSES`].
const NETWORK: &str = "10.77.0.0/24";

/// The addresses of the two ends of every network here.
pub(super) const ADDRESSES: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 77, 0, 1), Ipv4Addr::new(10, 77, 0, 2)];

/// Two namespaces that a pair of virtual interfaces connects.
pub(super) fn veth(link: Link) -> Outcome<[Namespace; 2]> {
    let ends = [Namespace::new()?, Namespace::new()?];
    let other = format!("/proc/{}/fd/{}", std::process::id(), ends[1].0.as_raw_fd());
    ends[0].ip(&format!("link add end0 type veth peer name end1 netns {other}"))?;
    for (n, end) in ends.iter().enumerate() {
        end.set_up(&format!("end{n}"), ADDRESSES[n], link)?;
    }
    Ok(ends)
}

/// The name of every tap. Each tap is in a namespace of its own.
pub(super) const TAP: &str = "tap0";

/// A tap in a namespace. The kernel has an address on it.
#[derive(Debug)]
pub(super) struct TapNetwork(pub(super) Namespace);

impl TapNetwork {
    /// Makes the tap. The kernel gets the address of this end.
    pub(super) fn new(end: usize, link: Link) -> Outcome<Self> {
        let namespace = Namespace::new()?;
        namespace.ip(&format!("tuntap add {TAP} mode tap vnet_hdr"))?;
        namespace.set_up(TAP, ADDRESSES[end], link)?;
        Ok(Self(namespace))
    }

    /// Opens the tap.
    pub(super) fn open(&self) -> Outcome<Tap> {
        self.0.run(|| {
            let tap = Tap::open(TAP, 1, true).map_err(|e| format!("{:#}", anyhow::Error::new(e)))?;
            tap.into_iter().next().ok_or_else(|| "no tap".into())
        })
    }
}

/// The argument of `SIOCETHTOOL` for a single flag (`struct ethtool_value` of linux/ethtool.h).
#[repr(C)]
struct Flag {
    command: u32,
    value: u32,
}

/// `SIOCETHTOOL` of linux/sockios.h, and the commands of linux/ethtool.h that switch transmit
/// checksums, scatter and gather, TCP segmentation, software segmentation and merging of received
/// frames.
const SIOCETHTOOL: libc::Ioctl = 0x8946;
const SET_TX_CHECKSUM: u32 = 0x17;
const SET_SCATTER_GATHER: u32 = 0x19;
const SET_SEGMENTATION: u32 = 0x1f;
const SET_SOFTWARE_SEGMENTATION: u32 = 0x24;
const SET_MERGING: u32 = 0x2c;

/// Switches the offloads of an interface of this thread's namespace on, and all others off.
fn offload(interface: &str, offloads: Offloads) -> Outcome<()> {
    let socket = UdpSocket::bind("0.0.0.0:0").map_err(|e| format!("a socket: {e}"))?;
    // A feature that depends on another one is switched on after it, and off before it.
    let commands = [SET_TX_CHECKSUM, SET_SCATTER_GATHER, SET_SEGMENTATION, SET_SOFTWARE_SEGMENTATION, SET_MERGING];
    let on = match offloads {
        Offloads::None => 0,
        Offloads::Checksums => 2,
        Offloads::All => commands.len(),
    };
    let (wanted, others) = commands.split_at(on);
    let switches = others.iter().rev().map(|command| (*command, 0)).chain(wanted.iter().map(|command| (*command, 1)));
    for (command, value) in switches {
        let mut flag = Flag { command, value };
        // SAFETY: all zero is a valid `ifreq`: integers, byte arrays and a union of them.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        for (to, from) in request.ifr_name.iter_mut().zip(interface.bytes()) {
            *to = from as libc::c_char;
        }
        request.ifr_ifru.ifru_data = std::ptr::from_mut(&mut flag).cast();
        // SAFETY: the request reads an `ifreq` whose data is what these commands take, and both
        // live until it returns.
        let result = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL, &mut request) };
        if result < 0 {
            return Err(format!("offloads of {interface}: {}", io::Error::last_os_error()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_with_another_congestion_control_is_found() {
        let list = "0 0 10.77.0.2:11211 10.77.0.1:41000 cubic wscale:7,7 rto:204\n";
        assert_eq!(all_use(&list.repeat(2), 2), Ok(()));
        assert!(all_use(list, 2).unwrap_err().contains("1 of 2"));
        let other = list.to_owned() + &list.replace("cubic", "bbr");
        assert!(all_use(&other, 2).unwrap_err().contains("bbr"));
    }
}
