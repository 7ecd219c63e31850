//! What the fuzz targets share: bytes that are read as a sequence of choices, and a count of
//! descriptors.

use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

/// The fuzzer's bytes, taken front to back. Behind their end everything is zero.
#[derive(Debug)]
pub struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    /// Whether all bytes were taken.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Up to `n` bytes.
    pub fn bytes(&mut self, n: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(n.min(self.0.len()));
        self.0 = rest;
        taken
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let bytes = self.bytes(N);
        array[..bytes.len()].copy_from_slice(bytes);
        array
    }

    /// One byte.
    pub fn u8(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    /// Two bytes.
    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    /// Four bytes.
    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    /// Eight bytes.
    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    /// A number below `n`, which is at most 256. One byte.
    pub fn below(&mut self, n: usize) -> usize {
        usize::from(self.u8()) % n
    }

    /// Any number, most likely one that matters: small, or next to a power of two, or next to one
    /// of `near`.
    pub fn number(&mut self, near: &[u64]) -> u64 {
        let choice = self.u8();
        let off = |n: u64, by: u8| n.wrapping_add(u64::from(by & 3)).wrapping_sub(1);
        match choice {
            0..112 => choice.into(),
            112..176 => off(1 << (choice - 112), self.u8()),
            176..240 if !near.is_empty() => {
                let n = near[usize::from(choice - 176) % near.len()];
                off(n, self.u8())
            }
            176..248 => self.u16().into(),
            248..252 => self.u32().into(),
            _ => self.u64(),
        }
    }
}

/// The lowest free descriptor number: the same before and after, if nothing was left open in
/// between.
pub fn next_descriptor() -> i32 {
    file(0).as_raw_fd()
}

/// A new file of `len` bytes in memory.
pub fn file(len: u64) -> OwnedFd {
    let fd = memfd_create(c"fuzz", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("a memory file");
    ftruncate(&fd, len).expect("its length");
    fd
}
