//! A fragment of received payload, and the binding that it is in.
//!
//! Sockets and streams queue many of these, and each must know its binding without counting it. So
//! a value points to the binding's reference in the provider, which the fragment itself keeps.

use crate::binding::{BindingCount, BindingRef};
use netmem_pool::{Device, Frag};
use std::ptr::NonNull;

/// BoundFrag in device memory.
///
/// Invariant: `binding` points to the reference in the provider to which the page of `frag`
/// belongs. The fragment keeps its page, the page keeps its pool, and the pool keeps the provider.
/// So the reference exists as long as the fragment, without a count.
pub(crate) struct BoundFrag<C: BindingCount> {
    frag: Frag<Device>,
    binding: NonNull<BindingRef<C>>,
    /// Bytes of payload. The fragment may be longer; the rest is padding.
    len: u32,
    /// The page's index. It is stored here so that the receiver does not read the page's
    /// descriptor, which the CPU of the network side wrote last.
    index: u32,
}

// SAFETY: a fragment and a reference to a binding are both `Send` and `Sync`.
unsafe impl<C: BindingCount> Send for BoundFrag<C> {}
// SAFETY: as above.
unsafe impl<C: BindingCount> Sync for BoundFrag<C> {}

impl<C: BindingCount> BoundFrag<C> {
    /// The first `len` bytes of `frag`. Returns `None` if `frag` is in a page of another binding.
    ///
    /// # Safety
    ///
    /// `binding` must be the reference in its binding's provider. Every pool with pages of the
    /// binding keeps this provider.
    #[inline]
    pub(crate) unsafe fn new(frag: Frag<Device>, binding: &BindingRef<C>, len: u32) -> Option<Self> {
        let index = binding.region().index_of(&frag)?;
        Some(Self { frag, binding: NonNull::from(binding), len, index })
    }

    /// The binding in which the payload is. The reference is valid as long as this value exists.
    #[inline]
    pub(crate) fn binding(&self) -> &BindingRef<C> {
        // SAFETY: the invariant.
        unsafe { self.binding.as_ref() }
    }

    /// The page's index in the binding.
    #[inline]
    pub(crate) fn index(&self) -> u32 {
        self.index
    }

    /// The offset in the binding of the first byte.
    #[inline]
    pub(crate) fn offset(&self) -> u64 {
        let page = u64::from(self.index) * self.binding().region().page_size() as u64;
        page + self.frag.offset() as u64
    }

    /// The length in bytes.
    #[inline]
    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// Drops the first `n` bytes. The payload must have at least `n` bytes.
    #[inline]
    pub(crate) fn advance(&mut self, n: usize) {
        self.frag.advance(n);
        self.len -= n as u32;
    }

    /// Drops all but the first `len` bytes.
    #[inline]
    pub(crate) fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len as u32);
    }

    /// Drops this value but keeps the fragment's count of its page. The caller then owns this
    /// count.
    #[inline]
    pub(crate) fn into_count(self) {
        let _ = self.frag.into_count();
    }
}

/// A clone refers to the same bytes, and has a count of its own.
impl<C: BindingCount> Clone for BoundFrag<C> {
    fn clone(&self) -> Self {
        Self { frag: self.frag.clone(), ..*self }
    }
}
