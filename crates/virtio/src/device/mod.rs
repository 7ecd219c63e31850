//! The virtio-net device: the counterpart of the driver, in the same process or behind a vhost-user socket.
//!
//! ```text
//!   front end ── vhost-user messages ──> Control (its own thread) ─┐
//!                                                                  ├─ one mutex per pair: rings, features, memory table
//!   Port ─ frames ─> Worker::poll (the caller's threads) ──────────┘
//!        <─ frames ─        │ copies, in order, up to 256 frames a pass
//!                     the driver's memory
//! ```
//!
//! A [`NetDevice`] has one [`port::Port`] per queue pair and moves frames between them and the rings of the one front
//! end that its [`Control`] serves. One thread serves all pairs, or each [`Worker`] some of them. The driver is not
//! trusted: its words are checked on a private copy, and a ring that breaks a rule is stopped and counted
//! ([`DriverFault`], [`Stats`]) while the others go on.

mod budget;
mod config;
mod connect;
mod control;
mod ctrl;
#[cfg(test)]
mod dirty_log_tests;
mod error;
mod flow;
#[cfg(fuzzing)]
pub(crate) mod fuzz;
mod net_device;
mod options;
mod pair;
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
pub use self::stats::{DropReason, Stats};
pub use self::worker::Worker;
pub use crate::virtqueue::device::inflight::InflightError;
pub use crate::virtqueue::fault::DriverFault;
