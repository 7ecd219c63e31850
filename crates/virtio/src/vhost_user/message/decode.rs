//! The payload and the descriptors of a received message, read front to back.

use super::header::{MAX_CONFIG, MAX_FDS, RawMessage};
use super::malformed::Malformed;
use super::payload::{Inflight, LOG, MemoryRegion, NO_FD, SPLITS, VringAddresses};
use super::request::Request;
use crate::vhost_user::received::Received;

/// Decodes a received message, front to back. A read behind the end returns zeros and is an error
/// in [`Self::done`].
pub(super) struct Decoder {
    request: Request,
    payload: Vec<u8>,
    at: usize,
    came: usize,
    pub(super) fds: std::vec::IntoIter<Received>,
}

impl Decoder {
    pub(super) fn new(packet: RawMessage) -> Self {
        let RawMessage { request, payload, fds, .. } = packet;
        Self { request, payload, at: 0, came: fds.len(), fds: fds.into_iter() }
    }

    pub(super) fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let bytes = self.payload.get(self.at..).and_then(<[u8]>::first_chunk).copied().unwrap_or([0; N]);
        self.at += N;
        bytes
    }

    pub(super) fn u16(&mut self) -> u16 {
        u16::from_ne_bytes(self.bytes())
    }

    pub(super) fn u32(&mut self) -> u32 {
        u32::from_ne_bytes(self.bytes())
    }

    pub(super) fn u64(&mut self) -> u64 {
        u64::from_ne_bytes(self.bytes())
    }

    pub(super) fn left(&self) -> usize {
        self.payload.len().saturating_sub(self.at)
    }

    pub(super) fn region(&mut self) -> MemoryRegion {
        let [guest_addr, size, user_addr, mmap_offset] = [self.u64(), self.u64(), self.u64(), self.u64()];
        MemoryRegion { guest_addr, size, user_addr, mmap_offset }
    }

    pub(super) fn config(&mut self) -> Result<(u32, u32, u32, Vec<u8>), Malformed> {
        let [offset, size, flags] = [self.u32(), self.u32(), self.u32()];
        if size as usize > MAX_CONFIG {
            return Err(self.field("size", size.into()));
        }
        let bytes = self.payload.get(self.at..).unwrap_or_default().to_vec();
        self.at += bytes.len();
        Ok((offset, size, flags, bytes))
    }

    /// The bytes of a message that writes configuration space, or answers with it.
    pub(super) fn config_bytes(&mut self) -> Result<(u32, u32, Vec<u8>), Malformed> {
        let (offset, size, flags, bytes) = self.config()?;
        if bytes.len() != size as usize {
            return Err(self.field("size", size.into()));
        }
        Ok((offset, flags, bytes))
    }

    pub(super) fn inflight(&mut self) -> Inflight {
        let (mmap_size, mmap_offset) = (self.u64(), self.u64());
        let (queues, queue_size) = (self.u16(), self.u16());
        // Some peers send the structure without its padding.
        if self.left() == 4 {
            self.at += 4;
        }
        Inflight { mmap_size, mmap_offset, queues, queue_size }
    }

    pub(super) fn fd(&mut self) -> Result<Received, Malformed> {
        self.fds.next().ok_or(Malformed::Descriptors { request: self.request, got: self.came })
    }

    /// The regions of `SET_MEM_TABLE`, each with its descriptor.
    pub(super) fn regions(&mut self) -> Result<Vec<(MemoryRegion, Received)>, Malformed> {
        let (count, _padding) = (self.u32(), self.u32());
        if count as usize > MAX_FDS {
            return Err(self.field("number of regions", count.into()));
        }
        (0..count).map(|_| Ok((self.region(), self.fd()?))).collect()
    }

    /// A ring and its addresses, as `SET_VRING_ADDR` has them.
    pub(super) fn addresses(&mut self) -> (u32, VringAddresses) {
        let (index, flags) = (self.u32(), self.u32());
        let [descriptors, used, available, log_addr] = [self.u64(), self.u64(), self.u64(), self.u64()];
        let (log, splits) = (flags & LOG != 0, flags & SPLITS != 0);
        (index, VringAddresses { descriptors, used, available, log_addr, log, splits })
    }

    /// A ring and its descriptor, as `SET_VRING_KICK`, `_CALL` and `_ERR` have them.
    pub(super) fn ring_fd(&mut self) -> Result<(u8, Option<Received>), Malformed> {
        let value = self.u64();
        let fd = if value & NO_FD == 0 { Some(self.fd()?) } else { None };
        Ok((value as u8, fd))
    }

    pub(super) fn field(&self, field: &'static str, value: u64) -> Malformed {
        Malformed::Field { request: self.request, field, value }
    }

    /// Validates that exactly all bytes and all descriptors were consumed.
    pub(super) fn done(self) -> Result<(), Malformed> {
        if self.at != self.payload.len() {
            return Err(Malformed::Size { request: self.request, size: self.payload.len() });
        }
        if self.fds.len() != 0 {
            return Err(Malformed::Descriptors { request: self.request, got: self.came });
        }
        Ok(())
    }
}
