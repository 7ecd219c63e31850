//! A buddy allocator over page numbers, as kernels have it. It keeps free blocks of `1 << order`
//! pages. An allocation splits a block, and a block that is given back is merged with its buddy.

/// The order of the largest blocks: 1024 pages, 4 MiB.
const MAX_ORDER: usize = 10;
/// The end of a list, in place of a page number.
const NONE: u32 = u32::MAX;
/// The order of a page that is not the first page of a free block.
const TAKEN: u8 = u8::MAX;

/// The allocator's record of a page. For the first page of a free block it is the block's place in
/// the list of its order.
#[derive(Clone, Copy, Debug)]
struct Block {
    prev: u32,
    next: u32,
    order: u8,
}

/// Free blocks of pages, by order.
#[derive(Debug)]
pub(crate) struct Buddy {
    blocks: Box<[Block]>,
    heads: [u32; MAX_ORDER + 1],
    free: usize,
}

impl Buddy {
    /// An allocator whose `pages` pages are all free, in the largest blocks that are possible.
    pub(crate) fn new(pages: u32) -> Self {
        let blocks = vec![Block { prev: NONE, next: NONE, order: TAKEN }; pages as usize];
        let mut this = Self { blocks: blocks.into(), heads: [NONE; MAX_ORDER + 1], free: 0 };
        // Pages are given from the last to the first, so that the lists begin with low numbers.
        for page in (0..pages).rev() {
            this.give(page, 0);
        }
        this
    }

    /// Pages that are free.
    pub(crate) fn free(&self) -> usize {
        self.free
    }

    /// Allocates a block of `1 << order` pages from the smallest free block that is large enough.
    /// Returns the number of its first page, which is a multiple of the block's size.
    pub(crate) fn take(&mut self, order: usize) -> Option<u32> {
        let found = order + self.heads[order..].iter().position(|&head| head != NONE)?;
        let page = self.heads[found];
        self.unlink(page);
        for order in (order..found).rev() {
            self.link(page + (1 << order), order);
        }
        self.free -= 1 << order;
        Some(page)
    }

    /// Returns a block of `1 << order` pages.
    pub(crate) fn give(&mut self, page: u32, order: usize) {
        self.free += 1 << order;
        let (mut page, mut order) = (page, order);
        while order < MAX_ORDER {
            let buddy = page ^ (1 << order);
            if self.blocks.get(buddy as usize).is_none_or(|b| usize::from(b.order) != order) {
                break;
            }
            self.unlink(buddy);
            page = page.min(buddy);
            order += 1;
        }
        self.link(page, order);
    }

    fn link(&mut self, page: u32, order: usize) {
        let next = std::mem::replace(&mut self.heads[order], page);
        self.blocks[page as usize] = Block { prev: NONE, next, order: order as u8 };
        if let Some(next) = self.blocks.get_mut(next as usize) {
            next.prev = page;
        }
    }

    fn unlink(&mut self, page: u32) {
        let Block { prev, next, order } =
            std::mem::replace(&mut self.blocks[page as usize], Block { prev: NONE, next: NONE, order: TAKEN });
        match self.blocks.get_mut(prev as usize) {
            Some(prev) => prev.next = next,
            None => self.heads[usize::from(order)] = next,
        }
        if let Some(next) = self.blocks.get_mut(next as usize) {
            next.prev = prev;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The free blocks: first page and order, in order of page.
    fn blocks(b: &Buddy) -> Vec<(u32, u8)> {
        (0..).zip(b.blocks.iter()).filter(|(_, b)| b.order != TAKEN).map(|(i, b)| (i, b.order)).collect()
    }

    #[test]
    fn memory_begins_in_the_largest_blocks() {
        assert_eq!(blocks(&Buddy::new(2048)), [(0, 10), (1024, 10)]);
        assert_eq!(blocks(&Buddy::new(1024 + 5)), [(0, 10), (1024, 2), (1028, 0)]);
        assert_eq!(blocks(&Buddy::new(1)), [(0, 0)]);
    }

    #[test]
    fn taking_splits_and_giving_coalesces() {
        let mut b = Buddy::new(8);
        let page = b.take(0).unwrap();
        assert_eq!((page, b.free()), (0, 7));
        assert_eq!(blocks(&b), [(1, 0), (2, 1), (4, 2)]);
        b.give(page, 0);
        assert_eq!(blocks(&b), [(0, 3)]);
        let (pair, page) = (b.take(1).unwrap(), b.take(0).unwrap());
        assert_eq!((pair, page, b.free()), (0, 2, 5));
        b.give(pair, 1);
        assert_eq!(blocks(&b), [(0, 1), (3, 0), (4, 2)]);
        b.give(page, 0);
        assert_eq!((blocks(&b), b.take(4)), (vec![(0, 3)], None));
    }

    #[test]
    fn every_page_once_and_all_memory_back_in_any_order() {
        for pages in [1, 7, 64, 3000] {
            let whole = blocks(&Buddy::new(pages));
            let mut b = Buddy::new(pages);
            let mut taken: Vec<u32> = std::iter::from_fn(|| b.take(0)).collect();
            assert_eq!((taken.len(), b.free()), (pages as usize, 0));
            // An order that is neither theirs nor its reverse.
            taken.sort_by_key(|p| p.wrapping_mul(0x9e37_79b9));
            for page in &taken {
                b.give(*page, 0);
            }
            assert_eq!(blocks(&b), whole);
            taken.sort_unstable();
            assert!(taken.into_iter().eq(0..pages));
        }
    }
}
