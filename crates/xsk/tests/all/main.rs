//! The tests of AF_XDP on interfaces, in one program: it is built and linked once.
//!
//! * `frames`: every byte of a frame, in both directions.
//! * `gone`: pages of interfaces that were deleted.
//! * `held_frames`: frames that have not come back for long.
//! * `kernel_metadata`: what the driver knows about a frame, by the feature `metadata`.
//! * `lifecycle`: sockets, interfaces and processes that end, in any order.
//! * `not_opened`: queues that another socket of the UMEM excludes, and errors after the bind.
//! * `queues`: several queues and devices on one memory; waiting; offloads.
//! * `reopen`: queues that are opened again on the same pool.
//! * `rx_metadata`: metadata of a program of the user's own.
//! * `sharing`: the maps of other programs, and queues that only send.
//!
//! `memlock.rs`, `quirks.rs` and `worker.rs` need processes of their own: their first lines have
//! the reasons.

mod frames;
mod gone;
mod held_frames;
#[cfg(feature = "metadata")]
mod kernel_metadata;
mod lifecycle;
mod not_opened;
mod queues;
mod reopen;
mod rx_metadata;
mod sharing;
