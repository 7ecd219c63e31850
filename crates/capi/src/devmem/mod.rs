//! Device memory: memory that this process does not map, bound to the queues of a network device;
//! and TCP streams that deliver their payload as extents of it, with tokens.
//!
//! ```text
//!   netmem_devmem ──► netmem_devmem_stack ──► netmem_devmem_listener ──► netmem_devmem_stream
//!                      a virtio-net device       (one thread)             receive: extents
//!                                                                         send: ranges
//!   netmem_devmem_returner ◄───────────────── netmem_devmem_return(extents), on any thread
//! ```

mod error;
pub mod memory;
pub mod returner;
pub mod stack;
pub mod stream;

use crate::handle;
use crate::owned::{self, Owned};
use ::netmem_devmem::BindingRef;

/// A handle that this thread owns from the beginning: its value has parts that are counted without
/// atomics, and shared with other values of the thread.
fn create_here<K: Owned>(value: K::Value) -> *mut K {
    let made = handle::create::<K>(value);
    // SAFETY: it was just created, and no other thread has it.
    let _ = unsafe { owned::get_mut(made) };
    made
}

/// The bytes of a binding.
fn bytes(memory: &BindingRef) -> u64 {
    memory.region().len() as u64
}
