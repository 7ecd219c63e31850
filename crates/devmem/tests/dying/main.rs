//! Devices that die with pages of a binding. These tests are alone in their process, because lost
//! pages are counted for the process, and the other tests assert that none is lost. Here each test
//! holds a lock while it counts.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used)]

#[path = "../all/memory_common.rs"]
mod memory_common;
#[path = "../all/stream_scene.rs"]
mod stream_scene;
#[path = "../all/stream_wire.rs"]
mod stream_wire;

mod sockets;
mod streams;

use memory_common::until;
use netmem_devmem::{cleaned_up, lost_pages};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The counters of this process before a test. No other test changes them meanwhile.
struct Count {
    lost: u64,
    gone: u64,
    _alone: MutexGuard<'static, ()>,
}

impl Count {
    fn begin() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        Self { lost: lost_pages(), gone: cleaned_up(), _alone }
    }

    /// Checks how many bindings were released, and how many of their pages were lost.
    #[track_caller]
    fn assert(&self, gone: u64, lost: u64) {
        until(|| cleaned_up() >= self.gone + gone);
        assert_eq!((cleaned_up() - self.gone, lost_pages() - self.lost), (gone, lost));
    }
}
