//! Big-packet mode: every buffer is a chain of pages long enough for the longest segment. Its pages are its own, from no
//! pool: a frame takes the ones it fills, the others stay in the chain.
//!
//! ```text
//!   descriptor  c*K ──► c*K+1 ──► ... ──► c*K+K-1      fixed; only the addresses change
//!   page        ├hdr│frame ├ frame ├ ...  ├ unused
//! ```

use super::Recipe;
use super::frame::{BATCH, ETHERNET, annotate, deliver, prefetch};
use super::panics::Panics;
use super::ring::DriverRing;
use super::stats::{DeviceFault, RxStats};
use crate::net::{Offloads, VnetHdr};
use netmem_packet::{Handler, XdpFrame};
use netmem_pool::{Direction, DmaDomain, MapError, Napi, Page, PeerMemory, RegionProvider};
use std::sync::Arc;

struct Link<M: PeerMemory> {
    page: Page<M>,
    dma: u64,
}

struct Chain<M: PeerMemory> {
    links: Vec<Link<M>>,
    posted: bool,
}

impl<M: PeerMemory> Default for Chain<M> {
    fn default() -> Self {
        Self { links: Vec::new(), posted: false }
    }
}

pub(crate) struct BigRing<M: PeerMemory> {
    ring: DriverRing,
    chains: Box<[Chain<M>]>,
    /// Chains that the device does not have, oldest first.
    free: Vec<u16>,
    supply: Arc<RegionProvider<M>>,
    domain: Option<Arc<dyn DmaDomain>>,
    offloads: Offloads,
    per_chain: u16,
    page_size: u32,
    stats: RxStats,
}

impl<M: PeerMemory> BigRing<M> {
    /// As many chains of pages for frames of `max_frame` bytes as the ring has room for, filled as far as there are pages.
    pub(crate) fn new(ring: DriverRing, supply: Arc<RegionProvider<M>>, recipe: &Recipe<M>, max_frame: usize) -> Self {
        let page_size = supply.region().page_size() as u32;
        let per_chain = (VnetHdr::LEN + max_frame).div_ceil(page_size as usize) as u16;
        let count = ring.size() / per_chain;
        describe(&ring, per_chain, page_size);
        let chains = (0..count).map(|_| Chain::default()).collect();
        let free = (0..count).collect();
        let (domain, offloads, stats) = (recipe.domain.clone(), recipe.offloads, RxStats::default());
        let mut this = Self { ring, chains, free, supply, domain, offloads, per_chain, page_size, stats };
        this.refill();
        this
    }

    /// Goes on with a new ring, in which nothing is posted. The pages that were posted stay in their chains, and are posted.
    pub(crate) fn adopt(&mut self, ring: DriverRing) {
        self.stats.restart(&self.ring);
        self.ring = ring;
        describe(&self.ring, self.per_chain, self.page_size);
        self.chains.iter_mut().for_each(|chain| chain.posted = false);
        self.free = (0..self.chains.len() as u16).collect();
        self.refill();
    }

    pub(crate) fn ring(&self) -> &DriverRing {
        &self.ring
    }

    pub(crate) fn stats(&self) -> RxStats {
        self.stats
    }

    /// Whether the device has a chain for a frame.
    pub(crate) fn can_receive(&self) -> bool {
        self.free.len() < self.chains.len()
    }

    pub(crate) fn ring_mut(&mut self) -> &mut DriverRing {
        &mut self.ring
    }

    pub(crate) fn posted(&self) -> usize {
        self.chains.iter().filter(|c| c.posted).map(|c| c.links.len()).sum()
    }

    pub(crate) fn receive<H: Handler<M>>(&mut self, napi: &mut Napi<'_, M>, budget: usize, handler: &mut H) -> usize {
        let mut done = 0;
        while done < budget && self.stats.stopped.is_none() {
            let pending = self.ring.pending();
            match pending.map(|n| n.min(BATCH).min((budget - done).try_into().unwrap_or(BATCH))) {
                Ok(0) => {
                    // Chains that had no pages may have some now, and without them nothing comes that would tell.
                    if !self.free.is_empty() {
                        self.refill();
                    }
                    break;
                }
                Ok(n) => {
                    for _ in 0..n {
                        if let Err(error) = self.frame(napi, handler) {
                            self.stats.stop(error);
                            break;
                        }
                        done += 1;
                    }
                    self.refill();
                }
                Err(error) => self.stats.stop(error),
            }
        }
        handler.flush();
        self.ring.notify();
        done
    }

    fn frame<H: Handler<M>>(&mut self, napi: &mut Napi<'_, M>, handler: &mut H) -> Result<(), DeviceFault> {
        let (id, len) = self.ring.used(0);
        let number =
            u16::try_from(id).ok().filter(|id| id.is_multiple_of(self.per_chain)).map(|id| id / self.per_chain);
        let number = number.filter(|&c| usize::from(c) < self.chains.len()).ok_or(DeviceFault::BadId { id })?;
        let chain = &mut self.chains[usize::from(number)];
        if !chain.posted {
            return Err(DeviceFault::NotPosted { id: id as u16 });
        }
        chain.posted = false;
        self.ring.consume(1);
        self.free.push(number);
        let have = u32::from(self.per_chain) * self.page_size;
        if len > have {
            return Err(DeviceFault::BadLength { len, have });
        }
        if (len as usize) < VnetHdr::LEN + ETHERNET {
            self.stats.short += 1;
            return Ok(());
        }
        let filled = len.div_ceil(self.page_size) as usize;
        if let Some(domain) = self.domain.as_ref().filter(|d| d.needs_sync()) {
            for (i, link) in chain.links[..filled].iter().enumerate() {
                let rest = len - i as u32 * self.page_size;
                domain.sync_for_cpu(link.dma, rest.min(self.page_size) as usize);
            }
        }
        let links = chain.links.drain(..filled);
        if let Some(domain) = &self.domain {
            // All pages are unmapped before the first of them can be dropped, also if the domain panics over one.
            let mut panics = Panics::default();
            for link in links.as_slice() {
                panics.call(|| domain.unmap(link.dma, self.page_size as usize));
            }
            panics.resume();
        }
        let mut pages = links.map(|link| link.page);
        // At least a header was written, so at least one page is filled.
        let Some(first) = pages.next() else { return Ok(()) };
        prefetch(first.as_ptr().addr());
        let header = VnetHdr::from_bytes(first.read_at(0).unwrap_or_default());
        let mut rest = len as usize;
        let mut frame = XdpFrame::new(first, VnetHdr::LEN, rest.min(self.page_size as usize) - VnetHdr::LEN);
        for page in pages {
            rest -= self.page_size as usize;
            // A chain is as long as the longest frame, which a packet's fragments hold.
            let pushed = frame.push(page.freeze_range(0..rest.min(self.page_size as usize)));
            debug_assert!(pushed.is_ok());
        }
        if frame.is_multi_buffer() {
            self.stats.multi_buffer += 1;
        }
        if !header.is_plain() && !annotate(&mut self.stats, &mut frame, header, self.offloads) {
            return Ok(());
        }
        drop(deliver(&mut self.stats, napi, frame, handler));
        Ok(())
    }

    /// Fills up and posts every chain that the device does not have, as far as there are pages.
    fn refill(&mut self) {
        let mut posted = false;
        while let Some(&number) = self.free.first() {
            match self.fill(number) {
                Ok(true) => {}
                Ok(false) => {
                    self.stats.starved += 1;
                    break;
                }
                Err(error) => {
                    tracing::debug!(%error, "a page could not be mapped");
                    self.stats.starved += 1;
                    break;
                }
            }
            let chain = &mut self.chains[usize::from(number)];
            let head = number * self.per_chain;
            let sync = self.domain.as_ref().filter(|d| d.needs_sync());
            for (i, link) in (0..).zip(&chain.links) {
                if let Some(domain) = sync {
                    domain.sync_for_device(link.dma, self.page_size as usize, Direction::FromDevice);
                }
                self.ring.point(head + i, link.dma);
            }
            chain.posted = true;
            self.ring.expose(head);
            // At once: user code may panic over the next chain, and no chain is exposed twice.
            self.free.remove(0);
            posted = true;
        }
        if posted {
            self.ring.publish();
        }
    }

    /// Fills a chain up; false if the supply ended first.
    fn fill(&mut self, number: u16) -> Result<bool, MapError> {
        let chain = &mut self.chains[usize::from(number)];
        while chain.links.len() < usize::from(self.per_chain) {
            let Some(page) = self.supply.page() else { return Ok(false) };
            let dma = match &self.domain {
                Some(domain) => domain.map(page.as_ptr(), self.page_size as usize, Direction::FromDevice)?,
                None => page.as_ptr().addr() as u64,
            };
            chain.links.push(Link { page, dma });
        }
        Ok(true)
    }

    /// The ring has stopped, `confirmed` by the device or not: then what it has is lost to everybody. Returns how many
    /// pages that are.
    pub(crate) fn stop(&mut self, confirmed: bool, panics: &mut Panics) -> u64 {
        let mut lost = 0;
        for chain in &mut self.chains {
            for link in chain.links.drain(..) {
                if let Some(domain) = &self.domain {
                    panics.call(|| domain.unmap(link.dma, self.page_size as usize));
                }
                if chain.posted && !confirmed {
                    self.supply.quarantine(link.page);
                    lost += 1;
                }
            }
            chain.posted = false;
        }
        lost
    }
}

/// Describes as many chains of `per_chain` pages as the ring has room for, with no pages yet.
fn describe(ring: &DriverRing, per_chain: u16, page_size: u32) {
    for id in 0..ring.size() / per_chain * per_chain {
        let next = Some(id + 1).filter(|next| !next.is_multiple_of(per_chain));
        ring.describe(id, 0, page_size, true, next);
    }
}
