//! What a helper opens for a worker.

use crate::program::ProgramOptions;
use std::time::Duration;

/// The largest number of sockets of a grant.
pub const MAX_SOCKETS: usize = 64;

/// The options of a helper.
#[derive(Clone, Debug)]
pub struct HelperOptions {
    /// The receive queues. A socket is opened for each.
    pub queues: Vec<u32>,
    /// The program. `None`: the worker only sends, or the user has a program of their own.
    pub program: Option<ProgramOptions>,
    /// Busy polling by the worker (`SO_PREFER_BUSY_POLL`): how long to poll, and how many frames at
    /// a time.
    pub busy_poll: Option<(Duration, u16)>,
}

impl Default for HelperOptions {
    fn default() -> Self {
        Self { queues: vec![0], program: Some(ProgramOptions::default()), busy_poll: None }
    }
}
