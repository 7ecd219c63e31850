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

/// Calls `group` with the tokens of extents, as many at a time as one call of the library of Rust
/// accepts.
fn in_groups(
    extents: &[netmem_devmem_extent],
    mut group: impl FnMut(&[TokenRange]) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut ranges = [TokenRange { start: 0, count: 0 }; MAX_RANGES];
    let (mut used, mut room) = (0, MAX_FRAGMENTS);
    for extent in extents.iter().filter(|extent| extent.memory != 0) {
        let (mut start, mut left) = (extent.token, extent.tokens);
        while left > 0 {
            let count = left.min(room);
            ranges[used] = TokenRange { start, count };
            (start, left) = (start.wrapping_add(count), left - count);
            (used, room) = (used + 1, room - count);
            if used == MAX_RANGES || room == 0 {
                group(&ranges[..used])?;
                (used, room) = (0, MAX_FRAGMENTS);
            }
        }
    }
    if used == 0 { Ok(()) } else { group(&ranges[..used]) }
}

/// Returns the pages of `n` extents, of one stream. On any thread, also while the stream receives
/// and while other threads return. `returned` gets how many pages were; it may be null. Extents in
/// host memory are left out. Tokens that the stream does not hold are ignored, and counted by
/// netmem_devmem_stream_get_stats: those of another stream, and those that were returned before.
///
/// The variables stay as they are: do not pass an extent twice. If the stream has received into its
/// pages again in between, the second call returns these later pages, and the device writes to them
/// while the program reads them.
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
        // Each page of an extent has at least a byte of it.
        if let Some(extent) = extents.iter().find(|extent| extent.tokens > MOST) {
            return Err(Failure::Argument(format!("an extent with {} tokens", extent.tokens)));
        }
        let mut freed = 0;
        in_groups(extents, |ranges| {
            freed += returner.return_tokens(ranges).map_err(|why| Failure::Argument(why.to_string()))?;
            Ok(())
        })?;
        if let Some(returned) = NonNull::new(returned) {
            // SAFETY: the caller has room for it there.
            unsafe { returned.write(freed) };
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Every token is in one group, and no group is larger than a call accepts.
    #[test]
    fn tokens_are_returned_in_groups_that_a_call_accepts() {
        let extent = |token, tokens| netmem_devmem_extent { memory: 1, token, tokens, ..Default::default() };
        let host = netmem_devmem_extent { length: 7, ..Default::default() };
        let single: Vec<_> = (1..1000).map(|token| extent(token, 1)).collect();
        let long: Vec<_> = (0..100).map(|n| extent(1 + 44 * n, 44)).chain([host, extent(4401, 5000)]).collect();
        for (extents, end) in [(&single[..], 1000), (&long[..], 9401), (&[][..], 1)] {
            let (mut tokens, mut calls) = (Vec::new(), 0);
            let done = in_groups(extents, |ranges| {
                assert!(!ranges.is_empty() && ranges.len() <= MAX_RANGES);
                assert!(ranges.iter().map(|range| range.count).sum::<u32>() <= MAX_FRAGMENTS);
                tokens.extend(ranges.iter().flat_map(|range| range.start..range.start + range.count));
                calls += 1;
                Ok(())
            });
            assert!(done.is_ok() && tokens.into_iter().eq(1..end), "{calls} calls");
        }
    }
}
