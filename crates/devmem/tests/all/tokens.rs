//! Valid and invalid uses of tokens, from one thread.

use crate::common::{Binding, binding, deliver, give, range, received};
use netmem_devmem::{DeliverError, MAX_RANGES, Token, TokenTable, TooManyRanges};
use std::sync::Arc;

/// Waits for objects that are released after a grace period, which threads of other tests can
/// delay.
fn until(gone: impl Fn() -> bool) {
    while !gone() {
        netmem_refs::rcu::flush();
        std::thread::yield_now();
    }
}

/// Fragments in one page have one token, which can be returned as often as it was received. Proves
/// MEM-5.
#[test]
fn a_token_is_returned_as_often_as_received() {
    let (binding, mut table) = (binding(10), TokenTable::new());
    let returner = table.returner();
    let tokens: Vec<u32> = (0..4).map(|_| received(&mut table, &binding, 4)).collect();
    let other = received(&mut table, &binding, 5);
    assert_eq!(tokens, [tokens[0]; 4]);
    assert_eq!(other, tokens[0] + 1);
    let named_thrice = [range(tokens[0], 1), range(tokens[0], 2), range(tokens[0], 1)];
    assert_eq!(returner.return_tokens(&named_thrice), Ok(4), "the range of two ends with the other page");
    assert_eq!((binding.out(), returner.stats().excess), (1, 0));
    assert_eq!(returner.return_tokens(&named_thrice), Ok(1), "returned more often than received");
    assert_eq!((binding.out(), returner.stats().excess), (0, 3));
}

/// Each fragment of a page that is received in one call counts once, in a row or not. Proves MEM-5.
#[test]
fn fragments_of_a_page_in_one_call() {
    let (binding, mut table) = (binding(10), TokenTable::new());
    let returner = table.returner();
    let mut receive = table.receive();
    for index in [3, 3, 3, 4, 3] {
        binding.get(index);
        assert_eq!(receive.reserve(&binding, index), Ok(Token(1 + index)));
    }
    // SAFETY: got above.
    unsafe { receive.commit() };
    assert_eq!(returner.return_tokens(&[range(4, 1); 9]), Ok(4));
    assert_eq!(binding.out(), 1);
}

/// A receive that is not committed changes nothing, and a receive that goes on after an error keeps
/// what it has reserved. Proves MEM-3.
#[test]
fn nothing_is_left_of_a_receive_that_failed() {
    let (binding, mut table) = (binding(10), TokenTable::new());
    let returner = table.returner();
    let mut receive = table.receive();
    let token = receive.reserve(&binding, 1).unwrap();
    receive.reserve(&binding, 2).unwrap();
    assert_eq!(give(&returner, token.0, 2), 0, "not before the commit");
    // This receive ends here, and another one begins.
    let mut receive = table.receive();
    assert_eq!(receive.reserve(&binding, 1), Ok(token));
    let no_such_page = DeliverError::NoSuchPage { binding: netmem_devmem::Pages::id(&binding), index: 10, pages: 10 };
    assert_eq!(receive.reserve(&binding, 10), Err(no_such_page));
    binding.get(1);
    // SAFETY: just got; the other was refused.
    unsafe { receive.commit() };
    assert_eq!(give(&returner, token.0, 9), 1);
    assert_eq!(binding.out(), 0);
}

/// Proves MEM-6.
#[test]
fn foreign_tokens_are_ignored_and_counted() {
    let (mine, mut table) = (binding(3000), TokenTable::new());
    let returner = table.returner();
    assert_eq!(give(&returner, 1, 5), 0, "a socket that never received");
    assert_eq!(give(&returner, 0, u32::MAX), 0);
    assert_eq!(returner.stats().foreign, 5 + 1024);
    assert_eq!(returner.return_tokens(&[]), Ok(0));
    assert_eq!(give(&returner, 1, 0), 0);

    let token = received(&mut table, &mine, 0);
    assert_eq!(token, 1);
    assert_eq!(give(&returner, 0, 1), 0, "token 0 is in no range");
    assert_eq!(give(&returner, 3001, 10), 0, "after the last page");
    assert_eq!(give(&returner, 2001, 10), 0, "in the range, where nothing was ever received");
    assert_eq!((returner.stats().foreign, returner.stats().excess), (5 + 1024 + 1 + 10, 10));
    assert_eq!(mine.out(), 1);
    assert_eq!(give(&returner, 0, 2), 1, "what is foreign does not keep the rest");
    assert_eq!(mine.out(), 0);
}

/// Proves MEM-6.
#[test]
fn ranges_that_go_over_the_end() {
    let (small, large, mut table) = (binding(16), binding(u32::MAX - 16), TokenTable::new());
    let returner = table.returner();
    let first = received(&mut table, &small, 0);
    let last = received(&mut table, &large, u32::MAX - 17);
    assert_eq!((first, last), (1, u32::MAX));
    assert_eq!(give(&returner, u32::MAX, 10), 1, "the last token there is");
    assert_eq!((small.out(), large.out()), (1, 0), "and it does not go on at the beginning");
    received(&mut table, &large, u32::MAX - 18);
    assert_eq!(give(&returner, u32::MAX - 1, u32::MAX), 1);
    assert_eq!((small.out(), large.out()), (1, 0));
    assert_eq!(returner.stats().foreign, 9 + 1022);
}

/// Proves MEM-6.
#[test]
fn no_more_than_128_ranges() {
    let (binding, mut table) = (binding(MAX_RANGES as u32 + 1), TokenTable::new());
    let returner = table.returner();
    let ranges: Vec<_> = (0..129).map(|n| Token(received(&mut table, &binding, n)).into()).collect();
    let refused = returner.return_tokens(&ranges).unwrap_err();
    assert_eq!(refused, TooManyRanges { ranges: 129 });
    assert_eq!(
        refused.to_string(),
        "129 ranges of tokens in one call; at most 128 are taken, give them back in several calls"
    );
    assert_eq!(binding.out(), 129, "nothing was given back");
    assert_eq!(returner.return_tokens(&ranges[..128]), Ok(128));
    assert_eq!(returner.return_tokens(&ranges[128..]), Ok(1));
}

/// A call stops after 1024 fragments that were valid, or not, or both. Proves MEM-6.
#[test]
fn no_more_than_1024_attempts() {
    let (binding, mut table) = (binding(5000), TokenTable::new());
    let returner = table.returner();
    for index in 0..1025 {
        assert_eq!(received(&mut table, &binding, index), 1 + index);
    }
    assert_eq!(give(&returner, 1, 1025), 1024, "valid ones");
    assert_eq!(returner.return_tokens(&[range(1, 1024), range(1025, 1)]), Ok(0), "returned before");
    assert_eq!(returner.return_tokens(&[range(4000, 1024), range(1025, 1)]), Ok(0), "never received");
    assert_eq!(returner.return_tokens(&[range(4000, 1000), range(1, 24), range(1025, 1)]), Ok(0));
    assert_eq!(returner.return_tokens(&[range(0, 0), range(4000, 1000), range(1, 23), range(1025, 2)]), Ok(1));
    assert_eq!((returner.stats().foreign, returner.stats().excess), (23, 1024 + 1001 + (1000 + 24) + (1000 + 23)));
    assert_eq!(binding.out(), 0);
}

/// A page of one binding is never taken for a page of another, for any number of bindings in any
/// order. The socket holds each binding once. Proves MEM-2 and MEM-4.
#[test]
fn any_number_of_bindings() {
    for bindings in [1, 2, 8, 9, 40] {
        let mut table = TokenTable::new();
        let returner = table.returner();
        let bindings: Vec<Binding> = (0..bindings).map(|n| binding(1 + n * 700)).collect();
        let mut tokens = Vec::new();
        for round in 0..3 {
            for binding in bindings.iter().rev() {
                tokens.push((received(&mut table, binding, 0), binding.clone()));
                let last = netmem_devmem::Pages::pages(binding) - 1;
                tokens.push((received(&mut table, binding, last), binding.clone()));
            }
            assert_eq!(table.stats().bindings, bindings.len(), "round {round}");
        }
        for (token, binding) in tokens.drain(..) {
            let before = binding.out();
            assert_eq!(give(&returner, token, 1), 1);
            assert_eq!(binding.out(), before - 1);
        }
        assert_eq!((returner.stats().foreign, returner.stats().excess), (0, 0));
        assert!(bindings.iter().all(|binding| Arc::strong_count(binding) == 2 && binding.out() == 0));
        drop((table, returner));
        until(|| bindings.iter().all(|binding| Arc::strong_count(binding) == 1));
    }
}

/// A call returns tokens of several bindings. It drops the handle on an unbound one, for any
/// position of its last page in the call. Proves MEM-2.
#[test]
fn drained_within_a_call() {
    for order in [[0, 1], [1, 0]] {
        let (bindings, mut table) = ([binding(10), binding(10)], TokenTable::new());
        let tokens = bindings.each_ref().map(|binding| Token(received(&mut table, binding, 3)).into());
        bindings[0].unbind();
        assert_eq!(table.returner().return_tokens(&order.map(|n| tokens[n])), Ok(2));
        assert_eq!(table.stats().bindings, 1, "{order:?}");
    }
}

/// A token is not valid on another socket. Proves MEM-6.
#[test]
fn token_of_another_socket() {
    let (binding, mut one, mut other) = (binding(2000), TokenTable::new(), TokenTable::new());
    let token = received(&mut one, &binding, 1500);
    received(&mut other, &binding, 7);
    assert_eq!(give(&other.returner(), token, 1), 0);
    drop(one);
    assert_eq!(binding.out(), 1, "it was closed");
    assert_eq!(give(&other.returner(), token, 1), 0, "a token of a closed socket");
    assert_eq!((binding.out(), other.stats().excess), (1, 2), "its own of that number is not held");
}

/// The pages that the user holds are returned with the drop of the last handle, and not before.
/// Proves MEM-7.
#[test]
fn closed_with_100_000_tokens_out() {
    let (one, far, mut table) = (binding(100_000), binding(20_000_000), TokenTable::new());
    let returner = table.returner();
    for index in 0..100_000 {
        received(&mut table, &one, index);
    }
    for index in [0, 0, 10_000_000, 19_999_999] {
        received(&mut table, &far, index);
    }
    drop(table);
    assert_eq!(give(&returner, 1, 1000), 1000, "a returner is enough");
    assert_eq!((one.out(), far.out()), (99_000, 4));
    drop(returner);
    assert_eq!((one.out(), far.out()), (0, 0));
}

/// If a binding is made again with the same size, the old tokens are not valid. Proves MEM-7.
#[test]
fn binding_made_again() {
    let mut table = TokenTable::new();
    let returner = table.returner();
    let mut old = Vec::new();
    for _ in 0..100 {
        let binding = binding(1000);
        let token = received(&mut table, &binding, 5);
        binding.unbind();
        assert_eq!(give(&returner, token, 1), 1);
        assert_eq!(table.stats().bindings, 0, "the last return let go of the binding");
        assert!(!old.contains(&token));
        old.push(token);
    }
    let binding = binding(1000);
    let held: Vec<u32> = (0..1000).map(|index| received(&mut table, &binding, index)).collect();
    assert!(old.iter().all(|old| !held.contains(old)));
    assert_eq!(old.iter().map(|old| give(&returner, *old, 1)).sum::<usize>(), 0);
    assert_eq!(binding.out(), 1000);
}

/// A socket drops its handle on an unbound binding when the last page is returned, and not before.
/// The thread that returns this page does it, or else the next thread that searches for drained
/// bindings. Proves MEM-2.
#[test]
fn unbound_bindings_are_let_go_of() {
    let (gone, stays, mut table) = (binding(10), binding(10), TokenTable::new());
    let returner = table.returner();
    let tokens = [received(&mut table, &gone, 1), received(&mut table, &gone, 2), received(&mut table, &stays, 1)];
    gone.get(3); // queued, and never received
    gone.unbind();
    assert_eq!((table.release_drained(), give(&returner, tokens[0], 2)), (0, 2));
    assert_eq!(table.stats().bindings, 2, "a page is queued");
    // SAFETY: got above.
    unsafe { netmem_devmem::Pages::put(&gone, 3, 1) };
    assert_eq!((returner.release_drained(), table.stats().bindings), (1, 1));
    assert_eq!(give(&returner, tokens[0], 1), 0);
    until(|| Arc::strong_count(&gone) == 1);
    // The receiver drops the handle when it receives from another binding for the first time.
    stays.get(3);
    stays.unbind();
    assert_eq!(give(&returner, tokens[2], 1), 1);
    // SAFETY: got above.
    unsafe { netmem_devmem::Pages::put(&stays, 3, 1) };
    assert_eq!(table.stats().bindings, 1, "no thread has checked for drained bindings");
    received(&mut table, &binding(10), 0);
    assert_eq!(table.stats().bindings, 1);
    until(|| Arc::strong_count(&stays) == 1);
}

/// If the space of tokens is exhausted, the error says so and nothing changes. After a binding is
/// released there is room again. Proves MEM-4.
#[test]
fn the_space_is_taken() {
    let (half, other, small, mut table) = (binding(1 << 31), binding(1 << 31), binding(4), TokenTable::new());
    let returner = table.returner();
    let token = received(&mut table, &half, 0);
    let exhausted = deliver(&mut table, &other, 0).unwrap_err();
    let id = netmem_devmem::Pages::id(&other);
    assert_eq!(exhausted, DeliverError::Exhausted { binding: id, pages: 1 << 31, bindings: 1, taken: 1 << 31 });
    assert!(exhausted.to_string().contains("1 bindings have 2147483648 of its 2^32"), "{exhausted}");
    assert_eq!(Arc::strong_count(&other), 1);
    let beside = received(&mut table, &small, 0);
    assert_eq!(beside, token + (1 << 31));
    half.unbind();
    assert_eq!(give(&returner, token, 1), 1);
    // There is not enough space behind `small`: the space has wrapped around, and the range of
    // `half` is free.
    assert_eq!(received(&mut table, &other, 0), token);
    assert_eq!(give(&returner, token, 1) + give(&returner, beside, 1), 2);
}
