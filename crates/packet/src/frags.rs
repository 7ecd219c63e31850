//! The fragments behind a frame's head: most frames have none.

use netmem_pool::{Frag, Memory};

/// Fragments behind the head: as many pages of 4 KiB as 64 KiB can touch.
pub const MAX_FRAGS: usize = 17;

/// No fragments, or up to 17 on the heap. One pointer: a frame without any stays in registers, and its drop is a test.
#[derive(Debug)]
#[allow(clippy::box_collection, reason = "a vector in place is three words and a call to drop")]
pub(crate) struct Frags<M: Memory>(Option<Box<Vec<Frag<M>>>>);

impl<M: Memory> Frags<M> {
    pub(crate) const NONE: Self = Self(None);

    /// Adds a fragment, or gives it back if there are as many as can be.
    pub(crate) fn push(&mut self, frag: Frag<M>) -> Result<(), Frag<M>> {
        let frags = self.0.get_or_insert_with(|| Box::new(Vec::with_capacity(MAX_FRAGS)));
        if frags.len() == MAX_FRAGS {
            return Err(frag);
        }
        frags.push(frag);
        Ok(())
    }

    #[inline]
    pub(crate) fn as_slice(&self) -> &[Frag<M>] {
        self.0.as_ref().map_or(&[], |frags| frags.as_slice())
    }

    pub(crate) fn into_vec(self) -> Vec<Frag<M>> {
        self.0.map_or_else(Vec::new, |frags| *frags)
    }
}
