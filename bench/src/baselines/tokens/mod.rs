//! Tokens of device memory: the old ways and the new way behind one trait.
//!
//! | | a token is | receive | give back |
//! | --- | --- | --- | --- |
//! | [`LockedMap`] | an id in a map under a lock, as in Linux up to now | the lock for each 16 | the lock for each 16; pages put after it |
//! | [`LockedEach`] | the same | the lock for each fragment | the lock for each fragment |
//! | [`HashedCounts`] | a number for the page | the lock for each 16, a hash map of counts | the same |
//! | [`RcuCounts`] | a number for the page | a tree of counters, by RCU | the same, and an atomic decrement |
//! | [`Ranges`] | a number for the page | a store | a lock of the returning threads for each 16; pages put after it |
//!
//! All of them ignore tokens that were not received, and put a page once for each time it was
//! received. The map of ids is as lean as such a map can be: bitmaps over leaves of 64 that are
//! never freed, and a hint where ids are free.

mod hashed;
mod id_map;
mod kind;
mod locked;
mod niovs;
mod ranges;
mod rcu_counts;

pub use hashed::HashedCounts;
pub use locked::{Locked, LockedEach, LockedMap};
pub use niovs::Niovs;
pub use ranges::Ranges;
pub use rcu_counts::RcuCounts;

pub use kind::{BATCH, Fragment, Receive, Return, Tokens};

#[cfg(test)]
mod tests {
    use super::*;
    use netmem_devmem::TokenRange;

    fn books_balance<T: Tokens>() {
        let bindings = [Niovs::new(300), Niovs::new(300)];
        let (mut receiver, returner) = T::open(&bindings);
        let fragments: Vec<_> = (0..300).map(|n| Fragment { binding: n % 2, index: n / 3 }).collect();
        let mut tokens = vec![0; fragments.len()];
        receiver.receive(&fragments, &mut tokens);
        let mut ranges: Vec<TokenRange> = tokens.iter().map(|&start| TokenRange { start, count: 1 }).collect();
        assert_eq!(returner.return_tokens(&ranges[..100]), 100);
        assert_eq!(bindings.iter().map(|b| b.puts()).sum::<u64>(), 100);
        ranges[0] = TokenRange { start: u32::MAX - 3, count: 9 };
        assert_eq!(ranges[100..].chunks(100).map(|chunk| returner.return_tokens(chunk)).sum::<usize>(), 200);
        assert_eq!(
            ranges.chunks(100).map(|chunk| returner.return_tokens(chunk)).sum::<usize>(),
            0,
            "nothing is freed twice"
        );
        assert_eq!(bindings.iter().map(|b| b.puts()).sum::<u64>(), 300);
    }

    #[test]
    fn all_free_what_was_received_and_nothing_else() {
        books_balance::<LockedMap>();
        books_balance::<LockedEach>();
        books_balance::<HashedCounts>();
        books_balance::<RcuCounts>();
        books_balance::<Ranges>();
    }
}
