//! The checks of all words that the peer writes.
//!
//! The peer may write anything at any time. A caller reads each word once and hands the copy to a
//! function of this file, which returns a value that is safe to use, or a fault. Only this file
//! makes a [`DeviceFault`] (a device has broken a rule of our driver's ring) or a [`DriverFault`]
//! (a driver has broken a rule of our device's ring). After a fault the queue is stopped.

use super::{DESC_INDIRECT, DESC_NEXT, DESC_WRITE, Desc};

/// A rule of a ring that the device has broken. The driver stops the queue, because it cannot trust
/// any later statement of the device about the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceFault {
    /// The device has used an id that is no chain of the ring.
    #[error("the device used buffer {id}, and there is none of that number")]
    BadId {
        /// The number in the used entry.
        id: u32,
    },
    /// The device has used a chain that it does not have: it was used twice, or never posted.
    #[error("the device used buffer {id}, which it did not have")]
    NotPosted {
        /// The number in the used entry.
        id: u16,
    },
    /// The device claims more bytes than the buffer has.
    #[error("the device wrote {len} bytes into a buffer of {have}")]
    BadLength {
        /// Bytes it claims.
        len: u32,
        /// Bytes there are.
        have: u32,
    },
    /// The used index is ahead of the posted buffers.
    #[error("the device used {by} buffers and had {posted}")]
    IndexJump {
        /// How far the index moved.
        by: u16,
        /// Buffers that were posted.
        posted: u16,
    },
    /// A frame's header counts no buffers, or more than a frame can have.
    #[error("the device claims a frame of {buffers} buffers")]
    BadBufferCount {
        /// The count in the header.
        buffers: u16,
    },
    /// The device has used only a part of a frame's buffers.
    #[error("the device claims a frame of {buffers} buffers and used {used}")]
    MissingBuffers {
        /// The count in the header.
        buffers: u16,
        /// Buffers that it had used by then.
        used: u16,
    },
}

impl DeviceFault {
    /// The name under which the fault is counted.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::BadId { .. } => "bad_id",
            Self::NotPosted { .. } => "not_posted",
            Self::BadLength { .. } => "bad_length",
            Self::IndexJump { .. } => "index_jump",
            Self::BadBufferCount { .. } => "bad_buffer_count",
            Self::MissingBuffers { .. } => "missing_buffers",
        }
    }
}

/// The driver's checks.
impl DeviceFault {
    /// Checks that the device, which had `posted` buffers, may have used `by` more.
    #[inline(always)]
    pub(crate) fn ahead(by: u16, posted: u16) -> Result<u16, Self> {
        if by <= posted { Ok(by) } else { Err(Self::IndexJump { by, posted }) }
    }

    /// Checks the id of a used buffer: it must be one of `slots` slots.
    #[inline(always)]
    pub(crate) fn id(id: u32, slot: u32, slots: u16) -> Result<u16, Self> {
        if slot < u32::from(slots) { Ok(slot as u16) } else { Err(Self::BadId { id }) }
    }

    /// Checks that `len` bytes, which the device claims to have written, fit a buffer of `have`
    /// bytes.
    #[inline(always)]
    pub(crate) fn length(len: u32, have: u32) -> Result<u32, Self> {
        if len <= have { Ok(len) } else { Err(Self::BadLength { len, have }) }
    }

    /// Checks that used buffer `id` was posted; `posted` is the driver's record of it.
    #[inline(always)]
    pub(crate) fn posted<T>(id: u16, posted: Option<T>) -> Result<T, Self> {
        posted.ok_or(Self::NotPosted { id })
    }

    /// Checks the number of buffers in a frame's header: `buffers`, of at most `most`; the device
    /// has used `used` so far.
    #[inline]
    pub(crate) fn buffers(buffers: u16, most: usize, used: u16) -> Result<u16, Self> {
        if buffers == 0 || usize::from(buffers) > most {
            return Err(Self::BadBufferCount { buffers });
        }
        if buffers > used { Err(Self::MissingBuffers { buffers, used }) } else { Ok(buffers) }
    }
}

/// A rule of a ring that the driver has broken. The ring is stopped and counted; the others
/// continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DriverFault {
    /// The available index is further ahead than the ring is long.
    #[error("the available index went from {from} to {to} in a ring of {size}")]
    AvailJump {
        /// The device's position.
        from: u16,
        /// The driver's index.
        to: u16,
        /// Entries of the ring.
        size: u16,
    },
    /// A chain's head is not a descriptor of the ring.
    #[error("chain head {head} in a ring of {size}")]
    HeadOutOfRange {
        /// The value in the available ring.
        head: u16,
        /// Entries of the ring.
        size: u16,
    },
    /// The next descriptor of a chain is not in the ring.
    #[error("descriptor {next} follows in a ring of {size}")]
    NextOutOfRange {
        /// The value in the descriptor.
        next: u16,
        /// Entries of the ring.
        size: u16,
    },
    /// A chain has more descriptors than the ring: a loop.
    #[error("the chain at {head} does not end within {size} descriptors")]
    ChainTooLong {
        /// The chain's head.
        head: u16,
        /// Entries of the ring.
        size: u16,
    },
    /// A table of descriptors, which was not negotiated.
    #[error("descriptor {id} is indirect, which was not negotiated")]
    Indirect {
        /// The descriptor.
        id: u16,
    },
    /// A table of descriptors in a descriptor that is not the last of its chain.
    #[error("descriptor {id} is indirect, and not the last of its chain")]
    IndirectNext {
        /// The descriptor.
        id: u16,
    },
    /// A table of descriptors of a wrong length.
    #[error("descriptor {id} is an indirect table of {len} bytes, which is not 16 for each of 1 to {most} descriptors")]
    IndirectLength {
        /// The descriptor.
        id: u16,
        /// Its length.
        len: u32,
        /// The most descriptors that a table of this ring can have.
        most: u16,
    },
    /// A table of descriptors in a table of descriptors.
    #[error("the indirect table of descriptor {id} has an indirect descriptor")]
    IndirectNested {
        /// The descriptor of the outer table.
        id: u16,
    },
    /// A chain of a packed ring whose next descriptor is not available.
    #[error("the chain goes on behind descriptor {id}, and nothing is available there")]
    Unfinished {
        /// The descriptor.
        id: u16,
    },
    /// A descriptor without bytes.
    #[error("descriptor {id} has no bytes")]
    ZeroLength {
        /// The descriptor.
        id: u16,
    },
    /// A buffer that the device must write but may only read, or the reverse.
    #[error("descriptor {id} has flags {flags:#x}, the wrong direction for this ring")]
    WrongDirection {
        /// The descriptor.
        id: u16,
        /// Its flags.
        flags: u16,
    },
    /// A buffer that is not wholly inside the memory table.
    #[error("descriptor {id}: {len} bytes at {addr:#x} are not in the memory table")]
    OutsideTable {
        /// The descriptor.
        id: u16,
        /// Its address.
        addr: u64,
        /// Its length.
        len: u32,
    },
    /// The buffers of a chain add up to 4 GiB or more.
    #[error("the chain at {head} has {len} bytes")]
    HugeChain {
        /// The chain's head.
        head: u16,
        /// Bytes, as far as they were counted.
        len: u64,
    },
    /// A chain that is more pieces of memory than a chain may be: 1,024. A buffer that lies across
    /// regions is a piece in each of them.
    #[error("the chain at {head} has more than {most} pieces of memory")]
    TooManyPieces {
        /// The chain's head.
        head: u16,
        /// As many as there may be.
        most: u16,
    },
    /// A control command without room for its answer.
    #[error("the command at {head} leaves no byte for its answer")]
    NoAnswerByte {
        /// The chain's head.
        head: u16,
    },
    /// A new memory table no longer holds the ring.
    #[error("ring part at user address {addr:#x} is not in the new memory table")]
    RingUnmapped {
        /// The part's address.
        addr: u64,
    },
    /// Pages of the memory table are gone: the front end has shortened a file, punched a hole into
    /// it, or filled its file system.
    #[error("{accesses} accesses have found pages of the memory table gone")]
    MemoryLost {
        /// How many accesses.
        accesses: u64,
    },
}

impl DriverFault {
    /// The names under which [`Stats::queue_errors`](crate::device::Stats::queue_errors) counts, in
    /// the order of [`Self::index`].
    pub const NAMES: [&'static str; 17] = [
        "avail_jump",
        "head_out_of_range",
        "next_out_of_range",
        "chain_too_long",
        "indirect",
        "zero_length",
        "wrong_direction",
        "outside_table",
        "huge_chain",
        "no_answer_byte",
        "ring_unmapped",
        "memory_lost",
        "indirect_next",
        "indirect_length",
        "indirect_nested",
        "unfinished",
        "too_many_pieces",
    ];

    /// Its index in [`Self::NAMES`].
    #[must_use]
    pub fn index(&self) -> usize {
        match self {
            Self::AvailJump { .. } => 0,
            Self::HeadOutOfRange { .. } => 1,
            Self::NextOutOfRange { .. } => 2,
            Self::ChainTooLong { .. } => 3,
            Self::Indirect { .. } => 4,
            Self::ZeroLength { .. } => 5,
            Self::WrongDirection { .. } => 6,
            Self::OutsideTable { .. } => 7,
            Self::HugeChain { .. } => 8,
            Self::NoAnswerByte { .. } => 9,
            Self::RingUnmapped { .. } => 10,
            Self::MemoryLost { .. } => 11,
            Self::IndirectNext { .. } => 12,
            Self::IndirectLength { .. } => 13,
            Self::IndirectNested { .. } => 14,
            Self::Unfinished { .. } => 15,
            Self::TooManyPieces { .. } => 16,
        }
    }
}

/// The device's checks.
impl DriverFault {
    /// Checks the driver's index `to`; the device is at `from`. Returns how many chains may be
    /// popped.
    #[inline(always)]
    pub(crate) fn ahead(from: u16, to: u16, size: u16) -> Result<u16, Self> {
        let ahead = to.wrapping_sub(from);
        if ahead <= size { Ok(ahead) } else { Err(Self::AvailJump { from, to, size }) }
    }

    /// Checks the head of a chain.
    #[inline(always)]
    pub(crate) fn head(head: u16, size: u16) -> Result<u16, Self> {
        if head < size { Ok(head) } else { Err(Self::HeadOutOfRange { head, size }) }
    }

    /// Checks the next descriptor of a chain.
    #[inline(always)]
    pub(crate) fn next(next: u16, size: u16) -> Result<u16, Self> {
        if next < size { Ok(next) } else { Err(Self::NextOutOfRange { next, size }) }
    }

    /// Checks that descriptor `id`, with `len` bytes at `addr`, is in the memory table. `found` is
    /// the result of the translation.
    #[inline(always)]
    pub(crate) fn inside<T>(id: u16, addr: u64, len: u32, found: Option<T>) -> Result<T, Self> {
        found.ok_or(Self::OutsideTable { id, addr, len })
    }

    /// Checks the length of a chain in a packed ring of `size` entries: it has `span` descriptors
    /// up to descriptor `id`.
    pub(crate) fn span(id: u16, span: u16, size: u16) -> Result<u16, Self> {
        if span <= size { Ok(span) } else { Err(Self::ChainTooLong { head: id, size }) }
    }

    /// Checks that descriptor `id`, which does not end its chain, has a next one that is available.
    pub(crate) fn finished<T>(id: u16, next: Option<T>) -> Result<T, Self> {
        next.ok_or(Self::Unfinished { id })
    }

    /// Checks that the command at `head` has room for its answer.
    pub(crate) fn answer<T>(head: u16, answer: Option<T>) -> Result<T, Self> {
        answer.ok_or(Self::NoAnswerByte { head })
    }
}

/// The kind of a chain: how its buffers may be accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// Only readable ones: a frame from the driver.
    Read,
    /// Only writable ones: room for a frame to the driver.
    Write,
    /// Readable ones, then writable ones: a command and its answer.
    ReadThenWrite,
}

/// The most pieces of memory of one chain: as many buffers as QEMU and DPDK allow. Without this
/// limit, a chain of 32,768 descriptors, each across 509 regions, would be 16 million pieces.
pub(crate) const MAX_PIECES: u16 = 1024;

/// Checks the descriptors of one chain in their order. The device's queue has read copies of them.
#[derive(Debug)]
pub(crate) struct ChainValidator {
    /// For messages.
    head: u16,
    /// Entries of the ring, and the most buffers of a chain.
    size: u16,
    direction: Direction,
    /// Whether there was a writable buffer already.
    writing: bool,
    buffers: u16,
    pieces: u16,
    bytes: u64,
}

impl ChainValidator {
    /// For the chain at `head` in a ring of `size`.
    #[inline]
    pub(crate) fn new(head: u16, size: u16, direction: Direction) -> Self {
        Self { head, size, direction, writing: direction == Direction::Write, buffers: 0, pieces: 0, bytes: 0 }
    }

    /// Checks the next buffer, that of `d`, which is descriptor `id` or in its table.
    #[inline]
    pub(crate) fn buffer(&mut self, id: u16, d: &Desc) -> Result<(), DriverFault> {
        if self.buffers == self.size {
            return Err(DriverFault::ChainTooLong { head: self.head, size: self.size });
        }
        self.buffers += 1;
        self.piece()?;
        if d.len == 0 {
            return Err(DriverFault::ZeroLength { id });
        }
        if (d.flags & DESC_WRITE != 0) != self.writing {
            if self.direction != Direction::ReadThenWrite || self.writing {
                return Err(DriverFault::WrongDirection { id, flags: d.flags });
            }
            self.writing = true;
        }
        self.bytes += u64::from(d.len);
        if self.bytes > u64::from(u32::MAX) {
            return Err(DriverFault::HugeChain { head: self.head, len: self.bytes });
        }
        Ok(())
    }

    /// Checks that the chain may have one more piece of memory. [`buffer`](Self::buffer) does it
    /// for the first one of a buffer.
    #[inline]
    pub(crate) fn piece(&mut self) -> Result<(), DriverFault> {
        if self.pieces == MAX_PIECES {
            return Err(DriverFault::TooManyPieces { head: self.head, most: MAX_PIECES });
        }
        self.pieces += 1;
        Ok(())
    }

    /// Checks the indirect table of `d`, which is descriptor `id` and ends the chain. Returns how
    /// many descriptors the table has.
    pub(crate) fn table(&self, id: u16, d: &Desc, negotiated: bool) -> Result<u16, DriverFault> {
        if !negotiated {
            return Err(DriverFault::Indirect { id });
        }
        if d.flags & DESC_NEXT != 0 {
            return Err(DriverFault::IndirectNext { id });
        }
        // A longer table would be copied, and have more pieces than a chain may have.
        let (entries, most) = (d.len / Desc::LEN as u32, self.size.min(MAX_PIECES));
        if !d.len.is_multiple_of(Desc::LEN as u32) || !(1..=u32::from(most)).contains(&entries) {
            return Err(DriverFault::IndirectLength { id, len: d.len, most });
        }
        Ok(entries as u16)
    }

    /// Checks the next buffer, that of `d`, in the table of descriptor `id`.
    ///
    /// `WRITE` is ignored where buffers are only read: reading one that the driver calls writable
    /// does no harm, and DPDK's virtio_user (22.11 to 24.11) leaves the flag in some entries of the
    /// tables that it transmits from packed rings.
    pub(crate) fn entry(&mut self, id: u16, d: &Desc) -> Result<(), DriverFault> {
        if d.flags & DESC_INDIRECT != 0 {
            return Err(DriverFault::IndirectNested { id });
        }
        let ignored = if self.direction == Direction::Read { DESC_WRITE } else { 0 };
        self.buffer(id, &Desc { flags: d.flags & !ignored, ..*d })
    }

    /// Bytes of the chain. [`buffer`](Self::buffer) has checked that they fit.
    #[inline]
    pub(crate) fn bytes(&self) -> u32 {
        self.bytes as u32
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_validated() {
        assert_eq!(
            [DeviceFault::ahead(3, 3), DeviceFault::ahead(4, 3)],
            [Ok(3), Err(DeviceFault::IndexJump { by: 4, posted: 3 })]
        );
        assert_eq!([DeviceFault::id(14, 7, 8), DeviceFault::id(16, 8, 8)], [Ok(7), Err(DeviceFault::BadId { id: 16 })]);
        assert_eq!(
            DeviceFault::id(1 << 16, 1 << 16, 8),
            Err(DeviceFault::BadId { id: 1 << 16 }),
            "the upper half counts"
        );
        assert_eq!(DeviceFault::length(60, 60), Ok(60));
        assert_eq!(DeviceFault::length(61, 60), Err(DeviceFault::BadLength { len: 61, have: 60 }));
        assert_eq!(DeviceFault::posted(5, None::<()>), Err(DeviceFault::NotPosted { id: 5 }));
        assert_eq!(DeviceFault::buffers(17, 17, 17), Ok(17));
        for buffers in [0, 18] {
            assert_eq!(DeviceFault::buffers(buffers, 17, 20), Err(DeviceFault::BadBufferCount { buffers }));
        }
        assert_eq!(DeviceFault::buffers(4, 17, 3), Err(DeviceFault::MissingBuffers { buffers: 4, used: 3 }));
    }

    #[test]
    fn a_driver_is_validated() {
        assert_eq!(DriverFault::ahead(0xfffe, 6, 8), Ok(8), "the index wraps");
        assert_eq!(DriverFault::ahead(0, 9, 8), Err(DriverFault::AvailJump { from: 0, to: 9, size: 8 }));
        assert_eq!(
            [DriverFault::head(7, 8), DriverFault::head(8, 8)],
            [Ok(7), Err(DriverFault::HeadOutOfRange { head: 8, size: 8 })]
        );
        assert_eq!(
            [DriverFault::next(7, 8), DriverFault::next(8, 8)],
            [Ok(7), Err(DriverFault::NextOutOfRange { next: 8, size: 8 })]
        );
    }
}
