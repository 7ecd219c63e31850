//! A TCP/IP stack over a virtio-net device, whose received payload is in device memory.

use super::memory::{Memory, netmem_devmem};
use super::stream::{listener, netmem_devmem_listener, netmem_devmem_stream, stream};
use super::{create_here, error};
use crate::handle::{self, Kind};
use crate::options::{self, Versioned};
use crate::owned::{self, Owned};
use crate::status::{Coded, Failure, netmem_status, status, value};
use ::netmem_devmem::stream::{Bindings, InFlight, OnDevice, StreamRx, StreamTx, Streams};
use ::netmem_devmem::{Mac, Netdev};
use netmem::host::OpenError;
use netmem_inet::tcp::Config;
use netmem_inet::{Address, Host, Interface, ListenOptions, Stack, StackOptions, Time};
use netmem_packet::{Armed, Wait};
use netmem_pool::PoolOptions;
use netmem_virtio::VhostUser;
use netmem_virtio::driver::{NetOptions, QueueWait, RxMode, VirtioNet, VirtioRxQueues, VirtioSplitTx};
use std::ffi::{CStr, OsStr, c_char};
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A host on a virtio-net device: TCP, IP and Ethernet, with the payload that it receives in device
/// memory.
#[derive(Debug)]
pub struct netmem_devmem_stack(());

impl Kind for netmem_devmem_stack {
    type Value = Stacked;
    const NAME: &'static str = "netmem_devmem_stack";
    const NUMBER: u64 = 0x6e65_746d_656d_0031;
}

impl Owned for netmem_devmem_stack {}

/// Pages of the memory that received payload never occupies: those of the receive ring, and of
/// frames on their way.
const SPARE: u32 = 1024;

/// Bytes of an IP packet: the least of each family, and what a buffer of the receive ring is for.
const LEAST_V4: u16 = 576;
const LEAST_V6: u16 = 1280;
const MOST: u16 = 1500;

/// How often a poll without work asks whether the device is there, which is a system call.
const CHECK: Duration = Duration::from_millis(1);

/// A stack, with what its queues belong to.
pub(crate) struct Stacked {
    stack: Stack<StreamRx<QueueWait>, StreamTx<VirtioSplitTx<InFlight>>>,
    streams: Streams,
    address: IpAddr,
    /// Pages that a connection may occupy: all that the stack may.
    pages: u32,
    beginning: Instant,
    /// When a poll without work asks next whether the device is there.
    check_at: Time,
    /// Whether the connections were told that the device is gone.
    gone: bool,
    _netdev: Netdev<VirtioRxQueues>,
    net: VirtioNet,
}

impl Stacked {
    fn new(memory: &Memory, device: VhostUser, interface: Interface, pages: u32) -> Result<Self, Failure> {
        let binding = &memory.binding;
        let options = NetOptions::new(RxMode::Small).tx_pages(2048).device_memory(binding.region().clone());
        let (net, pairs) = VirtioNet::probe(device, options)?;
        let unsupported = |text: &str| Coded::failure(netmem_status::NETMEM_ERR_UNSUPPORTED, text);
        let pair = pairs.into_iter().next().ok_or_else(|| unsupported("the device has no queue"))?;
        let domain = net.domain().ok_or_else(|| unsupported("the device reads no memory by address"))?;
        let queues = VirtioRxQueues::new([pair.rx]);
        let bindings = Bindings::new();
        bindings.add(binding);
        let queue = queues.wait(0).ok_or_else(|| unsupported("the device has no queue"))?;
        let rx = StreamRx::new(queue, &bindings);
        let mut netdev = Netdev::new(queues);
        netdev.attach(binding, &[0]).map_err(|why| Coded::failure(netmem_status::NETMEM_ERR_SYSTEM, why))?;
        let tx = StreamTx::new(pair.tx.into_split(), domain);
        let headers = Arc::new(net.tx_pool(PoolOptions::new("headers"))?);
        let beginning = Instant::now();
        let options = StackOptions { pages, ..StackOptions::default() };
        let address = interface.addresses.first().map_or(Ipv4Addr::UNSPECIFIED.into(), |address| address.addr);
        let host = Host::<OnDevice>::new(interface);
        let mut stack = Stack::new(&host, rx, tx, headers, options, Time::ZERO).map_err(Failure::System)?;
        let streams = Streams::new(&mut stack);
        let (check_at, gone) = (Time::ZERO, false);
        Ok(Self { stack, streams, address, pages, beginning, check_at, gone, _netdev: netdev, net })
    }

    fn now(&self) -> Time {
        Time::ZERO + self.beginning.elapsed()
    }

    fn poll(&mut self) -> Result<usize, Failure> {
        let now = self.now();
        let work = self.stack.poll(now);
        if work > 0 || !self.gone && now < self.check_at {
            return Ok(work);
        }
        self.check_at = now + CHECK;
        // The end of the device's connection wakes a thread that sleeps. A thread that only polls
        // asks for it.
        match self.stack.check() {
            Ok(()) if !self.gone && self.net.is_connected() => Ok(0),
            Ok(()) => Err(self.stop("the device has closed the connection")),
            Err(why) => Err(self.stop(why)),
        }
    }

    /// Ends all connections, once.
    #[cold]
    fn stop(&mut self, why: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Failure {
        if !self.gone {
            self.gone = true;
            self.stack.handle_device_gone();
            self.stack.poll(self.now());
        }
        Coded::failure(netmem_status::NETMEM_ERR_STOPPED, why)
    }

    /// Nanoseconds until the stack must be polled: 0 if there is work, -1 if it can wait for ever.
    fn arm(&mut self) -> Result<i64, Failure> {
        let left = self.stack.poll_timeout().map(|at| at.since(self.now()));
        if left.is_some_and(|left| left.is_zero()) {
            return Ok(0);
        }
        match self.stack.arm() {
            Ok(Armed::Waits) => Ok(left.map_or(-1, |left| i64::try_from(left.as_nanos()).unwrap_or(i64::MAX))),
            Ok(Armed::Work) => Ok(0),
            Err(why) => Err(self.stop(why)),
        }
    }

    fn config(&self) -> Config {
        Config { budget: self.pages, ..Config::default() }
    }
}

/// How a stack is opened. Set `size` to sizeof(netmem_devmem_stack_options), and the rest to zero
/// where the default will do.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct netmem_devmem_stack_options {
    /// sizeof(netmem_devmem_stack_options)
    pub size: usize,
    /// The path of the device's vhost-user socket, at which it listens, such as that of
    /// `netmem device --listen`.
    pub socket: *const c_char,
    /// This host's address and the length of its network's prefix: "192.0.2.2/24".
    pub address: *const c_char,
    /// The interface's Ethernet address; zeros: one that is made of `address`.
    pub mac: [u8; 6],
    /// The largest IP packet, in bytes: 576 to 1500, and 1280 at least with an address of IPv6; 0:
    /// 1500.
    pub mtu: u16,
    /// Pages of the memory that received payload may occupy, with what the program holds: at most
    /// all less 1024, which is what 0 means.
    pub pages: u32,
    /// 1 if the device is not Netmem's own: then the socket's device serves no control queue.
    pub foreign: u8,
    /// Zero.
    pub reserved: [u8; 3],
}

// SAFETY: repr(C), `size` is first, integers and pointers.
unsafe impl Versioned for netmem_devmem_stack_options {
    const NAME: &'static str = "netmem_devmem_stack_options";
    const LEAST: usize = 40;
}

/// # Safety
///
/// Null, or a string that ends with a zero byte and lives during `'a`.
unsafe fn text<'a>(from: *const c_char, name: &'static str) -> Result<&'a CStr, Failure> {
    if from.is_null() {
        return Err(Failure::null(name));
    }
    // SAFETY: as the caller promises.
    Ok(unsafe { CStr::from_ptr(from) })
}

fn parsed<T: std::str::FromStr<Err: std::fmt::Display>>(text: &CStr) -> Result<T, Failure> {
    let text = text.to_string_lossy();
    text.parse().map_err(|why| Failure::Argument(format!("{text}: {why}")))
}

/// The interface of the options.
fn interface(given: &netmem_devmem_stack_options, address: Address) -> Result<Interface, Failure> {
    let mac = if given.mac == [0; 6] {
        let bytes = match address.addr {
            IpAddr::V4(addr) => addr.octets(),
            IpAddr::V6(addr) => u128::from(addr).to_be_bytes().last_chunk().copied().unwrap_or_default(),
        };
        [2, 0, bytes[0], bytes[1], bytes[2], bytes[3]]
    } else {
        given.mac
    };
    if mac[0] & 1 == 1 {
        return Err(Failure::Argument(format!("{} is the Ethernet address of a group", Mac(mac))));
    }
    let least = if address.addr.is_ipv6() { LEAST_V6 } else { LEAST_V4 };
    let mtu = if given.mtu == 0 { MOST } else { given.mtu };
    if !(least..=MOST).contains(&mtu) {
        return Err(OpenError::Mtu { mtu, least, most: MOST }.into());
    }
    Ok(Interface { mac: Mac(mac), mtu, addresses: vec![address] })
}

/// Connects to a virtio-net device, lets its receive queue receive into the memory, and opens a
/// stack on it. The stack belongs to the calling thread, with all its listeners and streams. Its
/// first 1024 pages are for the ring, so the memory has more than 4 MiB.
///
/// The program drives it: netmem_devmem_stack_poll does all that is due. It is to be called again
/// when netmem_devmem_stack_fd is readable, after the time of netmem_devmem_stack_arm, and after
/// calls that send.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_ARGUMENT
/// (address, MTU, pages, too little memory), NETMEM_ERR_NOT_FOUND (no device listens there),
/// NETMEM_ERR_PRIVILEGE (the socket's file), NETMEM_ERR_UNSUPPORTED (a device that cannot receive
/// into device memory), NETMEM_ERR_NO_MEMORY, NETMEM_ERR_SYSTEM (also: the device has refused the
/// memory).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_devmem_stack_open(
    memory: *const netmem_devmem,
    options: *const netmem_devmem_stack_options,
    stack: *mut *mut netmem_devmem_stack,
) -> netmem_status {
    status(|| {
        let out = NonNull::new(stack).ok_or_else(|| Failure::null("stack"))?;
        // SAFETY: as the header says.
        let (memory, given) = unsafe { (handle::get(memory)?, options::read(options)?) };
        if given.reserved != [0; 3] || given.foreign > 1 {
            return Err(Failure::Argument(
                "netmem_devmem_stack_options: foreign is above 1, or reserved not zero".into(),
            ));
        }
        // SAFETY: as the header says.
        let (socket, address) = unsafe { (text(given.socket, "socket")?, text(given.address, "address")?) };
        let interface = interface(&given, parsed(address)?)?;
        let have = memory.binding.region().pages();
        let most = have.saturating_sub(SPARE);
        let pages = if given.pages == 0 { most } else { given.pages };
        if pages == 0 || pages > most {
            let text = format!("{pages} pages for received payload, of {have} of which {SPARE} are for the ring");
            return Err(Failure::Argument(text));
        }
        let path = Path::new(OsStr::from_bytes(socket.to_bytes()));
        let connected = UnixStream::connect(path).map_err(|why| error::connect(path, why))?;
        let device =
            if given.foreign == 1 { VhostUser::from_stream(connected) } else { VhostUser::own_device(connected) };
        let device = device.map_err(|why| Coded::failure(netmem_status::NETMEM_ERR_SYSTEM, why))?;
        let made = create_here(Stacked::new(memory, device, interface, pages)?);
        // SAFETY: the caller has room for a pointer there.
        unsafe { out.write(made) };
        Ok(())
    })
}

/// Does all work that is due: receives, fires timers, sends, and collects what the device has
/// completed. Never blocks. `work` gets how much there was, unless it is null: not 0 if the next
/// call may find more. A poll without work asks whether the device is there, at most once a
/// millisecond, by a system call.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_STOPPED (the device is
/// gone; all connections have ended).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_devmem_stack_poll(stack: *mut netmem_devmem_stack, work: *mut usize) -> netmem_status {
    status(|| {
        // SAFETY: as the header says.
        let done = unsafe { owned::get_mut(stack) }?.poll()?;
        if let Some(work) = NonNull::new(work) {
            // SAFETY: the caller has room for a number there.
            unsafe { work.write(done) };
        }
        Ok(())
    })
}

/// The descriptor on which to wait for work, with poll, select or epoll, for POLLIN: readable after
/// netmem_devmem_stack_arm when frames have arrived, the device is gone, or tokens were returned
/// for which a peer waits. It is the stack's, and the same until it is closed. Never read, write or
/// close it. -1 with a text for misuse.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_devmem_stack_fd(stack: *const netmem_devmem_stack) -> i32 {
    // SAFETY: as the header says.
    value(|| Ok(unsafe { owned::peek(stack) }?.stack.as_fd().as_raw_fd())).unwrap_or(-1)
}

/// Asks for a wake-up, and writes to `nanoseconds` how long to sleep at most, until the next timer:
/// 0 if there is work already, -1 if there is no timer. A thread that was woken calls
/// netmem_devmem_stack_disarm and netmem_devmem_stack_poll. A few system calls.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_STOPPED (the device is
/// gone; all connections have ended).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_devmem_stack_arm(
    stack: *mut netmem_devmem_stack,
    nanoseconds: *mut i64,
) -> netmem_status {
    status(|| {
        let out = NonNull::new(nanoseconds).ok_or_else(|| Failure::null("nanoseconds"))?;
        // SAFETY: as the header says.
        let left = unsafe { owned::get_mut(stack) }?.arm()?;
        // SAFETY: the caller has room for it there.
        unsafe { out.write(left) };
        Ok(())
    })
}

/// Ends the request for a wake-up. Misuse leaves a text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_devmem_stack_disarm(stack: *mut netmem_devmem_stack) {
    status(|| {
        // SAFETY: as the header says.
        unsafe { owned::get_mut(stack) }?.stack.disarm();
        Ok(())
    });
}

/// Listens on a port of the stack's address.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_ARGUMENT (port 0),
/// NETMEM_ERR_IN_USE (the port).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_devmem_listen(
    stack: *mut netmem_devmem_stack,
    port: u16,
    made: *mut *mut netmem_devmem_listener,
) -> netmem_status {
    status(|| {
        let out = NonNull::new(made).ok_or_else(|| Failure::null("made"))?;
        if port == 0 {
            return Err(Failure::Argument("port 0".into()));
        }
        // SAFETY: as the header says.
        let this = unsafe { owned::get_mut(stack) }?;
        let options = ListenOptions { connection: this.config(), ..ListenOptions::default() };
        let listens = this.streams.listen((this.address, port).into(), options)?;
        // SAFETY: the caller has room for a pointer there.
        unsafe { out.write(listener(listens)) };
        Ok(())
    })
}

/// Begins to connect to a peer on the stack's network: `192.0.2.1:9000`, `[fd00::1]:9000`. The
/// stream can be used at once: it receives nothing, and what it sends leaves when the peer has
/// answered.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_ARGUMENT (address),
/// NETMEM_ERR_UNREACHABLE (no route), NETMEM_ERR_IN_USE (no port is free), NETMEM_ERR_TOO_MANY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_devmem_connect(
    stack: *mut netmem_devmem_stack,
    peer: *const c_char,
    made: *mut *mut netmem_devmem_stream,
) -> netmem_status {
    status(|| {
        let out = NonNull::new(made).ok_or_else(|| Failure::null("made"))?;
        // SAFETY: as the header says.
        let peer = parsed(unsafe { text(peer, "peer") }?)?;
        // SAFETY: as the header says.
        let this = unsafe { owned::get_mut(stack) }?;
        let connects = this.streams.connect(peer, &this.config())?;
        // SAFETY: the caller has room for a pointer there.
        unsafe { out.write(stream(connects)) };
        Ok(())
    })
}

/// What a stack received, sent and lost. Set `size` to sizeof(netmem_devmem_stack_stats).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct netmem_devmem_stack_stats {
    /// sizeof(netmem_devmem_stack_stats)
    pub size: usize,
    /// frames received
    pub received: u64,
    /// frames sent
    pub sent: u64,
    /// frames dropped: wrong headers, or of protocols that are not known
    pub malformed: u64,
    /// segments dropped: a wrong checksum
    pub wrong_checksum: u64,
    /// segments dropped: in device memory, and the device has verified no checksum
    pub unverified: u64,
    /// frames dropped: headers in device memory
    pub unreadable: u64,
    /// frames dropped: payload in pages of other memory
    pub other_memory: u64,
    /// frames not sent because there was no page for headers
    pub no_page: u64,
    /// connections now, with those that are closing
    pub connections: u64,
    /// pages now of payload that waits, and of payload that the program holds
    pub pages: u64,
}

// SAFETY: repr(C), `size` is first, integers.
unsafe impl Versioned for netmem_devmem_stack_stats {
    const NAME: &'static str = "netmem_devmem_stack_stats";
    const LEAST: usize = 88;
}

/// Counts of the stack.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_devmem_stack_get_stats(
    stack: *mut netmem_devmem_stack,
    stats: *mut netmem_devmem_stack_stats,
) -> netmem_status {
    status(|| {
        // SAFETY: as the header says.
        let this = &mut unsafe { owned::get_mut(stack) }?.stack;
        let now = this.stats();
        let written = netmem_devmem_stack_stats {
            size: size_of::<netmem_devmem_stack_stats>(),
            received: now.received,
            sent: now.sent,
            malformed: now.malformed,
            wrong_checksum: now.wrong_checksum,
            unverified: now.unverified,
            unreadable: now.unreadable,
            other_memory: this.queues().0.foreign(),
            no_page: now.no_page,
            connections: this.connections() as u64,
            pages: this.pages().into(),
        };
        // SAFETY: as the header says.
        unsafe { options::write(stats, &written) }
    })
}

/// Closes the stack. What its streams have sent is delivered first, for at most `milliseconds`, in
/// which the call drives the stack; connections that are left then are reset. Streams and listeners
/// that are still open have NETMEM_ERR_CLOSED from now on, and are closed as before. The memory
/// can be given to another stack.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD. NETMEM_ERR_STOPPED: the device
/// was gone before all was sent; the stack is closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_devmem_stack_close(
    stack: *mut netmem_devmem_stack,
    milliseconds: u32,
) -> netmem_status {
    status(|| {
        // SAFETY: as the header says.
        let mut this = unsafe { owned::close(stack) }?;
        let (beginning, deadline) = (this.beginning, this.now() + Duration::from_millis(milliseconds.into()));
        let finished = this.stack.finish(deadline, || Time::ZERO + beginning.elapsed());
        finished.map(drop).map_err(|why| Coded::failure(netmem_status::NETMEM_ERR_STOPPED, why))
    })
}
