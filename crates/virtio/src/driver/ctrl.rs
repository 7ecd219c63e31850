//! The control queue: one command at a time. The driver waits for the answer of each.
//!
//! ```text
//!   command   class u8 | command u8   read by the device
//!   argument  by the command          read by the device
//!   answer    ack u8                  written by the device
//! ```

use super::error::NetError;
use super::ring::{RingHandle, RingQueue};
use super::stats::DeviceFault;
use crate::net::ctrl;
use crate::virtqueue::driver::{AnyDriverQueue, Segment, with_queue};
use netmem_pool::{PeerShared, Region};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The longest wait for an answer of the device.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Bytes for the three parts of a command, each at its own place.
pub(super) const BUFFER: usize = 64;
/// Entries in the ring: a command has three.
pub(super) const SIZE: u16 = 4;

pub(super) struct ControlQueue {
    ring: RingQueue<AnyDriverQueue<()>>,
    buffer: ControlBuffer,
    /// The driver has stopped waiting for a command, and the device may still answer it.
    answer_pending: bool,
}

impl ControlQueue {
    pub(super) fn new(handle: RingHandle, buffer: ControlBuffer) -> Self {
        Self { ring: RingQueue::new(handle), buffer, answer_pending: false }
    }

    /// Sets how many queue pairs the device uses.
    pub(super) fn set_pairs(&mut self, pairs: u16) -> Result<(), NetError> {
        match self.command(ctrl::CLASS_MQ, ctrl::MQ_PAIRS_SET, &pairs.to_le_bytes())? {
            true => Ok(()),
            false => Err(NetError::ControlRefused { pairs }),
        }
    }

    /// Sends a command with up to 16 bytes of argument, and waits for the answer. Returns false if
    /// the device refused, or violated a rule of the ring.
    pub(super) fn command(&mut self, class: u8, command: u8, argument: &[u8]) -> Result<bool, NetError> {
        let timeout = NetError::ControlTimeout { seconds: TIMEOUT.as_secs() };
        if self.answer_pending {
            // A late answer to that command would be mistaken for the answer to this one.
            match self.answered() {
                Err(_) => return Ok(false),
                Ok(false) => return Err(timeout),
                Ok(true) => self.answer_pending = false,
            }
        }
        let (text, data, answer) = (0, 16, 32);
        self.buffer.write(text, &[class, command]);
        self.buffer.write(data, argument);
        self.buffer.write(answer, &[ctrl::ERR]);
        let dma = self.buffer.dma();
        let argument = Segment::read(dma + data as u64, argument.len() as u32);
        let answered = Segment { addr: dma + answer as u64, len: 1, writable: true };
        let segments = [Segment::read(dma + text as u64, 2), argument, answered];
        with_queue!(&mut self.ring.queue, queue => {
            if let Some(vacant) = queue.vacant(segments.len()) {
                queue.post(vacant, |()| segments.into_iter().filter(|segment| segment.len > 0));
            }
            queue.publish();
        });
        self.ring.notify();
        let start = Instant::now();
        loop {
            match self.answered() {
                Err(_) => return Ok(false),
                Ok(false) if start.elapsed() > TIMEOUT => {
                    self.answer_pending = true;
                    return Err(timeout);
                }
                Ok(false) => std::thread::yield_now(),
                Ok(true) => break,
            }
        }
        Ok(self.buffer.read_byte(answer) == ctrl::OK)
    }

    /// Polls for the answer to the command that the device has.
    fn answered(&mut self) -> Result<bool, DeviceFault> {
        with_queue!(&mut self.ring.queue, queue => {
            if queue.pending()? == 0 {
                return Ok(false);
            }
            if queue.take().is_none() {
                return queue.outcome().map(|()| false);
            }
        });
        Ok(true)
    }
}

/// A piece of the rings' memory.
#[derive(Debug)]
pub(super) struct ControlBuffer {
    pub(super) region: Arc<Region<PeerShared>>,
    pub(super) offset: usize,
    pub(super) len: usize,
    pub(super) bus: u64,
}

impl ControlBuffer {
    fn dma(&self) -> u64 {
        self.bus + self.offset as u64
    }

    fn write(&mut self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len);
        for (i, b) in bytes.iter().enumerate() {
            // SAFETY: just checked; this process alone writes the buffer, and the device may read
            // it, hence volatile.
            unsafe { self.region.as_ptr().add(self.offset + at + i).write_volatile(*b) };
        }
    }

    fn read_byte(&self, at: usize) -> u8 {
        assert!(at < self.len);
        // SAFETY: just checked; the device may write it, hence volatile.
        unsafe { self.region.as_ptr().add(self.offset + at).read_volatile() }
    }
}
