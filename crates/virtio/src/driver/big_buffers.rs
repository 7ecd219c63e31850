//! Big-packet mode: a buffer is a chain of pages long enough for the longest segment. Its pages are
//! from no pool. A frame consumes the pages that it fills; the others stay in the chain.
//!
//! ```text
//!   page   ├ header 12 B │ frame ├ frame ├ ...  ├ unused
//! ```

use super::buffers::{Buffers, RawHeader, prefetch};
use super::panics::Panics;
use super::queue_config::QueueConfig;
use crate::net::VnetHdr;
use crate::virtqueue::driver::Segments;
use netmem_packet::XdpFrame;
use netmem_pool::{Direction, DmaDomain, MapError, Napi, Page, PagePool, PeerMemory, RegionProvider};
use std::sync::Arc;

struct MappedPage<M: PeerMemory> {
    page: Page<M>,
    dma: u64,
}

/// The pages of a buffer, as many as it has.
pub(super) struct Chain<M: PeerMemory> {
    pages: Vec<MappedPage<M>>,
}

impl<M: PeerMemory> Default for Chain<M> {
    fn default() -> Self {
        Self { pages: Vec::new() }
    }
}

/// See the module.
pub(super) struct BigBuffers<M: PeerMemory> {
    supply: Arc<RegionProvider<M>>,
    domain: Option<Arc<dyn DmaDomain>>,
    needs_sync: bool,
    /// Pages in a chain.
    pages_per_chain: usize,
    page_size: usize,
    /// Pages that were quarantined.
    lost: u64,
}

impl<M: PeerMemory> BigBuffers<M> {
    /// Buffers for frames of up to `max_frame` bytes.
    pub(super) fn new(supply: Arc<RegionProvider<M>>, config: &QueueConfig<M>, max_frame: usize) -> Self {
        let page_size = supply.region().page_size();
        let domain = config.domain.clone();
        Self {
            needs_sync: domain.as_ref().is_some_and(|d| d.needs_sync()),
            pages_per_chain: (VnetHdr::LEN + max_frame).div_ceil(page_size),
            lost: 0,
            supply,
            domain,
            page_size,
        }
    }

    /// Pages in a buffer.
    pub(super) fn pages(&self) -> usize {
        self.pages_per_chain
    }

    /// Pages that were quarantined when the queue stopped.
    pub(super) fn lost(&self) -> u64 {
        self.lost
    }

    /// Bytes in the `i`th page of a buffer that holds `len`.
    fn filled(&self, i: usize, len: usize) -> usize {
        (len - i * self.page_size).min(self.page_size)
    }

    /// Adds pages until the chain is complete; false if the supply ended first.
    fn complete_chain(&self, chain: &mut Chain<M>) -> Result<bool, MapError> {
        while chain.pages.len() < self.pages_per_chain {
            let Some(page) = self.supply.page() else { return Ok(false) };
            let dma = match &self.domain {
                Some(domain) => domain.map(page.as_ptr(), self.page_size, Direction::FromDevice)?,
                None => page.as_ptr().addr() as u64,
            };
            chain.pages.push(MappedPage { page, dma });
        }
        Ok(true)
    }

    /// Unmaps these pages. All of them are unmapped before the first can be dropped, also if the
    /// domain panics over one.
    fn unmap(&self, pages: &[MappedPage<M>], panics: &mut Panics) {
        let Some(domain) = &self.domain else { return };
        for page in pages {
            panics.call(|| domain.unmap(page.dma, self.page_size));
        }
    }
}

impl<M: PeerMemory> Buffers for BigBuffers<M> {
    type Mem = M;
    /// The pool has only pages to linearise into.
    type Pools = PagePool<M>;
    type Buffer = Chain<M>;
    type Frame = XdpFrame<M>;
    type Identity = ();

    fn segments(&self) -> Vec<u32> {
        vec![self.page_size as u32; self.pages_per_chain]
    }

    fn prefetch(chain: &Chain<M>) {
        if let Some(first) = chain.pages.first() {
            prefetch(first.page.as_ptr().addr());
        }
    }

    fn fill(&mut self, chain: &mut Chain<M>, _: &mut Napi<'_, M>, segments: &mut Segments<'_>) -> bool {
        match self.complete_chain(chain) {
            Ok(true) => {}
            Ok(false) => return false,
            Err(error) => {
                netmem_pool::trace::debug!(%error, "a page could not be mapped");
                return false;
            }
        }
        // All of them: pages that a frame left have moved to the front of the chain.
        for (i, page) in chain.pages.iter().enumerate() {
            segments.set(i, page.dma);
        }
        if let (true, Some(domain)) = (self.needs_sync, &self.domain) {
            for page in &chain.pages {
                domain.sync_for_device(page.dma, self.page_size, Direction::FromDevice);
            }
        }
        true
    }

    fn sync(&self, chain: &Chain<M>, len: u32, _: &Napi<'_, M>) {
        let len = len as usize;
        if let (true, Some(domain)) = (self.needs_sync, &self.domain) {
            for (i, page) in chain.pages.iter().take(len.div_ceil(self.page_size)).enumerate() {
                domain.sync_for_cpu(page.dma, self.filled(i, len));
            }
        }
    }

    fn header(&self, chain: &Chain<M>) -> RawHeader {
        chain.pages.first().and_then(|page| page.page.read_at(0).ok()).map_or(RawHeader::PLAIN, RawHeader::new)
    }

    fn complete(&mut self, chain: &mut Chain<M>, _: RawHeader, len: u32) -> Option<XdpFrame<M>> {
        let len = len as usize;
        let pages = chain.pages.drain(..len.div_ceil(self.page_size));
        let mut panics = Panics::default();
        self.unmap(pages.as_slice(), &mut panics);
        panics.resume();
        let mut pages = (0..).zip(pages.map(|page| page.page));
        let (_, first) = pages.next()?;
        let mut frame = XdpFrame::new(first, VnetHdr::LEN, self.filled(0, len) - VnetHdr::LEN);
        for (i, page) in pages {
            // A chain is as long as the longest frame, which a packet's fragments hold.
            let pushed = frame.push(page.freeze_range(0..self.filled(i, len)));
            debug_assert!(pushed.is_ok());
        }
        Some(frame)
    }

    fn recover(&mut self, chain: &mut Chain<M>, panics: &mut Panics) {
        let Chain { pages } = std::mem::take(chain);
        self.unmap(&pages, panics);
        panics.call(|| drop(pages));
    }

    fn quarantine(&mut self, chain: &mut Chain<M>, _: &mut PagePool<M>, panics: &mut Panics) {
        let Chain { pages } = std::mem::take(chain);
        self.unmap(&pages, panics);
        for page in pages {
            panics.call(|| self.supply.quarantine(page.page));
            self.lost += 1;
        }
    }
}
