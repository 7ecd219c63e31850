//! The driver with back ends of other projects: DPDK's vhost, Open vSwitch, passt. They are apart
//! from the other tests, and run one at a time, because each polls CPUs without a pause, and a
//! machine may have only two.
#![allow(clippy::unwrap_used, missing_docs)]

mod formats_dpdk;
mod ovs;
mod passt;
mod reconnect_dpdk;
mod split_dpdk;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Waits for the other tests of this process.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
