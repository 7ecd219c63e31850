//! A host of its own on a tap or on a network interface, with a stack for each queue.
//!
//! ```text
//!   on_tap:  kernel ── tap ── virtio-net device ── driver ── Stack     all on the stack's thread
//!   on_xsk:  interface ── XDP program ── AF_XDP socket ───── Stack
//! ```
//!
//! [`on_tap`] and [`on_xsk`] open all that a host needs, and return its [`Queue`]s. A queue goes to
//! a thread, which makes the stack there ([`Queue::start`]): a stack stays on its thread. The
//! thread then drives the stack by [`Driven::poll`] and [`Driven::pause`], and ends it by
//! [`Driven::finish`], which sends what was written and FIN.
//!
//! These functions choose sizes and modes. A program that needs others opens the parts itself:
//! [`NetDevice`](netmem_virtio::device::NetDevice) and
//! [`VirtioNet`](netmem_virtio::driver::VirtioNet), or [`Xsk`](netmem_xsk::Xsk), and
//! [`Stack::new`].
//!
//! ```no_run
//! # #[cfg(not(feature = "device"))]
//! # fn main() {}
//! # #[cfg(feature = "device")]
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use netmem::tcp::{ListenOptions, StackOptions};
//! use std::time::Duration;
//!
//! // The kernel's side of the tap is assigned its address by `ip addr add 192.0.2.1/24 dev nm0`.
//! let mut host = netmem::host::on_tap("nm0", 1, &["192.0.2.2/24".parse()?])?;
//! let mut stack = host.queues.remove(0).start(StackOptions::default())?;
//! let mut listener = stack.sockets().listen("0.0.0.0:7".parse()?, ListenOptions::default())?;
//! let mut connections = 0;
//! while connections < 3 {
//!     let work = stack.poll();
//!     while let Ok(stream) = listener.accept() {
//!         println!("{}", stream.peer_addr());
//!         connections += 1;
//!     }
//!     stack.pause(work, None)?; // polls on for 50 us after the last work, then sleeps
//! }
//! stack.finish(Duration::from_secs(5))?; // sends what was written, and FIN
//! # Ok(())
//! # }
//! ```

#[cfg(feature = "device")]
mod tap;
#[cfg(feature = "xsk")]
mod xsk;

#[cfg(feature = "device")]
pub use tap::{TapOptions, TapQueue, TapStack, on_tap};
#[cfg(feature = "xsk")]
pub use xsk::{XskQueue, XskStack, on_xsk};

use netmem_inet::{Address, Host, Payload, Sockets, Stack, StackOptions, Time};
use netmem_packet::{RxQueue, TxQueue, Wait};
use netmem_pool::{Mapped, SharedPool};
use std::fmt;
use std::io;
use std::net::{IpAddr, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a thread polls after the last work before it sleeps.
const SPIN: Duration = Duration::from_micros(50);

/// Why a host could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// There are no addresses.
    #[error("a host needs an address, such as 192.0.2.2/24")]
    NoAddress,
    /// The kernel has the address as well, and would answer for it.
    #[error("{0} is an address of the kernel; give this host another one of the network, which no other station has")]
    Kernel(IpAddr),
    /// No IP packets have this size.
    #[cfg(feature = "device")]
    #[error("an MTU of {mtu} bytes; it is {least} to {most}")]
    Mtu {
        /// The number of the options.
        mtu: u16,
        /// The smallest for the host's addresses.
        least: u16,
        /// The largest.
        most: u16,
    },
    /// There is no tap of this name, and none can be made.
    #[cfg(feature = "device")]
    #[error(transparent)]
    Port(#[from] netmem_virtio::device::port::PortError),
    /// The device could not be made.
    #[cfg(feature = "device")]
    #[error(transparent)]
    Device(#[from] netmem_virtio::device::DeviceError),
    /// The driver could not be connected to the device.
    #[cfg(feature = "device")]
    #[error(transparent)]
    Connect(#[from] netmem_virtio::device::ConnectError),
    /// The driver has no pages to send from.
    #[cfg(feature = "device")]
    #[error(transparent)]
    Net(#[from] netmem_virtio::driver::NetError),
    /// The interface could not be opened.
    #[cfg(feature = "xsk")]
    #[error(transparent)]
    Xsk(#[from] netmem_xsk::XskError),
    /// There are more addresses than the XDP program can match.
    #[cfg(feature = "xsk")]
    #[error(transparent)]
    Rules(#[from] netmem_xsk::TooManyRules),
    /// The state of the interface cannot be read.
    #[cfg(feature = "xsk")]
    #[error("cannot look at interface {name}")]
    Interface {
        /// Its name.
        name: String,
        /// The system's answer.
        source: io::Error,
    },
}

/// An open host: from [`on_tap`] or [`on_xsk`].
#[derive(Debug)]
pub struct Opened<M: Payload, Q> {
    /// What its stacks share: addresses, routes, ports.
    pub host: Host<M>,
    /// Its queues. Each is for a thread. What arrives by a queue that no thread polls is lost.
    pub queues: Vec<Q>,
}

mod sealed {
    use netmem_packet::Wait;
    use std::io;
    use std::time::Duration;

    pub trait Drives: std::fmt::Debug + Send {
        /// Does the work that is due. Returns how much there was.
        fn poll(&mut self) -> usize;

        /// Ends a round of the thread, and may sleep.
        fn pause(&mut self, work: usize, stack: &mut dyn Wait, at_most: Option<Duration>) -> io::Result<()>;

        /// Does the work on a thread of its own, if there is any.
        fn apart(self) -> io::Result<super::Apart>;
    }
}
use sealed::Drives;

/// What is behind the queue pair of a stack: a device, or the kernel. Sealed.
pub trait Behind: Drives {}

/// A queue of a host. It can be sent to the thread that is to drive it.
pub struct Queue<R: RxQueue<Mem: Payload>, T, D> {
    host: Host<R::Mem>,
    rx: R,
    tx: T,
    /// Pages for headers, and for payload that is copied.
    pool: Arc<SharedPool<R::Mem>>,
    /// Pages that the program allocates.
    user_pool: Option<Arc<SharedPool<R::Mem>>>,
    behind: D,
    beginning: Instant,
}

impl<R, T, D> Queue<R, T, D>
where
    R: RxQueue<Mem: Mapped> + Wait,
    T: TxQueue<Mem = R::Mem> + Wait,
    D: Behind,
{
    /// Makes the stack. It stays on this thread, which drives it, and what is behind it.
    ///
    /// # Errors
    ///
    /// The system has too few descriptors or too little memory.
    pub fn start(self, options: StackOptions) -> io::Result<Driven<R, T, D>> {
        let Self { host, rx, tx, pool, behind, beginning, .. } = self;
        let now = Time::ZERO + beginning.elapsed();
        Ok(Driven { stack: Stack::new(&host, rx, tx, pool, options, now)?, behind, beginning })
    }

    /// Makes the stack for code that drives it by itself, such as
    /// `netmem::tcp::tokio::drive`. `now` is that code's clock. What is behind the stack
    /// runs on a thread of its own. Drop it after the stack.
    ///
    /// # Errors
    ///
    /// As [`start`](Self::start); also if there is no thread.
    pub fn apart(self, options: StackOptions, now: Time) -> io::Result<(Stack<R, T>, Apart)> {
        let Self { host, rx, tx, pool, behind, .. } = self;
        let stack = Stack::new(&host, rx, tx, pool, options, now)?;
        Ok((stack, behind.apart()?))
    }

    /// Pages to send from, which any thread can use. The stack allocates headers from them, too.
    #[must_use]
    pub fn pool(&self) -> &Arc<SharedPool<R::Mem>> {
        &self.pool
    }

    /// Pages to send from that are the program's alone: `None` unless the options of a tap set some
    /// aside (`TapOptions::user_pages`).
    #[must_use]
    pub fn user_pool(&self) -> Option<&Arc<SharedPool<R::Mem>>> {
        self.user_pool.as_ref()
    }
}

impl<R: RxQueue<Mem: Payload> + fmt::Debug, T, D> fmt::Debug for Queue<R, T, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Queue({:?})", self.rx)
    }
}

/// A stack, what is behind it, and a clock, on the thread that drives them.
pub struct Driven<R: RxQueue<Mem: Mapped> + Wait, T: TxQueue, D> {
    // The queues stop before what is behind them ends.
    stack: Stack<R, T>,
    behind: D,
    beginning: Instant,
}

impl<R, T, D> Driven<R, T, D>
where
    R: RxQueue<Mem: Mapped> + Wait,
    T: TxQueue<Mem = R::Mem> + Wait,
    D: Behind,
{
    /// Does all work that is due: [`Stack::poll`], and what is behind the stack. Never blocks.
    /// Returns how much work there was.
    pub fn poll(&mut self) -> usize {
        self.behind.poll() + self.stack.poll(self.now())
    }

    /// Ends a round of the thread. `work` is how much there was. After the last round with work,
    /// the thread polls on for 50 us. Then this call sleeps until there is work, at most until the
    /// stack's next deadline, and at most for `at_most`.
    ///
    /// # Errors
    ///
    /// What is behind the stack has stopped: the tap or the interface is gone.
    pub fn pause(&mut self, work: usize, at_most: Option<Duration>) -> io::Result<()> {
        let due = self.stack.poll_timeout().map(|at| at.since(self.now()));
        let at_most = [due, at_most].into_iter().flatten().min();
        self.behind.pause(work, &mut self.stack, at_most)
    }

    /// Ends the host's part on this thread in order: closes all sockets, and drives the stack and
    /// what is behind it until the peers have acknowledged what was written, and its end.
    /// Connections that are left `within` this time are reset. Returns how many. As
    /// [`Stack::finish`], which does not drive the device of a tap.
    ///
    /// A program that leaves its loop without this sends no end, and its peers wait for it.
    ///
    /// # Errors
    ///
    /// As [`pause`](Self::pause).
    pub fn finish(&mut self, within: Duration) -> io::Result<usize> {
        self.stack.close();
        let deadline = self.now() + within;
        loop {
            let work = self.poll();
            if work == 0 && self.stack.is_closed() {
                return Ok(0);
            }
            let now = self.now();
            if now >= deadline {
                let left = self.stack.finish(now, || now)?;
                // The resets leave. Frames that arrive at the same time make no more rounds of it
                // than there are resets.
                for _ in 0..left {
                    if self.poll() == 0 {
                        break;
                    }
                }
                return Ok(left);
            }
            self.pause(work, Some(deadline.since(now)))?;
        }
    }

    /// Opens sockets.
    #[must_use]
    pub fn sockets(&self) -> Sockets<R::Mem> {
        self.stack.sockets()
    }

    /// The stack: its statistics, its waker.
    pub fn stack(&mut self) -> &mut Stack<R, T> {
        &mut self.stack
    }

    /// The stack's time: since the host was opened.
    #[must_use]
    pub fn now(&self) -> Time {
        Time::ZERO + self.beginning.elapsed()
    }
}

impl<R: RxQueue<Mem: Mapped> + Wait, T: TxQueue, D> fmt::Debug for Driven<R, T, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Driven({:?})", self.stack)
    }
}

/// What is behind a stack that other code drives. Dropping it ends its thread, if it has one.
#[derive(Debug)]
#[must_use = "what is behind the stack ends when this is dropped"]
pub struct Apart(#[expect(dead_code, reason = "it is dropped")] Box<dyn fmt::Debug + Send>);

/// Checks the addresses of a host, none of which the kernel may have.
fn check(addresses: &[Address]) -> Result<(), OpenError> {
    if addresses.is_empty() {
        return Err(OpenError::NoAddress);
    }
    match addresses.iter().find(|own| kernel_has(own.addr)) {
        Some(own) => Err(OpenError::Kernel(own.addr)),
        None => Ok(()),
    }
}

/// Checks the bytes of an IP packet: 576 to `most`, and 1280 at least if there is an address of
/// IPv6 (RFC 8200, section 5).
///
/// # Errors
///
/// [`OpenError::Mtu`].
#[cfg(feature = "device")]
pub fn check_mtu(mtu: u16, most: u16, addresses: &[Address]) -> Result<(), OpenError> {
    let least = if addresses.iter().any(|own| own.addr.is_ipv6()) { 1280 } else { 576 };
    if (least..=most).contains(&mtu) { Ok(()) } else { Err(OpenError::Mtu { mtu, least, most }) }
}

/// Whether an address is the kernel's, in the network namespace of this thread. What the kernel
/// sends to an address of its own, it sends from this address. (That a socket can be bound to an
/// address shows nothing: in a namespace without any address, each can be bound.)
#[must_use]
pub fn kernel_has(addr: IpAddr) -> bool {
    let any = if addr.is_ipv4() { IpAddr::from([0; 4]) } else { IpAddr::from([0; 16]) };
    // Nothing is sent: this only chooses the route.
    let from = UdpSocket::bind((any, 0)).and_then(|socket| {
        socket.connect((addr, 9))?;
        socket.local_addr()
    });
    from.is_ok_and(|from| from.ip() == addr)
}
