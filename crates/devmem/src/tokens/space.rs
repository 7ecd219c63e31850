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
//! Number 0 is never allocated, so a token that was not filled in is in no range. A range begins
//! with a block of counts, so that each block has tokens of one binding.

use super::counts::BLOCK;

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
    let mut at = aligned(from);
    for (first, last) in taken {
        if at + u64::from(pages) <= u64::from(first) {
            break;
        }
        at = at.max(aligned(u64::from(last) + 1));
    }
    if at + u64::from(pages) <= END { u32::try_from(at).ok() } else { None }
}

/// The first number from `at` on that begins a block.
fn aligned(at: u64) -> u64 {
    (at - 1).next_multiple_of(u64::from(BLOCK)) + 1
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
        assert_eq!(place(&mut space, 10, &[]), Some(17), "a range begins with a block");
        assert_eq!(place(&mut space, 16, &[(17, 26)]), Some(33));
        let rest = u32::MAX - 48;
        assert_eq!(place(&mut space, rest, &[(17, 26), (33, 48)]), Some(49));
        let taken = [(17, 26), (49, u32::MAX)];
        assert_eq!(place(&mut space, 17, &taken), None);
        assert_eq!(place(&mut space, 16, &taken), Some(1));
        assert_eq!(place(&mut space, 4, &[(1, 16), taken[0], taken[1]]), Some(33));
    }

    /// A range can be as large as the whole space, and no range goes beyond the end.
    #[test]
    fn the_whole_space() {
        let mut space = Space::new();
        assert_eq!(place(&mut space, u32::MAX, &[]), Some(1));
        assert_eq!(place(&mut space, 1, &[(1, u32::MAX)]), None);
        assert_eq!(place(&mut space, u32::MAX, &[]), Some(1));
        assert_eq!(place(&mut space, u32::MAX - 15, &[]), Some(1));
        assert_eq!(place(&mut space, 16, &[]), Some(1), "16 do not fit into the last 15 numbers");
        assert_eq!(place(&mut space, 1, &[]), Some(17));
    }
}
