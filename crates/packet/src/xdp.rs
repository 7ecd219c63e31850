//! A received frame during the XDP program, and the program's verdicts.
//!
//! A program that drops or bounces most frames must not pay for packets. In this state a frame has
//! one holder and one page that can be written, so its verdict costs no count.

use crate::frags::Frags;
use crate::meta::Meta;
use crate::packet::{Packet, copy_across};
use netmem_pool::{DataPage, Frag, Mapped, Memory, Napi, OutOfRange, Page, Readable};

/// The XDP program's decision about a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is delivered as a [`Packet`].
    Pass,
    /// Its pages return to their pools at once.
    Drop,
    /// It leaves by a transmit queue.
    Tx,
    /// It leaves by another device's transmit queue.
    Redirect,
    /// The program failed: the frame is dropped, and counted separately.
    Aborted,
}

/// Why a frame of several buffers was not copied into one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LineariseError {
    /// It does not fit a page of the pool.
    #[error("a frame of {len} bytes does not fit a page of {page} bytes")]
    TooLong {
        /// Bytes in the frame.
        len: usize,
        /// Bytes in a page.
        page: usize,
    },
    /// The pool has no page.
    #[error("the pool has no page to linearise into")]
    NoPage,
}

/// The most bytes that a program writes in front of a frame (`bpf_xdp_adjust_meta`).
const METADATA: usize = 256;

/// A received frame, which has no other holder.
///
/// ```text
///   head page  ├── headroom ──┤■■■■■■ data ■■■■■■├── tailroom ──┤      then fragments, read-only
/// ```
#[derive(Debug)]
pub struct XdpFrame<M: Memory> {
    page: DataPage<M>,
    len: u32,
    frags: Frags<M>,
    /// Offload information. Moving head or tail adjusts it; a program that changes the bytes that
    /// it describes clears it.
    pub meta: Meta,
}

impl<M: Memory> XdpFrame<M> {
    /// A frame whose head is `len` bytes from `start` of `page`.
    ///
    /// # Panics
    ///
    /// If they reach beyond the page.
    #[inline]
    #[must_use]
    pub fn new(page: Page<M>, start: usize, len: usize) -> Self {
        Self::from_page(DataPage::new(page, start, len), Meta::default())
    }

    /// A frame whose head is the data of `page`.
    #[inline(always)]
    #[must_use]
    pub fn from_page(page: DataPage<M>, meta: Meta) -> Self {
        let len = page.data().len() as u32;
        Self { page, len, frags: Frags::NONE, meta }
    }

    /// Adds a fragment; returns it if there is no room.
    ///
    /// # Errors
    ///
    /// The fragment itself, if there are 17 already.
    pub fn push(&mut self, frag: Frag<M>) -> Result<(), Frag<M>> {
        let len = frag.len() as u32;
        self.frags.push(frag)?;
        self.len += len;
        Ok(())
    }

    /// Bytes in the frame.
    #[inline]
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "an empty frame is of no interest")]
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Bytes in the head.
    #[inline]
    #[must_use]
    pub fn head_len(&self) -> usize {
        self.page.data().len()
    }

    /// Bytes free in front of the data.
    #[inline]
    #[must_use]
    pub fn headroom(&self) -> usize {
        self.page.headroom()
    }

    /// Whether the frame has fragments behind the head.
    #[inline]
    #[must_use]
    pub fn is_multi_buffer(&self) -> bool {
        !self.frags.as_slice().is_empty()
    }

    /// Moves the beginning of the data: forward by a positive `by`, into the headroom by a negative
    /// one.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`] if that leaves the headroom or the head, or if an offset in `meta` would not
    /// fit its type; nothing has changed then.
    pub fn adjust_head(&mut self, by: i32) -> Result<(), OutOfRange> {
        let (headroom, n) = (self.headroom(), by.unsigned_abs() as usize);
        let outside = OutOfRange { offset: headroom, len: n, have: self.head_len() };
        if n > if by < 0 { headroom } else { self.head_len() } {
            return Err(outside);
        }
        if by > 0 {
            self.meta.pulled(n);
        } else if self.meta.has_offsets() {
            self.meta = self.meta.prepended(n).ok_or(outside)?;
        }
        let by = by as isize;
        self.page.set_data(headroom.wrapping_add_signed(by), self.head_len().wrapping_add_signed(-by))?;
        self.len = self.len.wrapping_add_signed(-by as i32);
        Ok(())
    }

    /// Moves the end of the data of a frame in one buffer: longer by a positive `by`, shorter by a
    /// negative one.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`] if there are fragments, or if that leaves the head or its tailroom; nothing
    /// has changed then.
    pub fn adjust_tail(&mut self, by: i32) -> Result<(), OutOfRange> {
        let (headroom, len) = (self.headroom(), self.head_len());
        let outside =
            OutOfRange { offset: headroom + len, len: by.unsigned_abs() as usize, have: self.page.capacity() };
        let moved = len.checked_add_signed(by as isize).filter(|_| !self.is_multi_buffer()).ok_or(outside)?;
        self.page.set_data(headroom, moved).map_err(|_| outside)?;
        self.len = self.len.wrapping_add_signed(by);
        if by < 0 {
            self.meta.truncated(self.len());
        }
        Ok(())
    }

    /// The head's page, whole. Fragments are dropped.
    #[inline(always)]
    #[must_use]
    pub fn into_page(self) -> Page<M> {
        self.into_data_page().into_page()
    }

    /// The head's page, with the bytes of the head as its data. Fragments are dropped.
    #[inline(always)]
    pub(crate) fn into_data_page(self) -> DataPage<M> {
        let Self { page, frags, .. } = self;
        drop(frags);
        page
    }

    /// The frame as a packet. Free.
    #[inline]
    #[must_use]
    pub fn into_packet(self) -> Packet<M> {
        Packet::from_parts(self.page.into_data().freeze(), self.frags, self.len, self.meta)
    }
}

impl<M: Mapped> XdpFrame<M> {
    /// A private copy of `N` bytes of the head, each read once: how a program reads headers.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`] if the head is shorter.
    #[inline]
    pub fn read_at<const N: usize>(&self, offset: usize) -> Result<[u8; N], OutOfRange> {
        self.page.data().read_at(offset)
    }

    /// Copies bytes from `offset` out, across fragments, each read once.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`]; how much was copied is then undefined.
    pub fn copy_to(&self, offset: usize, to: &mut [u8]) -> Result<(), OutOfRange> {
        let short = OutOfRange { offset, len: to.len(), have: self.len() };
        let head = self.head_len();
        if offset.saturating_add(to.len()) <= head {
            return self.page.data().copy_to(offset, to);
        }
        let in_head = head.saturating_sub(offset).min(to.len());
        let (front, back) = to.split_at_mut(in_head);
        if in_head > 0 {
            self.page.data().copy_to(offset, front)?;
        }
        let skip = offset.saturating_sub(head);
        copy_across(self.frags.as_slice().iter().map(|f| (f.len(), f)), skip, back, Frag::copy_to).ok_or(short)
    }

    /// Writes into the head. `meta` is kept: see [`Meta`].
    ///
    /// # Errors
    ///
    /// [`OutOfRange`] if the head is shorter; nothing is written then.
    pub fn write_at(&mut self, offset: usize, from: &[u8]) -> Result<(), OutOfRange> {
        self.page.copy_from(offset, from)
    }

    /// Copies a frame of several buffers into one page of the pool whose poll context this is. The
    /// frame's own pages return to their pools. Headroom is kept as far as there is room for it,
    /// and the last 256 bytes of it are copied: what an XDP program of the user's own wrote there.
    ///
    /// # Errors
    ///
    /// [`LineariseError`]; the frame is as it was then.
    #[inline]
    pub fn linearise(&mut self, napi: &mut Napi<'_, M>) -> Result<(), LineariseError> {
        if self.is_multi_buffer() { self.copy_into_one(napi) } else { Ok(()) }
    }

    #[cold]
    #[inline(never)]
    fn copy_into_one(&mut self, napi: &mut Napi<'_, M>) -> Result<(), LineariseError> {
        let mut page = napi.alloc().ok_or(LineariseError::NoPage)?;
        if self.len() > page.len() {
            return Err(LineariseError::TooLong { len: self.len(), page: page.len() });
        }
        let start = self.headroom().min(page.len() - self.len());
        let mut bounce = [0; 512];
        let in_front = &mut bounce[..start.min(METADATA)];
        let copied = self.page.copy_in_front_to(in_front);
        let copied = copied.and_then(|()| page.copy_from(start - in_front.len(), in_front));
        debug_assert!(copied.is_ok());
        let mut at = start;
        while at < start + self.len() {
            let now = bounce.len().min(start + self.len() - at);
            let copied = self.copy_to(at - start, &mut bounce[..now]).and_then(|()| page.copy_from(at, &bounce[..now]));
            debug_assert!(copied.is_ok());
            at += now;
        }
        let meta = self.meta;
        *self = Self::new(page, start, self.len());
        self.meta = meta;
        Ok(())
    }
}

impl<M: Readable> XdpFrame<M> {
    /// The bytes of the head.
    #[must_use]
    pub fn data(&self) -> &[u8] {
        self.page.data().as_slice()
    }

    /// The bytes of the head, to be changed. `meta` is kept: see [`Meta`].
    #[must_use]
    pub fn data_mut(&mut self) -> &mut [u8] {
        self.page.as_mut_slice()
    }
}
