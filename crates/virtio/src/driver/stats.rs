//! The driver's counters.

pub use crate::virtqueue::fault::DeviceFault;
use netmem_packet::FrameCounts;
use std::fmt;

/// A receive queue's counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RxStats {
    /// Frames that the XDP program saw.
    pub frames: u64,
    /// Frames of several buffers among them.
    pub multi_buffer: u64,
    /// Bytes in them, from the Ethernet header on.
    // Not next to `frames`: two additions in memory would become five instructions on vectors.
    pub bytes: u64,
    /// Verdicts: pass.
    pub passed: u64,
    /// Verdicts: drop.
    pub dropped: u64,
    /// Verdicts: transmit.
    pub transmitted: u64,
    /// Verdicts: redirect.
    pub redirected: u64,
    /// Verdicts: the program failed.
    pub aborted: u64,
    /// Frames dropped because they did not become one buffer for a program that needs it.
    pub not_linear: u64,
    /// Frames dropped because they were too short for an Ethernet header.
    pub short: u64,
    /// Frames dropped because their virtio-net header is invalid.
    pub bad_header: u64,
    /// Frames dropped because their virtio-net header uses an offload that was not negotiated.
    pub not_negotiated: u64,
    /// Frames whose payload was dropped because there was no page for it: see
    /// [`SplitOptions::keep_receiving`](super::SplitOptions::keep_receiving).
    pub payload_dropped: u64,
    /// How often fewer buffers were posted than possible, because there was no page.
    pub out_of_buffers: u64,
    /// How often the queue switched to the ring of a new connection of its device
    /// ([`VirtioNet::reconnect`](super::VirtioNet::reconnect)).
    pub restarts: u64,
    /// Buffers that the device had filled before such a restart, or before
    /// [`VirtioRx::close_counted`](super::VirtioRx::close_counted), and that had not been polled.
    /// Their frames are lost.
    pub unread: u64,
    /// The fault that stopped the queue. A restart clears it.
    pub stopped: Option<DeviceFault>,
}

impl RxStats {
    /// Stops the queue.
    #[cold]
    pub(crate) fn stop(&mut self, error: DeviceFault) {
        netmem_pool::trace::warn!(%error, "a receive queue is stopped: its device cannot be trusted");
        self.stopped = Some(error);
    }

    /// These counters and those of frames that were delivered in groups.
    pub(crate) fn with(self, groups: FrameCounts) -> Self {
        Self {
            frames: self.frames + groups.frames,
            bytes: self.bytes + groups.bytes,
            passed: self.passed + groups.passed,
            dropped: self.dropped + groups.dropped,
            transmitted: self.transmitted + groups.transmitted,
            redirected: self.redirected + groups.redirected,
            aborted: self.aborted + groups.aborted,
            ..self
        }
    }

    /// Counts that the queue leaves this ring for one of a new connection.
    pub(crate) fn restart(&mut self, unread: u16) {
        self.restarts += 1;
        self.unread += u64::from(unread);
        self.stopped = None;
    }

    /// The counters of errors that are not zero, by name.
    pub fn errors(&self) -> impl Iterator<Item = (&'static str, u64)> {
        [
            ("aborted", self.aborted),
            ("not_linear", self.not_linear),
            ("short", self.short),
            ("bad_header", self.bad_header),
            ("not_negotiated", self.not_negotiated),
            ("payload_dropped", self.payload_dropped),
            ("out_of_buffers", self.out_of_buffers),
            ("unread", self.unread),
        ]
        .into_iter()
        .chain(self.stopped.map(|e| (e.name(), 1)))
        .filter(|&(_, n)| n > 0)
    }
}

/// A transmit queue's counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TxStats {
    /// Frames posted to the device.
    pub frames: u64,
    /// Bytes in them.
    pub bytes: u64,
    /// Frames among them that were of another DMA domain, and were mapped for this device.
    pub mapped: u64,
    /// Frames refused because the queue was full.
    pub full: u64,
    /// Frames refused because the device's DMA domain does not cover their pages.
    pub wrong_domain: u64,
    /// Frames refused because they need an offload that the device does not offer.
    pub no_offload: u64,
    /// Frames that the device has completed.
    pub completed: u64,
    /// How often the queue switched to the ring of a new connection of its device
    /// ([`VirtioNet::reconnect`](super::VirtioNet::reconnect)).
    pub restarts: u64,
    /// Frames that the device had not confirmed before such a restart. It may have sent them, or
    /// not.
    pub unconfirmed: u64,
    /// The fault that stopped the queue. A restart clears it.
    pub stopped: Option<DeviceFault>,
}

/// The name of a queue's state, for reports.
pub(crate) fn state_name(stopped: Option<DeviceFault>) -> impl fmt::Display {
    stopped.map_or("running", |e| e.name())
}
