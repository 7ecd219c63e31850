//! The front end's side of vhost-user: how the driver reaches a device in another process, or in this one.
//!
//! The `vhost` crate speaks the messages; what they say, in which order, and what an answer means, is here. Every wait is
//! bounded: a backend that does not answer is an error, and the end of the connection, for a late answer could be taken
//! for one to a later question.

use crate::net::feature;
use netmem_pool::TableEntry;
use rustix::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd};
use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;
use vhost::vhost_user::message::{VhostUserHeaderFlag, VhostUserProtocolFeatures as Protocol};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

/// How long a backend may take to answer.
const PATIENCE: Duration = Duration::from_secs(3);

/// What can go wrong between us and a backend.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VhostUserError {
    /// Nobody listens.
    #[error("cannot connect to the vhost-user socket {path}: {source}; start the backend first, and check the path")]
    Connect {
        /// The socket.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The socket could not be set up.
    #[error("cannot set up the vhost-user connection: {0}")]
    Socket(#[from] io::Error),
    /// The backend does not answer.
    #[error(
        "the backend did not answer {message} for {seconds} s; is it stuck, or something other than a vhost-user back end?"
    )]
    Silent {
        /// The message.
        message: &'static str,
        /// How long it was given.
        seconds: u64,
    },
    /// The backend refuses, or answers something else.
    #[error("the backend failed at {message} ({source}); does it speak vhost-user as a back end?")]
    Message {
        /// The message it failed at.
        message: &'static str,
        /// What came back.
        source: vhost::Error,
    },
    /// The backend lacks a feature that is needed.
    #[error("the backend does not offer {name} (bit {bit}), which {why}")]
    MissingFeature {
        /// The specification's name of the feature.
        name: &'static str,
        /// Its bit.
        bit: u32,
        /// What needs it.
        why: &'static str,
    },
    /// The backend has too few queues.
    #[error("{wanted} queue pairs asked for, but the backend has {has}")]
    TooFewQueues {
        /// Pairs asked for.
        wanted: u16,
        /// Pairs it has.
        has: u64,
    },
}

/// Where a ring lies, for the backend: addresses of this process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RingAddresses {
    pub(crate) size: u16,
    pub(crate) desc: u64,
    pub(crate) avail: u64,
    pub(crate) used: u64,
}

/// A connection to a vhost-user backend.
pub struct VhostUser {
    line: Line,
    offered: u64,
    protocol: bool,
    pairs: u64,
    control_queue: bool,
    /// Rings that were enabled last, so that one which is started again is as it was.
    enabled: Vec<bool>,
}

impl VhostUser {
    /// Connects to the backend that listens on `path`.
    ///
    /// # Errors
    ///
    /// [`VhostUserError`]: nobody listens, or it is no vhost-user backend.
    pub fn connect(path: impl AsRef<Path>) -> Result<Self, VhostUserError> {
        let path = path.as_ref();
        let stream =
            UnixStream::connect(path).map_err(|source| VhostUserError::Connect { path: path.to_owned(), source })?;
        Self::over(stream, false)
    }

    /// Uses a stream that is connected to one of our own [devices](crate::device), which serves the control queue itself.
    ///
    /// # Errors
    ///
    /// [`VhostUserError`].
    pub fn own_device(stream: UnixStream) -> Result<Self, VhostUserError> {
        Self::over(stream, true)
    }

    fn over(stream: UnixStream, control_queue: bool) -> Result<Self, VhostUserError> {
        let mut line = Line::new(stream)?;
        line.ask("SET_OWNER", |f| f.set_owner())?;
        let (mut offered, can) = line.negotiate()?;
        let mut pairs = 1;
        if can.contains(Protocol::MQ) {
            pairs = line.ask("GET_QUEUE_NUM", VhostUserFrontend::get_queue_num)?;
            // The library takes the answer for a number of rings, where backends mean pairs, and from then on refuses to
            // speak of half of them: what is spoken from here on is spoken through another, which has not asked.
            line = Line::new(line.stream)?;
            (offered, _) = line.negotiate()?;
        }
        Ok(Self {
            line,
            offered,
            protocol: offered & feature::VHOST_USER_PROTOCOL != 0,
            pairs,
            control_queue,
            enabled: Vec::new(),
        })
    }

    /// The features that the backend offers.
    #[must_use]
    pub fn offered(&self) -> u64 {
        self.offered
    }

    /// How many queue pairs it has.
    #[must_use]
    pub fn pairs(&self) -> u64 {
        self.pairs
    }

    /// Whether the backend answers on a control queue. Foreign ones leave that to the front end.
    pub(crate) fn has_control_queue(&self) -> bool {
        self.control_queue && self.offered & feature::CTRL_VQ != 0
    }

    /// Says which of `features` is not offered, if one is not, and `why` it is needed.
    pub(crate) fn require(&self, features: u64, why: &'static str) -> Result<(), VhostUserError> {
        match features & !self.offered {
            0 => Ok(()),
            missing => {
                let (name, bit) = (feature::name(missing), missing.trailing_zeros());
                Err(VhostUserError::MissingFeature { name, bit, why })
            }
        }
    }

    /// Takes `features`, or says which of them is not offered and `why` it is needed.
    pub(crate) fn negotiate(&mut self, features: u64, why: &'static str) -> Result<(), VhostUserError> {
        self.require(features, why)?;
        let all = features | (self.offered & feature::VHOST_USER_PROTOCOL);
        self.line.ask("SET_FEATURES", |f| f.set_features(all))
    }

    /// Gives the backend the memory: each region at the bus address of its entry.
    pub(crate) fn set_memory(&mut self, entries: &[TableEntry]) -> Result<(), VhostUserError> {
        let regions: Vec<_> = entries
            .iter()
            .filter_map(|e| {
                Some(VhostUserMemoryRegionInfo {
                    guest_phys_addr: e.bus(),
                    memory_size: e.len() as u64,
                    userspace_addr: e.user_addr(),
                    mmap_offset: e.file_offset(),
                    mmap_handle: e.fd()?.as_raw_fd(),
                })
            })
            .collect();
        self.line.ask("SET_MEM_TABLE", |f| f.set_mem_table(&regions)).map(drop)
    }

    /// Sets a ring up. Backends allocate a ring when they hear of its call descriptor, and start it with its kick
    /// descriptor, hence the order.
    pub(crate) fn start_ring(
        &mut self,
        index: usize,
        at: RingAddresses,
        call: BorrowedFd<'_>,
        kick: BorrowedFd<'_>,
    ) -> Result<(), VhostUserError> {
        let config = VringConfigData {
            queue_max_size: at.size,
            queue_size: at.size,
            flags: 0,
            desc_table_addr: at.desc,
            used_ring_addr: at.used,
            avail_ring_addr: at.avail,
            log_addr: None,
        };
        let [call, kick] = [call.try_clone_to_owned()?, kick.try_clone_to_owned()?];
        // SAFETY: each is a descriptor of its own.
        let [call, kick] = [call, kick].map(|fd| unsafe { EventFd::from_raw_fd(fd.into_raw_fd()) });
        let line = &mut self.line;
        line.ask("SET_VRING_CALL", |f| f.set_vring_call(index, &call))?;
        line.ask("SET_VRING_NUM", |f| f.set_vring_num(index, at.size))?;
        line.ask("SET_VRING_BASE", |f| f.set_vring_base(index, 0))?;
        line.ask("SET_VRING_ADDR", |f| f.set_vring_addr(index, &config))?;
        line.ask("SET_VRING_KICK", |f| f.set_vring_kick(index, &kick))
    }

    /// Starts a ring that was stopped, and enables it if it was. The other rings go on. A foreign backend has them disabled and
    /// enabled: DPDK's vhost takes all queues out of service when one stops, and a queue back only when it becomes ready.
    pub(crate) fn restart_ring(
        &mut self,
        index: usize,
        at: RingAddresses,
        call: BorrowedFd<'_>,
        kick: BorrowedFd<'_>,
    ) -> Result<(), VhostUserError> {
        self.start_ring(index, at, call, kick)?;
        for other in 0..self.enabled.len() {
            if other != index && self.enabled[other] && !self.control_queue {
                self.enable_ring(other, false)?;
                self.enable_ring(other, true)?;
            }
        }
        let enabled = self.enabled.get(index).copied().unwrap_or(false);
        self.enable_ring(index, enabled)
    }

    /// Lets a ring's buffers be used, or not.
    pub(crate) fn enable_ring(&mut self, index: usize, enable: bool) -> Result<(), VhostUserError> {
        if self.enabled.len() <= index {
            self.enabled.resize(index + 1, false);
        }
        self.enabled[index] = enable;
        if !self.protocol {
            // Without protocol features rings are enabled from the start.
            return Ok(());
        }
        self.line.ask("SET_VRING_ENABLE", |f| f.set_vring_enable(index, enable))
    }

    /// Stops a ring. Once the backend has answered it touches no buffer of it any more.
    pub(crate) fn stop_ring(&mut self, index: usize) -> Result<(), VhostUserError> {
        self.line.ask("GET_VRING_BASE", |f| f.get_vring_base(index)).map(drop)
    }

    /// Whether the backend still holds its end of the connection. One system call.
    pub(crate) fn is_connected(&self) -> bool {
        let mut byte = [0u8];
        let flags = rustix::net::RecvFlags::PEEK | rustix::net::RecvFlags::DONTWAIT;
        !matches!(
            rustix::net::recv(&self.line.stream, &mut byte[..], flags),
            Ok((0, _)) | Err(rustix::io::Errno::CONNRESET)
        )
    }
}

/// The library's end of the connection, and ours, by which it can be ended.
struct Line {
    frontend: Frontend,
    stream: UnixStream,
}

impl Line {
    fn new(stream: UnixStream) -> io::Result<Self> {
        Ok(Self { frontend: Frontend::from_stream(stream.try_clone()?, u64::from(u16::MAX)), stream })
    }

    /// Asks for the features, and takes the protocol features of ours that the backend has.
    fn negotiate(&mut self) -> Result<(u64, Protocol), VhostUserError> {
        let offered = self.ask("GET_FEATURES", |f| f.get_features())?;
        if offered & feature::VHOST_USER_PROTOCOL == 0 {
            return Ok((offered, Protocol::empty()));
        }
        // The library lets protocol features be spoken of only once the bit that offers them is acknowledged.
        self.ask("SET_FEATURES", |f| f.set_features(feature::VHOST_USER_PROTOCOL))?;
        let can = self.ask("GET_PROTOCOL_FEATURES", VhostUserFrontend::get_protocol_features)?;
        let take = can & (Protocol::MQ | Protocol::REPLY_ACK);
        self.ask("SET_PROTOCOL_FEATURES", |f| f.set_protocol_features(take))?;
        if take.contains(Protocol::REPLY_ACK) {
            self.frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        }
        Ok((offered, take))
    }

    /// Says something and waits for the answer, if there is one to wait for. Costs a thread, which ends the connection
    /// when the backend's time is over: the library takes a timeout of the socket for a reason to go on waiting.
    fn ask<R>(
        &mut self,
        message: &'static str,
        say: impl FnOnce(&mut Frontend) -> vhost::Result<R>,
    ) -> Result<R, VhostUserError> {
        let Self { frontend, stream } = self;
        let stream = &*stream;
        let (answered, waits) = mpsc::channel::<()>();
        let watch = move || {
            let late = waits.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout);
            if late {
                let _ = stream.shutdown(Shutdown::Both);
            }
            late
        };
        thread::scope(|s| {
            let watch = thread::Builder::new().name("netmem-vhost-wait".into()).spawn_scoped(s, watch)?;
            let result = say(frontend);
            drop(answered);
            let late = watch.join().unwrap_or(false);
            result.map_err(|source| {
                if late {
                    return VhostUserError::Silent { message, seconds: PATIENCE.as_secs() };
                }
                // After a plain "no" the two still understand each other; after anything else they may not.
                if !matches!(source, vhost::Error::VhostUserProtocol(vhost::vhost_user::Error::BackendInternalError)) {
                    let _ = stream.shutdown(Shutdown::Both);
                }
                VhostUserError::Message { message, source }
            })
        })
    }
}

impl std::fmt::Debug for VhostUser {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "VhostUser(offered {:#x}, {} pairs)", self.offered, self.pairs)
    }
}
