//! Properties of an interface that its driver reports: its name, the size of its rings, its queues.
//! They are read by the ioctl of ethtool, which needs no privilege for these requests.

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use std::ffi::{CString, c_char};
use std::os::fd::AsRawFd;
use std::{io, mem, ptr};

const SIOCETHTOOL: libc::Ioctl = 0x8946;
const ETHTOOL_GDRVINFO: u32 = 0x03;
const ETHTOOL_GRINGPARAM: u32 = 0x10;
const ETHTOOL_GCHANNELS: u32 = 0x3c;

/// `struct ethtool_drvinfo`.
#[repr(C)]
#[derive(Clone, Copy)]
struct DriverInfo {
    cmd: u32,
    driver: [u8; 32],
    rest: [u8; 32 + 32 + 32 + 32 + 12],
    counts: [u32; 5],
}

/// The common beginning of `struct ethtool_ringparam` and `struct ethtool_channels`: the command,
/// and eight numbers.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Numbers {
    cmd: u32,
    of: [u32; 8],
}

/// The name of an interface, in the network namespace of this thread.
pub(crate) fn name(ifindex: u32) -> Option<String> {
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None).ok()?;
    rustix::net::netdevice::index_to_name(&socket, ifindex).ok()
}

/// The numbers of queues of an interface that are in use: (receive, transmit). `None` if the driver
/// does not report them.
pub(crate) fn queues(interface: &str) -> Option<(u32, u32)> {
    // max_rx, max_tx, max_other, max_combined, rx, tx, other, combined
    let [.., rx, tx, _, combined] = numbers(interface, ETHTOOL_GCHANNELS).ok()?;
    Some((rx.saturating_add(combined), tx.saturating_add(combined)))
}

/// The numbers of entries of a receive ring and of a transmit ring of the device. `None` if the
/// driver does not report them.
pub(crate) fn rings(interface: &str) -> Option<(u32, u32)> {
    // rx_max_pending, rx_mini_max, rx_jumbo_max, tx_max, rx_pending, rx_mini, rx_jumbo, tx_pending
    let [_, _, _, _, rx, _, _, tx] = numbers(interface, ETHTOOL_GRINGPARAM).ok()?;
    Some((rx, tx))
}

/// The name of the driver.
pub(crate) fn driver(interface: &str) -> io::Result<String> {
    let mut info = DriverInfo { cmd: ETHTOOL_GDRVINFO, driver: [0; 32], rest: [0; 140], counts: [0; 5] };
    request(interface, &mut info)?;
    let end = info.driver.iter().position(|&b| b == 0).unwrap_or(info.driver.len());
    Ok(String::from_utf8_lossy(&info.driver[..end]).into_owned())
}

fn numbers(interface: &str, cmd: u32) -> io::Result<[u32; 8]> {
    let mut numbers = Numbers { cmd, ..Numbers::default() };
    request(interface, &mut numbers)?;
    Ok(numbers.of)
}

/// Makes a request, whose first word is the command. The answer overwrites the request.
fn request<T>(interface: &str, question: &mut T) -> io::Result<()> {
    let name = CString::new(interface)?;
    // SAFETY: made of integers, arrays of them and a union of those.
    let mut request: libc::ifreq = unsafe { mem::zeroed() };
    // The last byte stays 0, as the end of the name.
    let room = request.ifr_name.len() - 1;
    if name.as_bytes().len() > room {
        return Err(io::Error::from_raw_os_error(libc::ENODEV));
    }
    for (to, &from) in request.ifr_name.iter_mut().zip(name.as_bytes()) {
        *to = from as c_char;
    }
    request.ifr_ifru.ifru_data = ptr::from_mut(question).cast();
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    // SAFETY: the request is of the kind that the command reads. The kernel reads and writes the
    // structure that the question's number stands for, which is the question's type: see the
    // callers.
    let done = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL, &raw mut request) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
