//! Netmem's token table behind the same trait as the other ways.

use super::kind::{Fragment, Receive, Return, Tokens};
use super::niovs::Niovs;
use netmem_devmem::{Returner, TokenRange, TokenTable};
use std::sync::Arc;

/// A range for each binding, two numbers for each page: `netmem_devmem`.
#[derive(Debug)]
pub struct Ranges;

/// The receive side.
#[derive(Debug)]
pub struct Receiver {
    table: TokenTable<Arc<Niovs>>,
    bindings: Box<[Arc<Niovs>]>,
}

impl Tokens for Ranges {
    type Receiver = Receiver;
    type Returner = Returner<Arc<Niovs>>;

    fn open(bindings: &[Arc<Niovs>]) -> (Receiver, Self::Returner) {
        let table = TokenTable::new();
        let returner = table.returner();
        (Receiver { table, bindings: bindings.into() }, returner)
    }
}

impl Receive for Receiver {
    #[inline]
    fn receive(&mut self, fragments: &[Fragment], tokens: &mut [u32]) {
        let mut receive = self.table.receive();
        for (fragment, token) in fragments.iter().zip(tokens) {
            // A token that was not available is never freed, and the caller notices that.
            *token =
                receive.reserve(&self.bindings[fragment.binding as usize], fragment.index).map_or(0, |token| token.0);
        }
        // SAFETY: a put of these pages releases nothing.
        unsafe { receive.commit() };
    }
}

impl Return for Returner<Arc<Niovs>> {
    #[inline]
    fn return_tokens(&self, ranges: &[TokenRange]) -> usize {
        Returner::return_tokens(self, ranges).unwrap_or(0)
    }
}
