//! The control queue: one command at a time, each waited for.
//!
//! ```text
//!   command   class u8 | command u8   read by the device
//!   argument  by the command          read by the device
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
        match self.command(ctrl::CLASS_MQ, ctrl::MQ_PAIRS_SET, &pairs.to_le_bytes())? {
            true => Ok(()),
            false => Err(NetError::ControlRefused { pairs }),
        }
    }

    /// Gives the device a command with up to 16 bytes of argument, and waits for the answer. False: the device refused, or
    /// broke the ring's rules.
    pub(super) fn command(&mut self, class: u8, command: u8, argument: &[u8]) -> Result<bool, NetError> {
        let timeout = NetError::ControlTimeout { seconds: PATIENCE.as_secs() };
        if self.owed {
            // A late answer would pass for one to this command.
            match self.ring.pending() {
                Err(_) => return Ok(false),
                Ok(0) => return Err(timeout),
                Ok(_) => self.ring.consume(1),
            }
            self.owed = false;
        }
        let (text, data, answer) = (0, 16, 32);
        self.buffer.write(text, &[class, command]);
        self.buffer.write(data, argument);
        self.buffer.write(answer, &[ctrl::ERR]);
        let dma = self.buffer.dma();
        let last = if argument.is_empty() { 1 } else { 2 };
        self.ring.describe(0, dma + text as u64, 2, false, Some(1));
        if last == 2 {
            self.ring.describe(1, dma + data as u64, argument.len() as u32, false, Some(2));
        }
        self.ring.describe(last, dma + answer as u64, 1, true, None);
        self.ring.expose(0);
        self.ring.publish();
        self.ring.notify();
        let start = Instant::now();
        loop {
            match self.ring.pending() {
                Err(_) => return Ok(false),
                Ok(0) if start.elapsed() > PATIENCE => {
                    self.owed = true;
                    return Err(timeout);
                }
                Ok(0) => std::thread::yield_now(),
                Ok(_) => break,
            }
        }
        self.ring.consume(1);
        Ok(self.buffer.read_byte(answer) == ctrl::OK)
    }
}
