//! A stream whose payload is in device memory: receiving extents with tokens, sending ranges.
//!
//! A page can be delivered in several fragments, and a segment covers several pages. A user should
//! handle neither: it receives extents, as long as bytes, pages and tokens continue.

use super::account::{Account, DeliveredTokens, StreamReturner, TokenTableHandle};
use super::payload::{OnDevice, ReceivedChunk, ReceivedIn, SentChunk};
use super::range::{Completions, SendRange, Sent};
use super::streams::Streams;
use crate::binding::{BindingCount, BindingRef};
use crate::bound_frag::BoundFrag;
use crate::tokens::{DeliverError, Owned, Pages, Place, TokenRange};
use netmem_inet::tcp::Held;
use netmem_inet::{Fragment, Payload, SocketError, TcpStream};
use netmem_pool::{Frag, MapError, PeerMemory, PeerShared};
use netmem_refs::{PercpuRef, Ref};
use std::fmt;
use std::mem;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll};
use thiserror::Error;

/// The largest number of bytes in an extent.
const EXTENT: u32 = 64 << 10;
/// After this number of consecutive segments that the device has not verified, the stream returns
/// an error to the user. Fewer segments may simply be damaged.
const UNVERIFIED: u64 = 3;
/// The counts of the pages of this number of queued pieces are prefetched. The CPU that returned
/// the tokens wrote their cache lines last, so each line is a cache miss. The misses overlap.
const AHEAD: usize = 16;
/// After this number of received pieces, further counts are prefetched.
const STEP: usize = AHEAD / 2;

/// Received payload, or an empty entry for it.
#[derive(Debug, Default)]
pub enum StreamFragment<M: PeerMemory = PeerShared> {
    /// Nothing was received in this entry.
    #[default]
    Empty,
    /// An extent: consecutive bytes in device memory, at most 64 KiB.
    Device {
        /// The binding's id.
        binding: u64,
        /// The offset of the first byte in the binding.
        offset: u64,
        /// The length in bytes.
        len: u32,
        /// The tokens of the pages of the extent, one for each page. Return each of them once by a
        /// [`StreamReturner`].
        tokens: TokenRange,
    },
    /// Bytes that the device wrote to host memory. Dropping the fragment returns its page.
    Linear(Fragment<M>),
}

/// The reason why nothing was received.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum StreamError {
    /// [`SocketError::WouldBlock`]: no payload is queued. [`SocketError::Closed`]: the connection
    /// has ended, and the reason.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// No token can be assigned to the next page. Its payload stays queued.
    #[error("a fragment cannot be received now")]
    Token(#[from] DeliverError),
    /// The device does not verify the checksums of the peer's segments, so they are dropped and not
    /// acknowledged. The stream returns this error once. The connection continues. It receives
    /// again when the device verifies a later segment.
    #[error(
        "the device has verified none of the last {frames} segments from {peer}: their payload cannot be checked here, and is dropped; \
         have the peer or its device compute checksums, or receive into host memory"
    )]
    Unverified {
        /// The peer's address.
        peer: SocketAddr,
        /// The number of segments that were dropped since the last segment that the device has
        /// verified.
        frames: u64,
    },
}

/// The reason why a range of device memory was not sent. The stream has kept no reference to the
/// binding.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StreamSendError {
    /// [`SocketError::WouldBlock`]: the send buffer is full. [`SocketError::ShutDown`],
    /// [`SocketError::Closed`].
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The binding was unbound and sends no new ranges.
    #[error("binding {binding} was unbound: what was sent before drains, and nothing new is sent from it")]
    Unbound {
        /// The binding's id.
        binding: u64,
    },
    /// The range is not in the binding, or it is empty or too long for one call.
    #[error(
        "{len} bytes at {offset} are not in binding {binding}, which has {have}; a range has from 1 byte to 1 GiB less one"
    )]
    Range {
        /// The binding's id.
        binding: u64,
        /// The offset of the range in the binding.
        offset: u64,
        /// The length of the range in bytes.
        len: u32,
        /// The number of bytes in the binding.
        have: u64,
    },
    /// The device does not know the binding's memory.
    #[error("the binding cannot be sent from by this device: put its region into the device's memory table first")]
    Map(#[from] MapError),
    /// The peer is this host. There is no device on the path that could read the memory.
    #[error("the peer is this host, and device memory is only sent by a device")]
    Here,
}

/// Counters of a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StreamStats {
    /// Pages of device memory that were received: pieces of payload, each in one page.
    pub pages: u64,
    /// Bytes that were received in device memory.
    pub device_bytes: u64,
    /// Bytes that were received in host memory.
    pub linear_bytes: u64,
    /// The number of tokens that the user holds.
    pub out: u32,
    /// Returns that were ignored because the token is not of a binding that the stack's streams
    /// hold.
    pub foreign: u64,
    /// Returns that were ignored because the stream does not hold the page: it was returned as
    /// often as received, never received, or belongs to another stream.
    pub excess: u64,
    /// Segments that were dropped because the device had not verified them, since the last segment
    /// with accepted payload.
    pub unverified: u64,
}

/// A TCP connection whose payload is in device memory. This process neither reads nor writes the
/// payload.
///
/// A stream has one receiver, which is this value, on the stack's thread. [`StreamReturner`]s
/// return tokens on any thread. A page is counted in the budgets of the connection and of the stack
/// until its token is returned. Calls do not wait: see [`TcpStream`].
///
/// Dropping this value closes the connection, and the pages of payload that was not delivered are
/// returned to their pools. When the last handle is dropped, this value or a returner, all tokens
/// that were not returned are returned.
pub struct DeviceStream<C: BindingCount = PercpuRef, M: PeerMemory = PeerShared> {
    tcp: TcpStream<OnDevice<C, M>>,
    streams: Streams<C, M>,
    account: Arc<Account<C>>,
    delivered: DeliveredTokens,
    completions: Arc<Completions<C>>,
    /// The number of queued pieces, from the first on, whose counts were prefetched.
    ahead: usize,
    /// The number of ranges that were queued by `send`.
    ranges: u64,
    /// Whether the stream has returned the error that the device does not verify the peer's
    /// segments.
    reported: bool,
    pages: u64,
    device_bytes: u64,
    linear_bytes: u64,
}

/// The decision on the next piece of payload.
enum Next {
    /// It stays queued because `out` has no entry for it, or there is no piece.
    Nothing,
    /// It is in host memory, and is put into the next entry.
    Linear,
    /// It has this token. If `on` is true it extends the last extent; otherwise it is put into the
    /// next entry.
    Device { token: u32, on: bool, place: Option<Place<Owned>> },
    /// No token can be assigned to it.
    Refused(DeliverError),
}

impl<C: BindingCount, M: PeerMemory> DeviceStream<C, M> {
    pub(super) fn new(tcp: TcpStream<OnDevice<C, M>>, streams: &Streams<C, M>) -> Result<Self, SocketError> {
        let account = streams.table.open(tcp.budget().ok_or(SocketError::StackGone)?);
        let completions = Arc::new(Completions::new(streams.context.clone()));
        let (streams, delivered, ranges, reported) = (streams.clone(), DeliveredTokens::new(), 0, false);
        let (pages, device_bytes, linear_bytes) = (0, 0, 0);
        Ok(Self {
            tcp,
            streams,
            account,
            delivered,
            completions,
            ahead: 0,
            ranges,
            reported,
            pages,
            device_bytes,
            linear_bytes,
        })
    }

    /// Returns a handle that returns tokens, on any thread.
    #[must_use]
    pub fn returner(&self) -> StreamReturner<C> {
        StreamReturner::new(self.account.clone())
    }

    /// Receives queued payload into the entries of `out`, from the front. Returns how many entries
    /// were filled; 0 means that the peer sends no more. Consecutive bytes in consecutive pages are
    /// one extent.
    ///
    /// If `out` has no entry for a piece, the piece stays queued without a token, and the next call
    /// receives it. Costs a store for each page.
    ///
    /// # Errors
    ///
    /// [`StreamError`]. No payload is lost.
    pub fn recv(&mut self, out: &mut [StreamFragment<M>]) -> Result<usize, StreamError> {
        self.receive(out, true)
    }

    /// Receives as [`recv`](Self::recv) does, but without tokens. Measurements of other kinds of
    /// tokens use this. The field `tokens` has the indexes of the pages. The caller owns the counts
    /// of the pages, and ends them by [`Pages::put`] of the binding and
    /// [`StreamReturner::return_bare`].
    ///
    /// # Errors
    ///
    /// Those of [`recv`](Self::recv).
    #[cfg(feature = "bench")]
    pub fn recv_bare(&mut self, out: &mut [StreamFragment<M>]) -> Result<usize, StreamError> {
        self.receive(out, false)
    }

    fn receive(&mut self, out: &mut [StreamFragment<M>], tokens: bool) -> Result<usize, StreamError> {
        let (mut filled, mut pages, mut pieces) = (0, 0, 0usize);
        let why = loop {
            if tokens && pieces.is_multiple_of(STEP) {
                self.prefetch();
            }
            let mut next = Next::Nothing;
            let (last, room) = (out[..filled].last(), filled < out.len());
            let (table, holder) = (&self.streams.table, self.account.number());
            let taken = self.tcp.recv_chunk(|piece| {
                next = match &piece.0 {
                    ReceivedIn::Host(_) if room => Next::Linear,
                    ReceivedIn::Device(bound) => next_in_device(table, holder, bound, last, room, tokens),
                    ReceivedIn::Host(_) => Next::Nothing,
                };
                matches!(next, Next::Linear | Next::Device { .. })
            });
            let held = match taken {
                Ok(Some(held)) => held,
                Ok(None) => break None,
                Err(error) => {
                    break Some(match next {
                        Next::Refused(error) => error.into(),
                        _ => StreamError::Socket(error),
                    });
                }
            };
            (pieces, self.ahead) = (pieces + 1, self.ahead.saturating_sub(1));
            let (ReceivedChunk(piece), charge) = held.into_parts();
            match (piece, next) {
                (ReceivedIn::Host(frag), _) => {
                    self.linear_bytes += frag.len() as u64;
                    out[filled] = StreamFragment::Linear(Held::new(frag, charge).into());
                    filled += 1;
                }
                (ReceivedIn::Device(bound), Next::Device { token, on, place }) => {
                    let (binding, offset, len) = (bound.binding().id(), bound.offset(), bound.len());
                    pages += 1;
                    self.device_bytes += u64::from(len);
                    // The table owns the page's count from here on, and the account the charge.
                    bound.into_count();
                    charge.detach();
                    if let Some(place) = place {
                        // SAFETY: the receiver forgets the block only when it looks up another
                        // page.
                        unsafe { place.block.as_ref() }.deliver(place.at, holder);
                        self.delivered.push(token, &self.account);
                    }
                    if on && let Some(StreamFragment::Device { len: all, tokens, .. }) = out[..filled].last_mut() {
                        *all += len;
                        tokens.count += 1;
                    } else {
                        let tokens = TokenRange { start: token, count: 1 };
                        out[filled] = StreamFragment::Device { binding, offset, len, tokens };
                        filled += 1;
                    }
                }
                // The closure above accepts no other chunks.
                (ReceivedIn::Device(_), _) => {}
            }
        };
        self.pages += u64::from(pages);
        if tokens && pages > 0 {
            self.account.received(pages);
        }
        let Some(why) = why.filter(|_| filled == 0) else { return Ok(filled) };
        if why == StreamError::Socket(SocketError::WouldBlock) {
            self.report_unverified()?;
        }
        Err(why)
    }

    /// Prefetches the counts of the pages of queued pieces.
    #[inline]
    fn prefetch(&mut self) {
        let receiver = self.streams.table.receiver.borrow();
        self.ahead += self.tcp.peek_queued(self.ahead..AHEAD, |piece| {
            if let ReceivedIn::Device(bound) = &piece.0 {
                receiver.prefetch(bound.binding(), bound.index());
            }
        });
    }

    /// Returns the error once if the device does not verify the peer's segments.
    fn report_unverified(&mut self) -> Result<(), StreamError> {
        let frames = self.tcp.unverified();
        let report = frames >= UNVERIFIED && !mem::replace(&mut self.reported, frames >= UNVERIFIED);
        if report { Err(StreamError::Unverified { peer: self.tcp.peer_addr(), frames }) } else { Ok(()) }
    }

    /// Like [`recv`](Self::recv); if nothing is queued, the waker is called when there is payload
    /// to receive.
    ///
    /// # Errors
    ///
    /// Those of [`recv`](Self::recv).
    pub fn poll_recv(
        &mut self,
        cx: &mut TaskContext<'_>,
        out: &mut [StreamFragment<M>],
    ) -> Poll<Result<usize, StreamError>> {
        match self.recv(out) {
            Err(StreamError::Socket(SocketError::WouldBlock)) => {
                self.tcp.register_reader(cx);
                Poll::Pending
            }
            outcome => Poll::Ready(outcome),
        }
    }

    /// Sends the `len` bytes of a binding from `offset` on, without copying them. Returns the
    /// range's number. [`sent`](Self::sent) returns the same number when the range may be used
    /// again. Until then the device may read the range, so its bytes must not change. If the send
    /// buffer has room for one byte, it accepts a range of any length.
    ///
    /// `more` announces that the user sends more soon, so that a segment that is not full may wait
    /// for it.
    ///
    /// # Errors
    ///
    /// [`StreamSendError`].
    pub fn send(&mut self, from: &BindingRef<C>, offset: u64, len: u32, more: bool) -> Result<u64, StreamSendError> {
        let (binding, have) = (from.id(), from.region().len() as u64);
        if len == 0 || len >= 1 << 30 || offset > have || u64::from(len) > have - offset {
            return Err(StreamSendError::Range { binding, offset, len, have });
        }
        if self.tcp.is_loopback() {
            return Err(StreamSendError::Here);
        }
        let live = Ref::try_get_live(from).map_err(|_| StreamSendError::Unbound { binding })?;
        self.streams.context.map(from)?;
        let range = Arc::new(SendRange::new(self.ranges, live, offset, len, &self.completions));
        match self.tcp.send_chunk(SentChunk::of(range), more) {
            Ok(()) => {
                self.ranges += 1;
                Ok(self.ranges - 1)
            }
            Err((error, part)) => {
                part.cancel();
                Err(error.into())
            }
        }
    }

    /// Sends a fragment of host memory between ranges of device memory. Its page must be in the
    /// device's DMA domain.
    ///
    /// # Errors
    ///
    /// Those of [`TcpStream::send`]. The error returns the fragment.
    pub fn send_host(&mut self, fragment: Frag<M>, more: bool) -> Result<(), (SocketError, Frag<M>)> {
        match self.tcp.send_chunk(OnDevice::from_host(fragment), more) {
            Err((error, part)) => match part.into_host() {
                Some(fragment) => Err((error, fragment)),
                // The returned part is the fragment that was passed in.
                None => Ok(()),
            },
            Ok(()) => Ok(()),
        }
    }

    /// Copies bytes into host pages and sends them, as [`TcpStream::write`] does. An application
    /// uses this for its own headers between ranges of device memory.
    ///
    /// # Errors
    ///
    /// Those of [`TcpStream::write`].
    pub fn write(&mut self, bytes: &[u8]) -> Result<usize, SocketError> {
        self.tcp.write(bytes)
    }

    /// Returns the next range that may be used again. The peer has acknowledged it or the
    /// connection has ended, and the device is done with each of its transmissions.
    pub fn sent(&mut self) -> Option<Sent> {
        self.completions.pop()
    }

    /// Like [`sent`](Self::sent); if there is no such range, the waker is called when there is one.
    pub fn poll_sent(&mut self, cx: &mut TaskContext<'_>) -> Poll<Sent> {
        self.completions.wait(cx.waker().clone());
        self.sent().map_or(Poll::Pending, Poll::Ready)
    }

    /// The TCP connection, for calls that do not concern payload.
    #[must_use]
    pub fn tcp(&self) -> &TcpStream<OnDevice<C, M>> {
        &self.tcp
    }

    /// The TCP connection, for calls that do not concern payload.
    pub fn tcp_mut(&mut self) -> &mut TcpStream<OnDevice<C, M>> {
        &mut self.tcp
    }

    /// Resets the connection. Bytes that were sent and not acknowledged are lost.
    pub fn abort(mut self) {
        self.tcp.reset();
    }

    /// The counters of the stream.
    #[must_use]
    pub fn stats(&self) -> StreamStats {
        let account = self.account.stats();
        StreamStats {
            pages: self.pages,
            device_bytes: self.device_bytes,
            linear_bytes: self.linear_bytes,
            out: account.out,
            foreign: account.foreign,
            excess: account.excess,
            unverified: self.tcp.unverified(),
        }
    }
}

/// Decides where a piece in device memory is put. Looks up the piece's token, and changes no count.
#[inline]
fn next_in_device<C: BindingCount, M: PeerMemory>(
    table: &TokenTableHandle<C>,
    holder: u32,
    bound: &BoundFrag<C>,
    last: Option<&StreamFragment<M>>,
    room: bool,
    tokens: bool,
) -> Next {
    let index = bound.index();
    let (token, place) = if tokens {
        match table.receiver.borrow_mut().find(bound.binding(), index, true) {
            Ok(place) => (place.token().0, Some(place)),
            Err(error) => return Next::Refused(error),
        }
    } else {
        (index, None)
    };
    let on = match last {
        Some(StreamFragment::Device { binding, offset, len, tokens }) => {
            *binding == bound.binding().id()
                && offset + u64::from(*len) == bound.offset()
                && tokens.start.checked_add(tokens.count) == Some(token)
                && len.checked_add(bound.len()).is_some_and(|len| len <= EXTENT)
        }
        _ => false,
    };
    if !on && !room {
        return Next::Nothing;
    }
    // SAFETY: no other page was looked up since.
    if place.as_ref().is_some_and(|place| !unsafe { place.block.as_ref() }.accepts(place.at, holder)) {
        return Next::Refused(DeliverError::Held { binding: bound.binding().id(), index });
    }
    Next::Device { token, on, place }
}

impl<C: BindingCount, M: PeerMemory> Drop for DeviceStream<C, M> {
    fn drop(&mut self) {
        self.account.leave(&mut self.delivered);
    }
}

impl<C: BindingCount, M: PeerMemory> fmt::Debug for DeviceStream<C, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceStream({} - {}, {:?})", self.tcp.local_addr(), self.tcp.peer_addr(), self.stats())
    }
}
