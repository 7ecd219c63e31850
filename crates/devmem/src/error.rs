//! What can be wrong with a delivery or a return.

use crate::MAX_RANGES;
use thiserror::Error;

/// Why a fragment got no token. Nothing was counted; the reference to its page is still the caller's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DeliverError {
    /// The socket's 32-bit space is taken.
    #[error(
        "no {pages} tokens in a row are free on this socket for binding {binding}: {bindings} bindings have {taken} of \
         its 2^32; unbind what is not needed any more and return its tokens, or receive on another socket"
    )]
    Exhausted {
        /// The binding that the socket met.
        binding: u64,
        /// The tokens that it needs, one for each page.
        pages: u32,
        /// Bindings that have a range.
        bindings: usize,
        /// Tokens in those ranges.
        taken: u64,
    },
    /// The system has no memory for counts.
    #[error("no memory for the counts of tokens ({bytes} bytes)")]
    NoMemory {
        /// What was asked for.
        bytes: usize,
    },
    /// The fragment is said to be in a page that its binding does not have.
    #[error("binding {binding} has {pages} pages, and none with index {index}")]
    NoSuchPage {
        /// The binding.
        binding: u64,
        /// The page that was named.
        index: u32,
        /// Pages of the binding.
        pages: u32,
    },
}

/// More ranges in one call than are looked at. None was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{ranges} ranges of tokens in one call; at most {MAX_RANGES} are taken, give them back in several calls")]
pub struct TooManyRanges {
    /// How many there were.
    pub ranges: usize,
}
