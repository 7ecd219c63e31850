//! A transmit queue that writes its frames to a pcapng file.

use super::writer::PcapWriter;
use crate::device::{Reach, Sendable, TxQueue};
use crate::packet::Packet;
use crate::wait::{Armed, Wait};
use netmem_pool::{Frag, Mapped};
use rustix::event::{EventfdFlags, eventfd};
use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

/// The counters of a [`PcapTx`]. They only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PcapTxStats {
    /// Frames that were accepted.
    pub frames: u64,
    /// Bytes in them.
    pub bytes: u64,
}

/// A transmit queue that writes its frames to a pcapng file, with the time at which they were sent,
/// in nanoseconds.
///
/// A frame is copied when it is sent, and its pages return at once.
/// [`flush`](TxQueue::flush) writes what is buffered: a system call. If the file cannot be written, the queue stops. It refuses
/// further packets, and [`check`](Wait::check) and [`close`](Self::close) return the error.
///
/// The queue supports no offloads: [`SoftwareTx`](crate::SoftwareTx) computes checksums and cuts
/// segments in front of it.
pub struct PcapTx<M: Mapped> {
    file: PcapWriter,
    /// A frame in one piece, which the writer needs.
    frame: Vec<u8>,
    /// Packets that were sent since the last call of `complete`.
    sent: usize,
    stats: PcapTxStats,
    failed: Option<io::Error>,
    /// Never readable: no packet is waited for.
    fd: OwnedFd,
    memory: PhantomData<fn(M)>,
}

impl<M: Mapped> PcapTx<M> {
    /// Makes the file, or replaces it if it is there.
    ///
    /// # Errors
    ///
    /// The file cannot be made or written.
    pub fn create(path: &Path) -> io::Result<Self> {
        let file = PcapWriter::create(path)?;
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let (frame, stats) = (Vec::new(), PcapTxStats::default());
        Ok(Self { file, frame, sent: 0, stats, failed: None, fd, memory: PhantomData })
    }

    /// The queue's counters.
    #[must_use]
    pub fn stats(&self) -> PcapTxStats {
        self.stats
    }

    /// Writes what is buffered, and closes the file.
    ///
    /// # Errors
    ///
    /// The file could not be written, now or earlier: it lacks frames.
    pub fn close(mut self) -> io::Result<PcapTxStats> {
        self.flush();
        match self.failed {
            None => Ok(self.stats),
            Some(error) => Err(error),
        }
    }

    fn write(&mut self, packet: &Packet<M>) -> io::Result<()> {
        self.frame.resize(packet.len(), 0);
        packet.copy_to(0, &mut self.frame).map_err(io::Error::other)?;
        self.file.write(&self.frame, None, None)
    }
}

impl<M: Mapped> TxQueue for PcapTx<M> {
    type Mem = M;

    fn send(&mut self, packet: Packet<M>) -> Result<(), Packet<M>> {
        if self.sendable(&packet) != Sendable::Now {
            return Err(packet);
        }
        if let Err(error) = self.write(&packet) {
            self.failed = Some(error);
            return Err(packet);
        }
        self.sent += 1;
        self.stats.frames += 1;
        self.stats.bytes += packet.len() as u64;
        Ok(())
    }

    fn sendable(&self, packet: &Packet<M>) -> Sendable {
        if self.failed.is_none() && self.supports(packet.meta) { Sendable::Now } else { Sendable::Never }
    }

    fn flush(&mut self) {
        if self.failed.is_none() {
            self.failed = self.file.flush().err();
        }
    }

    fn complete(&mut self) -> usize {
        std::mem::take(&mut self.sent)
    }

    /// Frames are copied, so each can be reached.
    fn reach(&self, _: &Frag<M>) -> Reach {
        Reach::Map
    }
}

impl<M: Mapped> fmt::Debug for PcapTx<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PcapTx").field("stats", &self.stats).field("failed", &self.failed).finish_non_exhaustive()
    }
}

impl<M: Mapped> AsFd for PcapTx<M> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// There is never work to wait for: packets are completed when they are sent.
impl<M: Mapped> Wait for PcapTx<M> {
    fn arm(&mut self) -> io::Result<Armed> {
        self.check()?;
        Ok(if self.sent == 0 { Armed::Waits } else { Armed::Work })
    }

    fn disarm(&mut self) {}

    fn check(&self) -> io::Result<()> {
        match &self.failed {
            None => Ok(()),
            Some(error) => Err(io::Error::new(error.kind(), format!("the capture cannot be written: {error}"))),
        }
    }
}
