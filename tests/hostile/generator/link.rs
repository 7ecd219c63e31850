//! An AF_PACKET socket on the kernel's side of the tap.

use rustix::io::Errno;
use rustix::net::{MMsgHdr, RecvFlags, SendAncillaryBuffer, SendFlags};
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

/// Frames of one system call.
const BATCH: usize = 128;
/// Frames that the tap of a [`Peer`](super::peer::Peer) keeps for the server. A link sends at most
/// half of them ahead.
pub const QUEUE: usize = 4096;
/// Memory of received frames, with the kernel's own for each.
const BUFFER: libc::c_int = 256 << 20;
/// A server that reads no frame for so long hangs.
const PATIENCE: Duration = Duration::from_secs(30);

/// The kernel's counters of the tap, of what it sends to the server.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counters {
    /// Frames that the server has read.
    pub read: u64,
    /// Frames that the tap had no room for.
    pub dropped: u64,
}

/// The counters of an interface in this thread's network namespace.
///
/// # Errors
///
/// The interface is gone, with the server.
pub fn counters(name: &str) -> io::Result<Counters> {
    let table = std::fs::read_to_string("/proc/thread-self/net/dev")?;
    let line = table.lines().find_map(|line| line.trim().strip_prefix(&format!("{name}:")));
    let columns: Vec<u64> = line.ok_or(Errno::NODEV)?.split_whitespace().map(|n| n.parse().unwrap()).collect();
    Ok(Counters { read: columns[9], dropped: columns[11] })
}

/// The kinds of frames that a link receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hears {
    All,
    /// ARP alone, for a sender that must not spend its time on answers.
    Arp,
}

pub struct Link {
    socket: OwnedFd,
    name: String,
    /// Frames that were sent, and the counters before the first.
    sent: u64,
    begin: Counters,
}

/// A packet socket that receives nothing yet.
pub fn socket() -> io::Result<OwnedFd> {
    // SAFETY: no memory is passed.
    let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new, and this is its owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

impl Link {
    /// The interface `name` of this thread's network namespace.
    pub fn open(name: &str, hears: Hears) -> Self {
        let protocol = match hears {
            Hears::All => libc::ETH_P_ALL,
            Hears::Arp => libc::ETH_P_ARP,
        };
        let protocol = (protocol as u16).to_be();
        let socket = socket().unwrap();
        let set = |level, option, value: libc::c_int| {
            let size = size_of::<libc::c_int>() as libc::socklen_t;
            // SAFETY: the option's value is an integer, which lives until the call returns.
            let result =
                unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, (&raw const value).cast(), size) };
            assert_eq!(result, 0, "option {option}: {}", io::Error::last_os_error());
        };
        set(libc::SOL_PACKET, libc::PACKET_VNET_HDR, 1);
        // Without it, frames of the kernel and of other links are received, too.
        set(libc::SOL_PACKET, libc::PACKET_IGNORE_OUTGOING, 1);
        set(libc::SOL_PACKET, libc::PACKET_QDISC_BYPASS, 1);
        set(libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, BUFFER);
        let interface = rustix::net::netdevice::name_to_index(&socket, name).unwrap();
        // SAFETY: all zero is a valid `sockaddr_ll`: integers and an array of them.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = protocol;
        address.sll_ifindex = interface as i32;
        let size = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        // SAFETY: the address is of this type and size, and lives until the call returns.
        let result = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), size) };
        assert_eq!(result, 0, "bind: {}", io::Error::last_os_error());
        Self { socket, name: name.to_owned(), sent: 0, begin: counters(name).unwrap() }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sends frames in their order, as fast as the server reads them: no more wait in the tap than
    /// it keeps.
    ///
    /// # Errors
    ///
    /// The server has ended.
    pub fn send(&mut self, frames: &[Vec<u8>]) -> io::Result<()> {
        for frames in frames.chunks(BATCH) {
            self.wait(QUEUE as u64 / 2)?;
            self.pass(frames)?;
        }
        Ok(())
    }

    /// The same without a check of the tap, for a sender that paces itself.
    ///
    /// # Errors
    ///
    /// The server has ended.
    pub fn pass(&mut self, frames: &[Vec<u8>]) -> io::Result<()> {
        for frames in frames.chunks(BATCH) {
            let slices: Vec<[IoSlice<'_>; 1]> = frames.iter().map(|frame| [IoSlice::new(frame)]).collect();
            let mut controls: Vec<SendAncillaryBuffer<'_, '_, '_>> =
                frames.iter().map(|_| SendAncillaryBuffer::default()).collect();
            let parts = slices.iter().zip(&mut controls);
            let mut messages: Vec<MMsgHdr<'_>> = parts.map(|(slice, control)| MMsgHdr::new(slice, control)).collect();
            let mut done = 0;
            while done < messages.len() {
                match rustix::net::sendmmsg(&self.socket, &mut messages[done..], SendFlags::empty()) {
                    Ok(sent) => done += sent,
                    // The socket's share of memory is used up for a moment.
                    Err(Errno::AGAIN | Errno::NOBUFS | Errno::INTR) => std::thread::yield_now(),
                    Err(error) => return Err(error.into()),
                }
            }
            self.sent += frames.len() as u64;
        }
        Ok(())
    }

    /// Waits until the server has read all but `most` of the frames that were sent.
    ///
    /// # Errors
    ///
    /// The server has ended.
    pub fn wait(&self, most: u64) -> io::Result<()> {
        let begin = Instant::now();
        while self.ahead()? > most {
            assert!(begin.elapsed() < PATIENCE, "the server reads no frames any more");
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }

    fn ahead(&self) -> io::Result<u64> {
        let now = counters(&self.name)?;
        Ok(self.sent.saturating_sub(now.read - self.begin.read + now.dropped - self.begin.dropped))
    }

    /// Frames that were sent, and those that the tap has dropped.
    ///
    /// # Errors
    ///
    /// The server has ended.
    pub fn sent(&self) -> io::Result<(u64, u64)> {
        Ok((self.sent, counters(&self.name)?.dropped - self.begin.dropped))
    }

    /// The next received frame, if there is one, in `buffer`: its length.
    pub fn receive(&self, buffer: &mut [u8]) -> Option<usize> {
        match rustix::net::recv(&self.socket, buffer, RecvFlags::DONTWAIT) {
            Ok((len, _)) => Some(len),
            // The interface has gone with the server.
            Err(Errno::AGAIN | Errno::INTR | Errno::NETDOWN) => None,
            Err(error) => panic!("{}: {error}", self.name),
        }
    }

    /// Frames that the socket had no room for since the last call. They are the test's fault.
    pub fn missed(&self) -> u32 {
        let mut counts = [0_u32; 2];
        let mut size = size_of_val(&counts) as libc::socklen_t;
        let fd = self.socket.as_raw_fd();
        // SAFETY: the option's value is two integers, packets and drops, which live until the call
        // returns.
        let result = unsafe {
            libc::getsockopt(fd, libc::SOL_PACKET, libc::PACKET_STATISTICS, counts.as_mut_ptr().cast(), &mut size)
        };
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
        counts[1]
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
