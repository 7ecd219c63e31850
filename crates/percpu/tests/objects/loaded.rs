//! A library that contains sequences, to be loaded and unloaded.

use netmem_percpu::{Counter, Depot, Mode, mode};
use std::num::NonZeroUsize;

/// Runs each kind of sequence, so that the last sequence of the calling thread is one of this
/// library. Returns 1 if the process uses sequences, 0 if it uses none, and -1 after an error.
#[unsafe(no_mangle)]
pub extern "C" fn run_sequences() -> i32 {
    let (Ok(counter), Ok((depot, mut taker))) = (Counter::new(), Depot::new(4, 8)) else { return -1 };
    // SAFETY: the depot is there.
    let give = |n| unsafe { Depot::give(&depot, NonZeroUsize::MIN.saturating_add(n), |_| ()) };
    if !(1..=20).all(give) || taker.close(&depot, |_| ()).is_err() {
        return -1;
    }
    if counter.add(1).is_err() {
        return -1;
    }
    i32::from(matches!(mode(), Mode::Rseq(_)))
}
