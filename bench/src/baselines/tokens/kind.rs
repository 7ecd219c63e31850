//! What each kind of tokens can do: receive fragments, and free those whose tokens are returned.

use super::niovs::Niovs;
use netmem_devmem::TokenRange;
use std::sync::Arc;

/// The number of fragments for which a lock is taken once.
pub const BATCH: usize = 16;

/// A fragment that is to be received: a page of a binding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fragment {
    /// The position of the binding.
    pub binding: u32,
    /// The number of the page, below 2^24.
    pub index: u32,
}

/// A kind of token.
pub trait Tokens {
    /// The receive side. A socket has one.
    type Receiver: Receive;
    /// The side that returns tokens.
    type Returner: Return;

    /// A new socket, which will receive from these bindings, at most 255.
    fn open(bindings: &[Arc<Niovs>]) -> (Self::Receiver, Self::Returner);
}

/// The receive side of a socket.
pub trait Receive: Send {
    /// Delivers fragments, and stores the token of each.
    fn receive(&mut self, fragments: &[Fragment], tokens: &mut [u32]);
}

/// The side that returns tokens, on any thread.
pub trait Return: Clone + Send + Sync {
    /// Returns tokens. The result is how many fragments were freed.
    fn return_tokens(&self, ranges: &[TokenRange]) -> usize;
}

/// All tokens of some ranges.
#[inline]
pub(super) fn each(ranges: &[TokenRange]) -> impl Iterator<Item = u32> {
    ranges.iter().flat_map(|range| (0..range.count).map_while(|n| range.start.checked_add(n)))
}

/// The number of a page: one for each page of each binding.
#[inline]
pub(super) fn key(fragment: Fragment) -> u32 {
    ((fragment.binding + 1) << 24) | fragment.index
}

#[inline]
pub(super) fn page(key: u32) -> Fragment {
    Fragment { binding: (key >> 24) - 1, index: key & 0xFF_FFFF }
}
