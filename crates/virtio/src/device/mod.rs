//! The virtio-net device: the counterpart of the driver, in the same process or behind a vhost-user
//! socket.
//!
//! ```text
//!   front end ── vhost-user messages ──► Control (its own thread) ─┐  one mutex per pair:
//!                                                                  ├─ rings, features,
//!   Port ─ frames ─► Worker::poll (the caller's threads) ──────────┘  memory table
//!        ◄─ frames ─        │ copies, in order, up to 256 frames a pass
//!                     the driver's memory
//! ```
//!
//! A [`NetDevice`] has one [`port::Port`] per queue pair and moves frames between them and the
//! rings of the one front end that its [`Control`] serves. One thread serves all pairs, or each
//! [`Worker`] some of them. The driver is not trusted: its words are checked on a private copy. A
//! ring whose driver breaks a rule is stopped and counted ([`DriverFault`], [`Stats`]), and the
//! others continue.
//!
//! | file | what it has |
//! | --- | --- |
//! | `net_device.rs`, `options.rs` | the device, and what it offers |
//! | `control.rs`, `session.rs` | the control side: connections, and the messages of one front end |
//! | `shared.rs`, `pair.rs`, `config.rs` | what the control side sets and the data side reads, with its locks |
//! | `worker.rs`, `run.rs`, `budget.rs` | one thread of the data side: a pass, its bounds, its sleep |
//! | `rx.rs`, `split.rs` | a pass towards the driver: whole frames, or split behind their headers |
//! | `tx.rs`, `ctrl.rs` | a pass from the driver: frames, and commands of the control queue |
//! | `direct.rs`, `pair_handle.rs` | frames from one pair straight into the buffers of another |
//! | `software.rs`, `flow.rs`, `rarp.rs` | what the device computes for a frame |
//! | `port/` | where frames come from and go to |
//! | `connect.rs` | a driver in the same process |
//! | `error.rs`, `stats.rs` | what a caller sees of all that |
//!
//! The memory of a front end is in [`guest_memory`](crate::guest_memory), and its rings are in
//! [`virtqueue`](crate::virtqueue).

mod budget;
mod config;
mod connect;
mod control;
mod ctrl;
mod direct;
#[cfg(test)]
mod dirty_log_tests;
mod error;
mod flow;
#[cfg(fuzzing)]
pub(crate) mod fuzz;
mod net_device;
mod options;
mod pair;
mod pair_handle;
pub mod port;
mod rarp;
mod run;
mod rx;
mod session;
mod shared;
mod software;
mod split;
mod stats;
mod tx;
mod worker;

pub use self::connect::{ConnectError, InProcess};
pub use self::control::{Connection, Control};
pub use self::error::DeviceError;
pub use self::net_device::NetDevice;
pub use self::options::{MAX_PAIRS, Options};
pub use self::pair_handle::PairHandle;
pub use self::stats::{DropReason, Stats};
pub use self::worker::Worker;
pub use crate::virtqueue::device::inflight::InflightError;
pub use crate::virtqueue::fault::DriverFault;
