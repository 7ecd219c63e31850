//! The front end's side of vhost-user: how the driver reaches a device in another process, or in this one.
//!
//! The `vhost` crate speaks the messages; what they say, in which order, and what an answer means, is here. Every wait is
//! bounded: a backend that does not answer is an error.

use crate::net::feature;
use netmem_pool::TableEntry;
use rustix::fd::AsRawFd;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;
use vhost::vhost_user::message::{VhostUserHeaderFlag, VhostUserProtocolFeatures as Protocol};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

/// How long a backend may take to answer.
const PATIENCE: Duration = Duration::from_secs(3);

/// What can go wrong between us and a backend.
#[derive(Debug, thiserror::Error)]
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
    /// The backend does not answer, or answers something else.
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
    frontend: Frontend,
    stream: UnixStream,
    offered: u64,
    protocol: bool,
    pairs: u64,
    control_queue: bool,
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
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut first = negotiator(&stream)?;
        first.frontend.set_owner().map_err(failed("SET_OWNER"))?;
        let can = first.negotiate()?;
        let mut pairs = 1;
        if can.contains(Protocol::MQ) {
            pairs = first.frontend.get_queue_num().map_err(failed("GET_QUEUE_NUM"))?;
            // The library takes the answer for a number of rings, where backends mean pairs, and from then on refuses to
            // speak of half of them: what is spoken from here on is spoken through another, which has not asked.
            first = negotiator(&stream)?;
            first.negotiate()?;
        }
        let Negotiator { frontend, offered } = first;
        Ok(Self {
            frontend,
            stream,
            offered,
            protocol: offered & feature::VHOST_USER_PROTOCOL != 0,
            pairs,
            control_queue,
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

    /// Takes `features`, or says which of them is not offered and `why` it is needed.
    pub(crate) fn negotiate(&mut self, features: u64, why: &'static str) -> Result<(), VhostUserError> {
        let missing = features & !self.offered;
        if missing != 0 {
            let (name, bit) = (feature::name(missing), missing.trailing_zeros());
            return Err(VhostUserError::MissingFeature { name, bit, why });
        }
        let all = features | (self.offered & feature::VHOST_USER_PROTOCOL);
        self.frontend.set_features(all).map_err(failed("SET_FEATURES"))
    }

    /// Gives the backend the memory: each region at the bus address of its entry.
    pub(crate) fn set_memory(&mut self, entries: &[TableEntry]) -> Result<(), VhostUserError> {
        let regions: Vec<_> = entries
            .iter()
            .filter_map(|e| {
                Some(VhostUserMemoryRegionInfo {
                    guest_phys_addr: e.bus,
                    memory_size: e.region.len() as u64,
                    userspace_addr: e.region.as_ptr().addr() as u64,
                    mmap_offset: 0,
                    mmap_handle: e.region.fd()?.as_raw_fd(),
                })
            })
            .collect();
        self.frontend.set_mem_table(&regions).map_err(failed("SET_MEM_TABLE")).map(drop)
    }

    /// Sets a ring up. Backends allocate a ring when they hear of its call descriptor, and start it with its kick
    /// descriptor, hence the order.
    pub(crate) fn start_ring(
        &mut self,
        index: usize,
        at: RingAddresses,
        call: &EventFd,
        kick: &EventFd,
    ) -> Result<(), VhostUserError> {
        let f = &mut self.frontend;
        f.set_vring_call(index, call).map_err(failed("SET_VRING_CALL"))?;
        f.set_vring_num(index, at.size).map_err(failed("SET_VRING_NUM"))?;
        f.set_vring_base(index, 0).map_err(failed("SET_VRING_BASE"))?;
        let config = VringConfigData {
            queue_max_size: at.size,
            queue_size: at.size,
            flags: 0,
            desc_table_addr: at.desc,
            used_ring_addr: at.used,
            avail_ring_addr: at.avail,
            log_addr: None,
        };
        f.set_vring_addr(index, &config).map_err(failed("SET_VRING_ADDR"))?;
        f.set_vring_kick(index, kick).map_err(failed("SET_VRING_KICK"))
    }

    /// Lets a ring's buffers be used, or not.
    pub(crate) fn enable_ring(&mut self, index: usize, enable: bool) -> Result<(), VhostUserError> {
        if !self.protocol {
            // Without protocol features rings are enabled from the start.
            return Ok(());
        }
        self.frontend.set_vring_enable(index, enable).map_err(failed("SET_VRING_ENABLE"))
    }

    /// Stops a ring. Once the backend has answered it touches no buffer of it any more.
    pub(crate) fn stop_ring(&mut self, index: usize) -> Result<(), VhostUserError> {
        self.frontend.get_vring_base(index).map_err(failed("GET_VRING_BASE")).map(drop)
    }

    /// Whether the backend still holds its end of the connection. One system call.
    pub(crate) fn is_connected(&self) -> bool {
        let mut byte = [0u8];
        let flags = rustix::net::RecvFlags::PEEK | rustix::net::RecvFlags::DONTWAIT;
        !matches!(rustix::net::recv(&self.stream, &mut byte[..], flags), Ok((0, _)) | Err(rustix::io::Errno::CONNRESET))
    }
}

/// A front end that has not said anything yet.
struct Negotiator {
    frontend: Frontend,
    offered: u64,
}

fn negotiator(stream: &UnixStream) -> Result<Negotiator, VhostUserError> {
    Ok(Negotiator { frontend: Frontend::from_stream(stream.try_clone()?, u64::from(u16::MAX)), offered: 0 })
}

impl Negotiator {
    /// Asks for the features, and takes the protocol features of ours that the backend has.
    fn negotiate(&mut self) -> Result<Protocol, VhostUserError> {
        let f = &mut self.frontend;
        self.offered = f.get_features().map_err(failed("GET_FEATURES"))?;
        if self.offered & feature::VHOST_USER_PROTOCOL == 0 {
            return Ok(Protocol::empty());
        }
        // The library lets protocol features be spoken of only once the bit that offers them is acknowledged.
        f.set_features(feature::VHOST_USER_PROTOCOL).map_err(failed("SET_FEATURES"))?;
        let can = f.get_protocol_features().map_err(failed("GET_PROTOCOL_FEATURES"))?;
        let take = can & (Protocol::MQ | Protocol::REPLY_ACK);
        f.set_protocol_features(take).map_err(failed("SET_PROTOCOL_FEATURES"))?;
        if take.contains(Protocol::REPLY_ACK) {
            f.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        }
        Ok(take)
    }
}

impl std::fmt::Debug for VhostUser {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "VhostUser(offered {:#x}, {} pairs)", self.offered, self.pairs)
    }
}

fn failed(message: &'static str) -> impl FnOnce(vhost::Error) -> VhostUserError {
    move |source| VhostUserError::Message { message, source }
}
