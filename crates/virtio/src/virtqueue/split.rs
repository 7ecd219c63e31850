//! The split virtqueue as it lies in memory (virtio 1.2, section 2.7).
//!
//! ```text
//!   descriptor table   size x 16 bytes   written by the driver:  addr u64 | len u32 | flags u16 | next u16
//!   available ring     6 + 2 x size      written by the driver:  flags u16 | idx u16 | ring[size] u16 | used_event u16
//!   used ring          6 + 8 x size      written by the device:  flags u16 | idx u16 | ring[size] { id u32, len u32 } | avail_event u16
//! ```
//!
//! The peer may be another process, and hostile: every word is read and written as an atomic, once,
//! and the reader checks its copy. This file checks no values; see [`fault`](super::fault).

use super::sync::{AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::marker::PhantomData;
use std::ops::Deref;
use std::slice;

/// Descriptor flag: the chain continues at `next`.
pub const DESC_NEXT: u16 = 1;
/// Descriptor flag: the device writes this buffer (else it reads it).
pub const DESC_WRITE: u16 = 2;
/// Descriptor flag: the buffer holds a table of descriptors.
pub const DESC_INDIRECT: u16 = 4;
/// Available-ring flag: the driver polls and wants no interrupts.
pub const AVAIL_NO_INTERRUPT: u16 = 1;
/// Used-ring flag: the device polls and wants no notifications.
pub const USED_NO_NOTIFY: u16 = 1;

/// One descriptor, as a private copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Desc {
    /// Address of the buffer, in the device's address space.
    pub addr: u64,
    /// Bytes in the buffer.
    pub len: u32,
    /// [`DESC_NEXT`], [`DESC_WRITE`], [`DESC_INDIRECT`].
    pub flags: u16,
    /// The next descriptor's index, if `flags` has [`DESC_NEXT`].
    pub next: u16,
}

impl Desc {
    /// Bytes of a descriptor in memory.
    pub const LEN: usize = 16;
}

/// A descriptor as it is in memory.
#[repr(transparent)]
pub(crate) struct DescWords([AtomicU64; 2]);

impl DescWords {
    /// Writes only the address.
    #[inline(always)]
    pub(crate) fn set_addr(&self, addr: u64) {
        self.0[0].store(addr.to_le(), Ordering::Relaxed);
    }

    /// Writes a buffer of `len` bytes that the device reads, and that is not continued.
    #[inline(always)]
    pub(crate) fn set_readable(&self, addr: u64, len: u32) {
        self.set_addr(addr);
        self.0[1].store(u64::from(len).to_le(), Ordering::Relaxed);
    }
}

/// Elements of the used ring that follow each other, and are read by words of 64 bits. An element
/// is not aligned to 8 bytes, but the length of each and the id of the next are:
///
/// ```text
///   flags idx | id 0 : len 0 | id 1 : len 1 | id 2 : len 2
///             └ first ┘└──── word ────┘└──── word ────┘└ last ┘
/// ```
pub(crate) struct UsedRun<'r> {
    first: &'r AtomicU32,
    words: &'r [UsedWord],
    last: &'r AtomicU32,
}

/// The length of an element and the id of the next one.
#[repr(transparent)]
pub(crate) struct UsedWord(AtomicU64);

impl UsedWord {
    /// The length in the lower half, and the id in the upper one.
    #[inline(always)]
    pub(crate) fn read(&self) -> u64 {
        u64::from_le(self.0.load(Ordering::Relaxed))
    }

    /// The id alone.
    #[inline(always)]
    pub(crate) fn next_id(&self) -> u32 {
        (self.read() >> 32) as u32
    }
}

impl<'r> UsedRun<'r> {
    /// The id of the first element.
    #[inline(always)]
    pub(crate) fn first_id(&self) -> u32 {
        u32::from_le(self.first.load(Ordering::Relaxed))
    }

    /// One word less than there are elements.
    #[inline(always)]
    pub(crate) fn words(&self) -> &'r [UsedWord] {
        self.words
    }

    /// The length of the last element. It is not part of a word, because the device may be writing
    /// the id behind it.
    #[inline(always)]
    pub(crate) fn last_len(&self) -> u32 {
        u32::from_le(self.last.load(Ordering::Relaxed))
    }
}

/// Where the three parts of a ring of `size` entries lie in one block of memory, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct SplitLayout {
    /// Offset of the available ring; the descriptor table is at 0.
    pub avail: usize,
    /// Offset of the used ring.
    pub used: usize,
    /// Bytes in all, a multiple of [`Self::ALIGN`].
    pub total: usize,
}

impl SplitLayout {
    /// What each part, and the block, is aligned to: the two sides never write the same cache line
    /// or its neighbour.
    pub const ALIGN: usize = 128;
    /// The largest ring that the specification allows.
    pub const MAX_SIZE: u16 = 32768;

    /// The layout for a ring of `size` entries.
    #[must_use]
    pub const fn new(size: u16) -> Self {
        let n = size as usize;
        let avail = (n * Desc::LEN).next_multiple_of(Self::ALIGN);
        let used = (avail + 6 + 2 * n).next_multiple_of(Self::ALIGN);
        Self { avail, used, total: (used + 6 + 8 * n).next_multiple_of(Self::ALIGN) }
    }
}

/// A split ring mapped into this process.
///
/// Invariant (*mapped*): the pointers are valid for reads and writes of a ring of `size` entries,
/// and aligned to their types, for as long as the value exists; `size` is a power of two.
#[derive(Debug)]
pub struct SplitRing {
    /// Two words for each descriptor.
    desc: *const AtomicU64,
    /// Flags, index, `size` entries, and the used event.
    avail: *const AtomicU16,
    /// Flags and index of the used ring.
    used_head: *const AtomicU16,
    /// Two words for each element of the used ring.
    used: *const AtomicU32,
    /// The word behind the used ring's elements.
    avail_event: *const AtomicU16,
    size: u16,
}

// SAFETY: the pointers are to memory that is shared by design and touched through atomics alone.
unsafe impl Send for SplitRing {}

impl SplitRing {
    /// A ring whose parts lie at the three addresses.
    ///
    /// # Safety
    ///
    /// For as long as the value exists, the three parts (see the [module](super)) are valid for
    /// reads and writes, and aligned to 16, 2 and 4 bytes; `size` is a power of two.
    #[must_use]
    pub unsafe fn from_parts(desc: *mut u8, avail: *mut u8, used: *mut u8, size: u16) -> Self {
        debug_assert!(
            desc.addr().is_multiple_of(16) && avail.addr().is_multiple_of(2) && used.addr().is_multiple_of(4)
        );
        // SAFETY: the used ring is 6 + 8 x size bytes, of which the caller guarantees all.
        let (elements, event) = unsafe { (used.add(4), used.add(4 + 8 * usize::from(size))) };
        // SAFETY: the caller upholds what this function demands of the parts; the used ring's
        // elements and its last word keep its alignment.
        unsafe { Self::from_words(desc.cast(), avail.cast(), used.cast(), elements.cast(), event.cast(), size) }
    }

    /// A ring of these words: 2 x `size` of descriptors, 3 + `size` of the available ring, 2 at the
    /// used ring's head, 2 x `size` of its elements, and the available event.
    ///
    /// # Safety
    ///
    /// The caller upholds *mapped*, see the type.
    pub(crate) unsafe fn from_words(
        desc: *const AtomicU64,
        avail: *const AtomicU16,
        used_head: *const AtomicU16,
        used: *const AtomicU32,
        avail_event: *const AtomicU16,
        size: u16,
    ) -> Self {
        debug_assert!(size.is_power_of_two());
        Self { desc, avail, used_head, used, avail_event, size }
    }

    /// A ring laid out by [`SplitLayout`] at `base`.
    ///
    /// # Safety
    ///
    /// `base` is aligned to [`SplitLayout::ALIGN`] and valid for `SplitLayout::new(size).total`
    /// bytes as *mapped* asks; `size` is a power of two.
    #[must_use]
    pub unsafe fn from_layout(base: *mut u8, size: u16) -> Self {
        let at = SplitLayout::new(size);
        // SAFETY: the offsets lie inside the block that the caller guarantees, and keep its
        // alignment.
        unsafe { Self::from_parts(base, base.add(at.avail), base.add(at.used), size) }
    }

    /// Entries.
    #[inline]
    #[must_use]
    pub fn size(&self) -> u16 {
        self.size
    }

    /// The pointers and the size as a copy on the stack, for a loop that also writes other memory:
    /// the compiler keeps them in registers, because no write can change them.
    #[inline(always)]
    pub(crate) fn local(&self) -> Local<'_> {
        Local { ring: Self { ..*self }, borrowed: PhantomData }
    }

    #[inline]
    fn slot(&self, position: u16) -> usize {
        usize::from(position & (self.size - 1))
    }

    #[inline]
    fn desc_words(&self, id: u16) -> [&AtomicU64; 2] {
        let at = 2 * self.slot(id);
        // SAFETY: *mapped*; `slot` is below `size`, and a descriptor is two words.
        unsafe { [&*self.desc.add(at), &*self.desc.add(at + 1)] }
    }

    #[inline]
    fn avail_word(&self, at: usize) -> &AtomicU16 {
        debug_assert!(at < 3 + usize::from(self.size));
        // SAFETY: *mapped*; callers pass 0, 1, 2 + a slot, or 2 + the size.
        unsafe { &*self.avail.add(at) }
    }

    #[inline]
    fn used_head(&self, at: usize) -> &AtomicU16 {
        debug_assert!(at < 2);
        // SAFETY: *mapped*; flags and index are two words.
        unsafe { &*self.used_head.add(at) }
    }

    #[inline]
    fn used_words(&self, position: u16) -> [&AtomicU32; 2] {
        let at = 2 * self.slot(position);
        // SAFETY: *mapped*; `slot` is below `size`, and an element is two words.
        unsafe { [&*self.used.add(at), &*self.used.add(at + 1)] }
    }

    /// Makes everything zero, as fresh memory is: for a ring that neither side runs.
    pub fn clear(&self) {
        self.set_avail_flags(0);
        self.set_used_flags(0);
        for at in 0..self.size {
            self.set_desc(at, Desc::default());
            self.set_avail_entry(at, 0);
            self.set_used_entry(at, 0, 0);
        }
        self.set_used_event(0);
        self.set_avail_event(0);
        self.set_used_idx(0);
        self.set_avail_idx(0);
    }

    /// Reads descriptor `id` (modulo the size), each word once.
    #[inline]
    #[must_use]
    pub fn desc(&self, id: u16) -> Desc {
        let [addr, rest] = self.desc_words(id);
        let rest = u64::from_le(rest.load(Ordering::Relaxed));
        Desc {
            addr: u64::from_le(addr.load(Ordering::Relaxed)),
            len: rest as u32,
            flags: (rest >> 32) as u16,
            next: (rest >> 48) as u16,
        }
    }

    /// Writes descriptor `id` (modulo the size).
    #[inline]
    pub fn set_desc(&self, id: u16, d: Desc) {
        let [_, rest] = self.desc_words(id);
        self.set_desc_addr(id, d.addr);
        let word = u64::from(d.len) | u64::from(d.flags) << 32 | u64::from(d.next) << 48;
        rest.store(word.to_le(), Ordering::Relaxed);
    }

    /// All descriptors, to be written in a loop.
    #[inline(always)]
    pub(crate) fn descs(&self) -> &[DescWords] {
        // SAFETY: *mapped*; a descriptor is two words.
        unsafe { slice::from_raw_parts(self.desc.cast::<DescWords>(), usize::from(self.size)) }
    }

    /// Writes only the address of descriptor `id` (modulo the size).
    #[inline]
    pub fn set_desc_addr(&self, id: u16, addr: u64) {
        self.desc_words(id)[0].store(addr.to_le(), Ordering::Relaxed);
    }

    /// The available ring's flags.
    #[inline]
    #[must_use]
    pub fn avail_flags(&self) -> u16 {
        u16::from_le(self.avail_word(0).load(Ordering::Relaxed))
    }

    /// Sets the available ring's flags.
    #[inline]
    pub fn set_avail_flags(&self, flags: u16) {
        self.avail_word(0).store(flags.to_le(), Ordering::Relaxed);
    }

    /// The driver's index: how many chains it has made available, modulo 2^16. What it covers may
    /// be read after this (acquire).
    #[inline]
    #[must_use]
    pub fn avail_idx(&self) -> u16 {
        u16::from_le(self.avail_word(1).load(Ordering::Acquire))
    }

    /// Publishes the driver's index and everything written before it (release).
    #[inline]
    pub fn set_avail_idx(&self, idx: u16) {
        self.avail_word(1).store(idx.to_le(), Ordering::Release);
    }

    /// The head of the chain at `position` (modulo the size).
    #[inline]
    #[must_use]
    pub fn avail_entry(&self, position: u16) -> u16 {
        u16::from_le(self.avail_word(2 + self.slot(position)).load(Ordering::Relaxed))
    }

    /// Sets the head of the chain at `position` (modulo the size).
    #[inline]
    pub fn set_avail_entry(&self, position: u16, head: u16) {
        self.avail_word(2 + self.slot(position)).store(head.to_le(), Ordering::Relaxed);
    }

    /// The driver's event: the position in the used ring at which it wants an interrupt.
    #[inline]
    #[must_use]
    pub fn used_event(&self) -> u16 {
        u16::from_le(self.avail_word(2 + usize::from(self.size)).load(Ordering::Relaxed))
    }

    /// Sets the driver's event.
    #[inline]
    pub fn set_used_event(&self, position: u16) {
        self.avail_word(2 + usize::from(self.size)).store(position.to_le(), Ordering::Relaxed);
    }

    /// The used ring's flags.
    #[inline]
    #[must_use]
    pub fn used_flags(&self) -> u16 {
        u16::from_le(self.used_head(0).load(Ordering::Relaxed))
    }

    /// Sets the used ring's flags.
    #[inline]
    pub fn set_used_flags(&self, flags: u16) {
        self.used_head(0).store(flags.to_le(), Ordering::Relaxed);
    }

    /// The device's index: how many chains it has used, modulo 2^16. What it covers may be read
    /// after this (acquire).
    #[inline]
    #[must_use]
    pub fn used_idx(&self) -> u16 {
        u16::from_le(self.used_head(1).load(Ordering::Acquire))
    }

    /// Publishes the device's index and everything written before it (release).
    #[inline]
    pub fn set_used_idx(&self, idx: u16) {
        self.used_head(1).store(idx.to_le(), Ordering::Release);
    }

    /// The device's event: the position in the available ring at which it wants a notification.
    #[inline]
    #[must_use]
    pub fn avail_event(&self) -> u16 {
        // SAFETY: *mapped*.
        u16::from_le(unsafe { &*self.avail_event }.load(Ordering::Relaxed))
    }

    /// Sets the device's event.
    #[inline]
    pub fn set_avail_event(&self, position: u16) {
        // SAFETY: *mapped*.
        unsafe { &*self.avail_event }.store(position.to_le(), Ordering::Relaxed);
    }

    /// The used element at `position` (modulo the size): the chain's head, and bytes written into
    /// it.
    #[inline]
    #[must_use]
    pub fn used_entry(&self, position: u16) -> (u32, u32) {
        let [id, len] = self.used_words(position);
        (u32::from_le(id.load(Ordering::Relaxed)), u32::from_le(len.load(Ordering::Relaxed)))
    }

    /// `n` used elements from `position` (modulo the size) on, which the device's index covers.
    /// They do not go around the end. `None` if there are none, or if the ring is not aligned to 8
    /// bytes.
    #[inline(always)]
    pub(crate) fn used_run(&self, position: u16, n: usize) -> Option<UsedRun<'_>> {
        if cfg!(loom) {
            // Two of loom's words of 32 bits are no word of 64.
            return None;
        }
        let at = self.slot(position);
        if n == 0 || n > usize::from(self.size) - at || !self.used.wrapping_add(1).cast::<AtomicU64>().is_aligned() {
            return None;
        }
        // SAFETY: *mapped*; the last of them is below `size`, and an element is two words of 32
        // bits. The words of 64 bits begin with the second and end in front of the last, and are
        // aligned, as was checked.
        unsafe {
            let first = self.used.add(2 * at);
            let words = slice::from_raw_parts(first.add(1).cast::<UsedWord>(), n - 1);
            Some(UsedRun { first: &*first, words, last: &*first.add(2 * n - 1) })
        }
    }

    /// Sets the used element at `position` (modulo the size).
    #[inline]
    pub fn set_used_entry(&self, position: u16, id: u32, len: u32) {
        let [i, l] = self.used_words(position);
        i.store(id.to_le(), Ordering::Relaxed);
        l.store(len.to_le(), Ordering::Relaxed);
    }
}

/// A copy of a ring's pointers, which is used as long as the ring is borrowed.
pub(crate) struct Local<'r> {
    ring: SplitRing,
    borrowed: PhantomData<&'r SplitRing>,
}

impl Deref for Local<'_> {
    type Target = SplitRing;

    #[inline(always)]
    fn deref(&self) -> &SplitRing {
        &self.ring
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn both_sides_see_the_same_words() {
        let size = 8;
        let mut block = vec![0u64; SplitLayout::new(size).total / 8 + 16];
        let base = block.as_mut_ptr().cast::<u8>();
        let base = base.wrapping_add(base.align_offset(SplitLayout::ALIGN));
        // SAFETY: the block is large enough, aligned, and outlives both rings.
        let (driver, device) = unsafe { (SplitRing::from_layout(base, size), SplitRing::from_layout(base, size)) };
        let d = Desc { addr: 0x1234_5678_9abc, len: 1526, flags: DESC_WRITE | DESC_NEXT, next: 5 };
        driver.set_desc(3, d);
        driver.set_avail_entry(9, 3);
        driver.set_avail_idx(10);
        assert_eq!((device.avail_idx(), device.avail_entry(1), device.desc(3)), (10, 3, d));
        device.set_used_entry(9, 3, 76);
        device.set_used_idx(10);
        assert_eq!((driver.used_idx(), driver.used_entry(1)), (10, (3, 76)));
        driver.set_used_event(0x1234);
        device.set_avail_event(0x5678);
        assert_eq!((device.used_event(), driver.avail_event()), (0x1234, 0x5678));
        // The events follow the last entries, which they do not touch.
        let layout = SplitLayout::new(size);
        // SAFETY: both words are inside of the block, which only this thread uses.
        let at = |offset: usize| unsafe { base.add(offset).cast::<u16>().read() };
        assert_eq!((at(layout.avail + 4 + 2 * 8), at(layout.used + 4 + 8 * 8)), (0x1234, 0x5678));
        // Reading the last entries stays inside the block.
        assert_eq!((driver.desc(7), driver.avail_entry(7), driver.used_entry(7)), (Desc::default(), 0, (0, 0)));
        driver.clear();
        assert_eq!(
            (device.avail_idx(), device.used_event(), device.avail_event(), device.desc(3)),
            (0, 0, 0, Desc::default())
        );
    }
}
