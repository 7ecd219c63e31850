//! What a token table has seen.

/// A token table's numbers. Each is right, and they are not of one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TokenStats {
    /// Returns that were ignored because the token was never given out: of no binding of this socket, of one that is gone,
    /// or of a part of one that nothing was ever received from.
    pub foreign: u64,
    /// Returns that were ignored because the page was not held any more: returned more often than received.
    pub excess: u64,
    /// Bindings that have a range of tokens.
    pub bindings: usize,
    /// Bytes of counts: 4 for each page of each block of 1024 that something was received from.
    pub bytes: usize,
}
