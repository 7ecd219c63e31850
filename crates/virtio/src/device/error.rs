//! [`DeviceError`]: errors that end a connection of the device, or that keep the device from
//! starting.
//!
//! An error names what the front end has sent and what is possible, because an operator sees it in
//! the log of the device, and not in that of the front end.

use super::port::PortError;
use crate::guest_memory::MemoryError;
use crate::notify::NotifyError;
use crate::vhost_user::{MessageError, Request};
use crate::virtqueue::device::inflight::InflightError;

/// Why the device has refused a message of the front end, or could not carry it out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The device cannot be divided among no workers, or among more workers than it has queue
    /// pairs.
    #[error("{asked} workers asked for, 1 to {max} are possible: one for each queue pair")]
    Workers {
        /// Workers asked for.
        asked: usize,
        /// Queue pairs.
        max: usize,
    },
    /// A device cannot have no queue pairs, or more than the protocol has ring numbers for.
    #[error("{asked} queue pairs asked for, 1 to {max} are possible")]
    Pairs {
        /// Pairs asked for.
        asked: usize,
        /// Most that there can be.
        max: usize,
    },
    /// Another front end is connected.
    #[error("a front end is already connected")]
    Busy,
    /// Feature bits that were never offered.
    #[error("features {extra:#x} were not offered ({name}, ...)")]
    NotOffered {
        /// The bits.
        extra: u64,
        /// The specification's name of the lowest of them.
        name: &'static str,
    },
    /// A message that belongs to a protocol feature which the front end did not accept.
    #[error("{feature} was not negotiated")]
    NotNegotiated {
        /// The specification's name of the feature.
        feature: &'static str,
    },
    /// A message that is allowed only while rings are stopped.
    #[error("{what} while ring {ring} runs")]
    Running {
        /// The message.
        what: &'static str,
        /// The ring.
        ring: usize,
    },
    /// A ring number beyond the device's. Front ends that read the answer to `GET_QUEUE_NUM` as a
    /// number of pairs find out by this that there are fewer.
    #[error(
        "there is no ring {ring}: a front end with that ring has at least {} queue pairs, and the device has {pairs}; \
         Options::max_pairs (netmem device --queues) raises that",
        .ring / 2 + 1
    )]
    NoSuchRing {
        /// The number, counted from 0.
        ring: usize,
        /// How many queue pairs the device has, with two rings each.
        pairs: usize,
    },
    /// A ring size that is no power of two, or out of range.
    #[error("a ring of {size} entries: a power of two up to 32768 is needed")]
    RingSize {
        /// The size.
        size: u32,
    },
    /// A base that is no position in the ring.
    #[error("ring {ring} at base {base:#x}, which is not a position in it")]
    RingBase {
        /// The ring.
        ring: usize,
        /// The base.
        base: u32,
    },
    /// A ring was started before everything about it was known.
    #[error("ring {ring} started without {missing}")]
    NotReady {
        /// The ring.
        ring: usize,
        /// What the front end has not sent yet.
        missing: &'static str,
    },
    /// A ring part outside the memory table, or not aligned.
    #[error("ring {ring}: its {part} at user address {addr:#x} is unaligned or not in the memory table")]
    RingAddress {
        /// The ring.
        ring: usize,
        /// Which part.
        part: &'static str,
        /// Its address.
        addr: u64,
    },
    /// Memory of the front end was refused, or could not be mapped.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The front end's in-flight region cannot be used.
    #[error(transparent)]
    Inflight(#[from] InflightError),
    /// The device cannot wait for events of front ends.
    #[error("cannot wait for front ends")]
    Wait(#[from] NotifyError),
    /// A descriptor that cannot be used for events.
    #[error("the descriptor for events of ring {ring} cannot be used")]
    Event {
        /// The ring.
        ring: usize,
        /// Why.
        #[source]
        source: NotifyError,
    },
    /// A ring was started although pages of the memory table are gone.
    #[error("ring {ring} started although pages of its memory table are gone; a new table is needed")]
    MemoryLost {
        /// The ring.
        ring: usize,
    },
    /// A message that the device does not support.
    #[error("the message is not supported")]
    Unsupported,
    /// A field of the configuration space that cannot be written.
    #[error("{len} bytes at {offset} of the configuration space are read-only")]
    ReadOnly {
        /// The first byte's place.
        offset: u32,
        /// Bytes.
        len: usize,
    },
    /// An MTU that no network has, or that is more than the device offered.
    #[error("an MTU of {mtu}: 68 to {most} are possible")]
    Mtu {
        /// The MTU.
        mtu: u64,
        /// The most that is possible.
        most: u64,
    },
    /// A message could not be carried out, and the front end had not asked for an acknowledgement.
    #[error("{request} was refused")]
    Refused {
        /// The message.
        request: Request,
        /// Why.
        #[source]
        why: Box<DeviceError>,
    },
    /// The connection broke, or the received bytes were no message of the protocol.
    #[error("the vhost-user connection failed")]
    Connection(#[from] MessageError),
    /// A system call failed.
    #[error("{what}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        #[source]
        source: std::io::Error,
    },
    /// A port failed.
    #[error(transparent)]
    Port(#[from] PortError),
    /// A queue that the worker's thread also waits for has stopped: the error of
    /// [`Wait::arm`](netmem_packet::Wait::arm).
    #[error(transparent)]
    Queue(std::io::Error),
}
