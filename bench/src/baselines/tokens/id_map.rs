//! A map that chooses its keys: the lowest free key in the leaf where the last one was found, and
//! then in the next leaf.

/// 64 values, and which of them are in use.
struct Leaf<V> {
    used: u64,
    values: [V; 64],
}

pub(super) struct IdMap<V> {
    leaves: Vec<Box<Leaf<V>>>,
    /// The leaf in which a key may be free.
    hint: usize,
    len: usize,
}

impl<V: Copy + Default> IdMap<V> {
    pub(super) fn new() -> Self {
        Self { leaves: Vec::new(), hint: 0, len: 0 }
    }

    #[inline]
    pub(super) fn insert(&mut self, value: V) -> u32 {
        if self.len == 64 * self.leaves.len() {
            self.hint = self.leaves.len();
            self.leaves.push(Box::new(Leaf { used: 0, values: [V::default(); 64] }));
        }
        while self.leaves[self.hint].used == u64::MAX {
            self.hint = if self.hint + 1 == self.leaves.len() { 0 } else { self.hint + 1 };
        }
        let leaf = &mut self.leaves[self.hint];
        let at = leaf.used.trailing_ones();
        leaf.used |= 1 << at;
        leaf.values[at as usize] = value;
        self.len += 1;
        self.hint as u32 * 64 + at
    }

    #[inline]
    pub(super) fn remove(&mut self, id: u32) -> Option<V> {
        let leaf = self.leaves.get_mut(id as usize / 64)?;
        let bit = 1 << (id % 64);
        if leaf.used & bit == 0 {
            return None;
        }
        leaf.used &= !bit;
        self.len -= 1;
        Some(leaf.values[id as usize % 64])
    }
}
