//! Tokens: the numbers by which a user returns pages.

use std::fmt;

/// The largest number of ranges in a call that returns tokens.
pub const MAX_RANGES: usize = 128;
/// The largest number of fragments, valid or not, that a call processes. After them the call stops.
pub const MAX_FRAGMENTS: u32 = 1024;

/// The number by which a user returns a fragment of device memory. A token is valid on one socket
/// only. All fragments in one page have the same token and different offsets. A token is never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(pub u32);

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Consecutive tokens, each of which is returned once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TokenRange {
    /// The first token.
    pub start: u32,
    /// The number of tokens.
    pub count: u32,
}

impl From<Token> for TokenRange {
    /// A range with only that token.
    #[inline]
    fn from(token: Token) -> Self {
        Self { start: token.0, count: 1 }
    }
}
