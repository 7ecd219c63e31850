//! Netlink requests for the state of an interface: its link, the XDP program on it, and the XDP
//! features of its driver.
//!
//! Each request uses its own socket and has one answer. An answer is a header and attributes. An
//! attribute has a length, a number and bytes, and is padded to a multiple of 4. All integers are
//! in the byte order of this machine.

use rustix::io::Errno;
use rustix::net::netlink::GENERIC;
use rustix::net::{AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType};
use std::io;

/// The largest length of an answer, in bytes. The answer about a link has 2 to 4 KiB, because
/// statistics of virtual functions are left out by default.
const ANSWER: usize = 64 << 10;

const REQUEST: u16 = 1;
/// The type of an answer that is an error. The error 0 is a success.
const ERROR: u16 = 2;
const HEADER: usize = 16;
/// The bits of an attribute's number. The other bits of the field are flags.
const NUMBER: u16 = 0x3fff;

mod route {
    pub(super) const GET_LINK: u16 = 18;
    /// The header of a link, before its attributes. The index is at byte 4, the flags are at byte
    /// 8.
    pub(super) const HEADER: usize = 16;
    pub(super) const ADDRESS: u16 = 1;
    pub(super) const NAME: u16 = 3;
    pub(super) const MTU: u16 = 4;
    pub(super) const TX_QUEUES: u16 = 31;
    pub(super) const RX_QUEUES: u16 = 32;
    pub(super) const XDP: u16 = 43;
    pub(super) const XDP_ATTACHED: u16 = 2;
    pub(super) const XDP_PROGRAM: u16 = 4;
    pub(super) const XDP_DRIVER_PROGRAM: u16 = 5;
    pub(super) const XDP_GENERIC_PROGRAM: u16 = 6;
    pub(super) const XDP_HARDWARE_PROGRAM: u16 = 7;
    /// A value of the attribute for the mode of an attached program: there is a program in each of
    /// several modes.
    pub(super) const SEVERAL: u8 = 4;
}

mod generic {
    pub(super) const CONTROL: u16 = 16;
    pub(super) const GET_FAMILY: u8 = 3;
    pub(super) const FAMILY_ID: u16 = 1;
    pub(super) const FAMILY_NAME: u16 = 2;
    /// The header of a request to a family, before its attributes: command and version.
    pub(super) const HEADER: usize = 4;
    pub(super) const NETDEV: &[u8] = b"netdev\0";
    pub(super) const DEV_GET: u8 = 1;
    pub(super) const IFINDEX: u16 = 1;
    pub(super) const XDP_FEATURES: u16 = 3;
    pub(super) const ZERO_COPY_FRAGMENTS: u16 = 4;
    pub(super) const RX_METADATA: u16 = 5;
    pub(super) const XSK_FEATURES: u16 = 6;
}

/// The mode in which an XDP program is attached to an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AttachMode {
    /// In the driver, which runs the program before it makes a socket buffer ("native").
    Driver,
    /// In the network stack, which runs the program over the socket buffers of any driver ("skb
    /// mode").
    Generic,
    /// In the hardware.
    Hardware,
}

impl std::fmt::Display for AttachMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Driver => "driver mode",
            Self::Generic => "generic mode",
            Self::Hardware => "hardware mode",
        })
    }
}

/// An XDP program on an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attached {
    /// The kernel's number of the program: `bpftool prog show id N`.
    pub program: u32,
    /// The mode in which it is attached.
    pub mode: AttachMode,
}

/// The state of an interface of this thread's network namespace, at the time of the request.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Interface {
    /// Its number.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// Whether it is set up. Its link may still have no carrier.
    pub up: bool,
    /// Its MTU, in bytes.
    pub mtu: u32,
    /// Its MAC address, if it is an Ethernet interface.
    pub mac: Option<[u8; 6]>,
    /// The number of receive queues with which it was made: the numbers of its queues are below
    /// this. The number of queues in use can change.
    pub rx_queues: u32,
    /// The number of transmit queues with which it was made.
    pub tx_queues: u32,
    /// The XDP programs on it: at most one for each mode.
    pub programs: Vec<Attached>,
}

impl Interface {
    /// Reads the interface of this name. Costs a few system calls. Needs no privilege.
    ///
    /// # Errors
    ///
    /// The kernel's errors: `ENODEV` if there is no such interface.
    pub fn by_name(name: &str) -> io::Result<Self> {
        // Longer names cannot exist, and the kernel's error for them is less clear.
        if name.is_empty() || name.len() >= libc::IFNAMSIZ || name.contains('\0') {
            return Err(Errno::NODEV.into());
        }
        Self::request(0, Some(name))
    }

    /// Reads the interface with this index.
    ///
    /// # Errors
    ///
    /// The errors of [`by_name`](Self::by_name).
    pub fn by_index(index: u32) -> io::Result<Self> {
        if index == 0 {
            return Err(Errno::NODEV.into());
        }
        Self::request(index, None)
    }

    fn request(index: u32, name: Option<&str>) -> io::Result<Self> {
        let mut body = vec![0; route::HEADER];
        body[4..8].copy_from_slice(&index.to_ne_bytes());
        if let Some(name) = name {
            attribute(&mut body, route::NAME, &[name.as_bytes(), b"\0"].concat());
        }
        let answer = request(None, route::GET_LINK, &body)?;
        Self::parse(&answer).ok_or_else(|| Errno::BADMSG.into())
    }

    fn parse(answer: &[u8]) -> Option<Self> {
        let (header, rest) = answer.split_at_checked(route::HEADER)?;
        let mut link = Self {
            index: word(&header[4..8])?,
            name: String::new(),
            up: word(&header[8..12])? & libc::IFF_UP as u32 != 0,
            mtu: 0,
            mac: None,
            rx_queues: 1,
            tx_queues: 1,
            programs: Vec::new(),
        };
        for (number, value) in attributes(rest) {
            match number {
                route::NAME => {
                    link.name = String::from_utf8_lossy(value.split(|byte| *byte == 0).next()?).into_owned();
                }
                route::MTU => link.mtu = word(value)?,
                route::RX_QUEUES => link.rx_queues = word(value)?,
                route::TX_QUEUES => link.tx_queues = word(value)?,
                route::ADDRESS => link.mac = value.try_into().ok(),
                route::XDP => link.programs = programs(value),
                _ => {}
            }
        }
        Some(link)
    }
}

/// The programs of an interface. If there is one, the kernel reports its mode and its number. If
/// there are several, it reports the number for each mode.
fn programs(xdp: &[u8]) -> Vec<Attached> {
    let modes = [
        (route::XDP_DRIVER_PROGRAM, 1, AttachMode::Driver),
        (route::XDP_GENERIC_PROGRAM, 2, AttachMode::Generic),
        (route::XDP_HARDWARE_PROGRAM, 3, AttachMode::Hardware),
    ];
    let find = |number| attributes(xdp).find(|(found, _)| *found == number).map(|(_, value)| value);
    let attached = find(route::XDP_ATTACHED).and_then(|value| value.first().copied()).unwrap_or(0);
    let of_mode = |&(number, only, mode): &(u16, u8, AttachMode)| {
        let number = match attached {
            route::SEVERAL => number,
            attached if attached == only => route::XDP_PROGRAM,
            _ => return None,
        };
        Some(Attached { program: word(find(number)?)?, mode })
    };
    modes.iter().filter_map(of_mode).collect()
}

/// The XDP features of a driver, with the names of the kernel's `netdev` family (Linux 6.3 and
/// later).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct XdpFeatures {
    bits: u64,
    /// The largest number of fragments of a frame in zero-copy mode. It is 1 if frames have one
    /// fragment, and 0 without zero-copy.
    pub zero_copy_fragments: u32,
    rx_metadata: u64,
    xsk: u64,
}

impl XdpFeatures {
    /// Reads the features of an interface.
    ///
    /// # Errors
    ///
    /// The kernel's errors: `ENOENT` if it has no `netdev` family.
    pub fn of(ifindex: u32) -> io::Result<Self> {
        let mut body = vec![generic::GET_FAMILY, 1, 0, 0];
        attribute(&mut body, generic::FAMILY_NAME, generic::NETDEV);
        let answer = request(Some(GENERIC), generic::CONTROL, &body)?;
        let family = answer.get(generic::HEADER..).and_then(|rest| {
            let (_, value) = attributes(rest).find(|(number, _)| *number == generic::FAMILY_ID)?;
            Some(u16::from_ne_bytes(value.try_into().ok()?))
        });
        let family = family.ok_or(Errno::BADMSG)?;
        let mut body = vec![generic::DEV_GET, 1, 0, 0];
        attribute(&mut body, generic::IFINDEX, &ifindex.to_ne_bytes());
        let answer = request(Some(GENERIC), family, &body)?;
        let mut features = Self::default();
        for (number, value) in attributes(answer.get(generic::HEADER..).unwrap_or_default()) {
            match number {
                generic::XDP_FEATURES => features.bits = long(value),
                generic::ZERO_COPY_FRAGMENTS => features.zero_copy_fragments = word(value).unwrap_or(0),
                generic::RX_METADATA => features.rx_metadata = long(value),
                generic::XSK_FEATURES => features.xsk = long(value),
                _ => {}
            }
        }
        Ok(features)
    }

    /// The names of the features, as in the kernel's specification of the family.
    #[must_use]
    pub fn names(&self) -> Vec<&'static str> {
        const XDP: &[&str] = &["basic", "redirect", "ndo-xmit", "xsk-zerocopy", "hw-offload", "rx-sg", "ndo-xmit-sg"];
        const RX: &[&str] = &["rx-timestamp", "rx-hash", "rx-vlan-tag"];
        const XSK: &[&str] = &["tx-timestamp", "tx-checksum", "tx-launch-time-fifo"];
        let of = |bits: u64, names: &'static [&'static str]| {
            names.iter().enumerate().filter(move |(bit, _)| bits >> bit & 1 != 0).map(|(_, name)| *name)
        };
        of(self.bits, XDP).chain(of(self.rx_metadata, RX)).chain(of(self.xsk, XSK)).collect()
    }

    /// Whether the driver runs XDP programs in driver mode, including programs that redirect.
    #[must_use]
    pub fn driver_mode(&self) -> bool {
        self.bits & 0b11 == 0b11
    }

    /// Whether the driver supports AF_XDP without copies.
    #[must_use]
    pub fn zero_copy(&self) -> bool {
        self.bits & 0b1000 != 0
    }

    /// The bits of the metadata functions that the driver has: time, hash, VLAN tag. 0 if the
    /// kernel does not report them, too.
    pub(crate) fn rx_metadata(&self) -> u64 {
        self.rx_metadata
    }

    /// Whether the driver supports launch times: it sends a frame at the time that its
    /// [metadata](crate::TxRequest::launch_time) requests.
    #[must_use]
    pub fn launch_time(&self) -> bool {
        self.xsk & 0b100 != 0
    }

    /// Zero-copy with frames of at most so many buffers; no zero-copy, if 0.
    #[cfg(test)]
    pub(crate) fn with_zero_copy(fragments: u32) -> Self {
        Self { bits: if fragments > 0 { 0b1011 } else { 0b11 }, zero_copy_fragments: fragments, ..Self::default() }
    }

    /// A driver with driver mode and the metadata functions of these bits.
    #[cfg(test)]
    pub(crate) fn with_rx_metadata(bits: u64) -> Self {
        Self { bits: 0b11, rx_metadata: bits, ..Self::default() }
    }

    #[cfg(test)]
    pub(crate) fn with_launch_time() -> Self {
        Self { xsk: 0b100, ..Self::default() }
    }

    /// Whether programs in driver mode receive frames of several buffers.
    #[must_use]
    pub fn multi_buffer(&self) -> bool {
        self.bits & 0b10_0000 != 0
    }
}

/// Adds an attribute to a request.
fn attribute(to: &mut Vec<u8>, number: u16, value: &[u8]) {
    to.extend(((4 + value.len()) as u16).to_ne_bytes());
    to.extend(number.to_ne_bytes());
    to.extend(value);
    to.resize(to.len().next_multiple_of(4), 0);
}

/// The attributes in `bytes`, up to the first one that is truncated.
fn attributes(bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let len = usize::from(u16::from_ne_bytes(*rest.first_chunk()?));
        let number = u16::from_ne_bytes(*rest.get(2..)?.first_chunk()?);
        let value = rest.get(4..len)?;
        rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some((number & NUMBER, value))
    })
}

fn word(bytes: &[u8]) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.try_into().ok()?))
}

/// An integer of 8 bytes, or of 4 bytes, which newer families use for small values.
fn long(bytes: &[u8]) -> u64 {
    match bytes.try_into() {
        Ok(bytes) => u64::from_ne_bytes(bytes),
        Err(_) => word(bytes).map_or(0, u64::from),
    }
}

/// Sends a request whose answer is one message. Returns the message without its header. `None` as
/// the protocol is that of links and routes.
fn request(protocol: Option<Protocol>, kind: u16, body: &[u8]) -> io::Result<Vec<u8>> {
    let socket = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, protocol)?;
    let mut request = Vec::with_capacity(HEADER + body.len());
    request.extend(((HEADER + body.len()) as u32).to_ne_bytes());
    request.extend(kind.to_ne_bytes());
    request.extend(REQUEST.to_ne_bytes());
    // A sequence number and a port, which can be 0: this socket has one request, and the kernel
    // knows the socket.
    request.extend([0; 8]);
    request.extend(body);
    rustix::io::retry_on_intr(|| rustix::net::send(&socket, &request, SendFlags::empty()))?;
    let mut answer = vec![0; ANSWER];
    // The kernel has already answered when `send` returns.
    let flags = RecvFlags::DONTWAIT;
    let (len, _) = rustix::io::retry_on_intr(|| rustix::net::recv(&socket, &mut answer[..], flags))?;
    answer.truncate(len);
    let malformed = || io::Error::from(Errno::BADMSG);
    let header = answer.first_chunk::<HEADER>().ok_or_else(malformed)?;
    let len = word(&header[..4]).and_then(|len| usize::try_from(len).ok()).ok_or_else(malformed)?;
    let kind = u16::from_ne_bytes([header[4], header[5]]);
    let body = answer.get(HEADER..len).ok_or_else(malformed)?;
    if kind == ERROR {
        let code = body.first_chunk().map_or(0, |code| i32::from_ne_bytes(*code));
        return Err(if code < 0 { io::Error::from_raw_os_error(-code) } else { malformed() });
    }
    Ok(body.to_vec())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_loopback_is_found() {
        let link = Interface::by_name("lo").unwrap();
        assert_eq!((&*link.name, link.mac, &link.programs[..]), ("lo", Some([0; 6]), &[][..]));
        assert_eq!(Interface::by_index(link.index).unwrap(), link);
        for name in ["", "no-such-name", "a-name-of-many-bytes", "l\0o"] {
            assert_eq!(Interface::by_name(name).unwrap_err().raw_os_error(), Some(libc::ENODEV), "{name:?}");
        }
        assert_eq!(Interface::by_index(0).unwrap_err().raw_os_error(), Some(libc::ENODEV));
    }

    #[test]
    fn programs_are_told_by_mode() {
        let nested = |list: &[(u16, &[u8])]| {
            let mut bytes = Vec::new();
            list.iter().for_each(|(number, value)| attribute(&mut bytes, *number, value));
            bytes
        };
        let id = |n: u32| n.to_ne_bytes();
        assert_eq!(programs(&nested(&[(route::XDP_ATTACHED, &[0])])), []);
        let one =
            nested(&[(route::XDP_ATTACHED, &[2]), (route::XDP_PROGRAM, &id(7)), (route::XDP_GENERIC_PROGRAM, &id(7))]);
        assert_eq!(programs(&one), [Attached { program: 7, mode: AttachMode::Generic }]);
        let two = nested(&[
            (route::XDP_ATTACHED, &[route::SEVERAL]),
            (route::XDP_DRIVER_PROGRAM, &id(8)),
            (route::XDP_HARDWARE_PROGRAM, &id(9)),
        ]);
        let both = [(8, AttachMode::Driver), (9, AttachMode::Hardware)];
        assert_eq!(programs(&two), both.map(|(program, mode)| Attached { program, mode }));
    }

    /// A truncated attribute ends the list, at any place.
    #[test]
    fn attributes_are_bounded() {
        let mut bytes = Vec::new();
        attribute(&mut bytes, 1, b"abc");
        attribute(&mut bytes, 2, b"");
        attribute(&mut bytes, 0x8003, b"nested");
        let all: Vec<_> = attributes(&bytes).collect();
        assert_eq!(all, [(1, &b"abc"[..]), (2, b""), (3, b"nested")]);
        for len in 0..bytes.len() {
            assert!(attributes(&bytes[..len]).count() < 4);
        }
        // A length that is shorter than the attribute's own header.
        assert_eq!(attributes(&[3, 0, 1, 0, 0, 0, 0, 0]).count(), 0);
    }
}
