//! What fills the slots of a run of buffers in these tests.

use super::Pages;
use crate::virtqueue::driver::FillRun;

/// Fills slots with new addresses, and has no memory for some.
pub(super) struct RunFill<'t> {
    pub(super) next: &'t mut u64,
    pub(super) rng: &'t mut fastrand::Rng,
}

impl FillRun<Pages> for RunFill<'_> {
    fn is_empty(&self, pages: &Pages) -> bool {
        pages.is_none()
    }

    fn fill(&mut self, pages: &mut Pages) -> Option<u64> {
        assert!(pages.is_none(), "a slot that has memory keeps it");
        if self.rng.u8(..16) == 0 {
            return None;
        }
        *self.next += 0x1000;
        *pages = Some(vec![*self.next]);
        Some(*self.next)
    }

    fn fill_all(&mut self, all: &mut [Pages], addrs: &mut [u64]) -> usize {
        assert_eq!(all.len(), addrs.len());
        let filled = all.iter_mut().zip(addrs).map_while(|(pages, addr)| {
            *addr = self.fill(pages)?;
            Some(())
        });
        filled.count()
    }
}
