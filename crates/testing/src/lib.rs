//! What the integration tests of several packages share.
//!
//! Why a crate: a module that several packages include by path or link is compiled in each test
//! program, and is of no package. The packages have this crate as a dev-dependency by path alone,
//! which is not in their archives. So an archive has no test that uses it.
//!
//! Unit tests (in `src/`) do not use it: they are in the archives, and this crate would bring a
//! second copy of the crate that is tested.
//!
//! * What a test needs: [`skip()`], [`installed`], [`is_emulated`], [`namespace`], [`tree`],
//!   [`debian13`], [`libcuda`].
//! * Programs, their reports and their logs: `process`, `schema`, [`on_event`].
//! * Peers: [`vhost_user`], `driver`, `device`, `tap`, `xsk`,
//!   `bpf`, `metadata_program`, [`pausing`].
//! * Traffic and memory: `flows`, `large_frames`, [`device_memory`], `simulated_memory`, [`heap`].
//! * Trouble: [`disturb`], [`stress_ops`], [`permutations`], [`without_membarrier`].
#![cfg(not(loom))] // Models have no integration tests.
#![allow(clippy::unwrap_used, clippy::missing_errors_doc, reason = "a helper that fails fails its test")]
#![allow(
    missing_docs,
    clippy::new_without_default,
    clippy::should_implement_trait,
    reason = "only tests read and use it"
)]

#[cfg(feature = "xsk")]
pub mod bpf;
pub mod debian13;
#[cfg(feature = "virtio")]
pub mod device;
pub mod device_memory;
pub mod disturb;
#[cfg(feature = "virtio")]
pub mod driver;
mod emulated;
#[cfg(feature = "virtio")]
pub mod flows;
#[cfg(feature = "percpu")]
mod forced_mode;
pub mod heap;
#[cfg(feature = "packet")]
pub mod large_frames;
pub mod libcuda;
#[cfg(feature = "xsk")]
pub mod metadata_program;
pub mod namespace;
mod no_membarrier;
mod on_event;
pub mod pausing;
mod permutations;
#[cfg(feature = "process")]
pub mod process;
#[cfg(feature = "schema")]
pub mod schema;
#[cfg(feature = "inet")]
pub mod simulated_memory;
mod skip;
mod stress_ops;
#[cfg(feature = "virtio")]
pub mod tap;
pub mod tree;
pub mod vhost_user;
#[cfg(feature = "xsk")]
pub mod xsk;

pub use emulated::is_emulated;
#[cfg(feature = "percpu")]
pub use forced_mode::assert_forced_mode;
pub use no_membarrier::without_membarrier;
pub use on_event::{fields, on_event};
pub use permutations::permutations;
pub use skip::{installed, skip};
pub use stress_ops::stress_ops;
