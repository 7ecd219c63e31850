//! The answers of a back end: one definition that encodes and decodes.

use super::decode::Decoder;
use super::encode::EncodedMessage;
use super::header::{REPLY, RawMessage};
use super::malformed::Malformed;
use super::payload::Inflight;
use super::request::Request;
use crate::vhost_user::received::Received;
use std::os::fd::AsFd;

/// The back end's answer to a message.
#[derive(Debug)]
pub(crate) enum Reply<F> {
    /// A number that was asked for, or an acknowledgement: 0 for "done", any other number for
    /// "refused".
    Number(u64),
    /// To `GET_VRING_BASE`.
    VringBase { index: u32, base: u32 },
    /// To `GET_CONFIG`. At most [`MAX_CONFIG`](super::header::MAX_CONFIG) bytes.
    Config { offset: u32, flags: u32, bytes: Vec<u8> },
    /// To `GET_INFLIGHT_FD`. Without a descriptor if the back end keeps no record (a size of 0).
    Inflight(Inflight, Option<F>),
    /// To `SET_LOG_BASE`; to `GET_CONFIG`, a refusal.
    Empty,
}

impl<F: AsFd> Reply<F> {
    /// The answer to `asked` as it is sent.
    pub(crate) fn encode(&self, asked: Request) -> EncodedMessage<'_> {
        let mut f = EncodedMessage::new(asked, REPLY);
        match self {
            Self::Number(value) => f.u64s([*value]),
            Self::VringBase { index, base } => f.u32s([*index, *base]),
            Self::Config { offset, flags, bytes } => f.config(*offset, *flags, bytes),
            Self::Inflight(inflight, fd) => {
                f.inflight(inflight);
                fd.iter().for_each(|fd| f.fd(fd));
            }
            Self::Empty => {}
        }
        f.done()
    }
}

impl Reply<Received> {
    /// The answer to `asked`.
    pub(crate) fn decode(packet: RawMessage, asked: Request) -> Result<Self, Malformed> {
        let (request, flags) = (packet.request, packet.flags);
        if flags & REPLY == 0 {
            return Err(Malformed::Flags { request, flags });
        }
        if request != asked {
            return Err(Malformed::WrongAnswer { got: request });
        }
        let mut r = Decoder::new(packet);
        let reply = match asked {
            Request::GET_VRING_BASE => Self::VringBase { index: r.u32(), base: r.u32() },
            Request::GET_CONFIG | Request::SET_LOG_BASE if r.left() == 0 => Self::Empty,
            Request::GET_CONFIG if r.left() != 8 => {
                let (offset, flags, bytes) = r.config_bytes()?;
                Self::Config { offset, flags, bytes }
            }
            Request::GET_INFLIGHT_FD if r.left() != 8 => Self::Inflight(r.inflight(), r.fds.next()),
            _ => Self::Number(r.u64()),
        };
        r.done()?;
        Ok(reply)
    }
}
