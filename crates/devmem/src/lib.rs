//! Device memory for sockets. So far: the tokens by which its user gives pages back.
//!
//! A fragment in device memory is delivered as a place in a binding and a [`Token`], a number that means something to one
//! socket only; giving the token back gives up the reference to the page. Nothing is looked up in a tree, and nobody waits:
//! a token is the beginning of its binding's range plus the page's index, and the socket has a count for each page.
//!
//! ```text
//!   TokenTable (&mut)     receive: reserve ... reserve, commit      an atomic addition for each page
//!   Returner (any thread) give_back(ranges)                         an atomic exchange for each fragment
//!   the last of them      drop: what is held is given back
//! ```
//!
//! What a binding must be able to do is [`Pages`].
//!
//! ```
//! use netmem_devmem::{Pages, TokenTable};
//! use std::sync::Arc;
//! use std::sync::atomic::{AtomicU32, Ordering};
//!
//! struct Binding(AtomicU32); // how many references there are to its pages
//! // SAFETY: there is one, of a fixed size, and it is never said to be drained.
//! unsafe impl Pages for Binding {
//!     fn id(&self) -> u64 { 1 }
//!     fn pages(&self) -> u32 { 100 }
//!     unsafe fn put(&self, _index: u32, n: u32) { self.0.fetch_sub(n, Ordering::AcqRel); }
//!     fn drained(&self) -> bool { false }
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let binding = Arc::new(Binding(AtomicU32::new(2)));
//! let mut table = TokenTable::new();
//! let returner = table.returner();
//!
//! let mut receive = table.receive();
//! let tokens = [receive.reserve(&binding, 7)?, receive.reserve(&binding, 7)?]; // two fragments in one page
//! // SAFETY: the two references are ours.
//! unsafe { receive.commit() };
//!
//! assert_eq!(tokens[0], tokens[1]);
//! assert_eq!(returner.give_back(&[tokens[0].into()])?, 1);
//! drop((table, returner)); // and the other
//! assert_eq!(binding.0.load(Ordering::Relaxed), 0);
//! # Ok(())
//! # }
//! ```
//!
//! The theory opens `table.rs`; `docs/tokens.md` says what proves it, and what it costs.

mod counts;
mod error;
#[cfg(all(test, loom))]
mod model;
mod pages;
mod receive;
mod returner;
mod space;
mod stats;
mod sync;
mod table;
mod token;

pub use error::{DeliverError, TooManyRanges};
pub use pages::Pages;
pub use receive::{Receive, TokenTable};
pub use returner::{MAX_FRAGMENTS, MAX_RANGES, Returner};
pub use stats::TokenStats;
pub use token::{Token, TokenRange};
