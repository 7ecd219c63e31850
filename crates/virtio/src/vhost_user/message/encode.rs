//! A message as it is sent: its bytes and its descriptors.

use super::header::{HEADER, VERSION};
use super::payload::{Inflight, MemoryRegion};
use super::request::Request;
use std::os::fd::{AsFd, BorrowedFd};

/// The bytes of a message to send, and its descriptors.
#[derive(Debug)]
pub(crate) struct EncodedMessage<'a> {
    pub(crate) bytes: Vec<u8>,
    pub(crate) fds: Vec<BorrowedFd<'a>>,
}

impl<'a> EncodedMessage<'a> {
    pub(super) fn new(request: Request, flags: u32) -> Self {
        let mut bytes = Vec::with_capacity(HEADER + 64);
        for word in [request.0, flags | VERSION, 0] {
            bytes.extend(word.to_ne_bytes());
        }
        Self { bytes, fds: Vec::new() }
    }

    pub(super) fn u32s<const N: usize>(&mut self, words: [u32; N]) {
        self.bytes.extend(words.iter().flat_map(|w| w.to_ne_bytes()));
    }

    pub(super) fn u64s<const N: usize>(&mut self, words: [u64; N]) {
        self.bytes.extend(words.iter().flat_map(|w| w.to_ne_bytes()));
    }

    pub(super) fn region(&mut self, r: &MemoryRegion) {
        self.u64s([r.guest_addr, r.size, r.user_addr, r.mmap_offset]);
    }

    pub(super) fn config(&mut self, offset: u32, flags: u32, bytes: &[u8]) {
        self.u32s([offset, bytes.len() as u32, flags]);
        self.bytes.extend(bytes);
    }

    pub(super) fn inflight(&mut self, i: &Inflight) {
        self.u64s([i.mmap_size, i.mmap_offset]);
        // The structure ends with four bytes of padding, which peers count as part of it.
        self.bytes.extend([i.queues, i.queue_size, 0, 0].iter().flat_map(|w| w.to_ne_bytes()));
    }

    pub(super) fn fd(&mut self, fd: &'a impl AsFd) {
        self.fds.push(fd.as_fd());
    }

    /// Writes the payload's length into the header.
    pub(super) fn done(mut self) -> Self {
        let size = (self.bytes.len() - HEADER) as u32;
        self.bytes[8..HEADER].copy_from_slice(&size.to_ne_bytes());
        self
    }
}
