//! Errors of deliveries and returns.

use super::token::{MAX_RANGES, TokenRange};
use thiserror::Error;

/// The reason why no token was assigned to a fragment. Nothing was counted, and the caller still
/// owns the reference to its page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DeliverError {
    /// The socket's 32-bit space has no free range that is large enough.
    #[error(
        "no {pages} tokens in a row are free on this socket for binding {binding}: {bindings} bindings have {taken} of \
         its 2^32; unbind what is not needed any more and return its tokens, or receive on another socket"
    )]
    Exhausted {
        /// The id of the binding that needs a range.
        binding: u64,
        /// The number of tokens that it needs, one for each page.
        pages: u32,
        /// The number of bindings that have a range.
        bindings: usize,
        /// The number of tokens in those ranges.
        taken: u64,
    },
    /// The system has no memory for the counts.
    #[error("no memory for the counts of tokens ({bytes} bytes)")]
    NoMemory {
        /// The number of bytes that were requested.
        bytes: usize,
    },
    /// Another stream of the stack holds the page, because a queue has put frames of two
    /// connections into it.
    #[error("page {index} of binding {binding} is held by another stream, which must give it back first")]
    Held {
        /// The id of the binding.
        binding: u64,
        /// The index of the page.
        index: u32,
    },
    /// The fragment names a page that its binding does not have.
    #[error("binding {binding} has {pages} pages, and none with index {index}")]
    NoSuchPage {
        /// The id of the binding.
        binding: u64,
        /// The index of the named page.
        index: u32,
        /// The number of pages of the binding.
        pages: u32,
    },
}

/// The error that a call had more ranges than are allowed. No token was returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{ranges} ranges of tokens in one call; at most {MAX_RANGES} are taken, give them back in several calls")]
pub struct TooManyRanges {
    /// The number of ranges in the call.
    pub ranges: usize,
}

impl TooManyRanges {
    /// Returns the error if there are more than [`MAX_RANGES`].
    #[inline]
    pub(crate) fn check(ranges: &[TokenRange]) -> Result<(), Self> {
        if ranges.len() > MAX_RANGES { Err(Self { ranges: ranges.len() }) } else { Ok(()) }
    }
}
