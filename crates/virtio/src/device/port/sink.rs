//! A port without frames for the driver, which drops all frames of the driver.
//!
//! For measurements of transmit: frames are checked and counted, and not copied.

use super::interface::Port;

/// A port that only counts (in the device's statistics) what the driver sends.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sink;

impl Port for Sink {
    const WANTS_BYTES: bool = false;
    const FEATURES: u64 = 0;

    #[inline(always)]
    fn peek(&mut self) -> Option<&[u8]> {
        None
    }

    fn consume(&mut self) {}

    #[inline(always)]
    fn send(&mut self, _: &[u8]) -> bool {
        true
    }
}
