//! The mode of per-CPU data in which a program of tests runs.

use netmem_percpu::{Mode, Why, forced_mode, mode};

/// Fails if the mode is not the one that `NETMEM_PERCPU` chose: a library uses another one where
/// the machine does not have that mode, or where its name is wrong, and the tests would prove
/// nothing of it.
pub fn assert_forced_mode() {
    let asked = std::env::var("NETMEM_PERCPU").unwrap_or_default();
    let is = match mode() {
        Mode::Rseq(index) => index.to_string(),
        Mode::Portable(Why::Forced256) => "portable_256".into(),
        mode => mode.to_string(),
    };
    assert!(asked.is_empty() || asked == is, "NETMEM_PERCPU={asked}, and the mode is {is}: {:?}", forced_mode());
}
