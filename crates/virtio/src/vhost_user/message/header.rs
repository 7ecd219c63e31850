//! The header of a message: its layout, its flags, and the limits of what follows it.
//!
//! The header is validated before its payload is read, so that a peer cannot make this process
//! allocate more than [`MAX_PAYLOAD`] bytes.

use super::malformed::Malformed;
use super::request::Request;
use crate::vhost_user::received::Received;

/// Bytes of a header.
pub(crate) const HEADER: usize = 12;
/// Most bytes of payload. The largest message that is understood is `SET_CONFIG` with
/// [`MAX_CONFIG`] bytes; the rest is room for messages that are refused by name.
pub(crate) const MAX_PAYLOAD: usize = 1024;
/// Most descriptors of one message, and most regions of one memory table.
pub(crate) const MAX_FDS: usize = 8;
/// Most bytes of configuration space in one message.
pub(crate) const MAX_CONFIG: usize = 256;

pub(super) const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
pub(super) const REPLY: u32 = 1 << 2;
pub(super) const NEED_REPLY: u32 = 1 << 3;

/// A received message, before its payload is decoded.
#[derive(Debug)]
pub(crate) struct RawMessage {
    pub(crate) request: Request,
    pub(crate) flags: u32,
    /// At most [`MAX_PAYLOAD`] bytes.
    pub(crate) payload: Vec<u8>,
    /// At most [`MAX_FDS`].
    pub(crate) fds: Vec<Received>,
}

impl RawMessage {
    /// A packet from the header of a message, and how many bytes of payload follow it.
    pub(crate) fn with_header(header: &[u8; HEADER]) -> Result<(Self, usize), Malformed> {
        let word = |at: usize| u32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let (request, flags, size) = (Request(word(0)), word(4), word(8));
        if flags & VERSION_MASK != VERSION || flags & !(VERSION_MASK | REPLY | NEED_REPLY) != 0 {
            return Err(Malformed::Flags { request, flags });
        }
        match usize::try_from(size) {
            Ok(bytes) if bytes <= MAX_PAYLOAD => {
                Ok((Self { request, flags, payload: Vec::new(), fds: Vec::new() }, bytes))
            }
            _ => Err(Malformed::TooLong { request, size }),
        }
    }

    /// Whether the front end wants an acknowledgement, also if the message has no answer of its
    /// own.
    pub(crate) fn needs_reply(&self) -> bool {
        self.flags & NEED_REPLY != 0
    }
}
