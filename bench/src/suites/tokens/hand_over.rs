//! No tokens: the cost of passing a batch from one thread to another.

use netmem_bench::baselines::tokens::{Fragment, Niovs, Receive, Return, Tokens};
use netmem_devmem::TokenRange;
use std::sync::Arc;

/// A kind of tokens that does nothing.
pub(super) struct HandOver;

/// The receiving or the returning side.
#[derive(Clone)]
pub(super) struct Nothing;

impl Tokens for HandOver {
    type Receiver = Nothing;
    type Returner = Nothing;

    fn open(_: &[Arc<Niovs>]) -> (Nothing, Nothing) {
        (Nothing, Nothing)
    }
}

impl Receive for Nothing {
    fn receive(&mut self, fragments: &[Fragment], tokens: &mut [u32]) {
        fragments.iter().zip(tokens).for_each(|(fragment, token)| *token = fragment.index);
    }
}

impl Return for Nothing {
    fn return_tokens(&self, ranges: &[TokenRange]) -> usize {
        ranges.len()
    }
}
