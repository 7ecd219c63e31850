//! The memory that applications write and read: more than the last-level cache holds.
//!
//! A sender has a large buffer. It writes every word of the next piece before the piece is sent. A
//! receiver keeps the last received bytes, as many as the sender's buffer has, and reads every
//! word. With the kernel and with smoltcp, both are buffers of this process. With our stack they
//! are pages of the region that the device reaches: the sender uses a queue of pages in a circle,
//! and the receiver holds a queue of fragments.
//!
//! The memory is made once for all variants, because they take turns.

use netmem::pool::{PAGE_SIZE, PeerShared, RegionOptions, RegionProvider, TrustedPeer};
use std::fs;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// Bytes that are written or read at a time.
pub(super) const PIECE: usize = 64 << 10;
/// Pages in addition to the application's: for rings, headers, copies, and data that is out of
/// order.
pub(super) const SPARE: usize = 16 << 10;
/// A rate that no run reaches, in bytes per second.
const MOST: f64 = 10e9;

/// A buffer of whole pieces.
#[derive(Debug, Default)]
pub(super) struct Buffer {
    words: Vec<u64>,
    at: usize,
}

impl Buffer {
    /// Advances the position by this many bytes. If no whole piece follows, the position returns to
    /// the start.
    fn advance(&mut self, bytes: usize) {
        self.at += bytes.div_ceil(8);
        if self.at + PIECE / 8 > self.words.len() {
            self.at = 0;
        }
    }

    /// Writes the next piece, and returns it to be sent.
    pub(super) fn produce(&mut self) -> &[u8] {
        self.advance(PIECE);
        fill(&mut self.words[self.at..self.at + PIECE / 8]);
        self.produced()
    }

    /// The last produced piece.
    pub(super) fn produced(&self) -> &[u8] {
        let words = &self.words[self.at..self.at + PIECE / 8];
        // SAFETY: each word is eight bytes, so the bytes are as many and are initialised.
        unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), PIECE) }
    }

    /// Receives the next bytes with `receive`, which returns how many they are, and reads them.
    pub(super) fn consume(&mut self, receive: impl FnOnce(&mut [u8]) -> usize) -> usize {
        let words = &mut self.words[self.at..self.at + PIECE / 8];
        // SAFETY: each word is eight bytes, and any eight bytes are a valid word.
        let room = unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), PIECE) };
        let n = receive(room);
        read(&room[..n]);
        self.advance(n);
        n
    }
}

/// Writes every word, each time with another value.
fn fill(words: &mut [u64]) {
    let first = words.first().map_or(1, |word| word.wrapping_add(1));
    words.iter_mut().zip(first..).for_each(|(word, value)| *word = value);
}

/// Writes every word of a page.
pub(super) fn write(bytes: &mut [u8]) {
    let first = bytes.first().map_or(1, |byte| byte.wrapping_add(1));
    let (words, rest) = bytes.as_chunks_mut::<8>();
    let value = u64::from_ne_bytes([first; 8]);
    words.iter_mut().for_each(|word| *word = value.to_ne_bytes());
    rest.fill(first);
}

/// Reads every word.
pub(super) fn read(bytes: &[u8]) {
    let (words, rest) = bytes.as_chunks::<8>();
    let sum = words.iter().fold(0u64, |sum, word| sum.wrapping_add(u64::from_ne_bytes(*word)));
    std::hint::black_box((sum, rest.last()));
}

/// The memory that variants share.
#[derive(Debug)]
pub(super) struct Memory {
    /// Bytes of each working set.
    size: usize,
    /// Whether the receiver keeps the last received bytes.
    keeps: bool,
    source: Mutex<Buffer>,
    sink: Mutex<Buffer>,
    region: OnceLock<Arc<RegionProvider<TrustedPeer>>>,
}

/// The size of the last-level cache in bytes, as the system reports it.
fn cache() -> Option<usize> {
    let levels = (0..8).rev().map(|n| format!("/sys/devices/system/cpu/cpu0/cache/index{n}/size"));
    let text = levels.filter_map(|path| fs::read_to_string(path).ok()).next()?;
    let text = text.trim();
    let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    let shift = match unit {
        "K" => 10,
        "M" => 20,
        _ => 0,
    };
    number.parse::<usize>().ok().map(|n| n << shift)
}

/// Bytes of memory that are available.
fn available() -> Option<usize> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()? << 10)
}

impl Memory {
    /// A quarter more than the last-level cache has. At most as much as is moved in four times
    /// `duration`, and at most an eighth of the memory.
    pub(super) fn new(duration: Duration) -> Self {
        let wanted = cache().map_or(64 << 20, |bytes| bytes + bytes / 4);
        let moved = (4.0 * duration.as_secs_f64() * MOST) as usize;
        let size = wanted.min(moved).min(available().map_or(usize::MAX, |bytes| bytes / 8)).max(16 * PIECE);
        Self {
            size: size.next_multiple_of(PIECE),
            keeps: true,
            source: Mutex::default(),
            sink: Mutex::default(),
            region: OnceLock::new(),
        }
    }

    /// A few pieces, and a receiver that keeps nothing.
    pub(super) fn dropped() -> Self {
        Self { keeps: false, ..Self::new(Duration::ZERO) }
    }

    /// Pages that the receiver keeps on our stack.
    pub(super) fn kept(&self) -> usize {
        if self.keeps { self.pages() } else { 0 }
    }

    /// The sizes, as text.
    pub(super) fn note(&self) -> String {
        let cache = cache().map_or_else(|| "unknown".to_owned(), |bytes| format!("{} MiB", bytes >> 20));
        format!("working set {} MiB on each side, last-level cache {cache}", self.size >> 20)
    }

    fn buffer<'m>(&self, buffer: &'m Mutex<Buffer>) -> MutexGuard<'m, Buffer> {
        let mut buffer = buffer.lock().unwrap_or_else(PoisonError::into_inner);
        if buffer.words.is_empty() {
            buffer.words = vec![1; self.size / 8];
        }
        buffer
    }

    /// The sender's buffer.
    pub(super) fn source(&self) -> MutexGuard<'_, Buffer> {
        self.buffer(&self.source)
    }

    /// The receiver's buffer.
    pub(super) fn sink(&self) -> MutexGuard<'_, Buffer> {
        self.buffer(&self.sink)
    }

    /// Pages of each application on our stack.
    pub(super) fn pages(&self) -> usize {
        self.size / PAGE_SIZE
    }

    /// The memory that our device reaches.
    pub(super) fn region(&self) -> Result<Arc<RegionProvider<TrustedPeer>>, String> {
        if self.region.get().is_none() {
            // What the sender queues, and twice what the receiver holds.
            let pages = 3 * (self.pages() + SPARE);
            let region = RegionOptions::new(pages)
                .reserved_huge_pages(true)
                .build::<PeerShared>()
                .map_err(|e| format!("{e}"))?;
            // SAFETY: only devices of this process get the region's file, and they write only to
            // posted buffers.
            let _ = self.region.set(RegionProvider::new(unsafe { region.trust_peer() }));
        }
        self.region.get().cloned().ok_or_else(|| "memory of the device".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_go_round_the_buffer() {
        let memory = Memory::new(Duration::ZERO);
        assert_eq!(memory.size, 16 * PIECE);
        let mut buffer = memory.source();
        let first = buffer.produce().as_ptr();
        assert_eq!(buffer.produced().as_ptr(), first);
        let places: Vec<_> = (0..16).map(|_| buffer.produce().as_ptr()).collect();
        assert!(!places[..15].contains(&first) && places[15] == first);
        // The value differs from the one before.
        assert_ne!(buffer.produced()[0], 1);
    }

    #[test]
    fn a_page_has_other_bytes_each_time() {
        let mut page = [7; 19];
        write(&mut page);
        assert_eq!(page, [8; 19]);
        read(&page);
    }
}
