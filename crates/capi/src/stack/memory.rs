//! Fragments of a stack's memory as fragments of the header, and back.
//!
//! The type of a fragment names a kind of memory. The fragment itself is a page's descriptor and a
//! span, which are the same for each kind: the descriptor says to which pool the page returns.

use crate::frag::netmem_frag;
use crate::region::Kept;
use netmem_pool::{Frag, Readable, Region};
use std::mem::ManuallyDrop;
use std::sync::Arc;

/// The memory from whose pages a stack sends.
#[derive(Clone)]
pub(crate) enum SendMemory {
    /// The device of a tap knows the pages of this DMA domain.
    Domain(usize),
    /// The kernel knows the pages of the UMEM's region.
    Region(Arc<Region<Kept>>),
}

impl SendMemory {
    /// Whether a page is in it. The kind in the type of `frag` is not used.
    pub(crate) fn has(&self, frag: &Frag<Kept>) -> bool {
        match self {
            Self::Domain(domain) => *domain != 0 && frag.dma_domain() == *domain,
            Self::Region(region) => region.index_of(frag).is_some(),
        }
    }
}

/// The same bytes under another kind's name.
fn recast<A: Readable, B: Readable>(frag: Frag<A>) -> Frag<B> {
    const { assert!(size_of::<Frag<A>>() == size_of::<Frag<B>>() && align_of::<Frag<A>>() == align_of::<Frag<B>>()) };
    let frag = ManuallyDrop::new(frag);
    // SAFETY: both are `repr(transparent)` over a page's `repr(C)` descriptor and span, in which
    // the kind is a phantom. Both kinds are mapped, and readable as slices. The count moves to the
    // result.
    unsafe { std::ptr::from_ref(&*frag).cast::<Frag<B>>().read() }
}

/// A fragment of any kind, for C.
#[inline]
pub(crate) fn to_c<M: Readable>(frag: Frag<M>) -> netmem_frag {
    netmem_frag::of(frag)
}

/// A fragment of C's as one of the stack's memory, which [has](SendMemory::has) it.
#[inline]
pub(crate) fn from_c<M: Readable>(frag: Frag<Kept>) -> Frag<M> {
    recast(frag)
}
