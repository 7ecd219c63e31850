//! The old ways of handling network memory, as fair baselines for Netmem's figures.
//!
//! * [`PageAllocator`] is a page per packet: the general-purpose allocator that a driver without a page pool asks for every
//!   buffer. Put a pool with [`cache(0)`](netmem_pool::PoolOptions::cache) in front of it, and every allocation takes and
//!   maps, every drop unmaps and gives back.
//! * [`tokens`] are the ways in which a socket could find the page of a token that is given back.

mod buddy;
mod pages;
pub mod tokens;

pub use pages::PageAllocator;
