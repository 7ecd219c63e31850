//! The reset that answers a segment for which there is no connection.

use super::{Flags, Header};

/// The reset that answers a segment for which there is neither a connection nor a listener. A reset
/// is not answered. RFC 9293, section 3.10.7.1.
#[must_use]
pub fn reset_for(header: &Header, len: u32) -> Option<Header> {
    let flags = header.flags;
    if flags.has(Flags::RST) {
        return None;
    }
    if flags.has(Flags::ACK) {
        return Some(Header { seq: header.ack, flags: Flags::RST, ..Header::default() });
    }
    let len = len + u32::from(flags.has(Flags::SYN)) + u32::from(flags.has(Flags::FIN));
    Some(Header { ack: header.seq + len, flags: Flags::RST.with(Flags::ACK), ..Header::default() })
}
