//! Frames that have not come back for a long time: where they are, and since when.
//!
//! A queue knows at any time which chunks the kernel has. It does not know when each of them
//! changed hands, because writing a time for each frame would cost a store on a cold cache line.
//! Instead, each table of chunks records that a chunk left the kernel, with the store that writes
//! the entry (`accounts.rs`). A sample reads the tables, clears these marks, and keeps a time for
//! each chunk:
//!
//! ```text
//!   received or completed since the last sample   out now   time
//!   yes                                           yes       that of this sample
//!   no                                            yes       as it was; that of this sample if none
//!                                                 no        none
//! ```
//!
//! So a frame is out for at least as long as is reported, and is reported at the latest one
//! interval between two samples after the limit.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

/// A frame's page that has not come back for longer than a limit: see
/// [`XskRx::held_frames`](crate::XskRx::held_frames) and
/// [`XskTx::held_frames`](crate::XskTx::held_frames).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HeldFrame {
    /// The interface's name, or its index if the name is unknown.
    pub interface: Arc<str>,
    /// The number of the queue that received the frame, or that sends it.
    pub queue: u32,
    /// The number of the page in the UMEM's region.
    pub page: u32,
    /// The address of the chunk in the UMEM, in bytes from the region's first.
    pub address: u64,
    /// The time of the sample that found the frame first. It is out since then, or since some time
    /// between the sample before and that one.
    pub since: Instant,
    /// What has the frame.
    pub holder: FrameHolder,
}

/// What has a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FrameHolder {
    /// The program: it has the packet or a part of it, or has passed it to another queue (see
    /// [`HeldFrame::merge`]).
    Program,
    /// The TX ring: the kernel has not taken the frame. The queue was not flushed, the interface is
    /// down, or the device is busy.
    TxRing,
    /// The kernel or the device: the frame was taken from the TX ring, and has not completed. In
    /// copy mode, the receiver of the frame has it. Or the kernel had it when a socket of the UMEM
    /// was closed, and has not released that socket's queue ([`Umem::held`](crate::Umem::held)).
    Kernel,
}

impl fmt::Display for FrameHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Program => "the program",
            Self::TxRing => "the TX ring",
            Self::Kernel => "the kernel",
        })
    }
}

impl fmt::Display for HeldFrame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { interface, queue, page, address, since, holder } = self;
        let seconds = since.elapsed().as_secs_f64();
        write!(f, "queue {queue} of {interface}: page {page} at {address:#x}, held by {holder} for {seconds:.1} s")
    }
}

impl HeldFrame {
    /// The frames of both lists, which are of queues of one UMEM, each page once: a received frame
    /// that is being sent is in both, and is then listed as being sent.
    #[must_use]
    pub fn merge(mut received: Vec<Self>, sent: Vec<Self>) -> Vec<Self> {
        let being_sent: BTreeSet<_> = sent.iter().map(|frame| frame.page).collect();
        received.retain(|frame| !being_sent.contains(&frame.page));
        received.extend(sent);
        received.sort_by_key(|frame| frame.since);
        received
    }
}

/// The time for each chunk. Empty until the first sample.
#[derive(Debug, Default)]
pub(crate) struct Times(Vec<Option<Instant>>);

impl Times {
    /// The times of `chunks` chunks.
    pub(crate) fn of(&mut self, chunks: u32) -> &mut [Option<Instant>] {
        self.0.resize(chunks as usize, None);
        &mut self.0
    }
}
