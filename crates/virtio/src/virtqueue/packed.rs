//! The packed virtqueue as it lies in memory (virtio 1.2, section 2.8).
//!
//! ```text
//!   descriptor ring        size x 16 bytes   written by both sides:  addr u64 | len u32 | id u16 | flags u16
//!   driver event structure 4 bytes           written by the driver:  offset and wrap u16 | flags u16
//!   device event structure 4 bytes           written by the device:  offset and wrap u16 | flags u16
//! ```
//!
//! Both sides walk the ring, each with a [`Position`]. A descriptor's flags show which side owns
//! it: the driver sets `AVAIL` to its wrap counter and `USED` to the inverse, and the device sets
//! both to its wrap counter.
//!
//! The flags share a word of 64 bits with length and id. One load with acquire ordering reads the
//! three, and then the address may be read; one store with release ordering writes them, after the
//! address. The peer may be hostile: every word is read once. This file checks no values; see
//! [`fault`](super::fault).

use super::fours::for_each_by_fours;
use super::split::{DESC_INDIRECT, DESC_NEXT, DESC_WRITE};
use super::sync::{AtomicU32, AtomicU64, Ordering};
use std::marker::PhantomData;
use std::slice;

/// A place in a packed ring: an offset below the ring's size, and a wrap counter of one bit that
/// changes at each turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position(u16);

impl Position {
    /// Where both sides begin: offset 0 with wrap counter 1.
    pub const START: Self = Self(Self::WRAP);
    const WRAP: u16 = 1 << 15;

    /// The position as the specification and vhost-user write it: the wrap counter is bit 15.
    #[must_use]
    pub const fn from_bits(bits: u16) -> Self {
        Self(bits)
    }

    /// See [`from_bits`](Self::from_bits).
    #[must_use]
    pub const fn bits(self) -> u16 {
        self.0
    }

    /// The offset in the ring.
    #[inline]
    #[must_use]
    pub const fn offset(self) -> u16 {
        self.0 & !Self::WRAP
    }

    /// The wrap counter.
    #[inline]
    #[must_use]
    pub const fn wrap(self) -> bool {
        self.0 & Self::WRAP != 0
    }

    /// The position `n` descriptors on, in a ring of `size`. `n` is at most `size`, and the offset
    /// is below it.
    #[inline]
    #[must_use]
    pub const fn step(self, n: u16, size: u16) -> Self {
        debug_assert!(n <= size && self.offset() < size);
        let left = size - self.offset();
        if n < left { Self(self.0 + n) } else { Self((self.0 & Self::WRAP ^ Self::WRAP) | (n - left)) }
    }

    /// The position as a number that counts descriptors, modulo twice the `size`.
    #[inline]
    const fn linear(self, size: u16) -> u32 {
        self.offset() as u32 + if self.wrap() { 0 } else { size as u32 }
    }

    /// Descriptors from `earlier` to this position, modulo twice the `size`. Both offsets are below
    /// the size.
    #[inline]
    #[must_use]
    pub const fn since(self, earlier: Self, size: u16) -> u32 {
        let turn = 2 * size as u32;
        let n = self.linear(size) + turn - earlier.linear(size);
        if n >= turn { n - turn } else { n }
    }

    /// The two flags of a descriptor here that is available.
    #[inline]
    #[must_use]
    pub const fn available(self) -> u16 {
        if self.wrap() { PackedDesc::AVAIL } else { PackedDesc::USED }
    }

    /// The two flags of a descriptor here that is used.
    #[inline]
    #[must_use]
    pub const fn used(self) -> u16 {
        if self.wrap() { PackedDesc::AVAIL | PackedDesc::USED } else { 0 }
    }
}

/// One descriptor of a packed ring, as a private copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PackedDesc {
    /// Address of the buffer, in the device's address space. It has no meaning in a used
    /// descriptor.
    pub addr: u64,
    /// Bytes in the buffer; of a used descriptor, bytes written.
    pub len: u32,
    /// The buffer's id, in the last descriptor of a chain and in a used descriptor.
    pub id: u16,
    /// [`DESC_NEXT`], [`DESC_WRITE`], [`DESC_INDIRECT`], [`Self::AVAIL`], [`Self::USED`].
    pub flags: u16,
}

impl PackedDesc {
    /// Flag: equal to the driver's wrap counter in a descriptor that the driver has made available.
    pub const AVAIL: u16 = 1 << 7;
    /// Flag: equal to the device's wrap counter in a descriptor that the device has used.
    pub const USED: u16 = 1 << 15;
    /// The flags that describe the buffer.
    pub const KIND: u16 = DESC_NEXT | DESC_WRITE | DESC_INDIRECT;
    const TURN: u16 = Self::AVAIL | Self::USED;
    /// All flags that mean anything.
    pub(crate) const MEANING: u16 = Self::KIND | Self::TURN;

    /// Whether the driver has made this descriptor, read at `position`, available.
    #[inline]
    #[must_use]
    pub const fn is_available(&self, position: Position) -> bool {
        self.flags & Self::TURN == position.available()
    }

    /// Whether the device has used this descriptor, read at `position`.
    #[inline]
    #[must_use]
    pub const fn is_used(&self, position: Position) -> bool {
        self.flags & Self::TURN == position.used()
    }

    #[inline]
    fn word(&self) -> u64 {
        u64::from(self.len) | u64::from(self.id) << 32 | u64::from(self.flags) << 48
    }
}

/// The notifications that one side wants: a 4-byte event suppression structure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Event {
    /// With [`Self::AT`]: the descriptor that asks for a notification when it changes, as
    /// [`Position::bits`].
    pub position: u16,
    /// [`Self::ENABLE`], [`Self::DISABLE`] or [`Self::AT`], in the lowest two bits.
    pub flags: u16,
}

impl Event {
    /// A notification for each change.
    pub const ENABLE: u16 = 0;
    /// No notifications.
    pub const DISABLE: u16 = 1;
    /// A notification for one descriptor. Only with `VIRTIO_F_EVENT_IDX`.
    pub const AT: u16 = 2;

    /// The kind alone, without the reserved bits.
    #[inline]
    #[must_use]
    pub const fn kind(&self) -> u16 {
        self.flags & 3
    }
}

/// Where the three parts of a packed ring of `size` entries lie in one block of memory, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct PackedLayout {
    /// Offset of the driver's event structure; the descriptor ring is at 0.
    pub driver: usize,
    /// Offset of the device's event structure.
    pub device: usize,
    /// Bytes in all, a multiple of [`Self::ALIGN`].
    pub total: usize,
}

impl PackedLayout {
    /// What each part, and the block, is aligned to. The two sides' event structures are not in
    /// neighbouring cache lines.
    pub const ALIGN: usize = 128;

    /// The layout for a ring of `size` entries.
    #[must_use]
    pub const fn new(size: u16) -> Self {
        let driver = (size as usize * 16).next_multiple_of(Self::ALIGN);
        Self { driver, device: driver + Self::ALIGN, total: driver + 2 * Self::ALIGN }
    }
}

/// A packed ring mapped into this process.
///
/// Invariant (*mapped*): the pointers are valid for reads and writes of a ring of `size` entries,
/// and aligned to their types, for as long as the value exists; `size` is at most 32768, and not 0.
#[derive(Debug)]
pub struct PackedRing {
    /// Two words for each descriptor.
    desc: *const AtomicU64,
    driver: *const AtomicU32,
    device: *const AtomicU32,
    size: u16,
}

// SAFETY: the pointers are to memory that is shared by design and touched through atomics alone.
unsafe impl Send for PackedRing {}

impl PackedRing {
    /// A ring whose parts lie at the three addresses: the descriptor ring, the driver's and the
    /// device's event structure.
    ///
    /// # Safety
    ///
    /// For as long as the value exists, the three parts (see the [module](super)) are valid for
    /// reads and writes, and aligned to 16, 4 and 4 bytes; `size` is at most 32768, and not 0.
    #[must_use]
    pub unsafe fn from_parts(desc: *mut u8, driver: *mut u8, device: *mut u8, size: u16) -> Self {
        debug_assert!(
            desc.addr().is_multiple_of(16) && driver.addr().is_multiple_of(4) && device.addr().is_multiple_of(4)
        );
        // SAFETY: the caller upholds what this function demands of the parts.
        unsafe { Self::from_words(desc.cast(), driver.cast(), device.cast(), size) }
    }

    /// A ring of these words: 2 x `size` of descriptors, and one for each event structure.
    ///
    /// # Safety
    ///
    /// The caller upholds *mapped*, see the type.
    pub(crate) unsafe fn from_words(
        desc: *const AtomicU64,
        driver: *const AtomicU32,
        device: *const AtomicU32,
        size: u16,
    ) -> Self {
        debug_assert!(size > 0 && size <= super::MAX_SIZE);
        Self { desc, driver, device, size }
    }

    /// A ring laid out by [`PackedLayout`] at `base`.
    ///
    /// # Safety
    ///
    /// `base` is aligned to [`PackedLayout::ALIGN`] and valid for `PackedLayout::new(size).total`
    /// bytes, for as long as the value exists; `size` is at most 32768, and not 0.
    #[must_use]
    pub unsafe fn from_layout(base: *mut u8, size: u16) -> Self {
        let at = PackedLayout::new(size);
        // SAFETY: the offsets lie inside the block that the caller guarantees, and keep its
        // alignment.
        unsafe { Self::from_parts(base, base.add(at.driver), base.add(at.device), size) }
    }

    /// Entries.
    #[inline]
    #[must_use]
    pub fn size(&self) -> u16 {
        self.size
    }

    /// For a loop over descriptors from `at` on, with the flags of those that the driver makes
    /// available.
    #[inline(always)]
    pub(crate) fn available_from(&self, at: Position) -> Cursor<'_> {
        self.cursor(at, at.available())
    }

    /// The same with the flags of those that the device has used.
    #[inline(always)]
    pub(crate) fn used_from(&self, at: Position) -> Cursor<'_> {
        self.cursor(at, at.used())
    }

    #[inline(always)]
    fn cursor(&self, at: Position, flags: u16) -> Cursor<'_> {
        let offset = if at.offset() < self.size { at.offset() } else { 0 };
        Cursor { desc: self.desc, size: self.size, offset, flags, ring: PhantomData }
    }

    #[inline]
    fn words(&self, offset: u16) -> [&AtomicU64; 2] {
        // The offset may come from a position that the peer wrote. The common case, a valid offset,
        // falls through.
        let at = 2 * usize::from(if offset < self.size { offset } else { 0 });
        // SAFETY: *mapped*; the offset is below `size`, and a descriptor is two words.
        unsafe { [&*self.desc.add(at), &*self.desc.add(at + 1)] }
    }

    /// Makes everything zero, as fresh memory is: for a ring that neither side runs.
    pub fn clear(&self) {
        for at in 0..self.size {
            self.set_desc(at, PackedDesc::default());
        }
        self.set_driver_event(Event::default());
        self.set_device_event(Event::default());
    }

    /// Reads the descriptor at `offset`, each word once: the flags first, with acquire ordering,
    /// then the address.
    #[inline]
    #[must_use]
    pub fn desc(&self, offset: u16) -> PackedDesc {
        let [addr, rest] = self.words(offset);
        let rest = Self::read(rest);
        PackedDesc { addr: u64::from_le(addr.load(Ordering::Relaxed)), ..rest }
    }

    #[inline]
    fn read(word: &AtomicU64) -> PackedDesc {
        let rest = u64::from_le(word.load(Ordering::Acquire));
        PackedDesc { addr: 0, len: rest as u32, id: (rest >> 32) as u16, flags: (rest >> 48) as u16 }
    }

    /// Reads the descriptor at `offset` without its address, as a driver does. What its flags cover
    /// may be read after this (acquire).
    #[inline]
    #[must_use]
    pub fn used_desc(&self, offset: u16) -> PackedDesc {
        Self::read(self.words(offset)[1])
    }

    /// The descriptors from `at` on, up to `n`, as far as they are in a row.
    #[inline(always)]
    pub(crate) fn used_words(&self, at: Position, n: usize) -> &[UsedDesc] {
        let first = usize::from(at.offset()).min(usize::from(self.size));
        let n = n.min(usize::from(self.size) - first);
        // SAFETY: *mapped*; the last of them is below `size`, and a descriptor is two words.
        unsafe { slice::from_raw_parts(self.desc.add(2 * first).cast::<UsedDesc>(), n) }
    }

    /// Writes the descriptor at `offset`, the flags last. They publish everything written before
    /// them (release).
    #[inline]
    pub fn set_desc(&self, offset: u16, d: PackedDesc) {
        let [addr, rest] = self.words(offset);
        addr.store(d.addr.to_le(), Ordering::Relaxed);
        rest.store(d.word().to_le(), Ordering::Release);
    }

    /// Writes the descriptor at `offset`, which is behind one that the driver has not written yet.
    /// That one [publishes](Self::set_desc) this one, too: a device reads a descriptor when it has
    /// read those in front of it.
    #[inline]
    pub(crate) fn set_desc_behind(&self, offset: u16, d: PackedDesc) {
        let [addr, rest] = self.words(offset);
        addr.store(d.addr.to_le(), Ordering::Relaxed);
        rest.store(d.word().to_le(), Ordering::Relaxed);
    }

    /// Writes the descriptors from `first` on with these addresses, as far as the ring goes. Each
    /// has its place as its id, and else the fields of `d`. They are
    /// [behind](Self::set_desc_behind) one that was not written yet.
    #[inline(always)]
    pub(crate) fn set_descs_behind(&self, first: u16, addrs: &[u64], d: PackedDesc) {
        let at = usize::from(first.min(self.size));
        let n = usize::from(self.size) - at;
        // SAFETY: *mapped*; the last of them is below `size`, and a descriptor is two words.
        let descs = unsafe { slice::from_raw_parts(self.desc.add(2 * at).cast::<[AtomicU64; 2]>(), n) };
        let (word, next_id) =
            (PackedDesc { id: first, ..d }.word(), PackedDesc { id: 1, ..PackedDesc::default() }.word());
        for_each_by_fours(descs, addrs, |i, [to, rest], addr| {
            to.store(addr.to_le(), Ordering::Relaxed);
            rest.store((word + i as u64 * next_id).to_le(), Ordering::Relaxed);
        });
    }

    /// Writes the descriptor at `offset` without its address. The flags publish everything written
    /// before them (release).
    #[inline]
    pub fn set_used_desc(&self, offset: u16, d: PackedDesc) {
        self.words(offset)[1].store(d.word().to_le(), Ordering::Release);
    }

    #[inline]
    fn event(word: &AtomicU32) -> Event {
        let word = u32::from_le(word.load(Ordering::Relaxed));
        Event { position: word as u16, flags: (word >> 16) as u16 }
    }

    #[inline]
    fn set_event(word: &AtomicU32, e: Event) {
        word.store((u32::from(e.position) | u32::from(e.flags) << 16).to_le(), Ordering::Relaxed);
    }

    /// The interrupts that the driver wants.
    #[inline]
    #[must_use]
    pub fn driver_event(&self) -> Event {
        // SAFETY: *mapped*.
        Self::event(unsafe { &*self.driver })
    }

    /// Sets the interrupts that the driver wants.
    #[inline]
    pub fn set_driver_event(&self, event: Event) {
        // SAFETY: *mapped*.
        Self::set_event(unsafe { &*self.driver }, event);
    }

    /// The notifications that the device wants.
    #[inline]
    #[must_use]
    pub fn device_event(&self) -> Event {
        // SAFETY: *mapped*.
        Self::event(unsafe { &*self.device })
    }

    /// Sets the notifications that the device wants.
    #[inline]
    pub fn set_device_event(&self, event: Event) {
        // SAFETY: *mapped*.
        Self::set_event(unsafe { &*self.device }, event);
    }
}

/// A descriptor as it is in memory, for a driver that looks whether it is used.
#[repr(transparent)]
pub(crate) struct UsedDesc([AtomicU64; 2]);

impl UsedDesc {
    /// The two flags that show whether it is used.
    pub(crate) const TURN: u64 = (PackedDesc::TURN as u64) << 48;
    /// These flags, the id, and the length.
    pub(crate) const MASK: u64 = Self::TURN | ((1 << 48) - 1);

    /// Reads the word of length, id and flags, from the lowest bits on. What the flags cover may be
    /// read after this (acquire).
    #[inline(always)]
    pub(crate) fn read(&self) -> u64 {
        u64::from_le(self.0[1].load(Ordering::Acquire))
    }
}

/// A place in a packed ring that moves on, for loops: everything that it needs is in its own
/// fields, so that a compiler keeps it in registers, whatever else the loop writes.
///
/// Invariant: `desc` and `size` are those of a ring that is borrowed, and `offset` is below `size`.
pub(crate) struct Cursor<'r> {
    desc: *const AtomicU64,
    size: u16,
    offset: u16,
    /// The two flags of a descriptor here, which change at the end of the ring.
    flags: u16,
    ring: PhantomData<&'r PackedRing>,
}

impl Cursor<'_> {
    #[inline(always)]
    fn words(&self) -> [&AtomicU64; 2] {
        let at = 2 * usize::from(self.offset);
        // SAFETY: the invariant, and *mapped*; a descriptor is two words.
        unsafe { [&*self.desc.add(at), &*self.desc.add(at + 1)] }
    }

    /// The two flags of a descriptor here.
    #[inline(always)]
    pub(crate) fn flags(&self) -> u16 {
        self.flags
    }

    /// Moves on by `n` descriptors, at most the ring's size.
    #[inline(always)]
    pub(crate) fn advance(&mut self, n: u16) {
        let left = self.size - self.offset;
        if n < left {
            self.offset += n;
        } else {
            self.offset = (n - left).min(self.size - 1);
            self.flags ^= PackedDesc::TURN;
        }
    }

    /// Its position.
    #[inline(always)]
    pub(crate) fn position(&self) -> Position {
        // Of either pair of flags, this one is equal to the wrap counter.
        Position(self.offset | if self.flags & PackedDesc::AVAIL != 0 { Position::WRAP } else { 0 })
    }

    /// See [`PackedRing::desc`].
    #[inline(always)]
    pub(crate) fn desc(&self) -> PackedDesc {
        let [addr, rest] = self.words();
        let rest = PackedRing::read(rest);
        PackedDesc { addr: u64::from_le(addr.load(Ordering::Relaxed)), ..rest }
    }

    /// See [`PackedRing::used_desc`]. `None` if its two flags are not those of the cursor.
    #[inline(always)]
    pub(crate) fn used_desc(&self) -> Option<PackedDesc> {
        let d = PackedRing::read(self.words()[1]);
        (d.flags & PackedDesc::TURN == self.flags).then_some(d)
    }

    /// See [`PackedRing::set_desc_behind`].
    #[inline(always)]
    pub(crate) fn set_desc_behind(&self, d: PackedDesc) {
        let [addr, rest] = self.words();
        addr.store(d.addr.to_le(), Ordering::Relaxed);
        rest.store(d.word().to_le(), Ordering::Relaxed);
    }

    /// See [`PackedRing::set_used_desc`].
    #[inline(always)]
    pub(crate) fn set_used_desc(&self, d: PackedDesc) {
        self.words()[1].store(d.word().to_le(), Ordering::Release);
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
