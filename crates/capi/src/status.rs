//! Statuses, the text of a thread's last failure, and the border that no panic crosses.

use netmem::device::ConnectError;
use netmem::device::port::{PortError, TapError};
use netmem::host::OpenError;
use netmem::tcp::{self, SocketError};
use netmem_pool::{PoolError, RegionError, WaitError};
use netmem_refs::{KillError, NoMemory};
use netmem_virtio::VhostUserError;
use netmem_virtio::device::DeviceError;
use netmem_virtio::driver::{self, NetError};
use netmem_xsk::helper::{HelperError, Refusal};
use netmem_xsk::{AttachError, NoLaunchTimes, QueueStopped, XskError};
use rustix::io::Errno;
use std::any::Any;
use std::cell::RefCell;
use std::error::Error;
use std::ffi::{CString, c_char};
use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use thiserror::Error;

/// What a call ended with.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum netmem_status {
    /// It did what it says.
    NETMEM_OK = 0,
    /// A pointer is null that must not be.
    NETMEM_ERR_NULL = 1,
    /// The `size` of a structure is not that of any version of it, or a field that this library does
    /// not know is not zero.
    NETMEM_ERR_STRUCT_SIZE = 2,
    /// An argument has a value that is not valid.
    NETMEM_ERR_ARGUMENT = 3,
    /// The handle was closed, or is of another kind. Found by builds with debug assertions.
    NETMEM_ERR_HANDLE = 4,
    /// The handle belongs to another thread. Found by builds with debug assertions.
    NETMEM_ERR_THREAD = 5,
    /// The system has no memory, or refuses to lock or to map it.
    NETMEM_ERR_NO_MEMORY = 6,
    /// The region has fewer pages than were asked for.
    NETMEM_ERR_NO_PAGES = 7,
    /// The fragment has another holder, so it cannot be written.
    NETMEM_ERR_SHARED = 8,
    /// Bytes beyond the end of a fragment, or of device memory.
    NETMEM_ERR_RANGE = 9,
    /// A system call failed.
    NETMEM_ERR_SYSTEM = 10,
    /// The pool ended while the thread waited, or the stack of the listener or connection was
    /// closed or shut down, or netmem_stack_open_xsk failed after it had closed the queues.
    NETMEM_ERR_CLOSED = 11,
    /// The handle is in another state: the count is killed already, or not killed, or has reached
    /// zero; the device listens already; the memory was unbound.
    NETMEM_ERR_STATE = 12,
    /// The library panicked. It is a defect of the library: report it with the text.
    NETMEM_ERR_PANIC = 13,
    /// The queue or the stack has stopped, and neither receives nor sends any more: its interface,
    /// device or tap is gone, or a wrong value was written to a ring. Close it; a virtio queue can
    /// be reconnected.
    NETMEM_ERR_STOPPED = 14,
    /// The queue will never send this frame, or the connection this fragment.
    NETMEM_ERR_UNSENDABLE = 15,
    /// A privilege is missing. The text names it.
    NETMEM_ERR_PRIVILEGE = 16,
    /// In use: the interface has an XDP program already, or its queue an AF_XDP socket; another
    /// process has the tap; the device has another front end, or the path another socket.
    NETMEM_ERR_BUSY = 17,
    /// There is no such interface, queue or file, or no process listens on the socket.
    NETMEM_ERR_NOT_FOUND = 18,
    /// The kernel, the interface's driver or the device does not support what was asked for.
    NETMEM_ERR_UNSUPPORTED = 19,
    /// The peer sends no more: the end of the stream.
    NETMEM_ERR_END = 20,
    /// The peer's host refused the connection.
    NETMEM_ERR_REFUSED = 21,
    /// The peer reset the connection.
    NETMEM_ERR_RESET = 22,
    /// The peer did not answer in time.
    NETMEM_ERR_TIMED_OUT = 23,
    /// No route leads to the peer, or a router or the peer's host reports that it cannot be
    /// reached.
    NETMEM_ERR_UNREACHABLE = 24,
    /// This direction of the connection was shut down by the program.
    NETMEM_ERR_SHUT_DOWN = 25,
    /// Another listener or connection of the stack has the port, or no port is left.
    NETMEM_ERR_IN_USE = 26,
    /// The stack has as many connections as its options allow.
    NETMEM_ERR_TOO_MANY = 27,
    /// The device verifies no checksums of the peer's segments, so their payload is dropped.
    NETMEM_ERR_UNVERIFIED = 28,
}

/// Why a call failed.
#[derive(Debug, Error)]
pub(crate) enum Failure {
    #[error("{0} is null")]
    Null(&'static str),
    #[error("{name}.size is {size}, this library knows {least} to {most} bytes; set it to sizeof({name})")]
    StructSize { name: &'static str, size: usize, least: usize, most: usize },
    #[error(
        "{name} has a field that this library does not know, at byte {at}, and it is not zero; use a newer library"
    )]
    UnknownField { name: &'static str, at: usize },
    #[error("{0}")]
    Argument(String),
    #[error("this is no {0}, or it was closed")]
    Handle(&'static str),
    #[error("the {0} belongs to another thread, the first that used it")]
    Thread(&'static str),
    #[error("the fragment is empty: it was released, or never allocated")]
    Empty,
    #[error("the count has holders: kill it, and put the references")]
    Held,
    #[error("the fragment has another holder")]
    Shared,
    #[error("{len} bytes at {offset} of a fragment of {have}")]
    Range { offset: usize, len: usize, have: usize },
    #[error(transparent)]
    Region(#[from] RegionError),
    #[error(transparent)]
    Pool(#[from] PoolError),
    #[error(transparent)]
    Wait(#[from] WaitError),
    #[error(transparent)]
    NoMemory(#[from] NoMemory),
    #[error(transparent)]
    Kill(#[from] KillError),
    #[error(transparent)]
    Xsk(Box<XskError>),
    #[error(transparent)]
    Attach(Box<AttachError>),
    #[error(transparent)]
    NoLaunchTimes(NoLaunchTimes),
    #[error("no helper listens on the socket")]
    NoHelper(#[source] io::Error),
    #[error(transparent)]
    Helper(Box<HelperError>),
    #[error(transparent)]
    Net(Box<NetError>),
    #[error(transparent)]
    Device(Box<DeviceError>),
    #[error("a system call failed")]
    System(#[source] io::Error),
    #[error("the device listens already")]
    Listens,
    #[error(transparent)]
    Queue(io::Error),
    #[error("the queue cannot send the frame: {0}")]
    Unsendable(&'static str),
    #[error(transparent)]
    Open(Box<OpenError>),
    #[error(transparent)]
    Stopped(io::Error),
    #[error("the system has too few descriptors or too little memory for a stack, and the queues were closed: {0}")]
    QueuesClosed(io::Error),
    #[error(transparent)]
    Socket(SocketError),
    #[error("the peer sends no more")]
    End,
    #[error("the library panicked: {0}")]
    Panic(String),
    #[error(transparent)]
    Coded(Coded),
}

/// An error with its status, which only the module that it is from knows.
#[derive(Debug)]
pub(crate) struct Coded {
    status: netmem_status,
    error: Box<dyn Error + Send + Sync>,
}

impl Coded {
    #[cold]
    pub(crate) fn failure(status: netmem_status, error: impl Into<Box<dyn Error + Send + Sync>>) -> Failure {
        Failure::Coded(Self { status, error: error.into() })
    }
}

impl fmt::Display for Coded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl Error for Coded {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.error.source()
    }
}

impl From<OpenError> for Failure {
    fn from(error: OpenError) -> Self {
        Self::Open(Box::new(error))
    }
}

impl From<XskError> for Failure {
    fn from(error: XskError) -> Self {
        Self::Xsk(Box::new(error))
    }
}

impl From<NetError> for Failure {
    fn from(error: NetError) -> Self {
        Self::Net(Box::new(error))
    }
}

impl From<VhostUserError> for Failure {
    fn from(error: VhostUserError) -> Self {
        NetError::from(error).into()
    }
}

impl From<DeviceError> for Failure {
    fn from(error: DeviceError) -> Self {
        Self::Device(Box::new(error))
    }
}

impl From<HelperError> for Failure {
    fn from(error: HelperError) -> Self {
        Self::Helper(Box::new(error))
    }
}

impl From<AttachError> for Failure {
    fn from(error: AttachError) -> Self {
        Self::Attach(Box::new(error))
    }
}

/// For checks of hot paths: an error is made when it occurs. One that is made before and dropped
/// costs as much as the check's function.
impl Failure {
    #[cold]
    pub(crate) fn null(name: &'static str) -> Self {
        Self::Null(name)
    }

    #[cold]
    pub(crate) fn handle(name: &'static str) -> Self {
        Self::Handle(name)
    }

    #[cold]
    pub(crate) fn empty() -> Self {
        Self::Empty
    }

    fn status(&self) -> netmem_status {
        use netmem_status::*;
        match self {
            Self::Null(_) => NETMEM_ERR_NULL,
            Self::StructSize { .. } | Self::UnknownField { .. } => NETMEM_ERR_STRUCT_SIZE,
            Self::Argument(_) | Self::Empty => NETMEM_ERR_ARGUMENT,
            Self::Handle(_) => NETMEM_ERR_HANDLE,
            Self::Thread(_) => NETMEM_ERR_THREAD,
            Self::Shared => NETMEM_ERR_SHARED,
            Self::Range { .. } => NETMEM_ERR_RANGE,
            Self::Region(error) => region(error),
            Self::Pool(error) => pool(error),
            Self::NoMemory(_) => NETMEM_ERR_NO_MEMORY,
            Self::Wait(WaitError::Closed | WaitError::Ended | WaitError::DeviceGone) => NETMEM_ERR_CLOSED,
            Self::Wait(_) => NETMEM_ERR_SYSTEM,
            Self::Held | Self::Listens | Self::Kill(KillError::AlreadyDying) => NETMEM_ERR_STATE,
            Self::Kill(_) => NETMEM_ERR_SYSTEM,
            Self::Xsk(error) => xsk(error),
            Self::Attach(error) => attach(error),
            Self::NoLaunchTimes(_) => NETMEM_ERR_UNSUPPORTED,
            Self::NoHelper(error) => connecting(error),
            Self::Helper(error) => helper(error),
            Self::Net(error) => net(error),
            Self::Device(error) => device(error),
            Self::System(_) => NETMEM_ERR_SYSTEM,
            Self::Queue(error) if has_stopped(error) => NETMEM_ERR_STOPPED,
            Self::Queue(_) => NETMEM_ERR_SYSTEM,
            Self::Unsendable(..) => NETMEM_ERR_UNSENDABLE,
            Self::Open(error) => open(error),
            Self::Stopped(_) => NETMEM_ERR_STOPPED,
            Self::QueuesClosed(_) => NETMEM_ERR_CLOSED,
            Self::Socket(error) => socket(error),
            Self::End => NETMEM_ERR_END,
            Self::Panic(_) => NETMEM_ERR_PANIC,
            Self::Coded(coded) => coded.status,
        }
    }
}

/// Whether the error says that a queue has stopped.
fn has_stopped(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|reason| reason.is::<QueueStopped>() || reason.is::<driver::QueueStopped>())
}

fn pool(error: &PoolError) -> netmem_status {
    use netmem_status::*;
    match error {
        PoolError::Region(error) => region(error),
        PoolError::NoPages | PoolError::Prefill { .. } => NETMEM_ERR_NO_PAGES,
        PoolError::TooManyMagazines { .. } => NETMEM_ERR_ARGUMENT,
        PoolError::NoMemory(_) => NETMEM_ERR_NO_MEMORY,
        _ => NETMEM_ERR_SYSTEM,
    }
}

fn xsk(error: &XskError) -> netmem_status {
    use netmem_status::*;
    match error {
        XskError::Chunk { .. } | XskError::Headroom { .. } | XskError::RingSize { .. } | XskError::Provider => {
            NETMEM_ERR_ARGUMENT
        }
        XskError::Pool(error) => pool(error),
        XskError::Region(error) => region(error),
        XskError::Attach(error) => attach(error),
        XskError::Pages { .. } => NETMEM_ERR_NO_PAGES,
        XskError::Memlock { .. } => NETMEM_ERR_NO_MEMORY,
        XskError::Missing(_) | XskError::Privilege { .. } => NETMEM_ERR_PRIVILEGE,
        XskError::Busy { .. } => NETMEM_ERR_BUSY,
        XskError::NoInterface { .. } | XskError::NoQueue { .. } | XskError::NotGranted { .. } => NETMEM_ERR_NOT_FOUND,
        XskError::Unsupported { .. } => NETMEM_ERR_UNSUPPORTED,
        _ => NETMEM_ERR_SYSTEM,
    }
}

fn attach(error: &AttachError) -> netmem_status {
    use netmem_status::*;
    match error {
        AttachError::NoInterface(_) | AttachError::Queue { .. } => NETMEM_ERR_NOT_FOUND,
        AttachError::Pinned { .. } | AttachError::OtherInterface { .. } => NETMEM_ERR_ARGUMENT,
        AttachError::Privilege(_) => NETMEM_ERR_PRIVILEGE,
        AttachError::Occupied { .. } => NETMEM_ERR_BUSY,
        AttachError::Refused { .. } | AttachError::Mode(_) => NETMEM_ERR_UNSUPPORTED,
        _ => NETMEM_ERR_SYSTEM,
    }
}

/// Opening a stack.
fn open(error: &OpenError) -> netmem_status {
    use netmem_status::*;
    match error {
        OpenError::NoAddress | OpenError::Kernel(_) | OpenError::Mtu { .. } | OpenError::Rules(_) => {
            NETMEM_ERR_ARGUMENT
        }
        OpenError::Port(PortError::Tap { source, .. }) => match source {
            TapError::Name | TapError::Queues { .. } => NETMEM_ERR_ARGUMENT,
            TapError::Missing => NETMEM_ERR_UNSUPPORTED,
            TapError::NotPermitted => NETMEM_ERR_PRIVILEGE,
            TapError::Taken => NETMEM_ERR_BUSY,
            _ => NETMEM_ERR_SYSTEM,
        },
        OpenError::Connect(ConnectError::Driver(error)) | OpenError::Net(error) => net(error),
        OpenError::Interface { source, .. } if is_missing(source) => NETMEM_ERR_NOT_FOUND,
        OpenError::Xsk(error) => xsk(error),
        _ => NETMEM_ERR_SYSTEM,
    }
}

fn helper(error: &HelperError) -> netmem_status {
    use netmem_status::*;
    match error {
        HelperError::Refused { why: Refusal::Busy, .. } => NETMEM_ERR_BUSY,
        HelperError::Refused { why: Refusal::User, .. } => NETMEM_ERR_PRIVILEGE,
        HelperError::Refused { why: Refusal::Interface, .. } => NETMEM_ERR_NOT_FOUND,
        HelperError::Refused { why: Refusal::Version, .. } | HelperError::Version { .. } => NETMEM_ERR_UNSUPPORTED,
        _ => NETMEM_ERR_SYSTEM,
    }
}

/// Why a Unix socket could not be connected.
fn connecting(error: &io::Error) -> netmem_status {
    match error.kind() {
        io::ErrorKind::PermissionDenied => netmem_status::NETMEM_ERR_PRIVILEGE,
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => netmem_status::NETMEM_ERR_NOT_FOUND,
        _ => netmem_status::NETMEM_ERR_SYSTEM,
    }
}

fn net(error: &NetError) -> netmem_status {
    use netmem_status::*;
    match error {
        NetError::Backend(error) => backend(error),
        NetError::Region(error) => region(error),
        NetError::Pool(error) => pool(error),
        NetError::TxPages { .. } => NETMEM_ERR_NO_PAGES,
        NetError::RingSize { .. }
        | NetError::FrameSize { .. }
        | NetError::Headroom { .. }
        | NetError::Pairs { .. }
        | NetError::DeviceMemory { .. } => NETMEM_ERR_ARGUMENT,
        NetError::NoDeviceMemory | NetError::NoMemorySlots | NetError::MemorySlots { .. } => NETMEM_ERR_UNSUPPORTED,
        _ => NETMEM_ERR_SYSTEM,
    }
}

/// Whether the kernel knows no such interface.
fn is_missing(error: &io::Error) -> bool {
    let missing = [Errno::NOENT, Errno::NXIO, Errno::NODEV].map(Errno::raw_os_error);
    error.raw_os_error().is_some_and(|number| missing.contains(&number)) || error.kind() == io::ErrorKind::NotFound
}

/// Calls of listeners and connections.
pub(crate) fn socket(error: &SocketError) -> netmem_status {
    use netmem_status::*;
    match error {
        SocketError::Closed(tcp::Error::Refused) | SocketError::Refused => NETMEM_ERR_REFUSED,
        SocketError::Closed(tcp::Error::TimedOut) => NETMEM_ERR_TIMED_OUT,
        SocketError::Closed(tcp::Error::Unreachable(_)) | SocketError::NoRoute => NETMEM_ERR_UNREACHABLE,
        SocketError::Closed(tcp::Error::DeviceGone) => NETMEM_ERR_STOPPED,
        SocketError::Closed(tcp::Error::Reset) => NETMEM_ERR_RESET,
        // The program's abort ends the handle. This is that of the stack's shutdown.
        SocketError::Closed(tcp::Error::Aborted) => NETMEM_ERR_CLOSED,
        SocketError::ShutDown => NETMEM_ERR_SHUT_DOWN,
        SocketError::InUse | SocketError::NoPort => NETMEM_ERR_IN_USE,
        SocketError::NotOurs => NETMEM_ERR_ARGUMENT,
        SocketError::TooMany => NETMEM_ERR_TOO_MANY,
        SocketError::StackGone => NETMEM_ERR_CLOSED,
        _ => NETMEM_ERR_SYSTEM,
    }
}

fn backend(error: &VhostUserError) -> netmem_status {
    use netmem_status::*;
    match error {
        VhostUserError::Connect { source, .. } | VhostUserError::Listen { source, .. } => connecting(source),
        VhostUserError::TooFewQueues { .. } => NETMEM_ERR_NOT_FOUND,
        VhostUserError::Backlog { .. } | VhostUserError::Busy | VhostUserError::Occupied { .. } => NETMEM_ERR_BUSY,
        VhostUserError::MissingFeature { .. }
        | VhostUserError::FeaturesRefused { .. }
        | VhostUserError::TooManyRegions { .. }
        | VhostUserError::NoRxTables => NETMEM_ERR_UNSUPPORTED,
        VhostUserError::RingNumber { .. } => NETMEM_ERR_ARGUMENT,
        _ => NETMEM_ERR_SYSTEM,
    }
}

fn device(error: &DeviceError) -> netmem_status {
    use netmem_status::*;
    match error {
        DeviceError::Pairs { .. } | DeviceError::Workers { .. } => NETMEM_ERR_ARGUMENT,
        DeviceError::Busy => NETMEM_ERR_BUSY,
        _ => NETMEM_ERR_SYSTEM,
    }
}

fn region(error: &RegionError) -> netmem_status {
    match error {
        RegionError::System { .. } | RegionError::Memlock { .. } | RegionError::TooLittle { .. } => {
            netmem_status::NETMEM_ERR_NO_MEMORY
        }
        RegionError::File { .. } | RegionError::Node { .. } => netmem_status::NETMEM_ERR_SYSTEM,
        _ => netmem_status::NETMEM_ERR_ARGUMENT,
    }
}

thread_local! {
    static TEXT: RefCell<CString> = RefCell::default();
}

/// Records why a call of this thread failed.
#[cold]
pub(crate) fn record(failure: &Failure) -> netmem_status {
    let mut text = failure.to_string();
    let mut source = failure.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    // The verifier's log has lines.
    text = text.replace('\n', " ");
    text.retain(|c| c != '\0');
    // A thread that is ending has no text any more.
    let _ = TEXT.try_with(|kept| *kept.borrow_mut() = CString::new(text).unwrap_or_default());
    failure.status()
}

#[cold]
fn panicked(payload: &(dyn Any + Send)) -> Failure {
    let text = payload.downcast_ref::<String>().map(String::as_str).or_else(|| payload.downcast_ref::<&str>().copied());
    Failure::Panic(text.unwrap_or("without a text").to_owned())
}

/// Runs what may panic, which becomes a failure.
#[inline]
pub(crate) fn caught<R>(body: impl FnOnce() -> Result<R, Failure>) -> Result<R, Failure> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| Err(panicked(&*payload)))
}

/// Runs the body of a function of the header. A panic in it becomes a failure: to unwind into C is
/// undefined.
#[inline]
pub(crate) fn value<R>(body: impl FnOnce() -> Result<R, Failure>) -> Result<R, netmem_status> {
    caught(body).map_err(|failure| record(&failure))
}

/// [`value`] of a function that returns a status.
#[inline]
pub(crate) fn status(body: impl FnOnce() -> Result<(), Failure>) -> netmem_status {
    value(body).err().unwrap_or(netmem_status::NETMEM_OK)
}

/// The reason of the last failure on this thread, in one line without a newline; empty if there was
/// none. Valid until the next failure on this thread. Never null.
#[unsafe(no_mangle)]
pub extern "C" fn netmem_error_text() -> *const c_char {
    TEXT.try_with(|kept| kept.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// The name of a status, such as "NETMEM_ERR_NULL". `status` is an int, so that a value that this
/// library does not know is answered, too. Static; never null.
#[unsafe(no_mangle)]
pub extern "C" fn netmem_status_name(status: i32) -> *const c_char {
    let name = match status {
        0 => c"NETMEM_OK",
        1 => c"NETMEM_ERR_NULL",
        2 => c"NETMEM_ERR_STRUCT_SIZE",
        3 => c"NETMEM_ERR_ARGUMENT",
        4 => c"NETMEM_ERR_HANDLE",
        5 => c"NETMEM_ERR_THREAD",
        6 => c"NETMEM_ERR_NO_MEMORY",
        7 => c"NETMEM_ERR_NO_PAGES",
        8 => c"NETMEM_ERR_SHARED",
        9 => c"NETMEM_ERR_RANGE",
        10 => c"NETMEM_ERR_SYSTEM",
        11 => c"NETMEM_ERR_CLOSED",
        12 => c"NETMEM_ERR_STATE",
        13 => c"NETMEM_ERR_PANIC",
        14 => c"NETMEM_ERR_STOPPED",
        15 => c"NETMEM_ERR_UNSENDABLE",
        16 => c"NETMEM_ERR_PRIVILEGE",
        17 => c"NETMEM_ERR_BUSY",
        18 => c"NETMEM_ERR_NOT_FOUND",
        19 => c"NETMEM_ERR_UNSUPPORTED",
        20 => c"NETMEM_ERR_END",
        21 => c"NETMEM_ERR_REFUSED",
        22 => c"NETMEM_ERR_RESET",
        23 => c"NETMEM_ERR_TIMED_OUT",
        24 => c"NETMEM_ERR_UNREACHABLE",
        25 => c"NETMEM_ERR_SHUT_DOWN",
        26 => c"NETMEM_ERR_IN_USE",
        27 => c"NETMEM_ERR_TOO_MANY",
        28 => c"NETMEM_ERR_UNVERIFIED",
        _ => c"unknown status",
    };
    name.as_ptr()
}

#[cfg(test)]
mod tests;
