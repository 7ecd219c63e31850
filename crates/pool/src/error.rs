//! The errors of this crate. Each has the values that explain it, and what the user can do.

use netmem_percpu::{BarrierError, NoMemory};
use std::io;

/// Why a pool could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// The limit is 0.
    #[error("a pool limited to 0 pages can never deliver one; set a limit of at least 1")]
    NoPages,
    /// The provider's memory is not in the domain.
    #[error("the provider's memory cannot be mapped for the device")]
    Map(#[from] MapError),
    /// The memory for the pages could not be made.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// There is no memory for the magazines of the CPUs.
    #[error(transparent)]
    NoMemory(#[from] NoMemory),
    /// A pool for every thread that can have so many pages needs more magazines than there can be.
    #[error(
        "{magazines} magazines are too many for a pool, which has at most {most}: limit its pages, or make magazines larger"
    )]
    TooManyMagazines {
        /// The magazines that the pool would have.
        magazines: usize,
        /// The most that there can be.
        most: usize,
    },
    /// The provider has fewer pages than were requested in advance, or the limit is lower than
    /// that.
    #[error(
        "{got} of {want} pages could be had: raise the pool's limit, make the provider's region larger, or the queues fewer"
    )]
    Prefill {
        /// Pages that were requested.
        want: usize,
        /// Pages that there were.
        got: usize,
    },
}

/// Why a region could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegionError {
    /// No pages were requested, or more than descriptors can count.
    #[error("a region of {pages} pages: it must have between 1 and {max}", max = u32::MAX)]
    Pages {
        /// Pages that were requested.
        pages: usize,
    },
    /// A page order that does not fit a huge page.
    #[error("page order {order}: the largest is 9 (2 MiB)")]
    Order {
        /// The order that was requested.
        order: u8,
    },
    /// A system call failed.
    #[error("cannot {step} {bytes} bytes of {kind} memory: {source}; ask for fewer pages or free some memory")]
    System {
        /// What was attempted.
        step: &'static str,
        /// The number of bytes.
        bytes: usize,
        /// The kind of memory.
        kind: &'static str,
        /// The system's answer.
        r#source: io::Error,
    },
    /// The system does not have this much memory. This is checked first, because the system kills a
    /// process that allocates more than there is.
    #[error(
        "{bytes} bytes of memory asked for, and {available} are available; ask for fewer pages or free some memory"
    )]
    TooLittle {
        /// Bytes that were requested.
        bytes: usize,
        /// Bytes that the system has available.
        available: usize,
    },
    /// The memory may not be locked.
    #[error(
        "cannot lock {bytes} bytes in memory: the limit (RLIMIT_MEMLOCK) is {limit} bytes; raise it with `ulimit -l`, \
         ask for fewer pages, or do not lock"
    )]
    Memlock {
        /// Bytes to be locked.
        bytes: usize,
        /// The limit of the process.
        limit: u64,
    },
    /// Provided memory does not begin at a page boundary.
    #[error(
        "memory at {addr:#x} does not begin at a multiple of the page size, {page_size} bytes; provide memory that does, \
         or use a smaller page order"
    )]
    Unaligned {
        /// Where it begins.
        addr: usize,
        /// Bytes in a page.
        page_size: usize,
    },
    /// Provided memory is too small.
    #[error("{bytes} bytes hold no page of {page_size}; provide more memory, or use a smaller page order")]
    Small {
        /// Bytes that were provided.
        bytes: usize,
        /// Bytes in a page.
        page_size: usize,
    },
    /// The range is not inside the provided file, or does not begin where a mapping can begin.
    #[error(
        "bytes {start}..{end} of a file of {size} bytes cannot be mapped; begin at a multiple of 4096, and end within the \
         file"
    )]
    Range {
        /// Where the range begins in the file.
        start: u64,
        /// Where it ends.
        end: u64,
        /// Bytes in the file.
        size: u64,
    },
    /// A provided file cannot be used.
    #[error(
        "cannot {step} the provided file: {source}; it must have a size, be open for reading and writing, and be of a kind \
         that can be mapped"
    )]
    File {
        /// What was attempted.
        step: &'static str,
        /// The system's answer.
        r#source: io::Error,
    },
    /// A provided memfd can be made shorter, and cannot be sealed against that.
    #[error(
        "the provided memfd cannot be sealed against shrinking: {source}; seal it with F_SEAL_SHRINK, or make it with \
         MFD_ALLOW_SEALING"
    )]
    Shrinkable {
        /// The system's answer.
        r#source: io::Error,
    },
    /// The limit of a provider that grows is smaller than its first region.
    #[error(
        "{limit} pages are the limit of growth, and it grows by {step} at a time; raise the limit or make the step smaller"
    )]
    Growth {
        /// The limit, in pages.
        limit: usize,
        /// Pages in a region.
        step: usize,
    },
    /// The NUMA node does not exist, or has no memory for this process.
    #[error("cannot bind memory to NUMA node {node}: {source}")]
    Node {
        /// The node that was requested.
        node: u32,
        /// The system's answer.
        r#source: io::Error,
    },
}

/// Why memory could not be mapped for a device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MapError {
    /// The domain does not cover the address.
    #[error("{len} bytes at {addr:#x} are in none of the domain's regions; put the region into the domain before use")]
    Outside {
        /// Where the memory began.
        addr: usize,
        /// How long it was.
        len: usize,
    },
    /// The domain does not know the file.
    #[error(
        "{len} bytes at offset {offset} of a file that this process does not map are nothing that the DMA domain can reach; \
         use a domain that was given the file"
    )]
    File {
        /// Where in the file the memory began.
        offset: u64,
        /// How long it was.
        len: usize,
    },
    /// The domain cannot map any more.
    #[error("the DMA domain is full: {0}")]
    Full(String),
}

/// Why a thread cannot wait for a page, or waits no longer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WaitError {
    /// [`SharedPool::device_gone`](crate::SharedPool::device_gone): the pool allocates no pages any
    /// more.
    #[error("the device of the pool is gone, so the pool allocates no pages any more")]
    DeviceGone,
    /// The pool has been closed or dropped.
    #[error("the pool was closed while a page of it was awaited")]
    Closed,
    /// The pool may not interrupt other CPUs
    /// ([`PoolOptions::interrupt_cpus`](crate::PoolOptions::interrupt_cpus)), and pages that are
    /// dropped there stay in their magazines. Without magazines the pool needs no interrupts.
    #[error(
        "the pool may not interrupt other CPUs, so a page that is dropped there would wake no thread; use magazine(0)"
    )]
    NoInterrupts,
    /// A call of the pool's provider or domain requested a page of this pool: the pool is locked
    /// until the call returns.
    #[error("the pool's own provider or domain cannot wait for the pool")]
    InProvider,
    /// The magazines of other CPUs could not be paused.
    #[error(transparent)]
    Barrier(#[from] BarrierError),
    /// The future has already returned a page or an error.
    #[error("the future was polled after it had ended")]
    Ended,
}

/// An access outside of a page or fragment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{len} bytes at offset {offset} reach beyond the {have} bytes there are")]
pub struct OutOfRange {
    /// The first byte of the access.
    pub offset: usize,
    /// Bytes that were requested.
    pub len: usize,
    /// Bytes that the page or fragment has.
    pub have: usize,
}

impl OutOfRange {
    /// Checks that `len` bytes at `offset` lie within `have`.
    ///
    /// # Errors
    ///
    /// Itself, if they do not.
    #[inline]
    pub fn check(offset: usize, len: usize, have: usize) -> Result<(), Self> {
        // In this order: most lengths are constants.
        if len <= have && offset <= have - len { Ok(()) } else { Err(Self { offset, len, have }) }
    }
}

/// Why bytes of a fragment were not written. Nothing has changed then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError {
    /// There are not so many bytes.
    #[error(transparent)]
    OutOfRange(#[from] OutOfRange),
    /// The page has another holder, which may be reading these bytes.
    #[error(
        "another fragment or page value is on the same page; write before sharing it, or copy the bytes into a page of your own"
    )]
    Shared,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range_checks_do_not_overflow() {
        assert!(OutOfRange::check(4, 4, 8).is_ok());
        assert!(OutOfRange::check(8, 0, 8).is_ok());
        assert!(OutOfRange::check(5, 4, 8).is_err());
        assert!(OutOfRange::check(usize::MAX, 2, 8).is_err());
        assert!(OutOfRange::check(2, usize::MAX, 8).is_err());
    }
}
