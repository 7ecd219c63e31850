//! Why a helper could not open or pass what a worker needs, and the kinds of refusal that a worker
//! is sent.

use super::options::MAX_SOCKETS;
use crate::privileges::MissingPrivilege;
use crate::program::error::AttachError;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Why a helper refuses a worker. The text of [`HelperError::Refused`] has the details.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// No queue is free: another worker has them, or another program is attached to the interface.
    Busy,
    /// The worker's user may not have queues.
    User,
    /// The worker has asked for another interface, or the interface is gone.
    Interface,
    /// The worker is of another version of the protocol, or sent no request.
    Version,
    /// The worker exceeded its time limit, or too many others came after it.
    Late,
    /// The helper could not open what the worker needs.
    Failed,
}

impl Refusal {
    const ALL: [Self; 6] = [Self::Busy, Self::User, Self::Interface, Self::Version, Self::Late, Self::Failed];

    /// Its number in a message.
    pub(super) fn code(self) -> u32 {
        Self::ALL.iter().position(|refusal| *refusal == self).map_or(u32::MAX, |at| at as u32)
    }

    /// The refusal of this number. A number of a later version is [`Failed`](Self::Failed).
    pub(super) fn of(code: u32) -> Self {
        Self::ALL.get(code as usize).copied().unwrap_or(Self::Failed)
    }
}

/// The reason why a helper could not open or pass the parts that a worker needs.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HelperError {
    /// A privilege is missing.
    #[error(transparent)]
    Privilege(#[from] MissingPrivilege),
    /// The program could not be attached.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// There are no sockets, or too many.
    #[error("{asked} sockets: a grant has 1 to {MAX_SOCKETS}")]
    Sockets {
        /// The number of sockets.
        asked: usize,
    },
    /// The interface has fewer queues.
    #[error(
        "interface {interface} has {has} queue(s), with numbers from 0: there is no queue {queue}, which is one of the {asked} that \
         were asked for"
    )]
    Queue {
        /// The name of the interface.
        interface: String,
        /// The number of the queue that it does not have.
        queue: u32,
        /// How many queues were asked for.
        asked: usize,
        /// How many queues it has in use.
        has: u32,
    },
    /// The process at the other end did not send, or did not read, in time.
    #[error("the other side of the helper's socket took more than {} s", .0.as_secs_f64())]
    TimedOut(Duration),
    /// The process at the other end has closed the connection.
    #[error("the other side of the helper's socket has closed it")]
    Closed,
    /// A received message is not one of the protocol, or not the expected one.
    #[error("what came over the helper's socket is refused: {0}")]
    Malformed(&'static str),
    /// The process at the other end has another version of the protocol.
    #[error("the other side of the helper's socket has version {theirs} of the protocol, and this process {ours}")]
    Version {
        /// The other side's version.
        theirs: u32,
        /// This crate's version.
        ours: u32,
    },
    /// The helper has refused the worker, or has closed its queues.
    #[error("the helper refuses: {text}")]
    Refused {
        /// The kind of the reason.
        why: Refusal,
        /// The helper's words. At most 1024 bytes, without control characters.
        text: String,
    },
    /// The worker has asked for another interface.
    #[error("the worker asks for interface {asked}, and this helper has {has}")]
    Interface {
        /// The interface that the worker has asked for.
        asked: String,
        /// The interface of the helper.
        has: String,
    },
    /// The worker's user may not have queues.
    #[error("user {user} may not have queues of this helper")]
    User {
        /// The number of the user.
        user: u32,
    },
    /// So many workers wait for queues that an older one had to go.
    #[error("more than {0} workers wait for queues")]
    TooMany(usize),
    /// There is no user of this name, and it is no number.
    #[error("there is no user {0:?}")]
    NoUser(String),
    /// There is no group of this name, and it is no number.
    #[error("there is no group {0:?}")]
    NoGroup(String),
    /// The path cannot be listened on.
    #[error("cannot listen on {}", path.display())]
    Listen {
        /// The path.
        path: PathBuf,
        /// The error of the system call.
        #[source]
        source: io::Error,
    },
    /// The path is in use. It is left as it is.
    #[error("{}: {what}", path.display())]
    Occupied {
        /// The path.
        path: PathBuf,
        /// What is there.
        what: &'static str,
    },
    /// The system refused a step.
    #[error("{what}")]
    System {
        /// The attempted step.
        what: &'static str,
        /// The error of the system call.
        #[source]
        source: io::Error,
    },
}

impl HelperError {
    /// The kind of refusal for a worker that gets nothing because of this error.
    pub(super) fn refusal(&self) -> Refusal {
        match self {
            Self::Attach(AttachError::Occupied { .. }) => Refusal::Busy,
            Self::Attach(AttachError::NoInterface(_)) | Self::Interface { .. } => Refusal::Interface,
            Self::Version { .. } | Self::Malformed(_) => Refusal::Version,
            Self::TimedOut(_) | Self::TooMany(_) => Refusal::Late,
            Self::User { .. } => Refusal::User,
            _ => Refusal::Failed,
        }
    }
}

pub(super) fn system<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> HelperError {
    move |source| HelperError::System { what, source: source.into() }
}
