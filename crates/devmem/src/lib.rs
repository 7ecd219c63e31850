//! Device memory for sockets. So far: token tables.
//!
//! A fragment in device memory is delivered as a place in a binding and a [`Token`]; giving the token back gives up the
//! page. [`TokenTable`] is a socket's receive side, [`Returner`] its other handles.

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
