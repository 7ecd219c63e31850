//! Device memory for sockets: bindings, sockets, and the tokens by which a user returns pages.
//!
//! ```text
//!   dma-buf ──► Binding ──► Netdev's queues ──► SplitFrame ──► FlowQueue ──► Socket::recv
//!                  │                                                              │
//!                  │                                                  Fragment, Token
//!                  └──► Sender ──► SplitTxQueue                                   │
//!                                                   page returned ◄─── Returner ◄─┘
//! ```
//!
//! A GPU or an accelerator reads payload from its own memory. The CPU would only copy it there. So
//! the network device writes payload to that memory directly, and this process handles headers and
//! numbers: it never maps the memory, and cannot read it. Linux has this as "devmem TCP"; this
//! crate has it for queues in user space.
//!
//! * [`Binding`] is bound device memory; [`Netdev`] attaches queues to it, which then receive into
//!   it. `docs/design/devmem.md` describes which value keeps which other value alive.
//! * [`FlowTable`] finds the [`Socket`] for a received frame.
//! * [`Sender`] sends from a binding.
//! * [`stream`] has TCP streams whose payload is in device memory.
//! * [`AreaProvider`] and [`RefillRing`] do not use tokens: they deliver buffers in an area that
//!   the user provides, and the user returns the buffers through a ring.
//!
//! # Tokens
//!
//! A fragment in device memory is delivered as an offset in a binding and a [`Token`]. A token is a
//! number that is valid on one socket only. Returning the token drops the reference to the page. A
//! token is the first number of its binding's range plus the page's index. For each page the socket
//! has two numbers: how often it was delivered, and how often it was returned. So a receive is a
//! store, and the threads that return tokens take a lock of their own, once for 16 tokens.
//!
//! ```text
//!   TokenTable (&mut)     receive: reserve ... reserve, commit    a store for each fragment
//!   Returner (any thread) return_tokens(ranges)                   a lock for each 16 fragments
//!   the last handle       drop: all pages that are held are returned
//! ```
//!
//! The trait [`Pages`] lists the operations that a binding must provide.
//!
//! ```
//! use netmem_devmem::{Pages, TokenTable};
//! use std::sync::Arc;
//! use std::sync::atomic::{AtomicU32, Ordering};
//!
//! struct Binding(AtomicU32); // how many references there are to its pages
//! // SAFETY: there is one, of a fixed size, and `drained` is never true.
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
//! // Two fragments in one page.
//! let tokens = [receive.reserve(&binding, 7)?, receive.reserve(&binding, 7)?];
//! // SAFETY: the two references are ours.
//! unsafe { receive.commit() };
//!
//! assert_eq!(tokens[0], tokens[1]);
//! assert_eq!(returner.return_tokens(&[tokens[0].into()])?, 1);
//! drop((table, returner)); // and the other
//! assert_eq!(binding.0.load(Ordering::Relaxed), 0);
//! # Ok(())
//! # }
//! ```
//!
//! The theory of tokens is at the top of `tokens/table.rs`. `docs/design/tokens.md` lists the tests
//! that prove it, and the costs.

#[cfg(not(loom))]
mod area;
#[cfg(not(loom))]
mod binding;
#[cfg(not(loom))]
mod bound_frag;
#[cfg(any(test, not(loom)))]
mod ledger;
#[cfg(all(test, loom))]
mod model_binding;
#[cfg(not(loom))]
mod netdev;
#[cfg(not(loom))]
pub mod stream;
mod sync;
mod tokens;
#[cfg(any(test, not(loom)))]
mod udp;

#[cfg(not(loom))]
pub use area::{AreaError, AreaProvider, AreaStats, Buffer, RefillRing};
#[cfg(not(loom))]
pub use binding::{
    BindError, Binding, BindingCount, BindingRef, BindingStats, BoundMemory, CountMode, StillAttached, cleaned_up,
    lost_pages,
};
#[cfg(not(loom))]
pub use netdev::{AttachError, DetachError, Netdev, UnbindError};
#[cfg(not(loom))]
pub use netmem_inet::wire::Mac;
#[cfg(not(loom))]
pub use netmem_inet::{Address, Interface};
#[cfg(not(loom))]
pub use netmem_packet::Queues;
pub use tokens::{
    DeliverError, MAX_FRAGMENTS, MAX_RANGES, Pages, Receive, ReceiveOne, Returner, Token, TokenRange, TokenStats,
    TokenTable, TooManyRanges,
};
#[cfg(not(loom))]
pub use udp::{
    Endpoint, FlowBindError, FlowQueue, FlowStats, FlowTable, Fragment, Message, Received, RecvError, SendError,
    Sender, SenderError, Socket, SocketOptions, SocketStats,
};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
