//! Counters of a token table.

/// Counters of a token table. Each value is exact, but they are read one after the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TokenStats {
    /// Returns that were ignored because the token is in no range of this socket: it never was in
    /// one, or its binding was released.
    pub foreign: u64,
    /// Returns that were ignored because the page is not held: it was returned as often as
    /// received, or never received.
    pub excess: u64,
    /// The number of bindings that have a range of tokens.
    pub bindings: usize,
    /// Bytes of counts: those of each group of 16 pages from which at least one page was received.
    pub bytes: usize,
}
