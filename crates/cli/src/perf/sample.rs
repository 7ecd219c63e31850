//! What a run of a variant measured, before it becomes a row of the report.

use netmem::pool::{Backing, PoolStats};
use netmem::xdp::XskSocket;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// What a phase counted.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) frames: u64,
    pub(crate) bytes: u64,
    pub(crate) elapsed_ns: u64,
    /// The driver's own time: in polls that found packets, while the driver's thread had the CPU.
    pub(crate) busy_ns: u64,
    /// The same in ticks of the time stamp counter, where the clock has one.
    pub(crate) busy_ticks: u64,
    /// How often another thread got this thread's CPU.
    pub(crate) preempted: u64,
}

/// The measured values of one run.
#[derive(Clone, Debug)]
pub(crate) struct Sample {
    pub(crate) counts: Counts,
    pub(crate) device: Option<DeviceSample>,
    pub(crate) pool: PoolStats,
    /// Pages without a holder that were not returned.
    pub(crate) leaked: u64,
    /// Errors by name; only those that are not zero.
    pub(crate) errors: BTreeMap<&'static str, u64>,
    pub(crate) backing: Backing,
    /// The features that driver and device have negotiated; 0 if there are none.
    pub(crate) features: u64,
    /// The modes of the AF_XDP sockets; empty without them.
    pub(crate) sockets: Vec<SocketMode>,
    /// The CPUs that threads were moved to.
    pub(crate) cpus: BTreeSet<usize>,
}

/// The measured values of the embedded device.
#[derive(Clone, Debug, Default)]
pub(crate) struct DeviceSample {
    pub(crate) frames: u64,
    pub(crate) busy_ns: u64,
    /// Drops of the whole run by name; only those that are not zero.
    pub(crate) drops: BTreeMap<&'static str, u64>,
}

/// How an AF_XDP socket was bound.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize)]
pub(crate) struct SocketMode {
    pub(crate) mode: String,
    /// Why frames are copied.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) copy_reason: Option<String>,
    pub(crate) multi_buffer: bool,
    /// With `--busy-poll`, of a queue that has received frames: whether the kernel knows what to
    /// poll for the socket.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) busy_polled: Option<bool>,
}

impl SocketMode {
    /// Of a socket. From a frame that it receives, the kernel learns what to poll.
    pub(crate) fn of(socket: &XskSocket, has_received: bool) -> Self {
        Self {
            mode: socket.mode().to_string(),
            copy_reason: socket.copy_reason().map(|reason| reason.to_string()),
            multi_buffer: socket.is_multi_buffer(),
            busy_polled: socket.is_busy_polled().filter(|_| has_received),
        }
    }
}

impl fmt::Display for SocketMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.mode)?;
        self.copy_reason.as_ref().map_or(Ok(()), |reason| write!(f, " ({reason})"))?;
        f.write_str(if self.multi_buffer { ", frames of several buffers" } else { ", frames of one buffer" })?;
        f.write_str(match self.busy_polled {
            None => "",
            Some(true) => "; busy polling: the kernel polls the driver",
            Some(false) => "; busy polling: the kernel does not know what to poll (SO_INCOMING_NAPI_ID is 0)",
        })
    }
}
