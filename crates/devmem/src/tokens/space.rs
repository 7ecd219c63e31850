//! Allocation of the ranges of bindings in a socket's 32-bit space. A binding is assigned the next
//! free range. Freed ranges are used again only after all other numbers.
//!
//! A late return names a token of a binding that is gone. If its numbers were used again at once,
//! the return would free a page of another binding.
//!
//! ```text
//!   0   1                          next                       2^32
//!   │ - │ A A A A │     │ B B │ C C C C ─────────────────────► │
//!               a gap here is used only after `next` has wrapped around
//! ```
//!
//! Number 0 is never allocated, so a token that was not filled in is in no range.

/// One past the last token.
const END: u64 = 1 << 32;

/// The position at which the next range is placed.
pub(crate) struct Space {
    next: u64,
}

impl Space {
    pub(crate) fn new() -> Self {
        Self { next: 1 }
    }

    /// Finds `pages` free numbers in a row. Searches from the end of the last range that it found
    /// to the end of the space, then from the beginning. `taken` are the first and last numbers of
    /// the ranges in use, in order.
    pub(crate) fn place(&mut self, pages: u32, taken: impl Iterator<Item = (u32, u32)> + Clone) -> Option<u32> {
        let base = first_gap(self.next, pages, taken.clone()).or_else(|| first_gap(1, pages, taken))?;
        self.next = u64::from(base) + u64::from(pages);
        Some(base)
    }
}

fn first_gap(from: u64, pages: u32, taken: impl Iterator<Item = (u32, u32)>) -> Option<u32> {
    let mut at = from;
    for (first, last) in taken {
        if at + u64::from(pages) <= u64::from(first) {
            break;
        }
        at = at.max(u64::from(last) + 1);
    }
    if at + u64::from(pages) <= END { u32::try_from(at).ok() } else { None }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn place(space: &mut Space, pages: u32, taken: &[(u32, u32)]) -> Option<u32> {
        space.place(pages, taken.iter().copied())
    }

    /// A gap is used only after the space has wrapped around. Proves MEM-4.
    #[test]
    fn gaps_wait_for_the_space_to_wrap() {
        let mut space = Space::new();
        assert_eq!(place(&mut space, 10, &[]), Some(1));
        assert_eq!(place(&mut space, 10, &[]), Some(11));
        assert_eq!(place(&mut space, 5, &[(11, 20)]), Some(21));
        let rest = u32::MAX - 25;
        assert_eq!(place(&mut space, rest, &[(11, 20), (21, 25)]), Some(26));
        let taken = [(11, 20), (26, u32::MAX)];
        assert_eq!(place(&mut space, 11, &taken), None);
        assert_eq!(place(&mut space, 7, &taken), Some(1));
        assert_eq!(place(&mut space, 4, &[(1, 7), taken[0], taken[1]]), Some(21));
    }

    /// A range can be as large as the whole space, and no range goes beyond the end.
    #[test]
    fn the_whole_space() {
        let mut space = Space::new();
        assert_eq!(place(&mut space, u32::MAX, &[]), Some(1));
        assert_eq!(place(&mut space, 1, &[(1, u32::MAX)]), None);
        assert_eq!(place(&mut space, u32::MAX, &[]), Some(1));
        assert_eq!(place(&mut space, u32::MAX - 1, &[]), Some(1));
        assert_eq!(place(&mut space, 2, &[]), Some(1), "2 do not fit into the last number");
        assert_eq!(place(&mut space, 1, &[]), Some(3));
    }
}
