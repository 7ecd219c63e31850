//! Received payload that the user holds.
//!
//! Why not a plain fragment of a page: the page counts in the budgets of its connection and its
//! queue until the user drops it, so that a user who keeps payload closes the window and not the
//! queue.

use crate::tcp::{Budget, Charge, Held};
use netmem_pool::{BytesOwner, Frag, Mapped, Memory, OutOfRange, Page, Readable, SharedPool};
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

/// Received payload: bytes of a page, which is counted in the budgets of its connection and its
/// queue until this is dropped.
///
/// A fragment can be sent to any thread, and by a stream as it is. An empty fragment, the default,
/// is a place for payload: calls that receive fill a slice of such places.
///
/// Memory that an untrusted peer shares (`PeerShared`) is copied out ([`copy_to`](Self::copy_to)),
/// because the peer can change it at any time. If the user has declared the peer trusted, and for
/// memory of this process, a fragment is also a slice, and turns into `Bytes` without a copy.
#[must_use]
pub struct Fragment<M: Memory>(Inner<M>);

enum Inner<M: Memory> {
    Empty,
    /// In the page that the device wrote.
    Page(Held<Frag<M>>),
    /// In a page of detached payload.
    Packed(Frag<M>, #[expect(dead_code, reason = "they count until they are dropped")] Arc<[Charge; 2]>),
}

impl<M: Memory> Fragment<M> {
    pub(crate) fn new(held: Held<Frag<M>>) -> Self {
        Self(Inner::Page(held))
    }

    fn frag(&self) -> Option<&Frag<M>> {
        match &self.0 {
            Inner::Empty => None,
            Inner::Page(held) => Some(held),
            Inner::Packed(frag, _) => Some(frag),
        }
    }

    fn frag_mut(&mut self) -> Option<&mut Frag<M>> {
        match &mut self.0 {
            Inner::Empty => None,
            Inner::Page(held) => Some(held),
            Inner::Packed(frag, _) => Some(frag),
        }
    }

    /// Bytes.
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        self.frag().map_or(0, Frag::len)
    }

    /// Whether there are no bytes: nothing was received into this place, or all of it was used.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Removes `n` bytes from the front, or all that there are. No atomic, unless the page is
    /// returned.
    pub fn advance(&mut self, n: usize) {
        match self.frag_mut() {
            Some(frag) if n < frag.len() => frag.advance(n),
            _ => self.0 = Inner::Empty,
        }
    }

    /// Shortens the fragment to its first `len` bytes; does nothing if it has no more.
    pub fn truncate(&mut self, len: usize) {
        if let Some(frag) = self.frag_mut() {
            frag.truncate(len);
        }
    }

    /// Another holder of the bytes, to be sent or kept. The budgets count the page only as long as
    /// the fragment itself lives.
    #[must_use]
    pub fn share(&self) -> Option<Frag<M>> {
        self.frag().cloned()
    }

    /// Copies `to.len()` bytes from `offset` out.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`]: there are fewer.
    pub fn copy_to(&self, offset: usize, to: &mut [u8]) -> Result<(), OutOfRange>
    where
        M: Mapped,
    {
        OutOfRange::check(offset, to.len(), self.len())?;
        self.frag().map_or(Ok(()), |frag| frag.copy_to(offset, to))
    }

    /// All bytes, copied.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8>
    where
        M: Mapped,
    {
        let mut all = vec![0; self.len()];
        let copied = self.copy_to(0, &mut all);
        debug_assert!(copied.is_ok());
        all
    }

    /// Copies the bytes out of a page that they would keep for long: into a page of `packer`'s,
    /// next to other detached payload. The received page returns to its pool, and its charge ends;
    /// the packed page is counted once, in the queue's budget, until the last fragment in it is
    /// dropped. Packed pages are at most half of the stack's pool.
    ///
    /// Use it for payload that is kept for long and is much smaller than a page. Returns false, and
    /// leaves the fragment as it was, if there is no page or no budget for one, or if the fragment
    /// has more than a quarter of a page.
    #[must_use]
    pub fn detach(&mut self, packer: &mut Packer<M>) -> bool
    where
        M: Mapped,
    {
        let Inner::Page(held) = &self.0 else { return !self.is_empty() };
        let Some((frag, charge)) = packer.pack(held) else { return false };
        self.0 = Inner::Packed(frag, charge);
        true
    }
}

/// A received page, which is counted in its budgets until this value is dropped.
impl<M: Memory> From<Held<Frag<M>>> for Fragment<M> {
    fn from(held: Held<Frag<M>>) -> Self {
        Self::new(held)
    }
}

/// An empty one.
impl<M: Memory> Default for Fragment<M> {
    fn default() -> Self {
        Self(Inner::Empty)
    }
}

impl<M: Readable> Deref for Fragment<M> {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        self.frag().map_or(&[], |frag| frag)
    }
}

impl<M: Readable> AsRef<[u8]> for Fragment<M> {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

/// Nothing is copied. With the last clone the page returns to its pool, and its charge ends.
impl<M: Readable> From<Fragment<M>> for bytes::Bytes {
    fn from(fragment: Fragment<M>) -> Self {
        match fragment.0 {
            Inner::Empty => Self::new(),
            Inner::Page(held) => {
                let (frag, charge) = held.into_parts();
                Self::from_owner(Owner { frag: frag.into(), _charge: charge })
            }
            packed @ Inner::Packed(..) => Self::from_owner(Fragment(packed)),
        }
    }
}

/// A received page behind `Bytes`.
struct Owner<M: Readable> {
    frag: BytesOwner<M>,
    /// Counts until it is dropped.
    _charge: Charge,
}

impl<M: Readable> AsRef<[u8]> for Owner<M> {
    fn as_ref(&self) -> &[u8] {
        self.frag.as_ref()
    }
}

impl<M: Memory> fmt::Debug for Fragment<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fragment({} bytes)", self.len())
    }
}

/// Pages into which small payload is [detached](Fragment::detach), one after the other.
pub struct Packer<M: Memory> {
    pool: Arc<SharedPool<M>>,
    /// The queue's budget.
    budget: Budget,
    /// The pages of the pool that packed payload may occupy.
    pages: Budget,
    open: Option<(Page<M>, Arc<[Charge; 2]>)>,
    copied: u64,
}

impl<M: Mapped> Packer<M> {
    pub(crate) fn new(pool: Arc<SharedPool<M>>, budget: Budget, pages: Budget) -> Self {
        Self { pool, budget, pages, open: None, copied: 0 }
    }

    /// Bytes that were copied so far.
    #[must_use]
    pub fn copied(&self) -> u64 {
        self.copied
    }

    fn pack(&mut self, from: &Frag<M>) -> Option<(Frag<M>, Arc<[Charge; 2]>)> {
        if from.len() > self.pool.page_size() / 4 {
            return None;
        }
        if self.open.as_ref().is_none_or(|(page, _)| page.len() < from.len()) {
            let charges = [self.pages.try_charge()?, self.budget.try_charge()?];
            self.open = Some((self.pool.alloc()?, Arc::new(charges)));
        }
        let (page, charges) = self.open.as_mut()?;
        let mut bounce = [0; 512];
        let mut at = 0;
        while at < from.len() {
            let now = &mut bounce[..(from.len() - at).min(512)];
            from.copy_to(at, now).ok()?;
            page.copy_from(at, now).ok()?;
            at += now.len();
        }
        self.copied += from.len() as u64;
        Some((page.split_to(from.len()).freeze(), charges.clone()))
    }
}

impl<M: Memory> fmt::Debug for Packer<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Packer({} bytes copied)", self.copied)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use netmem_pool::{PoolOptions, Private, RegionOptions, RegionProvider};

    #[test]
    fn detached_payload_is_packed_and_returns_its_page() {
        let pool = |name: &str| {
            let region = RegionOptions::new(8).huge_pages(false).build::<Private>().unwrap();
            PoolOptions::new(name).magazine(0).build_shared(RegionProvider::new(region), None).unwrap()
        };
        let (rx, tx) = (pool("rx"), Arc::new(pool("tx")));
        let budget = Budget::new(8);
        let receive = |bytes: &[u8]| {
            let mut page = rx.alloc().unwrap();
            page.copy_from(100, bytes).unwrap();
            Fragment::new(Held::new(page.freeze_range(100..100 + bytes.len()), budget.try_charge().unwrap()))
        };
        let mut packer = Packer::new(tx.clone(), budget.clone(), Budget::new(2));
        let kept: Vec<_> = (0..100_u8)
            .map(|n| {
                let mut fragment = receive(&[n; 33]);
                assert!(fragment.detach(&mut packer) && fragment.detach(&mut packer), "the second time does nothing");
                fragment
            })
            .collect();
        rx.reclaim();
        assert_eq!((rx.stats().inflight, tx.stats().inflight, budget.used()), (0, 1, 1));
        assert!(kept.iter().enumerate().all(|(n, fragment)| fragment[..] == [n as u8; 33]));
        let mut large = receive(&[7; 2000]);
        assert!(!large.detach(&mut packer) && large.len() == 2000);
        drop((large, packer));
        assert_eq!(budget.used(), 1, "the packed page has holders");
        drop(kept);
        tx.reclaim();
        assert_eq!((budget.used(), tx.stats().inflight), (0, 0));
    }
}
