//! The return of tokens, on any thread.

use super::stream::netmem_devmem_extent;
use crate::handle::{self, Kind};
use crate::status::{Failure, netmem_status, status};
use ::netmem_devmem::stream::StreamReturner;
use ::netmem_devmem::{MAX_FRAGMENTS, MAX_RANGES, TokenRange};
use std::ptr::NonNull;

/// Returns the tokens of a stream.
#[derive(Debug)]
pub struct netmem_devmem_returner(());

impl Kind for netmem_devmem_returner {
    type Value = StreamReturner;
    const NAME: &'static str = "netmem_devmem_returner";
    const NUMBER: u64 = 0x6e65_746d_656d_0034;
}

/// Several threads use a handle at a time.
const _: fn() = || {
    fn any_thread<T: Send + Sync>() {}
    any_thread::<StreamReturner>();
};

pub(super) fn returner(returns: StreamReturner) -> *mut netmem_devmem_returner {
    handle::create(returns)
}

/// Tokens in groups that one call of the library of Rust accepts.
struct Groups<'r> {
    returner: &'r StreamReturner,
    ranges: [TokenRange; MAX_RANGES],
    /// Ranges of the group, and tokens in them.
    used: usize,
    tokens: u32,
    freed: usize,
}

impl<'r> Groups<'r> {
    fn new(returner: &'r StreamReturner) -> Self {
        let none = TokenRange { start: 0, count: 0 };
        Self { returner, ranges: [none; MAX_RANGES], used: 0, tokens: 0, freed: 0 }
    }

    fn add(&mut self, mut start: u32, mut count: u32) -> Result<(), Failure> {
        while count > 0 {
            if self.used == MAX_RANGES || self.tokens == MAX_FRAGMENTS {
                self.flush()?;
            }
            let now = count.min(MAX_FRAGMENTS - self.tokens);
            self.ranges[self.used] = TokenRange { start, count: now };
            (self.used, self.tokens) = (self.used + 1, self.tokens + now);
            (start, count) = (start.wrapping_add(now), count - now);
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Failure> {
        let ranges = &self.ranges[..self.used];
        self.freed += self.returner.return_tokens(ranges).map_err(|why| Failure::Argument(why.to_string()))?;
        (self.used, self.tokens) = (0, 0);
        Ok(())
    }
}

/// Returns the pages of `n` extents, of one stream. On any thread, also while the stream receives and
/// while other threads return. `returned` gets how many pages were; it may be null. Extents in host
/// memory are left out. Tokens that the stream does not hold are ignored, and counted by
/// netmem_devmem_stream_get_stats: those of another stream, and those that were returned before. The
/// variables stay as they are: do not pass an extent twice.
///
/// If the peer's window was closed for want of pages, the stack is woken to open it. A lock of the
/// stack's returning threads for each 16 pages: return many at once.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_ARGUMENT (an extent with more tokens than
/// 64 KiB have pages). Then none was returned.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_devmem_return(
    returner: *const netmem_devmem_returner,
    extents: *const netmem_devmem_extent,
    n: usize,
    returned: *mut usize,
) -> netmem_status {
    const MOST: u32 = 64 << 10;
    status(|| {
        let extents = NonNull::new(extents.cast_mut()).ok_or_else(|| Failure::null("extents"))?;
        // SAFETY: as the header says.
        let returner = unsafe { handle::get(returner) }?;
        // SAFETY: the caller has `n` of them there.
        let extents = unsafe { std::slice::from_raw_parts(extents.as_ptr(), n) };
        let of_device = || extents.iter().filter(|extent| extent.memory != 0);
        // Each page of an extent has at least a byte of it.
        if let Some(extent) = of_device().find(|extent| extent.tokens > MOST) {
            return Err(Failure::Argument(format!("an extent with {} tokens", extent.tokens)));
        }
        let mut groups = Groups::new(returner);
        for extent in of_device() {
            groups.add(extent.token, extent.tokens)?;
        }
        groups.flush()?;
        if let Some(returned) = NonNull::new(returned) {
            // SAFETY: the caller has room for it there.
            unsafe { returned.write(groups.freed) };
        }
        Ok(())
    })
}

/// Closes the handle. With the last handle of a stream, its own and those that return, the tokens
/// that it still holds are returned. Any thread.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_devmem_returner_close(returner: *mut netmem_devmem_returner) -> netmem_status {
    // SAFETY: as the header says.
    status(|| unsafe { handle::close(returner) }.map(drop))
}
