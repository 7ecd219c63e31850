//! The memory of all slots: areas of a page for each CPU, in which each slot has one word of eight
//! bytes.
//!
//! ```text
//!   chunk   CPU 0: │ slot 0 │ slot 1 │ ... │ slot 511 │   a slot is the address of its word
//!           CPU 1: │ slot 0 │ slot 1 │ ... │ slot 511 │   for CPU 0; CPU n's is n pages on
//!           ...
//! ```
//!
//! A word shares its line with words of the same CPU only. Chunks are added when all slots are in
//! use, and never unmapped: so a sequence that is about to be restarted reads from memory of this
//! process, also if its slot was freed meanwhile.
//!
//! A chunk has an area for every index that there can be, which are more than there are CPUs. If no
//! thread ever has an index, the page of that index is read when a gate closes, and never written.
//! The kernel maps its one page of zeros for all such pages: they take no memory, and few cache
//! lines.

use crate::error::NoMemory;
use crate::sync::AtomicUsize;

#[cfg(not(loom))]
mod real {
    use super::*;
    use crate::cpus::areas;
    use crate::decision::mode;
    use crate::process;
    use crate::word::STRIDE;

    const SLOTS: usize = STRIDE / size_of::<AtomicUsize>();

    pub(crate) fn alloc() -> Result<usize, NoMemory> {
        // The mode is decided before the first gate opens, so a signal handler never has to do so.
        mode();
        process::prepare()?;
        let mut slots = process::free_slots();
        if let Some(slot) = slots.pop() {
            return Ok(slot);
        }
        let chunk = new_chunk()?;
        slots.extend((1..SLOTS).rev().map(|slot| chunk + slot * size_of::<AtomicUsize>()));
        Ok(chunk)
    }

    pub(crate) fn free(slot: usize) {
        process::free_slots().push(slot);
    }

    fn new_chunk() -> Result<usize, NoMemory> {
        let bytes = areas() * STRIDE;
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: new memory, of zeros, at an address that the kernel chooses.
        let chunk = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, kind | libc::MAP_NORESERVE, -1, 0) };
        if chunk == libc::MAP_FAILED {
            return Err(NoMemory { bytes });
        }
        // A huge page would put all CPUs' areas on the node of the CPU that touches it first. A
        // kernel without huge pages refuses.
        // SAFETY: our own memory, and advice.
        unsafe { libc::madvise(chunk, bytes, libc::MADV_NOHUGEPAGE) };
        Ok(chunk.expose_provenance())
    }
}

#[cfg(not(loom))]
pub(crate) use real::{alloc, free};

/// In a model each slot is a separate box, so that loom sees when it is made and freed.
#[cfg(loom)]
mod model {
    use super::*;
    use crate::cpus::areas;

    pub(crate) fn alloc() -> Result<usize, NoMemory> {
        let words: Box<[AtomicUsize]> = (0..areas()).map(|_| AtomicUsize::new(0)).collect();
        Ok(Box::into_raw(words).cast::<AtomicUsize>().expose_provenance())
    }

    pub(crate) fn free(slot: usize) {
        let words = std::ptr::with_exposed_provenance_mut::<AtomicUsize>(slot);
        // SAFETY: made by `alloc`, freed once.
        drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(words, areas())) });
    }
}

#[cfg(loom)]
pub(crate) use model::{alloc, free};
