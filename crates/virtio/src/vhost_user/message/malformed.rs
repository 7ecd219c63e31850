//! How a message can break the specification.

use super::header::{MAX_FDS, MAX_PAYLOAD};
use super::request::Request;

/// How a message breaks the specification.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Malformed {
    /// Another version of the protocol, flags without a meaning, or an answer where a question
    /// belongs or the reverse.
    #[error("{request} has the flags {flags:#x}")]
    Flags {
        /// The message.
        request: Request,
        /// Its flags.
        flags: u32,
    },
    /// More payload than any message has.
    #[error("{request} announces {size} bytes of payload, where {MAX_PAYLOAD} are the most")]
    TooLong {
        /// The message.
        request: Request,
        /// The bytes that it announces.
        size: u32,
    },
    /// More or fewer bytes of payload than the message has.
    #[error("{request} has {size} bytes of payload, which is not its length")]
    Size {
        /// The message.
        request: Request,
        /// Bytes of its payload.
        size: usize,
    },
    /// More or fewer descriptors than the message has.
    #[error("{request} came with {got} file descriptors, which is not their number")]
    Descriptors {
        /// The message.
        request: Request,
        /// How many came.
        got: usize,
    },
    /// More descriptors than any message has.
    #[error("a message came with more than {MAX_FDS} file descriptors")]
    TooManyDescriptors,
    /// Descriptors with an answer of which none has any.
    #[error("an answer came with file descriptors, and none was asked for")]
    UnwantedDescriptors,
    /// A field that is out of its range.
    #[error("{request} has {value} as its {field}")]
    Field {
        /// The message.
        request: Request,
        /// The specification's word for the field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// The answer to another message.
    #[error("{got} was answered instead")]
    WrongAnswer {
        /// The message that was answered.
        got: Request,
    },
}
