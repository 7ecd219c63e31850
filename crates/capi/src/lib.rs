//! The C library of Netmem: `include/netmem.h` is written from this crate by `cbindgen`.
//!
//! ```text
//!   netmem_region          memory, cut into pages          any thread
//!     netmem_page_pool     the pool of one thread          alloc and release in bulk
//!     netmem_shared_pool   a pool for all threads          alloc, or wait for a page
//!       netmem_frag        counted bytes of a page         released on any thread
//!   netmem_umem            a region, registered with the kernel for AF_XDP
//!     netmem_xsk_rx        a receive queue                 groups of fragments
//!     netmem_xsk_tx        its transmit queue              groups of fragments
//!   netmem_xsk_grant       sockets that a helper with privileges has opened
//!   netmem_xdp_program     redirects frames of an interface to receive queues
//!   netmem_virtio_net      a virtio-net device that the driver is connected to
//!     netmem_virtio_rx     a receive queue                 groups of fragments
//!     netmem_virtio_tx     its transmit queue              groups of fragments
//!   netmem_virtio_device   a virtio-net device of virtual machines: groups of fragments
//!   netmem_stack           TCP and IP on a tap, or on the two queues above
//!     netmem_tcp_listener  accepts connections
//!     netmem_tcp           a connection         payload as fragments
//!   netmem_devmem          memory of a GPU or another device   any thread
//!     netmem_devmem_stack  a host on a virtio-net device
//!       netmem_devmem_stream   TCP into and out of it          extents, with tokens
//!   netmem_refcount, netmem_rcuref, netmem_percpu_ref      the three counts
//! ```
//!
//! Each function of the header is a few lines here: it validates what C cannot express, calls the
//! library of Rust, and turns an error into a status and a text. **No panic reaches C**: `status`
//! catches it. A handle is a box whose first word says which handle it is (`handle`). A fragment is
//! a [`Frag`](netmem_pool::Frag) by value, because an allocation for each would cost more than the
//! pool does (`frag`).
//!
//! Functions are `unsafe` because C's pointers are: each page of the header says what must hold.

#![allow(non_camel_case_types, reason = "the names are C's")]
#![allow(clippy::missing_safety_doc, reason = "stated once: the pointers are what the header says they are")]

mod callback;
pub mod counts;
pub mod devmem;
pub mod frag;
pub mod groups;
mod handle;
mod options;
mod owned;
pub mod page_pool;
mod queues;
pub mod rcu;
pub mod region;
pub mod shared_pool;
pub mod stack;
pub mod status;
pub mod virtio;
pub mod xsk;
