//! The fragments behind a frame's head.
//!
//! Most frames have none, and pay for none: the list is one pointer, which is null.

use netmem_pool::{Frag, Memory};

/// Fragments behind the head: as many pages of 4 KiB as 64 KiB can touch.
pub const MAX_FRAGS: usize = 17;

/// No fragments, or up to 17 on the heap. One pointer: a frame without any stays in registers, and
/// its drop is a test.
#[derive(Debug)]
#[allow(clippy::box_collection, reason = "a vector in place is three words and a call to drop")]
pub(crate) struct Frags<M: Memory>(Option<Box<Vec<Frag<M>>>>);

impl<M: Memory> Frags<M> {
    pub(crate) const NONE: Self = Self(None);

    /// Adds a fragment, or returns it if there are 17 already.
    pub(crate) fn push(&mut self, frag: Frag<M>) -> Result<(), Frag<M>> {
        let frags = self.0.get_or_insert_with(|| Box::new(Vec::with_capacity(MAX_FRAGS)));
        if frags.len() == MAX_FRAGS {
            return Err(frag);
        }
        frags.push(frag);
        Ok(())
    }

    /// Whether no list was allocated. An allocated list can be empty, too.
    #[inline]
    pub(crate) fn is_none(&self) -> bool {
        self.0.is_none()
    }

    #[inline]
    pub(crate) fn as_slice(&self) -> &[Frag<M>] {
        self.0.as_ref().map_or(&[], |frags| frags.as_slice())
    }

    #[inline]
    pub(crate) fn as_mut_slice(&mut self) -> &mut [Frag<M>] {
        self.0.as_mut().map_or(&mut [], |frags| frags.as_mut_slice())
    }

    /// Removes the first fragment, if there is one.
    pub(crate) fn pop_front(&mut self) -> Option<Frag<M>> {
        self.0.as_mut().filter(|frags| !frags.is_empty()).map(|frags| frags.remove(0))
    }

    /// Puts a fragment in front, or returns it if there are 17 already.
    pub(crate) fn push_front(&mut self, frag: Frag<M>) -> Result<(), Frag<M>> {
        self.push(frag)?;
        self.as_mut_slice().rotate_right(1);
        Ok(())
    }

    /// Removes `n` bytes from the front; there are at least `n`. Fragments that are used up are
    /// dropped after all bytes were removed, so that a panic in a drop leaves the rest in the
    /// right state.
    pub(crate) fn advance(&mut self, mut n: usize) {
        let Some(frags) = &mut self.0 else { return };
        let mut used_up = 0;
        for frag in frags.iter_mut() {
            if frag.len() > n {
                frag.advance(n);
                break;
            }
            n -= frag.len();
            used_up += 1;
        }
        frags.drain(..used_up);
    }

    /// Keeps the first `len` bytes. Fragments behind them are dropped, after all bytes were cut
    /// off.
    pub(crate) fn truncate(&mut self, mut len: usize) {
        let Some(frags) = &mut self.0 else { return };
        let mut kept = 0;
        for frag in frags.iter_mut() {
            if len == 0 {
                break;
            }
            frag.truncate(len);
            len -= frag.len();
            kept += 1;
        }
        frags.truncate(kept);
    }

    pub(crate) fn into_vec(self) -> Vec<Frag<M>> {
        self.0.map_or_else(Vec::new, |frags| *frags)
    }
}

impl<M: Memory> Clone for Frags<M> {
    fn clone(&self) -> Self {
        Self(self.0.as_ref().filter(|frags| !frags.is_empty()).map(|frags| {
            let mut all = Vec::with_capacity(MAX_FRAGS);
            all.extend(frags.iter().cloned());
            Box::new(all)
        }))
    }
}
