//! The XDP program: it redirects frames to AF_XDP sockets, by the number of the receive queue on
//! which they arrived.
//!
//! ```text
//!   frame in queue q ─► Filter ─┬─ match ─► map of sockets, entry q ─┬─ a socket ─► its RX ring
//!                               │                                    └─ empty ──┐
//!                               └─ no match ────────────────────────────────────┴─► the kernel
//! ```
//!
//! The program is a few dozen instructions that this module assembles itself. A library that loads
//! compiled programs would be larger than this module, and would need a compiler in the build. The
//! kernel's verifier checks each program before it runs.
//!
//! The program is attached by a BPF link that is not pinned. The link ends when its last descriptor
//! is closed. So the program leaves the interface when the process ends, in any way. No other
//! program can replace it while the link exists.

mod asm;
mod bpf;
mod entries;
pub(crate) mod error;
mod filter;
mod kernel_functions;
mod metadata;
#[cfg(test)]
mod tests;

use self::entries::SocketMap;
pub(crate) use self::entries::leave;
pub use self::error::AttachError;
use self::error::system;
pub use self::filter::{Filter, MAX_RULES, Rule, TooManyRules};
use self::metadata::Metadata;
pub use self::metadata::{KernelMetadata, NoRxMetadata};
use crate::netlink::{AttachMode, Interface};
use crate::privileges::Privileges;
use crate::rx_metadata::RxMetadataReader;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

/// The options of a program.
#[derive(Clone, Debug)]
pub struct ProgramOptions {
    /// The mode in which to attach it. `None`: driver mode, or generic mode if the driver has no
    /// XDP.
    pub mode: Option<AttachMode>,
    /// Whether the program accepts frames of several buffers, which Linux supports since 5.18.
    /// Without this option, drivers refuse a program while the MTU is too large for one buffer. It
    /// is on by default.
    pub frags: bool,
    /// The frames that are redirected, by default all.
    pub filter: Filter,
    /// Whether the program writes what the driver knows about each frame in front of it: time, hash
    /// and VLAN tag. By default it does not.
    pub metadata: KernelMetadata,
}

impl Default for ProgramOptions {
    fn default() -> Self {
        Self { mode: None, frags: true, filter: Filter::default(), metadata: KernelMetadata::Off }
    }
}

/// The flags of a link for a mode.
fn flags(mode: AttachMode) -> Result<u32, AttachError> {
    match mode {
        AttachMode::Generic => Ok(1 << 1),
        AttachMode::Driver => Ok(1 << 2),
        AttachMode::Hardware => Err(AttachError::Mode(mode)),
    }
}

/// An XDP program with its map of sockets. Dropping this value detaches the program from the
/// interface.
///
/// A frame that the filter matches is redirected to the socket of its receive queue. If the queue
/// has no socket, the kernel gets the frame. When a socket is closed, the kernel removes it from
/// the map.
#[derive(Debug)]
pub struct Program {
    /// The link, or `None` if the user has attached the program.
    link: Option<OwnedFd>,
    map: SocketMap,
    entries: u32,
    mode: Option<AttachMode>,
    frags: bool,
    metadata: Option<Metadata>,
}

impl Program {
    /// Loads a program and attaches it to the interface with this index.
    ///
    /// Cost: about ten system calls, and the time of the verifier (below a millisecond). A driver
    /// may restart its queues.
    ///
    /// # Errors
    ///
    /// [`AttachError`]. If there is an error, nothing has changed.
    pub fn attach(ifindex: u32, options: &ProgramOptions) -> Result<Self, AttachError> {
        Privileges::current().check_program(&options.filter)?;
        let interface = interface(ifindex)?;
        let entries = interface.rx_queues.max(1);
        let map = bpf::create_xskmap(entries).map_err(system("making the map of sockets"))?;
        let (id, entries) = look_at(map.as_fd())?;
        let map = SocketMap::own(map, id);
        let with_metadata = match options.metadata {
            KernelMetadata::Off => None,
            KernelMetadata::Required => Some(attach_with_metadata(&interface, options, map.as_fd())?),
            KernelMetadata::IfSupported => match attach_with_metadata(&interface, options, map.as_fd()) {
                Err(AttachError::NoMetadata { .. }) => None,
                attached => Some(attached?),
            },
        };
        let (link, mode, frags, metadata) = match with_metadata {
            Some((link, frags, metadata)) => (link, AttachMode::Driver, frags, Some(metadata)),
            None => {
                let program = load(&options.filter, map.as_fd(), options.frags)?;
                let (link, mode) = attach_somehow(&interface, options.mode, program.as_fd())?;
                (link, mode, options.frags, None)
            }
        };
        Ok(Self { link: Some(link), map, entries, mode: Some(mode), frags, metadata })
    }

    /// Checks whether this thread can load a program: makes a map, has the kernel verify a program,
    /// and drops both. It does not check the driver of any interface.
    ///
    /// # Errors
    ///
    /// [`AttachError`]: a privilege that is missing, or a kernel without BPF.
    pub fn check() -> Result<(), AttachError> {
        Privileges::current().check_program(&Filter::default())?;
        let map = bpf::create_xskmap(1).map_err(system("making a map of sockets"))?;
        load(&Filter::default(), map.as_fd(), true).map(drop)
    }

    /// Attaches the user's own program, pinned at `program`, which redirects to the map of sockets
    /// pinned at `map`. Both stay pinned. Dropping this value detaches the program from the
    /// interface.
    ///
    /// # Errors
    ///
    /// [`AttachError`], for example [`AttachError::Pinned`]. If there is an error, nothing has
    /// changed.
    pub fn attach_pinned(
        ifindex: u32,
        mode: Option<AttachMode>,
        program: &Path,
        map: &Path,
    ) -> Result<Self, AttachError> {
        let mut pinned = Self::pinned_map(map)?;
        let interface = interface(ifindex)?;
        let program = open_pinned(program)?;
        let (link, mode) = attach_somehow(&interface, mode, program.as_fd())?;
        (pinned.link, pinned.mode) = (Some(link), Some(mode));
        Ok(pinned)
    }

    /// Uses a map of sockets that is pinned at `map`, and that belongs to a program which the user
    /// has attached. This value puts sockets into the map. It neither attaches nor detaches a
    /// program. It can be dropped before the queues: an [`XskRx`](crate::XskRx) that is dropped
    /// leaves the map nevertheless.
    ///
    /// # Errors
    ///
    /// [`AttachError::Pinned`] if something else is pinned there.
    pub fn pinned_map(map: &Path) -> Result<Self, AttachError> {
        Self::map(open_pinned(map)?).map_err(|error| match error {
            AttachError::NoSocketMap { .. } => {
                let what = "what is pinned there is no map of AF_XDP sockets (BPF_MAP_TYPE_XSKMAP)";
                AttachError::Pinned { path: map.to_owned(), what }
            }
            error => error,
        })
    }

    /// Uses a map of sockets by its descriptor, as another BPF library has it (Aya's `MapData::fd`,
    /// libbpf's `bpf_map__fd`), or as another process has sent it. The rest is as for
    /// [`pinned_map`](Self::pinned_map): the map belongs to a program that is attached already.
    ///
    /// # Errors
    ///
    /// [`AttachError::NoSocketMap`] if the descriptor is that of something else.
    pub fn map(map: OwnedFd) -> Result<Self, AttachError> {
        let (id, entries) = look_at(map.as_fd())?;
        let map = SocketMap::foreign(map, id);
        Ok(Self { link: None, map, entries, mode: None, frags: false, metadata: None })
    }

    /// Whether the program with this number uses the map. `None` if this process may not ask.
    pub(crate) fn is_used_by(&self, program: u32) -> Option<bool> {
        Some(bpf::program_maps(program)?.contains(&self.map.id()))
    }

    /// The name of the program with this number, if it has one and this process may read it.
    pub(crate) fn name_of(program: u32) -> Option<String> {
        bpf::program_name(program)
    }

    /// Makes this value from descriptors that another process has sent.
    pub(crate) fn from_parts(
        [link, map]: [OwnedFd; 2],
        mode: AttachMode,
        frags: bool,
        metadata: Option<RxMetadataReader>,
    ) -> Result<Self, AttachError> {
        let (id, entries) = look_at(map.as_fd())?;
        // The map is that of the program, which ends with the link.
        let map = SocketMap::own(map, id);
        let metadata = metadata.map(Metadata::of_helper);
        Ok(Self { link: Some(link), map, entries, mode: Some(mode), frags, metadata })
    }

    /// The descriptors of link and map, the mode of the program, whether it accepts frames of
    /// several buffers, and what reads its metadata. `None` if the user has attached the program.
    pub(crate) fn parts(&self) -> Option<([BorrowedFd<'_>; 2], AttachMode, bool, Option<RxMetadataReader>)> {
        Some(([self.link.as_ref()?.as_fd(), self.map.as_fd()], self.mode?, self.frags, self.rx_metadata()))
    }

    /// Drops this value without detaching the program. Another process has the descriptors.
    pub(crate) fn pass_on(mut self) {
        self.link = None;
    }

    /// Redirects frames of receive queue `queue` to an AF_XDP socket. A previous socket of the
    /// queue gets no more frames.
    ///
    /// The kernel drops frames for a socket that is not bound to this interface and queue. When the
    /// [`XskRx`](crate::XskRx) of the socket is dropped, the socket leaves the map, and frames of
    /// the queue go to the kernel again. Two system calls and a lock.
    ///
    /// If the map is the user's ([`map`](Self::map), [`pinned_map`](Self::pinned_map),
    /// [`attach_pinned`](Self::attach_pinned)), this also applies when this value was dropped
    /// before: the map's descriptor stays open until the [`XskRx`](crate::XskRx) ends. For a socket
    /// that is not of an [`XskRx`](crate::XskRx) of this process, it stays open until
    /// [`remove`](Self::remove), or until another socket of the queue is inserted.
    ///
    /// Several values of this process can have one map of the kernel's. A queue has the socket that
    /// was inserted last, by whichever value, and an earlier socket that ends leaves it there.
    /// Warning: this process cannot see that another process has put a socket into the map. If a
    /// socket that this process has put there before ends then, it removes that of the other.
    ///
    /// # Errors
    ///
    /// [`AttachError::Queue`]; [`AttachError::System`] if the descriptor is no AF_XDP socket.
    pub fn insert(&self, queue: u32, socket: BorrowedFd<'_>) -> Result<(), AttachError> {
        self.check_queue(queue)?;
        entries::insert(&self.map, queue, socket, || {
            let what = "putting a socket into the program's map";
            bpf::update(self.map.as_fd(), queue, socket.as_raw_fd() as u32).map_err(system(what))
        })
    }

    /// Records that another process has put the socket with this number into the map, as
    /// [`insert`](Self::insert) does.
    pub(crate) fn has(&self, queue: u32, cookie: u64) {
        entries::record(&self.map, queue, cookie);
    }

    /// Passes frames of receive queue `queue` to the kernel again, also if another value on the
    /// same map has inserted the socket. Does nothing if the queue has no socket. One system call
    /// and a lock.
    ///
    /// # Errors
    ///
    /// [`AttachError::Queue`], [`AttachError::System`].
    pub fn remove(&self, queue: u32) -> Result<(), AttachError> {
        self.check_queue(queue)?;
        entries::remove(&self.map, queue, || match bpf::delete(self.map.as_fd(), queue) {
            Err(e) if !matches!(e.raw_os_error(), Some(libc::ENOENT | libc::EINVAL)) => {
                Err(system("taking a socket out of the program's map")(e))
            }
            _ => Ok(()),
        })
    }

    /// Checks that the map has an entry for a queue.
    pub(crate) fn check_queue(&self, queue: u32) -> Result<(), AttachError> {
        if queue < self.entries { Ok(()) } else { Err(AttachError::Queue { queue, entries: self.entries }) }
    }

    /// Replaces the program by one with another filter, between two frames. The map and its sockets
    /// stay.
    ///
    /// # Errors
    ///
    /// [`AttachError`]: the program is unchanged. This value cannot replace a program that the user
    /// has attached.
    pub fn set_filter(&self, filter: &Filter) -> Result<(), AttachError> {
        Privileges::current().check_program(filter)?;
        let what = "exchanging the program";
        let link = self.link.as_ref().ok_or_else(|| system(what)(io::ErrorKind::Unsupported.into()))?;
        let program = match &self.metadata {
            None => load(filter, self.map.as_fd(), self.frags)?,
            Some(metadata) => {
                // Its number may have changed with its namespace.
                let ifindex = self.attached_to().ok_or_else(|| system(what)(io::ErrorKind::NotFound.into()))?;
                let metadata = metadata.on(ifindex).map_err(|reason| {
                    let interface = interface(ifindex).map_or(format!("number {ifindex}"), |found| found.name);
                    AttachError::NoMetadata { interface, reason }
                })?;
                load_with(filter, self.map.as_fd(), self.frags, Some((&metadata, ifindex)))?
            }
        };
        bpf::replace(link.as_fd(), program.as_fd()).map_err(system(what))
    }

    /// The mode in which the program is attached. `None` if the user has attached it.
    #[must_use]
    pub fn mode(&self) -> Option<AttachMode> {
        self.mode
    }

    /// What reads the metadata that the program writes in front of each frame. `None` if it writes
    /// none: [`ProgramOptions::metadata`] was off, or the kernel or the driver has no metadata
    /// functions, or the program is the user's.
    ///
    /// It is for frames that this program has redirected. A chunk of the UMEM keeps what was
    /// written in front of an earlier frame until something else is: when another program redirects
    /// frames to the same memory, do not read them with the reader of a program that has ended.
    #[must_use]
    pub fn rx_metadata(&self) -> Option<RxMetadataReader> {
        self.metadata.as_ref().map(|metadata| metadata.reader)
    }

    /// The number of queues for which the map has entries. Their numbers are below this.
    #[must_use]
    pub fn queues(&self) -> u32 {
        self.entries
    }

    /// The index of the interface to which the program is attached, in the network namespace in
    /// which the interface is now. `None` if the interface is gone, or if the user has attached the
    /// program. One system call.
    #[must_use]
    pub fn attached_to(&self) -> Option<u32> {
        bpf::attached_to(self.link.as_ref()?.as_fd()).ok().flatten()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // A forked child has a copy of the descriptor until it executes another program. So closing
        // our descriptor would not end the link at once.
        if let Some(link) = &self.link {
            let _ = bpf::detach(link.as_fd());
        }
    }
}

fn interface(ifindex: u32) -> Result<Interface, AttachError> {
    Interface::by_index(ifindex).map_err(|source| match source.raw_os_error() {
        Some(libc::ENODEV) => AttachError::NoInterface(format!("number {ifindex}")),
        _ => AttachError::System { what: "looking at the interface", source },
    })
}

/// The kernel's number of a map of sockets, and the number of its entries.
fn look_at(map: BorrowedFd<'_>) -> Result<(u32, u32), AttachError> {
    let found = bpf::map_info(map).map_err(system("looking at the map of sockets"))?;
    let map_type = found.as_ref().map(|found| found.map_type);
    let of = found.and_then(|found| Some((found.id, found.xskmap_entries()?)));
    of.ok_or(AttachError::NoSocketMap { map_type })
}

fn load(filter: &Filter, map: BorrowedFd<'_>, frags: bool) -> Result<OwnedFd, AttachError> {
    load_with(filter, map, frags, None)
}

/// Loads a program that writes metadata, for the interface with this index.
fn load_with(
    filter: &Filter,
    map: BorrowedFd<'_>,
    frags: bool,
    metadata: Option<(&Metadata, u32)>,
) -> Result<OwnedFd, AttachError> {
    // No filter is too long for a jump, because of MAX_RULES.
    let code = filter::program(filter, map.as_raw_fd(), metadata.map(|(metadata, _)| metadata));
    let code = code.ok_or_else(|| AttachError::System {
        what: "writing the program",
        source: io::ErrorKind::InvalidInput.into(),
    })?;
    bpf::load(&code, frags, metadata.map(|(_, ifindex)| ifindex)).map_err(|bpf::NotLoaded { source, log }| {
        if log.is_empty() { system("loading the XDP program")(source) } else { AttachError::Rejected { log, source } }
    })
}

fn open_pinned(path: &Path) -> Result<OwnedFd, AttachError> {
    let pinned = |what| AttachError::Pinned { path: path.to_owned(), what };
    bpf::pinned(path).map_err(|source| match source.raw_os_error() {
        Some(libc::ENOENT) => pinned("nothing is pinned there"),
        Some(libc::EACCES | libc::EPERM) => {
            pinned("this user may not open what is pinned there (its mode and owner decide)")
        }
        Some(libc::EINVAL) => pinned("that is not a file of a BPF file system (mount -t bpf bpf /sys/fs/bpf)"),
        _ => AttachError::System { what: "opening what is pinned", source },
    })
}

/// Loads a program that writes metadata, and attaches it in driver mode: the kernel runs programs
/// that call functions of a driver in no other. Returns the link, whether the program accepts
/// frames of several buffers, and the metadata.
fn attach_with_metadata(
    interface: &Interface,
    options: &ProgramOptions,
    map: BorrowedFd<'_>,
) -> Result<(OwnedFd, bool, Metadata), AttachError> {
    let missing = |reason| AttachError::NoMetadata { interface: interface.name.clone(), reason };
    let metadata = Metadata::find(interface.index, options.mode).map_err(missing)?;
    let load = |frags| load_with(&options.filter, map, frags, Some((&metadata, interface.index)));
    let (program, frags) = match load(options.frags) {
        // Before Linux 6.8, a program of a device cannot accept frames of several buffers. The
        // verifier does not see the program then. A driver whose MTU needs them refuses to attach
        // it.
        Err(AttachError::System { source, .. }) if options.frags && source.raw_os_error() == Some(libc::EINVAL) => {
            (load(false)?, false)
        }
        // ENOTSUPP of the kernel, which the C library does not have.
        Err(AttachError::Rejected { source, .. }) if source.raw_os_error() == Some(524) => {
            return Err(missing(NoRxMetadata::Jit));
        }
        loaded => (loaded?, options.frags),
    };
    match attach_in(interface, AttachMode::Driver, program.as_fd()) {
        Err(AttachError::Refused { source, .. }) if source.raw_os_error() == Some(libc::EOPNOTSUPP) => {
            Err(missing(NoRxMetadata::DriverMode))
        }
        attached => Ok((attached?, frags, metadata)),
    }
}

/// Attaches in `mode`. If `mode` is `None`, attaches in driver mode if the driver supports it,
/// otherwise in generic mode.
fn attach_somehow(
    interface: &Interface,
    mode: Option<AttachMode>,
    program: BorrowedFd<'_>,
) -> Result<(OwnedFd, AttachMode), AttachError> {
    match mode {
        Some(mode) => Ok((attach_in(interface, mode, program)?, mode)),
        None => match attach_in(interface, AttachMode::Driver, program) {
            Err(AttachError::Refused { source, .. }) if source.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                Ok((attach_in(interface, AttachMode::Generic, program)?, AttachMode::Generic))
            }
            attached => Ok((attached?, AttachMode::Driver)),
        },
    }
}

fn attach_in(interface: &Interface, mode: AttachMode, program: BorrowedFd<'_>) -> Result<OwnedFd, AttachError> {
    let flags = flags(mode)?;
    // Another process may remove its program between the refusal and this query. The next attempt
    // then succeeds.
    let mut attempts = 0..3;
    loop {
        let source = match bpf::attach(program, interface.index, flags) {
            Ok(link) => return Ok(link),
            Err(source) => source,
        };
        let name = interface.name.clone();
        return Err(match source.raw_os_error() {
            Some(libc::EBUSY | libc::EEXIST) => {
                let attached = Interface::by_index(interface.index).ok().and_then(|now| now.programs.first().copied());
                match attached {
                    Some(attached) => {
                        AttachError::Occupied { interface: name, attached, name: bpf::program_name(attached.program) }
                    }
                    None if attempts.next().is_some() => continue,
                    None => AttachError::System { what: "attaching the program", source },
                }
            }
            Some(libc::ENODEV) => AttachError::NoInterface(name),
            Some(libc::EPERM | libc::EACCES) => AttachError::System { what: "attaching the program", source },
            _ => AttachError::Refused { interface: name, mode, mtu: interface.mtu, source },
        });
    }
}
