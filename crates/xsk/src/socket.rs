//! A socket: it is made, gets its rings, and is bound to one queue of an interface.

use crate::binding::{Binding, CopyReason};
use crate::error::XskError;
use crate::ethtool;
use crate::fault::{Fault, QueueStopped};
use crate::if_xdp::Desc;
use crate::interface_state::InterfaceState;
use crate::netlink::Interface;
use crate::options::{BusyPoll, Mode, QueueOptions};
use crate::queue_key::{QueueAddress, QueueKey};
use crate::ring::{Consumer, Producer, RingEntry, RingPointers};
use crate::stats::KernelStats;
use crate::sys::{self, Mapping};
use rustix::io::Errno;
use std::fmt;
use std::io;
use std::mem;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The largest ring.
const MAX_RING: u32 = 32_768;

/// If the kernel still has what a closed socket had, a step is repeated this often, with a pause
/// before each attempt. The pauses are half a second in total.
const BUSY_TRIES: u32 = 100;
const BUSY_WAIT: Duration = Duration::from_millis(5);

/// How often a step is tried that the kernel refuses until it has released what a closed socket
/// had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Retry {
    Once,
    /// For half a second.
    Patient,
}

impl Retry {
    /// Repeats `attempt` while its error is the number `refusal`. The kernel releases what a socket
    /// had some time after the socket was closed, also if its process was killed.
    pub(crate) fn run(self, refusal: i32, mut attempt: impl FnMut() -> io::Result<()>) -> io::Result<()> {
        let mut done = attempt();
        for _ in 0..if self == Self::Once { 0 } else { BUSY_TRIES } {
            if !done.as_ref().is_err_and(|error| error.raw_os_error() == Some(refusal)) {
                break;
            }
            std::thread::sleep(BUSY_WAIT);
            done = attempt();
        }
        done
    }
}

/// A socket that was not opened. It is closed.
pub(crate) struct NotOpened {
    pub(crate) error: XskError,
    /// Whether the socket was bound before the error: the kernel may write to its chunks until it
    /// lets the queue be bound again.
    pub(crate) was_bound: bool,
}

impl From<XskError> for NotOpened {
    fn from(error: XskError) -> Self {
        Self { error, was_bound: false }
    }
}

/// A socket that is bound to a queue of an interface. Its two halves, [`XskRx`](crate::XskRx) and
/// [`XskTx`](crate::XskTx), share it. It is closed when both are gone.
#[derive(Debug)]
pub struct XskSocket {
    // The rings are unmapped before the descriptor is closed, because the kernel keeps a socket
    // whose rings are mapped.
    _rings: [Mapping; 4],
    fd: OwnedFd,
    key: QueueKey,
    interface: String,
    ifindex: u32,
    queue: u32,
    mode: Mode,
    reason: Option<CopyReason>,
    need_wakeup: bool,
    multi_buffer: bool,
    busy_poll: bool,
    gone: AtomicBool,
}

/// The rings of a socket, for each of its two halves.
pub(crate) struct Rings {
    pub(crate) receive: RxRings,
    pub(crate) transmit: TxRings,
}

/// The rings of a receive queue.
pub(crate) struct RxRings {
    pub(crate) fill: Producer<u64>,
    pub(crate) rx: Consumer<Desc>,
}

/// The rings of a transmit queue.
pub(crate) struct TxRings {
    pub(crate) tx: Producer<Desc>,
    pub(crate) completion: Consumer<u64>,
}

/// A socket that has rings and is not bound.
pub(crate) struct Unbound {
    rings: [Mapping; 4],
    fd: OwnedFd,
}

impl AsFd for Unbound {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

pub(crate) fn failed(step: &'static str) -> impl FnOnce(io::Error) -> XskError {
    move |source| XskError::System { step, source }
}

impl Unbound {
    /// The socket of the options, or a new one.
    pub(crate) fn descriptor(options: &mut QueueOptions) -> Result<OwnedFd, XskError> {
        if let Some(fd) = options.socket.take() {
            return Ok(fd);
        }
        let step = "make an AF_XDP socket";
        sys::socket().map_err(|source| match source.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => XskError::Privilege { step, privilege: "CAP_NET_RAW", source },
            _ => XskError::System { step, source },
        })
    }

    /// Makes the rings of a socket, which has no memory yet. Before Linux 5.10 the kernel made no
    /// fill ring and no completion ring for it (`EINVAL`).
    pub(crate) fn new(fd: OwnedFd, fill: u32, options: &QueueOptions) -> Result<(Self, Rings), XskError> {
        let make = |ring, option, size: u32| {
            if !size.is_power_of_two() || !(2..=MAX_RING).contains(&size) {
                return Err(XskError::RingSize { ring, size, max: MAX_RING });
            }
            sys::set(fd.as_fd(), libc::SOL_XDP, option, &size).map_err(failed("make a ring of the socket"))
        };
        make("fill", libc::XDP_UMEM_FILL_RING, fill)?;
        make("completion", libc::XDP_UMEM_COMPLETION_RING, options.tx)?;
        make("RX", libc::XDP_RX_RING, options.rx)?;
        make("TX", libc::XDP_TX_RING, options.tx)?;
        let at = sys::offsets(fd.as_fd()).map_err(failed("ask for the layout of the rings"))?;
        let map = |offsets: &libc::xdp_ring_offset, entry: usize, size: u32, place: u64| {
            let len = offsets.desc as usize + size as usize * entry;
            Mapping::new(fd.as_fd(), place, len).map_err(failed("map a ring of the socket"))
        };
        let (address, desc) = (mem::size_of::<u64>(), mem::size_of::<Desc>());
        let rings = [
            map(&at.fr, address, fill, libc::XDP_UMEM_PGOFF_FILL_RING)?,
            map(&at.cr, address, options.tx, libc::XDP_UMEM_PGOFF_COMPLETION_RING)?,
            map(&at.rx, desc, options.rx, libc::XDP_PGOFF_RX_RING as u64)?,
            map(&at.tx, desc, options.tx, libc::XDP_PGOFF_TX_RING as u64)?,
        ];
        // SAFETY: the kernel reports the offsets of the parts in each ring's memory, and `map` has
        // mapped them with all entries. The socket keeps the mappings, and both queues keep the
        // socket. Each ring has one user.
        let made = unsafe {
            Rings {
                receive: RxRings {
                    fill: Producer::new(pointers::<u64>(&rings[0], &at.fr), fill),
                    rx: Consumer::new(pointers::<Desc>(&rings[2], &at.rx), options.rx),
                },
                transmit: TxRings {
                    tx: Producer::new(pointers::<Desc>(&rings[3], &at.tx), options.tx),
                    completion: Consumer::new(pointers::<u64>(&rings[1], &at.cr), options.tx),
                },
            }
        };
        Ok((Self { rings, fd }, made))
    }

    /// Binds the socket to a queue of an interface. `shared` is a bound socket of the same UMEM,
    /// whose mode is the one that the options require.
    pub(crate) fn bind(
        self,
        address: QueueAddress,
        options: &QueueOptions,
        binding: &Binding,
        shared: Option<&XskSocket>,
        retry: Retry,
    ) -> Result<XskSocket, NotOpened> {
        let QueueAddress { interface, ifindex, queue } = address;
        let &Binding { mode, reason, .. } = binding;
        let base = match mode {
            None => 0,
            Some(Mode::Copy) => libc::XDP_COPY,
            Some(Mode::ZeroCopy) => libc::XDP_ZEROCOPY,
        };
        let base = base | if options.need_wakeup { libc::XDP_USE_NEED_WAKEUP } else { 0 };
        let mut multi_buffer = binding.multi_buffer;
        let mut bind = || {
            let mut bound = Ok(());
            for several in binding.attempts() {
                // The kernel uses the flags of the first socket of the UMEM, and refuses others.
                let flags = match shared {
                    Some(_) => libc::XDP_SHARED_UMEM,
                    None => base | if several { libc::XDP_USE_SG } else { 0 },
                };
                bound = sys::bind(self.fd.as_fd(), ifindex, queue, flags, shared.map(AsFd::as_fd));
                multi_buffer = several;
                if !bound.as_ref().is_err_and(|e| e.raw_os_error() == Some(libc::EINVAL)) {
                    break;
                }
            }
            bound
        };
        let key = QueueKey::new(self.fd.as_fd(), ifindex, queue);
        retry.run(libc::EBUSY, &mut bind).map_err(|source| refused(source, interface.clone(), queue, mode))?;
        let zero_copy = sys::is_zero_copy(self.fd.as_fd())
            .map_err(|source| NotOpened { error: failed("ask for the mode of the socket")(source), was_bound: true })?;
        let now = if zero_copy { Mode::ZeroCopy } else { Mode::Copy };
        let (need_wakeup, multi_buffer, reason) = match shared {
            Some(first) => (first.need_wakeup, first.multi_buffer, CopyReason::First),
            None => (options.need_wakeup, multi_buffer, reason),
        };
        Ok(XskSocket {
            _rings: self.rings,
            key,
            fd: self.fd,
            interface,
            ifindex,
            queue,
            mode: now,
            reason: (now == Mode::Copy).then_some(reason),
            need_wakeup,
            multi_buffer,
            busy_poll: options.busy_poll.is_some(),
            gone: AtomicBool::new(false),
        })
    }
}

/// What a driver does not support.
const ZERO_COPY: &str = "zero-copy mode";

/// The error of a socket that the kernel has not bound in this mode.
fn refused(source: io::Error, interface: String, queue: u32, mode: Option<Mode>) -> XskError {
    let what = if mode == Some(Mode::ZeroCopy) { ZERO_COPY } else { "AF_XDP sockets with these options" };
    match source.raw_os_error() {
        Some(libc::EBUSY) => XskError::Busy { interface, queue },
        Some(libc::ENODEV) => XskError::NoInterface { interface },
        // A driver also returns this error if it supports the mode, but not on this queue or
        // device.
        Some(libc::EINVAL) if mode != Some(Mode::ZeroCopy) => XskError::NoQueue { interface, queue, in_use: None },
        Some(libc::EOPNOTSUPP | libc::EINVAL) => XskError::Unsupported { interface, queue, what, source },
        _ => XskError::System { step: "bind the socket to a queue", source },
    }
}

/// The addresses of a ring's parts, as the kernel reports them.
///
/// # Safety
///
/// The offsets are those of this ring, and are inside the mapping.
unsafe fn pointers<E: RingEntry>(memory: &Mapping, at: &libc::xdp_ring_offset) -> RingPointers<E::Atomic> {
    debug_assert!(at.desc as usize <= memory.len);
    // SAFETY: the caller's.
    unsafe {
        RingPointers {
            producer: memory.at.add(at.producer as usize).cast(),
            consumer: memory.at.add(at.consumer as usize).cast(),
            flags: memory.at.add(at.flags as usize).cast(),
            entries: memory.at.add(at.desc as usize).cast(),
        }
    }
}

/// Sets the options for busy polling, unless the helper that made the socket has set them.
pub(crate) fn poll_busily(fd: BorrowedFd<'_>, poll: BusyPoll) -> Result<(), XskError> {
    if sys::prefers_busy_poll(fd) {
        return Ok(());
    }
    let set = |option, value: i32| {
        let step = "make the socket poll busily";
        sys::set(fd, libc::SOL_SOCKET, option, &value).map_err(|source| match source.raw_os_error() {
            Some(libc::EPERM) => XskError::Privilege { step, privilege: "CAP_NET_ADMIN", source },
            _ => XskError::System { step, source },
        })
    };
    set(libc::SO_PREFER_BUSY_POLL, 1)?;
    set(libc::SO_BUSY_POLL, i32::try_from(poll.microseconds.max(1)).unwrap_or(i32::MAX))?;
    set(libc::SO_BUSY_POLL_BUDGET, i32::from(poll.budget.max(1)))
}

#[cfg(all(test, not(loom)))]
impl XskSocket {
    /// For [`crate::fake`].
    pub(crate) fn fake(rings: [Mapping; 4], fd: OwnedFd, mode: Mode) -> Self {
        use std::sync::atomic::AtomicU32;
        // No other fake has its queue.
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let (interface, queue, gone) = ("fake".to_owned(), 0, AtomicBool::new(false));
        let ifindex = NEXT.fetch_add(1, Ordering::Relaxed);
        let key = QueueKey::new(fd.as_fd(), ifindex, queue);
        let (need_wakeup, multi_buffer, busy_poll) = (true, true, false);
        let reason = (mode == Mode::Copy).then_some(CopyReason::Requested);
        Self {
            _rings: rings,
            fd,
            key,
            interface,
            ifindex,
            queue,
            mode,
            reason,
            need_wakeup,
            multi_buffer,
            busy_poll,
            gone,
        }
    }
}

impl XskSocket {
    /// The mode that is in use.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Why the mode is [`Mode::Copy`]; `None` in zero-copy mode.
    #[must_use]
    pub fn copy_reason(&self) -> Option<CopyReason> {
        self.reason
    }

    /// The interface's name at the time when the socket was bound; its index, if the name is
    /// unknown here because the socket is of another network namespace.
    #[must_use]
    pub fn interface(&self) -> &str {
        &self.interface
    }

    /// The interface's index at the time when the socket was bound.
    #[must_use]
    pub fn ifindex(&self) -> u32 {
        self.ifindex
    }

    /// The interface's queue.
    #[must_use]
    pub fn queue(&self) -> u32 {
        self.queue
    }

    pub(crate) fn key(&self) -> QueueKey {
        self.key
    }

    /// Whether frames may be in several buffers.
    #[must_use]
    pub fn is_multi_buffer(&self) -> bool {
        self.multi_buffer
    }

    /// Whether the kernel knows what to poll for this socket: `SO_INCOMING_NAPI_ID` is not 0.
    /// `None` without [`QueueOptions::busy_poll`].
    ///
    /// The kernel learns it from a frame that it receives for the socket, so it is false before the
    /// first. It stays false on a veth pair of Linux 6.18. A system call.
    #[must_use]
    pub fn is_busy_polled(&self) -> Option<bool> {
        self.busy_poll.then(|| sys::has_napi(self.fd.as_fd()))
    }

    /// What the kernel counts for the socket. A system call.
    ///
    /// # Errors
    ///
    /// The system call has failed.
    pub fn kernel_stats(&self) -> io::Result<KernelStats> {
        sys::statistics(self.fd.as_fd()).map(KernelStats::from)
    }

    /// Whether the interface was deleted, or moved to another network namespace. The socket is then
    /// not bound any more. Costs a system call.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        // Relaxed: the flag only changes to true, and publishes no other data.
        if self.gone.load(Ordering::Relaxed) {
            return true;
        }
        let unbound = self.mode == Mode::Copy && self.wake_rx() == Err(Errno::NXIO);
        if unbound || sys::take_error(self.fd.as_fd()) {
            self.gone.store(true, Ordering::Relaxed);
            return true;
        }
        false
    }

    /// Whether the kernel has unbound the socket because its interface is gone. It then accesses no
    /// chunk that was posted: drivers have stopped, and all CPUs have left their receive paths.
    ///
    /// The kernel reports that the interface is gone before it has finished this. It holds the
    /// socket's mutex until then, for which the option that makes a ring waits.
    pub(crate) fn is_unbound(&self) -> bool {
        let attempt = || sys::set(self.fd.as_fd(), libc::SOL_XDP, libc::XDP_RX_RING, &2_u32);
        self.is_gone() && attempt().is_err_and(|error| error.raw_os_error() == Some(libc::EBUSY))
    }

    /// The state of the interface: why a queue neither receives nor sends. Cost: a few system calls.
    ///
    /// # Errors
    ///
    /// `Unsupported` if the socket is of another network namespace than this thread, in which the
    /// interface cannot be looked up (before Linux 5.14, the kernel does not report the namespace,
    /// and the answer is about this thread's interface of the same index); the kernel's errors.
    pub fn interface_state(&self) -> io::Result<InterfaceState> {
        if self.is_gone() {
            return Ok(InterfaceState::Gone);
        }
        if !sys::is_of_this_namespace(self.fd.as_fd()) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        match Interface::by_index(self.ifindex) {
            Ok(interface) => Ok(InterfaceState::of(interface.up, self.queue, ethtool::queues(&interface.name))),
            // It was deleted since the check above.
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(InterfaceState::Gone),
            Err(error) => Err(error),
        }
    }

    /// An error if the queue has stopped by a fault, or if its other half has noticed that the
    /// interface is gone.
    pub(crate) fn check(&self, stopped: Option<Fault>) -> io::Result<()> {
        // Relaxed, as in `is_gone`.
        let fault = stopped.or_else(|| self.gone.load(Ordering::Relaxed).then_some(Fault::Gone));
        let Some(fault) = fault else { return Ok(()) };
        let kind = match fault {
            Fault::Gone => io::ErrorKind::NetworkDown,
            _ => io::ErrorKind::InvalidData,
        };
        Err(io::Error::new(kind, QueueStopped { interface: self.interface.clone(), queue: self.queue, fault }))
    }

    /// Whether the driver may need a wake-up for new chunks. In copy mode the kernel consumes
    /// chunks when a frame arrives.
    #[inline(always)]
    pub(crate) fn wakes_rx(&self) -> bool {
        self.mode == Mode::ZeroCopy
    }

    /// Whether each flush is a system call.
    #[inline(always)]
    pub(crate) fn always_kicks(&self) -> bool {
        !self.need_wakeup || self.busy_poll
    }

    #[inline(always)]
    pub(crate) fn polls_busily(&self) -> bool {
        self.busy_poll
    }

    #[inline]
    pub(crate) fn wake_rx(&self) -> Result<(), Errno> {
        sys::kick_rx(self.fd.as_fd())
    }
}

impl AsFd for XskSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl fmt::Display for XskSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "interface {} queue {}, {}", self.interface, self.queue, self.mode)?;
        self.reason.map_or(Ok(()), |reason| write!(f, " ({reason})"))
    }
}
