//! The token table: how a user returns pages of device memory, on any thread.
//!
//! A user cannot return a page by dropping a value, as it does with host memory, if it only has a
//! number. The numbers of Linux's `SO_DEVMEM_DONTNEED` are keys of a map under a lock. Here a token
//! is an index: the first number of the binding's range plus the number of the page. The theory is
//! at the top of `table.rs`.
//!
//! | file | what |
//! | --- | --- |
//! | `token.rs`, `error.rs`, `stats.rs` | the types of the interface |
//! | `pages.rs` | what a binding must provide |
//! | `space.rs` | which numbers a binding gets |
//! | `counts.rs` | two numbers for each page, in blocks; the lock of the returning threads |
//! | `owned.rs` | the number of deliveries with its socket, for the streams of a stack |
//! | `directory.rs` | which block has the numbers of a token's page |
//! | `table.rs` | the ranges, shared by all handles; their theory, and the end of the table |
//! | `receive.rs` | the handle of the one receiver, which counts deliveries |
//! | `returner.rs` | the handles of threads that return tokens |
//! | `model*.rs` | models of the races, for loom |

mod counts;
mod directory;
mod error;
#[cfg(all(test, loom))]
pub(crate) mod model;
#[cfg(all(test, loom))]
mod model_owned;
#[cfg(any(test, not(loom)))]
mod owned;
mod pages;
mod receive;
mod returner;
mod space;
mod stats;
mod table;
mod token;

pub use error::{DeliverError, TooManyRanges};
#[cfg(not(loom))]
pub(crate) use owned::Owned;
pub use pages::Pages;
#[cfg(not(loom))]
pub(crate) use receive::{Place, Receiver};
pub use receive::{Receive, ReceiveOne, TokenTable};
pub use returner::Returner;
pub use stats::TokenStats;
#[cfg(not(loom))]
pub(crate) use table::Shared;
pub use token::{MAX_FRAGMENTS, MAX_RANGES, Token, TokenRange};
