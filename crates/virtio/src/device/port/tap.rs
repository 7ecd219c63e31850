//! A tap device: the kernel's network stack is at the other end.
//!
//! The kernel writes received frames into posted buffers, and reads large sent ones from them, by
//! [`in_place`](super::in_place). All else is copied once.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::error::{CONTROL, PortError, TapError};
use super::in_place::{Posted, Rest};
use super::interface::Port;
use super::reader::Reader;
use crate::device::options::ALL_OFFLOADS;
use crate::net::{Offloads, VnetHdr, feature};

/// Offloads that the kernel accepts only together.
const UDP_SEGMENTS: libc::c_uint = libc::TUN_F_USO4 | libc::TUN_F_USO6;

/// The most frames that are read when a front end has left: more than the kernel queues by default
/// (1000).
const WAITING: u64 = 4096;

/// One queue of a tap device. The interface is removed with its last queue, unless it existed
/// before.
#[derive(Debug)]
pub struct Tap {
    file: File,
    reader: Reader,
    features: u64,
    /// Whether the kernel has UDP segmentation in both directions.
    udp_segments: bool,
    error: Option<io::Error>,
    dead: bool,
    /// Whether the queue's ring is served, so that this queue is read.
    served: bool,
    /// Whether the kernel sends frames to this queue. `None` for the first queue of a tap, which is
    /// always attached.
    attached: Option<bool>,
    /// Of all queues that were opened together.
    queues: TapQueues,
}

/// The queues of a tap that one [`Tap::open`] has opened: reports whether other queues receive
/// frames of the tap as well. Clones share one state.
#[derive(Clone, Debug)]
pub struct TapQueues {
    name: Arc<str>,
    /// How many of them are attached. Locked while that changes, so that the kernel's number of
    /// queues and this one belong together.
    attached: Arc<Mutex<usize>>,
}

impl TapQueues {
    /// The interface's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How many queues of the interface are attached in addition to these; `None` if sysfs does not
    /// show it. They are those of other processes, or of another [`Tap::open`]. The kernel spreads
    /// frames over all queues, so those get a part of the frames. A queue counts as one of these
    /// until all of them are dropped.
    ///
    /// Reads a directory of sysfs. Waits while one of the queues is being attached or detached.
    #[must_use]
    pub fn others(&self) -> Option<usize> {
        let mine = self.attached.lock().unwrap_or_else(PoisonError::into_inner);
        Some(Tap::attached(&self.name)?.saturating_sub(*mine))
    }
}

impl Tap {
    /// Opens (creates, where there is none) the tap `name` with `queues` queues. With `up`, sets
    /// the link up.
    ///
    /// # Errors
    ///
    /// [`PortError::Tap`]. Nothing is left behind: an interface that was created is gone.
    pub fn open(name: &str, queues: usize, up: bool) -> Result<Vec<Self>, PortError> {
        let open = || {
            if name.is_empty()
                || name.len() > 15
                || [".", ".."].contains(&name)
                || name.bytes().any(|b| b"/%:\0".contains(&b) || b.is_ascii_whitespace())
            {
                return Err(TapError::Name);
            }
            if !(1..=256).contains(&queues) {
                return Err(TapError::Queues { asked: queues });
            }
            let mine = TapQueues { name: name.into(), attached: Arc::new(Mutex::new(queues)) };
            let mut taps = (0..queues).map(|_| Self::queue(&mine, queues > 1)).collect::<Result<Vec<_>, _>>()?;
            taps.iter_mut().skip(1).for_each(|tap| tap.attached = Some(true));
            if up {
                link_up(name)?;
            }
            if let Some(attached) = Self::attached(name).filter(|&attached| attached > queues) {
                let others = attached - queues;
                netmem_pool::trace::warn!(
                    "tap {name}: other processes have {others} of its {attached} queues, and get frames there"
                );
            }
            Ok(taps)
        };
        open().map_err(|source| PortError::Tap { name: name.to_owned(), source })
    }

    fn queue(queues: &TapQueues, several: bool) -> Result<Self, TapError> {
        let file =
            OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC).open(CONTROL);
        let file = file.map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => TapError::Missing,
            io::ErrorKind::PermissionDenied => TapError::NotPermitted,
            _ => TapError::Io { what: CONTROL, source },
        })?;
        let mut request = request(&queues.name);
        let flags =
            libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | if several { libc::IFF_MULTI_QUEUE } else { 0 };
        request.ifr_ifru.ifru_flags = flags as libc::c_short;
        ioctl(&file, "TUNSETIFF", libc::TUNSETIFF, &mut request).map_err(|e| match &e {
            TapError::Io { source, .. } => match source.raw_os_error() {
                Some(libc::EBUSY | libc::EINVAL | libc::EEXIST | libc::E2BIG) => TapError::Taken,
                Some(libc::EPERM | libc::EACCES) => TapError::NotPermitted,
                _ => e,
            },
            _ => e,
        })?;
        ioctl(&file, "TUNSETVNETHDRSZ", libc::TUNSETVNETHDRSZ, &mut (VnetHdr::LEN as libc::c_int))?;
        ioctl(&file, "TUNSETVNETLE", libc::TUNSETVNETLE, &mut 1)?;
        // Linux 6.2 and later.
        let udp_segments = set_offload(&file, libc::TUN_F_CSUM | UDP_SEGMENTS).is_ok();
        let tap = Self {
            file,
            reader: Reader::new(),
            features: 0,
            udp_segments,
            error: None,
            dead: false,
            served: false,
            attached: None,
            queues: queues.clone(),
        };
        tap.offload(0)?;
        Ok(tap)
    }

    /// Handles the result of a read. An error other than "would block" is kept: the interface was
    /// deleted.
    #[inline]
    fn settle<T>(&mut self, read: io::Result<T>) -> Option<T> {
        match read {
            Ok(brought) => Some(brought),
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => None,
            // Memory of the driver is gone. That is the ring's fault, and not the port's.
            Err(e) if e.raw_os_error() == Some(libc::EFAULT) => None,
            Err(e) => {
                (self.error, self.dead) = (Some(e), true);
                None
            }
        }
    }

    /// Reads the next frame into private memory. Returns whether there is one.
    #[inline]
    fn fetch(&mut self) -> bool {
        if self.dead {
            return false;
        }
        let read = self.reader.read_private(&self.file);
        self.settle(read) == Some(true)
    }

    /// Has the kernel send frames to this queue, or to the others only. The kernel sends a flow's
    /// frames to the queue that the flow last came from. Without this call, they would wait in the
    /// queue of a pair that the driver has just stopped using.
    #[cold]
    fn attach(&mut self, attach: bool) {
        let mut request = request("");
        let flag = if attach { libc::IFF_ATTACH_QUEUE } else { libc::IFF_DETACH_QUEUE };
        request.ifr_ifru.ifru_flags = flag as libc::c_short;
        let mut mine = self.queues.attached.lock().unwrap_or_else(PoisonError::into_inner);
        let done = ioctl(&self.file, "TUNSETQUEUE", libc::TUNSETQUEUE, &mut request);
        match &done {
            Ok(()) if attach => *mine += 1,
            Ok(()) => *mine -= 1,
            Err(_) => {}
        }
        drop(mine);
        self.attached = Some(attach);
        // Not while it is locked: a subscriber is user code.
        if let Err(e) = done {
            let verb = if attach { "attached" } else { "detached" };
            netmem_pool::trace::warn!("tap {}: a queue could not be {verb}: {e}", self.queues.name);
        }
    }

    /// How many queues of the interface `name` processes have attached, this one's included; none
    /// if sysfs does not show it. The kernel spreads frames over all of them, so that two processes
    /// with one tap get a part of the frames each.
    #[must_use]
    pub fn attached(name: &str) -> Option<usize> {
        let queues = std::fs::read_dir(format!("/sys/class/net/{name}/queues")).ok()?;
        let transmit = |entry: &io::Result<std::fs::DirEntry>| {
            entry.as_ref().is_ok_and(|entry| entry.file_name().as_encoded_bytes().starts_with(b"tx-"))
        };
        Some(queues.filter(transmit).count())
    }

    /// The queues that were opened together with this one, and this one.
    #[must_use]
    pub fn queues(&self) -> &TapQueues {
        &self.queues
    }

    /// The interface's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.queues.name
    }

    /// Has the kernel show frames with these offloads and no others.
    fn offload(&self, features: u64) -> Result<(), TapError> {
        let pairs = [
            (feature::GUEST_CSUM, libc::TUN_F_CSUM),
            (feature::GUEST_TSO4, libc::TUN_F_TSO4),
            (feature::GUEST_TSO6, libc::TUN_F_TSO6),
            (feature::GUEST_ECN, libc::TUN_F_TSO_ECN),
            (feature::GUEST_UFO, libc::TUN_F_UFO),
        ];
        // The kernel refuses a segment without a checksum, as the specification does.
        let features = feature::with_needs(features);
        let mut flags = pairs.iter().filter(|(bit, _)| features & bit != 0).fold(0, |flags, (_, flag)| flags | flag);
        if self.udp_segments && features & feature::GUEST_USO4 != 0 {
            flags |= UDP_SEGMENTS;
        }
        set_offload(&self.file, flags).map_err(|source| TapError::Io { what: "TUNSETOFFLOAD", source })
    }
}

fn set_offload(tap: &File, flags: libc::c_uint) -> io::Result<()> {
    // SAFETY: this request has its argument by value.
    let rc = unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETOFFLOAD, libc::c_ulong::from(flags)) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn request(name: &str) -> libc::ifreq {
    // SAFETY: all zero is a valid `ifreq`: integers, byte arrays and a union of them.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    request
}

/// A request whose argument is a pointer to `T`.
fn ioctl<T>(fd: &impl AsRawFd, what: &'static str, request: libc::Ioctl, argument: &mut T) -> Result<(), TapError> {
    // SAFETY: callers pair `request` with the type that it reads and writes (`ifreq`, or an `int`).
    let rc = unsafe { libc::ioctl(fd.as_raw_fd(), request, std::ptr::from_mut(argument)) };
    if rc < 0 { Err(TapError::Io { what, source: io::Error::last_os_error() }) } else { Ok(()) }
}

fn link_up(name: &str) -> Result<(), TapError> {
    let socket = std::net::UdpSocket::bind("0.0.0.0:0").map_err(|source| TapError::Io { what: "a socket", source })?;
    let mut request = request(name);
    ioctl(&socket, "SIOCGIFFLAGS", libc::SIOCGIFFLAGS as libc::Ioctl, &mut request)?;
    // SAFETY: the kernel has just written the flags.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    if libc::c_int::from(flags) & libc::IFF_UP != 0 {
        return Ok(());
    }
    request.ifr_ifru.ifru_flags = flags | libc::IFF_UP as libc::c_short;
    ioctl(&socket, "SIOCSIFFLAGS", libc::SIOCSIFFLAGS as libc::Ioctl, &mut request).map_err(|e| match &e {
        TapError::Io { source, .. } if source.raw_os_error() == Some(libc::EPERM) => TapError::NotPermitted,
        _ => e,
    })
}

impl Port for Tap {
    const WANTS_BYTES: bool = true;
    const FEATURES: u64 = ALL_OFFLOADS;
    const READS: bool = true;
    const SENDS_IN_PLACE: bool = true;

    #[inline]
    fn peek(&mut self) -> Option<&[u8]> {
        if self.reader.expects().is_some() && !self.fetch() {
            return None;
        }
        let wire = self.reader.pending()?;
        if self.features & feature::GUEST_CSUM == 0 {
            wire[0] &= !VnetHdr::DATA_VALID;
        }
        wire[10..VnetHdr::LEN].copy_from_slice(&1u16.to_le_bytes());
        Some(wire)
    }

    #[inline]
    fn expects(&self) -> Option<usize> {
        self.reader.expects()
    }

    #[inline]
    fn read(&mut self, accepts: Offloads, posted: Posted<'_>) -> Option<(VnetHdr, usize)> {
        if self.dead {
            return None;
        }
        let read = self.reader.read(&self.file, accepts, posted);
        self.settle(read).flatten()
    }

    #[inline]
    fn consume(&mut self) {
        self.reader.forget();
    }

    fn accepted_offloads(&self) -> Offloads {
        Offloads::sent(if self.udp_segments { Self::FEATURES } else { Self::FEATURES & !feature::HOST_USO })
    }

    #[inline]
    fn send(&mut self, wire: &[u8]) -> bool {
        (&self.file).write(wire).is_ok_and(|n| n == wire.len())
    }

    fn send_in_place(&mut self, head: &[u8], rest: Rest<'_>) -> Option<bool> {
        // The kernel accepts a frame as a whole, or refuses it.
        Some(rest.write(&self.file, head).is_ok())
    }

    fn negotiated(&mut self, features: u64) -> Result<(), PortError> {
        self.features = features;
        // A frame that was read before may use offloads that are no longer accepted.
        self.reader.forget();
        self.offload(features).map_err(|source| PortError::Tap { name: self.queues.name.to_string(), source })
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        (!self.dead).then(|| self.file.as_fd())
    }

    #[inline]
    fn served(&mut self, served: bool) {
        self.served = served;
        if self.attached.is_some_and(|attached| attached != served) {
            self.attach(served);
        }
    }

    fn drop_waiting(&mut self) -> u64 {
        let mut dropped = u64::from(self.reader.forget());
        while dropped < WAITING && self.fetch() {
            self.reader.forget();
            dropped += 1;
        }
        dropped
    }

    fn take_error(&mut self) -> Option<PortError> {
        // A queue that is not read does not notice by itself that the interface was deleted.
        if !self.served && !self.dead {
            let mut fds = [PollFd::new(&self.file, PollFlags::empty())];
            let asked = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
            if asked.is_ok() && fds[0].revents().contains(PollFlags::ERR) {
                let gone = io::Error::from_raw_os_error(libc::EBADFD);
                (self.error, self.dead) = (Some(gone), true);
            }
        }
        let source = TapError::Io { what: "reading", source: self.error.take()? };
        Some(PortError::Tap { name: self.queues.name.to_string(), source })
    }
}
