//! A packet: a head and up to 17 more fragments.
//!
//! A frame of 64 KiB lies in several pages, and its holders are many: a retransmission queue, a
//! clone for a capture, a device that still reads it. So a packet is references to pages, and an
//! edit changes which bytes belong to it, not the bytes.

use crate::frags::{Frags, MAX_FRAGS};
use crate::meta::Meta;
use netmem_pool::{Frag, Mapped, Memory, OutOfRange, Page, Readable, WriteError};
use std::io::IoSlice;
use std::{iter, mem};

/// A frame as fragments of pages: a received frame that a handler has passed on, or a frame to be
/// sent.
///
/// ```text
///   Packet { head: Frag, frags: [Frag; 0..=17], len, meta }      frags are on the heap
/// ```
///
/// Dropping it drops each fragment. A page returns to its pool when the last fragment of it is
/// dropped. Cloning it makes another holder of every fragment: one atomic addition for each, and an
/// allocation if there are any behind the head.
///
/// A packet is edited in place. [`pull`](Self::pull), [`truncate`](Self::truncate),
/// [`push`](Self::push) and [`append`](Self::append) change which bytes are part of it, and always
/// can. [`write_at`](Self::write_at) and [`prepend`](Self::prepend) change bytes: they need pages
/// that have no other holder. [`copy_head`](Self::copy_head) makes such a head out of shared bytes.
/// All of them keep [`meta`](Self::meta) true; see [`Meta`].
///
/// ```
/// # use netmem_pool::{PoolOptions, Private, RegionOptions, RegionProvider};
/// use netmem_packet::{Checksum, Packet};
///
/// # let region = RegionOptions::new(8).huge_pages(false).build::<Private>()?;
/// # let mut pool = PoolOptions::new("rx0").build(RegionProvider::new(region), None)?;
/// let mut page = pool.alloc().ok_or("no page")?;
/// page.copy_from(64, b"ethernet, ip, udp: payload")?;
/// let mut packet = Packet::new(page.freeze_range(64..90));
/// packet.meta.checksum = Checksum::Partial { start: 14, offset: 6 };
///
/// packet.pull(10)?;
/// assert!(packet.prepend(b"vlan, ") && packet.to_vec() == b"vlan, ip, udp: payload");
/// assert_eq!(packet.meta.checksum, Checksum::Partial { start: 10, offset: 6 });
/// packet.write_at(0, b"VLAN")?;
///
/// // A clone shares the pages, so that neither can be written in place.
/// let kept = packet.clone();
/// assert!(packet.write_at(0, b"Vlan").is_err());
/// packet.copy_head(15, pool.alloc().ok_or("no page")?, 64)?;
/// packet.write_at(0, b"Vlan")?;
/// assert_eq!(packet.to_vec(), b"Vlan, ip, udp: payload");
/// assert_eq!(kept.to_vec(), b"VLAN, ip, udp: payload");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Packet<M: Memory> {
    head: Frag<M>,
    frags: Frags<M>,
    len: u32,
    /// Offload information.
    pub meta: Meta,
}

impl<M: Memory> Clone for Packet<M> {
    #[inline]
    fn clone(&self) -> Self {
        Self { head: self.head.clone(), frags: self.frags.clone(), ..*self }
    }
}

/// Why the head of a packet was not copied. The packet is as it was, and the page that was offered
/// has been dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CopyHeadError {
    /// The packet has fewer bytes, or the page has no room for them behind the headroom.
    #[error(transparent)]
    OutOfRange(#[from] OutOfRange),
    /// The rest of the head would be one fragment too many.
    #[error("a packet has at most {MAX_FRAGS} fragments behind its head; copy the whole head, of {head} bytes")]
    TooManyFrags {
        /// Bytes in the head.
        head: usize,
    },
}

/// A packet has no room for one more fragment, which is returned.
#[derive(Debug, thiserror::Error)]
#[error("a packet has at most 17 fragments behind its head")]
pub struct TooManyFrags<M: Memory>(pub Frag<M>);

impl<M: Memory> Packet<M> {
    /// A packet of one fragment.
    #[inline]
    #[must_use]
    pub fn new(head: Frag<M>) -> Self {
        let len = head.len() as u32;
        Self { head, frags: Frags::NONE, len, meta: Meta::default() }
    }

    #[inline]
    pub(crate) fn from_parts(head: Frag<M>, frags: Frags<M>, len: u32, meta: Meta) -> Self {
        Self { head, frags, len, meta }
    }

    /// Adds a fragment at the end. Allocates if it is the first behind the head. Keeps `meta`.
    ///
    /// # Errors
    ///
    /// [`TooManyFrags`] returns the fragment.
    pub fn push(&mut self, frag: Frag<M>) -> Result<(), TooManyFrags<M>> {
        let len = frag.len() as u32;
        self.frags.push(frag).map_err(TooManyFrags)?;
        self.len += len;
        Ok(())
    }

    /// Drops a packet that has no list of fragments. It is always inlined: a loop over packets is
    /// then a loop over pages.
    #[inline(always)]
    pub(crate) fn release_head(self) {
        debug_assert!(!self.has_list());
        self.head.release();
    }

    /// Whether a list of fragments was allocated. It can be empty.
    #[inline(always)]
    pub(crate) fn has_list(&self) -> bool {
        !self.frags.is_none()
    }

    /// The list of the fragments behind the head.
    #[inline(always)]
    pub(crate) fn list(&mut self) -> &mut Frags<M> {
        &mut self.frags
    }

    /// Adds the fragments of another packet at the end. Allocates if they are the first behind the
    /// head. Keeps `meta`, and drops the other's.
    ///
    /// # Errors
    ///
    /// The other packet, if there were more than 17 fragments behind the head then; nothing has
    /// changed.
    pub fn append(&mut self, other: Self) -> Result<(), Self> {
        if self.frags().len() + 1 + other.frags().len() > MAX_FRAGS {
            return Err(other);
        }
        let (head, frags) = other.into_fragments();
        for frag in iter::once(head).chain(frags) {
            // There is room for all of them.
            let pushed = self.push(frag);
            debug_assert!(pushed.is_ok());
        }
        Ok(())
    }

    /// Bytes in all fragments.
    #[inline]
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "an empty packet is of no interest")]
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// The first fragment.
    #[inline]
    #[must_use]
    pub fn head(&self) -> &Frag<M> {
        &self.head
    }

    /// The fragments behind the head.
    #[inline]
    #[must_use]
    pub fn frags(&self) -> &[Frag<M>] {
        self.frags.as_slice()
    }

    /// All fragments, in order.
    pub fn fragments(&self) -> impl Iterator<Item = &Frag<M>> {
        iter::once(&self.head).chain(self.frags())
    }

    /// Takes `n` bytes off the front, and adjusts `meta`. The head stays, perhaps empty, unless
    /// bytes are removed behind it; fragments that are used up are dropped. Within the head it
    /// touches no count: no atomic.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`] if the packet is shorter; nothing has changed then.
    #[inline]
    pub fn pull(&mut self, n: usize) -> Result<(), OutOfRange> {
        if n > self.head.len() {
            return self.pull_fragments(n);
        }
        self.head.advance(n);
        self.len -= n as u32;
        self.meta.pulled(n);
        Ok(())
    }

    /// Takes off the whole head and some bytes behind it.
    #[cold]
    fn pull_fragments(&mut self, n: usize) -> Result<(), OutOfRange> {
        OutOfRange::check(0, n, self.len())?;
        // The drop of a fragment can be user code, which can panic: before the first drop, `len`
        // and `meta` are set.
        self.len -= n as u32;
        self.meta.pulled(n);
        let behind = n - self.head.len();
        self.head.truncate(0);
        self.frags.advance(behind);
        if let Some(first) = self.frags.pop_front() {
            self.head = first;
        }
        Ok(())
    }

    /// Shortens the packet to its first `len` bytes, and adjusts `meta`; does nothing if it has no
    /// more. Fragments behind them are dropped. Touches no other count.
    pub fn truncate(&mut self, len: usize) {
        if len >= self.len() {
            return;
        }
        // As in `pull_fragments`: fragments are dropped last.
        self.len = len as u32;
        self.meta.truncated(len);
        let behind = len.saturating_sub(self.head.len());
        self.head.truncate(len);
        self.frags.truncate(behind);
    }

    /// The head of a packet that has no other fragment. Costs a comparison, where
    /// [`into_fragments`](Self::into_fragments) makes a vector.
    ///
    /// # Errors
    ///
    /// The packet, if it has fragments behind the head.
    #[inline]
    pub fn into_head(self) -> Result<Frag<M>, Self> {
        if self.frags.is_none() { Ok(self.head) } else { self.into_head_slowly() }
    }

    /// A list of fragments was allocated. It can be empty by now.
    #[cold]
    fn into_head_slowly(self) -> Result<Frag<M>, Self> {
        if self.frags().is_empty() { Ok(self.head) } else { Err(self) }
    }

    /// Takes the packet apart: the head, and the rest in order.
    pub fn into_fragments(self) -> (Frag<M>, impl Iterator<Item = Frag<M>>) {
        (self.head, self.frags.into_vec().into_iter())
    }

    /// The bytes as slices, in order, for vectored writes. There is one for each fragment, also for
    /// an empty one, and at most 18.
    ///
    /// ```
    /// # use netmem_packet::Packet;
    /// # use netmem_pool::{PoolOptions, Private, RegionOptions, RegionProvider};
    /// # use std::io::Write;
    /// # let region = RegionOptions::new(8).huge_pages(false).build::<Private>()?;
    /// # let mut pool = PoolOptions::new("rx0").build(RegionProvider::new(region), None)?;
    /// let mut page = pool.alloc().ok_or("no page")?;
    /// page[..11].copy_from_slice(b"hello world");
    /// let mut packet = Packet::new(page.freeze_range(0..11));
    /// let world = packet.head().slice(6..11);
    /// packet.truncate(6);
    /// packet.push(world)?;
    ///
    /// let mut file = Vec::new();
    /// let written = file.write_vectored(&packet.io_slices().collect::<Vec<_>>())?;
    /// assert_eq!((written, &file[..]), (11, &b"hello world"[..]));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn io_slices(&self) -> impl Iterator<Item = IoSlice<'_>>
    where
        M: Readable,
    {
        self.fragments().map(|frag| IoSlice::new(frag))
    }

    /// Calls `f` with each fragment that has some of the `len` bytes from `offset`, with their
    /// offset in the fragment and their number. The packet has at least so many bytes.
    fn each_part<E>(
        &mut self,
        offset: usize,
        len: usize,
        mut f: impl FnMut(&mut Frag<M>, usize, usize) -> Result<(), E>,
    ) -> Result<(), E> {
        let (mut skip, mut left) = (offset, len);
        for frag in iter::once(&mut self.head).chain(self.frags.as_mut_slice()) {
            let at = skip.min(frag.len());
            let now = left.min(frag.len() - at);
            if now > 0 {
                f(frag, at, now)?;
            }
            (skip, left) = (skip - at, left - now);
        }
        Ok(())
    }
}

impl<M: Mapped> Packet<M> {
    /// Copies `to.len()` bytes from `offset` out, across fragments.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`]; how much was copied is then undefined.
    #[inline]
    pub fn copy_to(&self, offset: usize, to: &mut [u8]) -> Result<(), OutOfRange> {
        // Headers, and small frames.
        self.head.copy_to(offset, to).or_else(|_| self.copy_across_to(offset, to))
    }

    #[inline(never)]
    fn copy_across_to(&self, offset: usize, to: &mut [u8]) -> Result<(), OutOfRange> {
        let short = OutOfRange { offset, len: to.len(), have: self.len() };
        copy_across(self.fragments().map(|f| (f.len(), f)), offset, to, Frag::copy_to).ok_or(short)
    }

    /// Copies bytes in at `offset`, across fragments. `meta` is kept: see [`Meta`]. No atomic
    /// read-modify-write.
    ///
    /// Each page that is written must have no other holder: no clone of the packet, no other
    /// fragment of the same page in this packet, and no part of the page that is posted to a
    /// device, as where a receive queue puts several buffers into a page.
    /// [`copy_head`](Self::copy_head) copies bytes out of such a page.
    ///
    /// # Errors
    ///
    /// [`WriteError`]; nothing is written then.
    pub fn write_at(&mut self, offset: usize, from: &[u8]) -> Result<(), WriteError> {
        OutOfRange::check(offset, from.len(), self.len())?;
        // Headers, nearly always.
        if offset + from.len() <= self.head.len() {
            return self.head.write_at(offset, from);
        }
        self.each_part(
            offset,
            from.len(),
            |frag, _, _| {
                if frag.is_writable() { Ok(()) } else { Err(WriteError::Shared) }
            },
        )?;
        let mut from = from;
        self.each_part(offset, from.len(), |frag, at, n| {
            let (now, later) = from.split_at(n);
            from = later;
            frag.write_at(at, now)
        })
    }

    /// Copies the first `len` bytes into `page`, at `headroom`, and makes that the head. This is
    /// copy-on-write for headers; the page may be from any pool. [`write_at`](Self::write_at) can
    /// write these bytes then, and [`prepend`](Self::prepend) has `headroom` bytes to put headers
    /// in. Length and `meta` are kept; the copied bytes' fragments are dropped or shortened.
    ///
    /// # Errors
    ///
    /// [`CopyHeadError`]; the packet is as it was then.
    pub fn copy_head(&mut self, len: usize, mut page: Page<M>, headroom: usize) -> Result<(), CopyHeadError> {
        OutOfRange::check(0, len, self.len())?;
        OutOfRange::check(headroom, len, page.len())?;
        let used_up = len >= self.head.len();
        if !used_up && self.frags().len() == MAX_FRAGS {
            return Err(CopyHeadError::TooManyFrags { head: self.head.len() });
        }
        let mut bounce = [0; 512];
        let mut at = 0;
        while at < len {
            let now = &mut bounce[..(len - at).min(512)];
            self.copy_to(at, now)?;
            page.copy_from(headroom + at, now)?;
            at += now.len();
        }
        let mut old = mem::replace(&mut self.head, page.freeze_range(headroom..headroom + len));
        if used_up {
            self.frags.advance(len - old.len());
        } else {
            old.advance(len);
            let pushed = self.frags.push_front(old);
            debug_assert!(pushed.is_ok());
        }
        Ok(())
    }

    /// Puts `header` in front of the packet, as [`Frag::prepend`] does, and adjusts `meta`. Returns
    /// false and does nothing if [`Frag::prepend`] cannot, or if an offset in `meta` would not fit
    /// its type.
    #[inline]
    #[must_use]
    pub fn prepend(&mut self, header: &[u8]) -> bool {
        let moved = self.meta.has_offsets().then(|| self.meta.prepended(header.len()));
        if moved == Some(None) || !self.head.prepend(header) {
            return false;
        }
        if let Some(Some(meta)) = moved {
            self.meta = meta;
        }
        self.len += header.len() as u32;
        true
    }

    /// All bytes, copied.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        let mut all = vec![0; self.len()];
        let copied = self.copy_to(0, &mut all);
        debug_assert!(copied.is_ok());
        all
    }
}

impl<M: Memory> From<Page<M>> for Packet<M> {
    fn from(page: Page<M>) -> Self {
        Self::new(page.freeze())
    }
}

/// Copies out of a sequence of parts as if they were one. `None` if they end too early.
pub(crate) fn copy_across<P>(
    parts: impl Iterator<Item = (usize, P)>,
    mut skip: usize,
    mut to: &mut [u8],
    copy: impl Fn(P, usize, &mut [u8]) -> Result<(), OutOfRange>,
) -> Option<()> {
    for (len, part) in parts {
        if to.is_empty() {
            break;
        }
        if skip >= len {
            skip -= len;
            continue;
        }
        let (now, later) = to.split_at_mut(to.len().min(len - skip));
        copy(part, skip, now).ok()?;
        (skip, to) = (0, later);
    }
    to.is_empty().then_some(())
}
