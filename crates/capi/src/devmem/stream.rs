//! Listeners and streams: what is received as extents with tokens, and what is sent as ranges.

use super::create_here;
use super::memory::netmem_devmem;
use super::returner::{netmem_devmem_returner, returner};
use crate::handle::{self, Kind};
use crate::options::{self, Versioned};
use crate::owned::{self, Owned};
use crate::status::{Failure, netmem_status, status};
use ::netmem_devmem::stream::{DeviceListener, DeviceStream, StreamError, StreamFragment, StreamSendError};
use netmem_inet::{Fragment, SocketError};
use netmem_pool::PeerShared;
use std::collections::VecDeque;
use std::ffi::c_void;
use std::ptr::NonNull;

/// A port on which a stack listens.
#[derive(Debug)]
pub struct netmem_devmem_listener(());

impl Kind for netmem_devmem_listener {
    type Value = DeviceListener;
    const NAME: &'static str = "netmem_devmem_listener";
    const NUMBER: u64 = 0x6e65_746d_656d_0032;
}

impl Owned for netmem_devmem_listener {}

pub(super) fn listener(listens: DeviceListener) -> *mut netmem_devmem_listener {
    create_here(listens)
}

/// A TCP connection whose received payload is in device memory.
#[derive(Debug)]
pub struct netmem_devmem_stream(());

impl Kind for netmem_devmem_stream {
    type Value = Connected;
    const NAME: &'static str = "netmem_devmem_stream";
    const NUMBER: u64 = 0x6e65_746d_656d_0033;
}

impl Owned for netmem_devmem_stream {}

/// A stream, and payload in host memory that was received and not read.
pub(crate) struct Connected {
    stream: DeviceStream,
    host: VecDeque<Fragment<PeerShared>>,
    /// The error that the last call found behind payload, and the stream does not report again.
    pending: Option<StreamError>,
}

pub(super) fn stream(stream: DeviceStream) -> *mut netmem_devmem_stream {
    create_here(Connected { stream, host: VecDeque::new(), pending: None })
}

/// Received payload: consecutive bytes in consecutive pages of device memory, or bytes in host
/// memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct netmem_devmem_extent {
    /// `id` of the memory (netmem_devmem_get_stats); 0: the bytes are in host memory, and
    /// netmem_devmem_stream_read copies them.
    pub memory: u64,
    /// The first byte's offset in the memory.
    pub offset: u64,
    /// Bytes, at most 64 KiB.
    pub length: u32,
    /// The token of its first page. The pages behind it have the next ones.
    pub token: u32,
    /// Its tokens, one for each page. Pass the extent to netmem_devmem_return once: the token of a
    /// page is the same each time that the page is received into.
    pub tokens: u32,
    /// Zero.
    pub reserved: u32,
}

/// Accepts a connection; `stream` gets null if none waits.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_CLOSED (the stack was
/// closed).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_devmem_accept(
    from: *mut netmem_devmem_listener,
    made: *mut *mut netmem_devmem_stream,
) -> netmem_status {
    status(|| {
        let out = NonNull::new(made).ok_or_else(|| Failure::null("made"))?;
        // SAFETY: as the header says.
        let accepted = match unsafe { owned::get_mut(from) }?.accept() {
            Ok(accepted) => stream(accepted),
            Err(SocketError::WouldBlock) => std::ptr::null_mut(),
            Err(error) => return Err(error.into()),
        };
        // SAFETY: the caller has room for a pointer there.
        unsafe { out.write(accepted) };
        Ok(())
    })
}

/// Closes the listener. Connections that were not accepted are reset.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_devmem_listener_close(listener: *mut netmem_devmem_listener) -> netmem_status {
    // SAFETY: as the header says.
    status(|| unsafe { owned::close(listener) }.map(drop))
}

/// Receives up to `n` extents, in order, and writes how many to `received`: 0 if nothing waits.
/// `ended` gets whether the peer sends no more, and all was received. It may be null.
///
/// The pages are the program's until it returns the tokens, and count against what the stack may
/// hold: the peer's window closes when it holds too many. A store for each page.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD; after all that was received
/// NETMEM_ERR_REFUSED, NETMEM_ERR_RESET, NETMEM_ERR_TIMED_OUT, NETMEM_ERR_UNREACHABLE,
/// NETMEM_ERR_STOPPED (the device is gone), NETMEM_ERR_CLOSED; NETMEM_ERR_UNVERIFIED (once; the
/// connection goes on), NETMEM_ERR_NO_MEMORY, NETMEM_ERR_BUSY (another stream holds the page:
/// return its tokens). No payload is lost.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_devmem_stream_receive(
    stream: *mut netmem_devmem_stream,
    extents: *mut netmem_devmem_extent,
    n: usize,
    received: *mut usize,
    ended: *mut bool,
) -> netmem_status {
    status(|| {
        let out = NonNull::new(extents).ok_or_else(|| Failure::null("extents"))?;
        let count = NonNull::new(received).ok_or_else(|| Failure::null("received"))?;
        // SAFETY: as the header says.
        let this = unsafe { owned::get_mut(stream) }?;
        let Connected { stream, host, pending } = this;
        let receive = |places: &mut [StreamFragment]| stream.recv(places);
        let (done, at_end) = gather(n, pending, receive, |at, place| {
            // SAFETY: the caller has room for `n` of them, and `at` is below.
            unsafe { out.add(at).write(extent(host, place)) };
        })?;
        // SAFETY: the caller has room for both there.
        unsafe {
            count.write(done);
            if let Some(ended) = NonNull::new(ended) {
                ended.write(at_end);
            }
        }
        Ok(())
    })
}

/// Receives up to `n` fragments by calls of `receive`, and passes each with its number to `put`.
/// Returns how many there were, and whether the peer sends no more.
///
/// A stream reports [`StreamError::Unverified`] once. Behind received fragments it is kept in
/// `pending`, and the next call returns it. Other errors are found again by the next call.
fn gather(
    n: usize,
    pending: &mut Option<StreamError>,
    mut receive: impl FnMut(&mut [StreamFragment]) -> Result<usize, StreamError>,
    mut put: impl FnMut(usize, StreamFragment),
) -> Result<(usize, bool), StreamError> {
    if let Some(error) = pending.take() {
        return Err(error);
    }
    let (mut done, mut at_end) = (0, false);
    while done < n {
        let mut places = [const { StreamFragment::Empty }; 16];
        let room = places.len().min(n - done);
        let filled = match receive(&mut places[..room]) {
            Ok(filled) => filled,
            Err(StreamError::Socket(SocketError::WouldBlock)) => break,
            Err(error) if done > 0 => {
                *pending = Some(error).filter(|error| matches!(error, StreamError::Unverified { .. }));
                break;
            }
            Err(error) => return Err(error),
        };
        at_end = filled == 0;
        for place in places.into_iter().take(filled) {
            put(done, place);
            done += 1;
        }
        if filled < room {
            break;
        }
    }
    Ok((done, at_end))
}

/// The extent of a received fragment. One in host memory is kept in `host` until it is read.
fn extent(host: &mut VecDeque<Fragment<PeerShared>>, place: StreamFragment) -> netmem_devmem_extent {
    match place {
        StreamFragment::Device { binding, offset, len, tokens } => netmem_devmem_extent {
            memory: binding,
            offset,
            length: len,
            token: tokens.start,
            tokens: tokens.count,
            reserved: 0,
        },
        StreamFragment::Linear(fragment) => {
            // A fragment is in one page.
            let length = fragment.len() as u32;
            host.push_back(fragment);
            netmem_devmem_extent { length, ..Default::default() }
        }
        StreamFragment::Empty => netmem_devmem_extent::default(),
    }
}

impl Connected {
    /// Copies bytes of the fragments in host memory, and drops what was copied.
    fn read(&mut self, to: &mut [u8]) -> Result<usize, Failure> {
        let mut done = 0;
        while done < to.len()
            && let Some(fragment) = self.host.front_mut()
        {
            let n = fragment.len().min(to.len() - done);
            fragment.copy_to(0, &mut to[done..done + n]).map_err(|why| Failure::Argument(why.to_string()))?;
            fragment.advance(n);
            if fragment.is_empty() {
                self.host.pop_front();
            }
            done += n;
        }
        Ok(done)
    }
}

/// Copies bytes of received extents that are in host memory, in their order, and releases them.
/// They are there if the device does not split frames behind the headers exactly. `done` gets how
/// many were copied, less than `length` if there are no more.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_devmem_stream_read(
    stream: *mut netmem_devmem_stream,
    to: *mut c_void,
    length: usize,
    done: *mut usize,
) -> netmem_status {
    status(|| {
        let to = NonNull::new(to.cast::<u8>()).ok_or_else(|| Failure::null("to"))?;
        let count = NonNull::new(done).ok_or_else(|| Failure::null("done"))?;
        // SAFETY: as the header says.
        let this = unsafe { owned::get_mut(stream) }?;
        let length = length.min(this.host.iter().map(|fragment| fragment.len()).sum());
        // SAFETY: the caller has room for so many bytes there.
        unsafe { to.write_bytes(0, length) };
        // SAFETY: as above, and they are initialised.
        let copied = this.read(unsafe { std::slice::from_raw_parts_mut(to.as_ptr(), length) })?;
        // SAFETY: the caller has room for it there.
        unsafe { count.write(copied) };
        Ok(())
    })
}

/// Sends `length` bytes of device memory from `offset` on, of any length below 1 GiB, without a
/// copy in this process. They must not change until netmem_devmem_stream_sent reports the range.
/// `more`: the next range follows soon, and a segment may wait for it. `accepted` gets false if the
/// send buffer is full; poll the stack, and try again.
///
/// Ranges are numbered from 0 on, in the order in which the stream has accepted them.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_RANGE (also a length
/// of 0), NETMEM_ERR_SHUT_DOWN, those of a connection that has ended
/// (netmem_devmem_stream_receive), NETMEM_ERR_UNSUPPORTED (the device does not have this memory, or
/// the peer is this host).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_devmem_stream_send(
    stream: *mut netmem_devmem_stream,
    memory: *const netmem_devmem,
    offset: u64,
    length: u32,
    more: bool,
    accepted: *mut bool,
) -> netmem_status {
    status(|| {
        let out = NonNull::new(accepted).ok_or_else(|| Failure::null("accepted"))?;
        // SAFETY: as the header says.
        let (this, memory) = unsafe { (owned::get_mut(stream)?, handle::get(memory)?) };
        let done = match this.stream.send(memory.binding.as_ref(), offset, length, more) {
            Ok(_) => true,
            Err(StreamSendError::Socket(SocketError::WouldBlock)) => false,
            Err(error) => return Err(error.into()),
        };
        // SAFETY: the caller has room for it there.
        unsafe { out.write(done) };
        Ok(())
    })
}

/// How many ranges of netmem_devmem_stream_send may be used again, of those that no call has
/// reported: the peer has acknowledged them or the connection has ended, and the device reads them
/// no more. Up to `n` of their numbers are written to `ranges`, and their number to `done`.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_devmem_stream_sent(
    stream: *mut netmem_devmem_stream,
    ranges: *mut u64,
    n: usize,
    done: *mut usize,
) -> netmem_status {
    status(|| {
        let out = NonNull::new(ranges).ok_or_else(|| Failure::null("ranges"))?;
        let count = NonNull::new(done).ok_or_else(|| Failure::null("done"))?;
        // SAFETY: as the header says.
        let this = unsafe { owned::get_mut(stream) }?;
        let mut found = 0;
        while found < n
            && let Some(sent) = this.stream.sent()
        {
            // SAFETY: the caller has room for `n` of them.
            unsafe { out.add(found).write(sent.range) };
            found += 1;
        }
        // SAFETY: the caller has room for it there.
        unsafe { count.write(found) };
        Ok(())
    })
}

/// Copies bytes of the host and sends them, between ranges of device memory: headers of the
/// application's own. `done` gets how many were taken, 0 if the send buffer is full.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_SHUT_DOWN, those of a
/// connection that has ended (netmem_devmem_stream_receive).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_devmem_stream_write(
    stream: *mut netmem_devmem_stream,
    from: *const c_void,
    length: usize,
    done: *mut usize,
) -> netmem_status {
    status(|| {
        let from = NonNull::new(from.cast_mut().cast::<u8>()).ok_or_else(|| Failure::null("from"))?;
        let count = NonNull::new(done).ok_or_else(|| Failure::null("done"))?;
        // SAFETY: as the header says.
        let this = unsafe { owned::get_mut(stream) }?;
        // SAFETY: the caller has `length` readable bytes there.
        let taken = match this.stream.write(unsafe { std::slice::from_raw_parts(from.as_ptr(), length) }) {
            Ok(taken) => taken,
            Err(SocketError::WouldBlock) => 0,
            Err(error) => return Err(error.into()),
        };
        // SAFETY: the caller has room for it there.
        unsafe { count.write(taken) };
        Ok(())
    })
}

/// Sends no more: the peer learns it after what was sent. The stream still receives.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_devmem_stream_shutdown(stream: *mut netmem_devmem_stream) -> netmem_status {
    status(|| {
        // SAFETY: as the header says.
        unsafe { owned::get_mut(stream) }?.stream.tcp_mut().shutdown();
        Ok(())
    })
}

/// Makes a handle that returns the stream's tokens on any thread. It can outlive the stream. Close
/// it.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_devmem_returner_open(
    stream: *mut netmem_devmem_stream,
    made: *mut *mut netmem_devmem_returner,
) -> netmem_status {
    status(|| {
        let out = NonNull::new(made).ok_or_else(|| Failure::null("made"))?;
        // SAFETY: as the header says.
        let returns = unsafe { owned::get_mut(stream) }?.stream.returner();
        // SAFETY: the caller has room for a pointer there.
        unsafe { out.write(returner(returns)) };
        Ok(())
    })
}

/// What a stream received and holds. Set `size` to sizeof(netmem_devmem_stream_stats).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct netmem_devmem_stream_stats {
    /// sizeof(netmem_devmem_stream_stats)
    pub size: usize,
    /// pieces of payload received in device memory, each in one page
    pub pages: u64,
    /// bytes received in device memory
    pub device_bytes: u64,
    /// bytes received in host memory
    pub host_bytes: u64,
    /// tokens that the program holds
    pub held: u64,
    /// tokens returned that are in no memory of the stack's streams: ignored
    pub unknown_tokens: u64,
    /// tokens returned that the stream does not hold, such as one that was returned twice before
    /// its page was received into again: ignored
    pub excess_tokens: u64,
    /// segments dropped since the last that was received, because the device verified no checksum
    pub unverified: u64,
}

// SAFETY: repr(C), `size` is first, integers.
unsafe impl Versioned for netmem_devmem_stream_stats {
    const NAME: &'static str = "netmem_devmem_stream_stats";
    const LEAST: usize = 64;
}

/// Counts of the stream.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_devmem_stream_get_stats(
    stream: *mut netmem_devmem_stream,
    stats: *mut netmem_devmem_stream_stats,
) -> netmem_status {
    status(|| {
        // SAFETY: as the header says.
        let now = unsafe { owned::get_mut(stream) }?.stream.stats();
        let written = netmem_devmem_stream_stats {
            size: size_of::<netmem_devmem_stream_stats>(),
            pages: now.pages,
            device_bytes: now.device_bytes,
            host_bytes: now.linear_bytes,
            held: now.out.into(),
            unknown_tokens: now.foreign,
            excess_tokens: now.excess,
            unverified: now.unverified,
        };
        // SAFETY: as the header says.
        unsafe { options::write(stats, &written) }
    })
}

/// Closes the connection: what was sent is still delivered while the stack is polled. Payload that
/// was not received is dropped, and the peer learns it by a reset. Tokens that were not returned
/// are returned when the last returner is closed, too.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_devmem_stream_close(stream: *mut netmem_devmem_stream) -> netmem_status {
    // SAFETY: as the header says.
    status(|| unsafe { owned::close(stream) }.map(drop))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ::netmem_devmem::TokenRange;

    /// A stream reports an error once. A call that has received a group before keeps it for the
    /// next.
    #[test]
    fn an_error_behind_payload_is_of_the_next_call() {
        let unverified = || StreamError::Unverified { peer: ([192, 0, 2, 1], 9000).into(), frames: 3 };
        let mut answers = [Ok(16), Err(unverified())].into_iter();
        let would_block = || StreamError::Socket(SocketError::WouldBlock);
        let mut receive = |places: &mut [StreamFragment]| {
            let filled = answers.next().unwrap_or(Err(would_block()))?;
            for (at, place) in places.iter_mut().take(filled).enumerate() {
                let tokens = TokenRange { start: at as u32, count: 1 };
                *place = StreamFragment::Device { binding: 1, offset: 0, len: 1, tokens };
            }
            Ok(filled)
        };
        let (mut pending, mut tokens, mut host) = (None, Vec::new(), VecDeque::new());
        let put = |at, place| {
            assert_eq!(at, tokens.len());
            tokens.push(extent(&mut host, place).token);
        };
        assert_eq!(gather(64, &mut pending, &mut receive, put), Ok((16, false)));
        assert!(tokens.into_iter().eq(0..16));
        let nothing = |_, _| panic!("there is no payload");
        assert_eq!(gather(64, &mut pending, &mut receive, nothing), Err(unverified()));
        assert_eq!(gather(64, &mut pending, &mut receive, nothing), Ok((0, false)));
    }
}
