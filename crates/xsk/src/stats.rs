//! Counters of the queues and of the kernel.

use crate::fault::Fault;
use std::fmt;

/// A receive queue's counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RxStats {
    /// Frames that were passed to the handler's program.
    pub frames: u64,
    /// Bytes in these frames.
    pub bytes: u64,
    /// Those of these frames that have several buffers.
    pub multi_buffer: u64,
    /// Frames with the verdict: pass.
    pub passed: u64,
    /// Frames with the verdict: drop.
    pub dropped: u64,
    /// Frames with the verdict: transmit.
    pub transmitted: u64,
    /// Frames with the verdict: redirect.
    pub redirected: u64,
    /// Frames with the verdict that the program failed.
    pub aborted: u64,
    /// Frames dropped because they could not be copied into one buffer for a handler that needs one
    /// buffer.
    pub not_linear: u64,
    /// Frames dropped because they were too short for an Ethernet header.
    pub short: u64,
    /// Frames dropped because they were in more buffers than a packet has fragments.
    pub too_many: u64,
    /// Frames that were received and not polled when the socket was closed, and were dropped. A
    /// queue that is [opened again](crate::ClosedQueue) counts on.
    pub unpolled: u64,
    /// Times that the kernel had fewer chunks than it should, because there was no page to post.
    pub out_of_buffers: u64,
    /// System calls that notified the driver of new chunks.
    pub wakeups: u64,
    /// The fault that stopped the queue, if there was one.
    pub stopped: Option<Fault>,
}

impl RxStats {
    /// The counters of errors, by name, without those that are zero.
    pub fn errors(&self) -> impl Iterator<Item = (&'static str, u64)> {
        [
            ("aborted", self.aborted),
            ("not_linear", self.not_linear),
            ("short", self.short),
            ("too_many", self.too_many),
            ("unpolled", self.unpolled),
            ("out_of_buffers", self.out_of_buffers),
        ]
        .into_iter()
        .chain(self.stopped.map(|fault| (fault.name(), 1)))
        .filter(|&(_, n)| n > 0)
    }
}

/// A transmit queue's counters. A *descriptor* is a part of a frame in one chunk. Most frames have
/// one descriptor.
///
/// Every descriptor that was posted to the kernel is outstanding or completed, or the kernel had it
/// when the socket was closed: `descriptors = completed + XskTx::outstanding() + unconfirmed`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TxStats {
    /// Frames posted to the kernel.
    pub frames: u64,
    /// Bytes in them.
    pub bytes: u64,
    /// Descriptors posted to the kernel.
    pub descriptors: u64,
    /// Descriptors that the kernel is done with.
    pub completed: u64,
    /// Descriptors that the kernel had when the socket was closed, of a queue that was
    /// [opened again](crate::ClosedQueue). Their frames were sent, or were not. Their pages return
    /// when the queue is bound again.
    pub unconfirmed: u64,
    /// Frames refused because the queue was full, or because a frame must be copied and there was
    /// no page.
    pub full: u64,
    /// Frames refused because their pages are not in the UMEM.
    pub unreachable: u64,
    /// Frames refused because they need an offload that the socket does not have.
    pub no_offload: u64,
    /// Frames refused because they have no bytes, or are in more parts than a frame can have and
    /// too long to be copied into fewer.
    pub bad_shape: u64,
    /// Frames that were copied before they were sent, because they were in more parts than the
    /// driver sends ([`XskTx::max_descriptors`](crate::XskTx::max_descriptors)).
    pub linearised: u64,
    /// System calls that notified the kernel of frames.
    pub kicks: u64,
    /// Those of these system calls that were a repetition, because the kernel had sent only some of
    /// the frames.
    pub kicks_again: u64,
    /// Times that the kernel sent no frame because memory, the send buffer or the device was full.
    /// The frames stay in the ring, and the kernel is notified again.
    pub busy: u64,
    /// Times that the kernel sent no frame because the interface is down. The frames stay in the
    /// ring.
    pub down: u64,
    /// Descriptors that were out for a second without any completion. Their pages are returned when
    /// they complete. In copy mode, they complete when the receiver of the frame has released it.
    pub late: u64,
    /// Descriptors that were counted as late and completed later.
    pub late_completed: u64,
    /// The fault that stopped the queue, if there was one.
    pub stopped: Option<Fault>,
}

impl TxStats {
    /// The counters of errors, by name, without those that are zero.
    pub fn errors(&self) -> impl Iterator<Item = (&'static str, u64)> {
        [
            ("unreachable", self.unreachable),
            ("no_offload", self.no_offload),
            ("bad_shape", self.bad_shape),
            ("down", self.down),
            ("late", self.late),
            ("unconfirmed", self.unconfirmed),
        ]
        .into_iter()
        .chain(self.stopped.map(|fault| (fault.name(), 1)))
        .filter(|&(_, n)| n > 0)
    }
}

/// The kernel's counters of a socket: frames that were lost between the interface and the rings.
///
/// In copy mode, each frame for the socket is either received, or counted once as `rx_dropped` or
/// `rx_ring_full`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct KernelStats {
    /// Frames for the socket that were dropped because there were no chunks, which also counts as
    /// `rx_fill_empty`. In copy mode, also frames that were dropped because they were longer than a
    /// chunk and the socket does not accept frames of several buffers.
    pub rx_dropped: u64,
    /// Entries of the fill ring that were not valid.
    pub rx_invalid: u64,
    /// Descriptors of the TX ring that were not valid. They have no completion.
    pub tx_invalid: u64,
    /// Frames dropped because the RX ring was full.
    pub rx_ring_full: u64,
    /// Times that the kernel needed a chunk, and the fill ring was empty.
    pub rx_fill_empty: u64,
    /// Times that the kernel polled for a frame to send, and there was none.
    pub tx_ring_empty: u64,
}

impl KernelStats {
    /// The sum of these counters and those of another socket.
    pub(crate) fn plus(&self, other: &Self) -> Self {
        Self {
            rx_dropped: self.rx_dropped + other.rx_dropped,
            rx_invalid: self.rx_invalid + other.rx_invalid,
            tx_invalid: self.tx_invalid + other.tx_invalid,
            rx_ring_full: self.rx_ring_full + other.rx_ring_full,
            rx_fill_empty: self.rx_fill_empty + other.rx_fill_empty,
            tx_ring_empty: self.tx_ring_empty + other.tx_ring_empty,
        }
    }
}

impl From<libc::xdp_statistics> for KernelStats {
    fn from(s: libc::xdp_statistics) -> Self {
        Self {
            rx_dropped: s.rx_dropped,
            rx_invalid: s.rx_invalid_descs,
            tx_invalid: s.tx_invalid_descs,
            rx_ring_full: s.rx_ring_full,
            rx_fill_empty: s.rx_fill_ring_empty_descs,
            tx_ring_empty: s.tx_ring_empty_descs,
        }
    }
}

/// The state of a queue as a word.
pub(crate) fn state(stopped: Option<Fault>) -> impl fmt::Display {
    stopped.map_or("running", Fault::name)
}
