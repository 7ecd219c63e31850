//! The control queue: one command at a time, each waited for.
//!
//! ```text
//!   command   class u8 | command u8   read by the device
//!   argument  pairs u16 le            read by the device
//!   answer    ack u8                  written by the device
//! ```

use super::ring::DriverRing;
use super::{NetError, VnetMemory};
use crate::net::ctrl;
use std::time::{Duration, Instant};

/// How long a device may take to answer.
const PATIENCE: Duration = Duration::from_secs(3);
/// Bytes for the three parts of a command, each on a place of its own.
pub(super) const BUFFER: usize = 64;
/// Entries in the ring: a command takes three.
pub(super) const SIZE: u16 = 4;

pub(super) struct ControlQueue {
    ring: DriverRing,
    buffer: VnetMemory,
    /// A command was given up on, and the device may still answer it.
    owed: bool,
}

impl ControlQueue {
    pub(super) fn new(ring: DriverRing, buffer: VnetMemory) -> Self {
        Self { ring, buffer, owed: false }
    }

    /// Tells the device how many queue pairs are in use.
    pub(super) fn set_pairs(&mut self, pairs: u16) -> Result<(), NetError> {
        let timeout = NetError::ControlTimeout { seconds: PATIENCE.as_secs() };
        let answers = |ring: &DriverRing| ring.pending().map_err(|_| NetError::ControlRefused { pairs });
        if self.owed {
            // A late answer would pass for one to this command.
            if answers(&self.ring)? == 0 {
                return Err(timeout);
            }
            self.ring.consume(1);
            self.owed = false;
        }
        let (command, argument, answer) = (0, 16, 32);
        self.buffer.write(command, &[ctrl::CLASS_MQ, ctrl::MQ_PAIRS_SET]);
        self.buffer.write(argument, &pairs.to_le_bytes());
        self.buffer.write(answer, &[ctrl::ERR]);
        let dma = self.buffer.dma();
        self.ring.describe(0, dma + command as u64, 2, false, Some(1));
        self.ring.describe(1, dma + argument as u64, 2, false, Some(2));
        self.ring.describe(2, dma + answer as u64, 1, true, None);
        self.ring.expose(0);
        self.ring.publish();
        self.ring.notify();
        let start = Instant::now();
        while answers(&self.ring)? == 0 {
            if start.elapsed() > PATIENCE {
                self.owed = true;
                return Err(timeout);
            }
            std::thread::yield_now();
        }
        self.ring.consume(1);
        if self.buffer.read_byte(answer) == ctrl::OK { Ok(()) } else { Err(NetError::ControlRefused { pairs }) }
    }
}
