//! The cookie of a run: by it, a target knows the run's flows from what other stations send.
//!
//! ```text
//!   streams     the cookie ─► then messages          the target closes a connection without it
//!   datagrams   the cookie ─► again and again, until the target of streams knows all flows, or the
//!               target of requests has sent it back; then messages
//! ```
//!
//! A connection takes the place of a flow, and a datagram is counted or answered, only after the
//! cookie has come from there. Each run has another one, which the driver of several hosts sends
//! over its own connections. Flows are not encrypted: a station that reads them knows the cookie.

use anyhow::Context;
use serde::{Deserialize, Serialize};

/// The most connections of a target that have not sent the cookie yet. Further ones are closed.
pub(super) const MAX_UNKNOWN: usize = 64;

/// See the module.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub(super) struct Cookie([u8; Self::LEN]);

impl Cookie {
    pub(super) const LEN: usize = 16;

    /// A cookie that no station can guess.
    pub(super) fn random() -> anyhow::Result<Self> {
        let mut cookie = Self::default();
        let n =
            rustix::rand::getrandom(&mut cookie.0, rustix::rand::GetRandomFlags::empty()).context("random bytes")?;
        anyhow::ensure!(n == Self::LEN, "the kernel gave {n} random bytes of {}", Self::LEN);
        Ok(cookie)
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Whether these bytes are the cookie.
    pub(super) fn is(&self, bytes: &[u8]) -> bool {
        self.0 == bytes
    }
}
