//! Loom's models of the counts that the streams of a stack share. `owned.rs` names the races;
//! `MODELS.md` lists changes that make the models fail.

use super::model::{Handle, binding, fill};
use super::owned::Owned;
use super::receive::Receiver;
use super::table::Shared;
use super::token::TokenRange;
use crate::sync::Arc;
use loom::sync::atomic::Ordering;
use loom::thread;

/// The table, as the stack's thread uses it.
type Table = Receiver<Handle, Owned>;
/// The table, as all threads use it.
type Counts = Arc<Shared<Handle, Owned>>;

/// The token of page 0. All models use this page only.
const TOKEN: u32 = 1;

/// Delivers a fragment of page 0 to a socket.
fn receive(table: &mut Table, binding: &Handle, holder: u32) {
    binding.0.out.fetch_add(1, Ordering::Relaxed);
    let place = table.find(binding, 0, true).unwrap();
    assert_eq!(place.token().0, TOKEN);
    // SAFETY: the table outlives the block.
    let block = unsafe { place.block.as_ref() };
    assert!(block.accepts(place.at, holder));
    block.deliver(place.at, holder);
}

/// Delivers a fragment to another socket if the page was returned. Returns whether it was.
fn receive_if_home(table: &mut Table, binding: &Handle, holder: u32) -> bool {
    let home = binding.0.out.load(Ordering::Acquire) == 0;
    if home {
        fill(binding);
        receive(table, binding, holder);
    }
    home
}

fn return_tokens(counts: &Counts, holder: u32) -> u32 {
    counts.return_tokens(&[TokenRange { start: TOKEN, count: 1 }], holder).freed
}

fn held(binding: &Handle) -> u32 {
    binding.0.out.load(Ordering::Relaxed)
}

/// Return against return: if two threads return a token that was received once, exactly one frees
/// it.
#[test]
fn return_against_return() {
    loom::model(|| {
        let (binding, mut table) = (binding(), Table::new());
        fill(&binding);
        receive(&mut table, &binding, 7);
        let counts = table.shared.clone();
        let other = thread::spawn(move || return_tokens(&counts, 7));
        let freed = return_tokens(&table.shared, 7);
        assert_eq!((freed + other.join().unwrap(), held(&binding)), (1, 0));
    });
}

/// Return against the next fragment of the page: no reference is lost, and none is dropped twice.
#[test]
fn return_against_the_next_fragment_of_the_page() {
    loom::model(|| {
        let (binding, mut table) = (binding(), Table::new());
        fill(&binding);
        receive(&mut table, &binding, 7);
        let counts = table.shared.clone();
        let other = thread::spawn(move || assert_eq!(return_tokens(&counts, 7), 1));
        receive(&mut table, &binding, 7);
        other.join().unwrap();
        assert_eq!(held(&binding), 1);
        assert_eq!((return_tokens(&table.shared, 7), return_tokens(&table.shared, 7), held(&binding)), (1, 0, 0));
    });
}

/// Return against the next socket: if the first socket returns a token twice, it removes nothing of
/// the second socket.
#[test]
fn return_against_the_next_socket() {
    loom::model(|| {
        let (binding, mut table) = (binding(), Table::new());
        fill(&binding);
        receive(&mut table, &binding, 7);
        let others = [(); 2].map(|()| {
            let counts = table.shared.clone();
            thread::spawn(move || return_tokens(&counts, 7))
        });
        let next = receive_if_home(&mut table, &binding, 8);
        assert_eq!(others.map(|other| other.join().unwrap()).iter().sum::<u32>(), 1);
        assert_eq!((held(&binding), return_tokens(&table.shared, 8)), (u32::from(next), u32::from(next)));
    });
}

/// A guess against the store: the guess is ignored, or it frees the page and sees what the receiver
/// did with it.
#[test]
fn a_guess_against_the_store() {
    loom::model(|| {
        let (binding, mut table) = (binding(), Table::new());
        fill(&binding);
        receive(&mut table, &binding, 7);
        assert_eq!(return_tokens(&table.shared, 7), 1);
        let counts = table.shared.clone();
        let other = thread::spawn(move || return_tokens(&counts, 8));
        assert!(receive_if_home(&mut table, &binding, 8));
        let freed = other.join().unwrap();
        assert_eq!((freed + return_tokens(&table.shared, 8), held(&binding)), (1, 0));
    });
}

/// The end of an account against the next socket: the end returns what the account still holds,
/// and nothing of the next socket. Another thread returns the last token meanwhile, so the
/// account's list has a page that the account may not hold any more.
#[test]
fn the_end_of_an_account_against_the_next_socket() {
    loom::model(|| {
        let (binding, mut table) = (binding(), Table::new());
        fill(&binding);
        receive(&mut table, &binding, 7);
        let (counts, all) = (table.shared.clone(), table.shared.clone());
        let last = thread::spawn(move || return_tokens(&counts, 7));
        let end = thread::spawn(move || all.return_all(&[TOKEN], 7));
        let next = receive_if_home(&mut table, &binding, 8);
        let freed = last.join().unwrap() + end.join().unwrap();
        assert_eq!((freed, held(&binding)), (1, u32::from(next)));
        assert_eq!(return_tokens(&table.shared, 8), u32::from(next));
    });
}
