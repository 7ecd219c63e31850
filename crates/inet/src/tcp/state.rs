//! The states of a connection (RFC 9293, section 3.3.2).

use serde::{Deserialize, Serialize};

/// The states of RFC 9293, section 3.3.2. LISTEN is a [`Listener`](super::Listener).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)] // The names are the RFC's.
pub enum State {
    SynSent,
    SynReceived,
    Established,
    FinWait1,
    FinWait2,
    CloseWait,
    Closing,
    LastAck,
    TimeWait,
    Closed,
}
