//! The errors between the driver and a back end.

use super::message::Request;
use super::message_socket::MessageError;
use crate::advice::advice;
use std::io;
use std::path::PathBuf;

/// An error between the driver and a back end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VhostUserError {
    /// No process listens on the path.
    #[error("cannot connect to the vhost-user socket {path}: {source}; {}", advice(.source, "start the backend first, and check the path"))]
    Connect {
        /// The socket.
        path: PathBuf,
        /// The system's answer.
        r#source: io::Error,
    },
    /// A process listens on the path, and does not accept connections.
    #[error(
        "the backend on the vhost-user socket {path} accepted no connection for {seconds} s and its queue of connections is \
         full; is it stuck, or in use by another front end?"
    )]
    Backlog {
        /// The socket.
        path: PathBuf,
        /// How long it was tried.
        seconds: f64,
    },
    /// A path cannot be listened on.
    #[error("cannot listen on the vhost-user socket {path}: {source}; {}", advice(.source, "check the path"))]
    Listen {
        /// The socket.
        path: PathBuf,
        /// The system's answer.
        r#source: io::Error,
    },
    /// A path cannot be listened on, because it is in use.
    #[error("cannot listen on the vhost-user socket {path}: {what}; choose another path, or remove it")]
    Occupied {
        /// The path.
        path: PathBuf,
        /// What is there.
        what: &'static str,
    },
    /// No back end connected.
    #[error("no backend connected to {path} for {seconds} s; start one that connects to this socket")]
    NotConnected {
        /// The socket.
        path: PathBuf,
        /// How long it was waited for.
        seconds: f64,
    },
    /// Another back end does not follow the tables of descriptors that receive queues have.
    #[error(
        "the backend may not follow tables of descriptors in packed receive rings, which the queues have since they were \
         probed; connect to a device of this project, or probe again"
    )]
    NoRxTables,
    /// The memory of the queues is for a device in this process.
    #[error("the driver was connected to a device in this process, and its memory is given to no other back end")]
    InProcess,
    /// The back end does not answer.
    #[error(
        "the backend did not answer {message} for {seconds} s; is it stuck, or something other than a vhost-user back end?"
    )]
    Silent {
        /// The message.
        message: Request,
        /// How long the driver has waited.
        seconds: f64,
    },
    /// The back end accepted the connection and closed it without an answer.
    #[error(
        "the backend closed the connection at GET_FEATURES, the first message; is another front end connected to it, or \
         does it speak vhost-user as something else than a back end?"
    )]
    Busy,
    /// The back end hung up, or its answer was not the expected one.
    #[error("the backend failed at {message} ({source}); does it speak vhost-user as a back end?")]
    Message {
        /// The message that failed.
        message: Request,
        /// The answer, or the error in its place.
        r#source: MessageError,
    },
    /// The back end understood a message, and refuses what it asks for.
    #[error("the backend refused {message}; its own log may say why")]
    Refused {
        /// The message.
        message: Request,
    },
    /// This process cannot receive the descriptors of an answer.
    #[error(
        "too few file descriptors for the answer to {message}; raise the limit (`ulimit -n`, or LimitNOFILE of the service)"
    )]
    TooFewDescriptors {
        /// The message.
        message: Request,
    },
    /// The back end cannot work with the features, although it offers each of them.
    #[error("the backend does not accept the features {features:#x} together; its own log may say why")]
    FeaturesRefused {
        /// The features.
        features: u64,
    },
    /// The back end lacks a feature that is needed.
    #[error("the backend does not offer {name} (bit {bit}), which {why}")]
    MissingFeature {
        /// The specification's name of the feature.
        name: &'static str,
        /// Its bit.
        bit: u32,
        /// What needs it.
        why: &'static str,
    },
    /// The back end has too few queues.
    #[error("{wanted} queue pairs asked for, but the backend has {has}")]
    TooFewQueues {
        /// Pairs asked for.
        wanted: u16,
        /// Pairs it has.
        has: u64,
    },
    /// More pieces of memory than a message holds.
    #[error("{count} regions of memory for the backend, where {max} are the most; use fewer regions")]
    TooManyRegions {
        /// Regions.
        count: usize,
        /// Most that there can be.
        max: usize,
    },
    /// A ring whose number does not fit the messages.
    #[error("ring {index}: vhost-user has numbers for 256 rings; use fewer queue pairs")]
    RingNumber {
        /// The ring.
        index: usize,
    },
}
