//! What a token table has seen.

/// A token table's numbers. Each is right, and they are not of one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TokenStats {
    /// Returns that were ignored because the token is of no binding of this socket, or of one that is gone.
    pub foreign: u64,
    /// Returns that were ignored because the page is not held: returned more often than received, or never received.
    pub excess: u64,
    /// Bindings that have a range of tokens.
    pub bindings: usize,
    /// Bytes of counts: 4 for each page of those 1024 in a row that something was received from.
    pub bytes: usize,
}
