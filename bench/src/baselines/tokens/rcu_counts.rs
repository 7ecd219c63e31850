//! A tree of counters that is read by RCU: a node for each 256 keys of a level, a counter for each
//! page that was ever received.

use super::kind::{Fragment, Receive, Return, Tokens, each, key, page};
use super::niovs::Niovs;
use netmem_devmem::TokenRange;
use netmem_refs::{Borrowed, Owner, RcuCell, RcuRef, rcu};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// A counter for each page, found in a tree by RCU.
#[derive(Debug)]
pub struct RcuCounts;

struct Node<T>([RcuCell<T, RcuRef>; 256]);

impl<T> Default for Node<T> {
    fn default() -> Self {
        Self(std::array::from_fn(|_| RcuCell::default()))
    }
}

/// By the bytes of the key, the highest first.
type Tree = Node<Node<Node<Node<AtomicU32>>>>;

impl<T: Default + Send + Sync + 'static> Node<T> {
    /// The child for a byte of the key. It is made if it does not exist. Called by the receiver
    /// alone.
    #[inline]
    fn at<'g>(&self, guard: &'g rcu::Guard, byte: u8) -> Option<&'g T> {
        let cell = &self.0[byte as usize];
        if cell.load(guard).is_none() {
            cell.store(Some(Owner::new(T::default())));
        }
        Some(Borrowed::value(cell.load(guard)?))
    }

    #[inline]
    fn find<'g>(&self, guard: &'g rcu::Guard, byte: u8) -> Option<&'g T> {
        Some(Borrowed::value(self.0[byte as usize].load(guard)?))
    }
}

/// A handle of a socket.
#[derive(Clone)]
pub struct RcuTree(Arc<(Box<[Arc<Niovs>]>, Tree)>);

impl std::fmt::Debug for RcuTree {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RcuTree").finish_non_exhaustive()
    }
}

impl Tokens for RcuCounts {
    type Receiver = RcuTree;
    type Returner = RcuTree;

    fn open(bindings: &[Arc<Niovs>]) -> (RcuTree, RcuTree) {
        let socket = RcuTree(Arc::new((bindings.into(), Tree::default())));
        (socket.clone(), socket)
    }
}

impl Receive for RcuTree {
    #[inline]
    fn receive(&mut self, fragments: &[Fragment], tokens: &mut [u32]) {
        rcu::read(|guard| {
            for (fragment, token) in fragments.iter().zip(tokens) {
                *token = key(*fragment);
                let [a, b, c, d] = token.to_be_bytes();
                let root = &self.0.1;
                let count = root.at(guard, a).and_then(|n| n.at(guard, b)?.at(guard, c)?.at(guard, d));
                if let Some(count) = count {
                    count.fetch_add(1, Ordering::Release);
                }
            }
        });
    }
}

impl Return for RcuTree {
    #[inline]
    fn return_tokens(&self, ranges: &[TokenRange]) -> usize {
        let (bindings, root) = &*self.0;
        rcu::read(|guard| {
            let mut freed = 0;
            for token in each(ranges) {
                let [a, b, c, d] = token.to_be_bytes();
                let count = root.find(guard, a).and_then(|n| n.find(guard, b)?.find(guard, c)?.find(guard, d));
                let take = |count: &AtomicU32| {
                    count.fetch_update(Ordering::Acquire, Ordering::Relaxed, |n| n.checked_sub(1)).is_ok()
                };
                if count.is_some_and(take) {
                    let Fragment { binding, index } = page(token);
                    bindings[binding as usize].put_one(index);
                    freed += 1;
                }
            }
            freed
        })
    }
}
