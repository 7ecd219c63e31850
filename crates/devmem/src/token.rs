//! The numbers by which a user gives pages back.

use std::fmt;

/// What a user gets with a fragment of device memory, and gives back when done with it: a number that means something to
/// one socket only. All fragments in one page have the same token, each its own offset. Never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(pub u32);

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Tokens that follow each other, given back once each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TokenRange {
    /// The first token.
    pub start: u32,
    /// How many.
    pub count: u32,
}

impl From<Token> for TokenRange {
    /// That token, once.
    #[inline]
    fn from(token: Token) -> Self {
        Self { start: token.0, count: 1 }
    }
}
