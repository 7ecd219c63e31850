//! Segmentation in software: a frame with [`Gso`] is cut into its segments.
//!
//! A stack sends up to 64 KiB as one frame, because its cost is per frame. A device without
//! segmentation offload transmits only frames of the MTU. So the frame is cut here, as late as
//! possible.
//!
//! ```text
//!   packet    │ headers │ payload ............ │ ................ │ ....... │   head, fragments
//!                         ├── size ──┼── size ──┼── size ──┼ rest ┤
//!   segment 0 │ headers'│ slice    │           headers': a page from the caller
//!   segment 1 │ headers'│ slice     slice │     slices: references to the packet's pages, no copy
//! ```
//!
//! | field | in each segment |
//! | --- | --- |
//! | IP length, UDP length | its own |
//! | IPv4 identification | one more than in the segment before |
//! | IPv4 header checksum | computed |
//! | TCP sequence number | `size` more than in the segment before |
//! | TCP FIN, PSH | in the last segment only |
//! | TCP CWR | in the first segment only: the sender reduced its window once |
//! | transport checksum | computed, or the sum of the pseudo header and [`Checksum::Partial`] |
//!
//! [`GsoKind::UdpFragment`] is cut into IPv4 fragments instead: the IP header is repeated, and the
//! UDP header is a part of the first fragment's payload. IPv6 fragments are not made.
//!
//! [`SegmentPlan`] has the headers of each segment, and the place of its payload.
//! [`Packet::segment`] uses it to make packets. If frames are slices, the caller cuts them by the
//! plan itself.

use super::checksum::{ChecksumError, Sum, sum};
use super::headers::{Headers, MAX_HEADERS, Transport, tcp, udp};
use crate::frags::{Frags, MAX_FRAGS};
use crate::meta::{Checksum, Gso, GsoKind, Meta};
use crate::packet::Packet;
use netmem_pool::{Frag, Mapped, Memory, OutOfRange, Page};
use std::ops::Range;
use std::{fmt, vec};

/// The most segments into which a frame is cut.
///
/// The virtio specification has no bound, and a peer could turn one frame of 64 KiB into 65,000
/// with a segment size of 1. 256 segments are a whole IP packet for an MTU of 296, which is the
/// smallest that links have. Linux sends at most 128 of UDP.
pub const MAX_SEGMENTS: usize = 256;

/// Bytes left free in front of each segment, for headers that a queue or a program puts there.
const HEADROOM: usize = 128;

/// Why a frame is not cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SegmentError {
    /// The frame has no [`Gso`].
    #[error("the frame is not one to be cut")]
    NoGso,
    /// The segment size is 0.
    #[error("segments of 0 bytes")]
    NoSize,
    /// There would be more than [`MAX_SEGMENTS`].
    #[error("{segments} segments of {size} bytes: a frame is cut into at most {MAX_SEGMENTS}")]
    TooMany {
        /// How many there would be.
        segments: usize,
        /// Bytes in each.
        size: u16,
    },
    /// The frame does not begin with the headers that its kind of segment has, or its headers are
    /// longer than 192 bytes.
    #[error("the headers are not those of {kind:?}, or are cut off")]
    Headers {
        /// The kind that the frame's [`Gso`] names.
        kind: GsoKind,
    },
    /// The partial checksum is not that of the transport header.
    #[error("the checksum to be computed begins at byte {start}, the transport header at byte {transport}")]
    ChecksumPlace {
        /// Where the checksum begins.
        start: u16,
        /// The offset of the transport header.
        transport: usize,
    },
    /// The checksum of a datagram that must be fragmented could not be computed.
    #[error(transparent)]
    Checksum(#[from] ChecksumError),
    /// A segment would have more fragments than a packet can.
    #[error("a segment would consist of more than {MAX_FRAGS} fragments")]
    TooManyFrags,
    /// There are not enough pages for the headers.
    #[error("{needed} pages are needed for headers, and there are {had}")]
    NoPages {
        /// Segments.
        needed: usize,
        /// Pages that there were.
        had: usize,
    },
}

/// A packet that was not cut, and why.
#[derive(thiserror::Error)]
#[error("{error}")]
pub struct NotSegmented<M: Memory> {
    /// The packet as it was. If it must be fragmented, its checksum may have been computed.
    pub packet: Packet<M>,
    /// Why.
    pub error: SegmentError,
}

impl<M: Memory> fmt::Debug for NotSegmented<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NotSegmented({:?})", self.error)
    }
}

/// How a frame is cut: the headers of each segment, and where its payload is.
///
/// The first bytes of the frame are copied and checked once. Later changes by a peer have no
/// effect.
///
/// ```
/// use netmem_packet::{Checksum, Gso, GsoKind, Meta, SegmentPlan};
/// # let mut frame = vec![0u8; 54 + 2500];
/// # frame[12..15].copy_from_slice(&[8, 0, 0x45]);
/// # (frame[23], frame[46]) = (6, 0x50);
///
/// // A TCP frame over IPv4 with 2500 bytes of payload.
/// let gso = Gso { kind: GsoKind::TcpV4, size: 1000, headers: 54, ecn: false };
/// let meta = Meta { checksum: Checksum::Partial { start: 34, offset: 16 }, gso: Some(gso) };
/// let mut plan = SegmentPlan::new(&frame, frame.len(), meta)?;
/// assert_eq!((plan.count(), plan.payload(2)), (3, 54 + 2000..54 + 2500));
/// assert_eq!(plan.headers(2)[16..18], (20 + 20 + 500_u16).to_be_bytes());
/// # Ok::<(), netmem_packet::SegmentError>(())
/// ```
#[derive(Clone)]
pub struct SegmentPlan {
    bytes: [u8; MAX_HEADERS],
    at: Headers,
    /// Bytes of `bytes` that each segment begins with.
    len: usize,
    /// Bytes of payload in each segment except the last.
    size: usize,
    /// Bytes in the frame.
    total: usize,
    /// Values of the frame's headers: identification, sequence number, TCP flags.
    id: u16,
    sequence: u32,
    flags: u8,
    fragments: bool,
}

impl SegmentPlan {
    /// The longest headers of a segment, in bytes. The plan parses so many of the frame's first
    /// bytes.
    pub const MAX_HEADERS: usize = MAX_HEADERS;

    /// A plan for a frame of `total` bytes, of which `head` holds the first ones: 192, or all.
    ///
    /// # Errors
    ///
    /// [`SegmentError`].
    pub fn new(head: &[u8], total: usize, meta: Meta) -> Result<Self, SegmentError> {
        let Some(Gso { kind, size, .. }) = meta.gso else { return Err(SegmentError::NoGso) };
        let head = &head[..head.len().min(MAX_HEADERS).min(total)];
        let wrong = SegmentError::Headers { kind };
        let at = Headers::parse(head).ok_or(wrong)?;
        let fits = match kind {
            GsoKind::TcpV4 => !at.v6 && at.transport == Transport::Tcp,
            GsoKind::TcpV6 => at.v6 && at.transport == Transport::Tcp,
            GsoKind::UdpSegment => at.transport == Transport::Udp,
            GsoKind::UdpFragment => !at.v6 && at.transport == Transport::Udp,
        };
        if !fits {
            return Err(wrong);
        }
        if let Checksum::Partial { start, offset } = meta.checksum
            && (usize::from(start), usize::from(offset)) != (at.l4, at.transport.checksum())
        {
            return Err(SegmentError::ChecksumPlace { start, transport: at.l4 });
        }
        let fragments = kind == GsoKind::UdpFragment;
        // Offsets of fragments count 8 bytes.
        let bytes_each = if fragments { usize::from(size) & !7 } else { usize::from(size) };
        if bytes_each == 0 {
            return Err(SegmentError::NoSize);
        }
        let mut bytes = [0; MAX_HEADERS];
        bytes[..head.len()].copy_from_slice(head);
        let be16 = |at: usize| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
        let (id, (sequence, flags)) = (
            if at.v6 { 0 } else { be16(at.l3 + 4) },
            match at.transport {
                Transport::Tcp => {
                    let sequence = u32::from(be16(at.l4 + 4)) << 16 | u32::from(be16(at.l4 + 6));
                    (sequence, bytes[at.l4 + tcp::FLAGS])
                }
                Transport::Udp => (0, 0),
            },
        );
        let len = if fragments { at.l4 } else { at.payload };
        let plan = Self { bytes, at, len, size: bytes_each, total, id, sequence, flags, fragments };
        let segments = plan.count();
        if segments > MAX_SEGMENTS {
            return Err(SegmentError::TooMany { segments, size });
        }
        // A segment whose length the field of the IP header cannot hold. A frame of one segment is
        // not changed.
        if segments > 1 && len - at.l3 + bytes_each > usize::from(u16::MAX) {
            return Err(wrong);
        }
        Ok(plan)
    }

    /// How many segments there are, at least 1.
    #[inline]
    #[must_use]
    pub fn count(&self) -> usize {
        (self.total - self.len).div_ceil(self.size).max(1)
    }

    /// Where in the frame the payload of segment `n` is.
    ///
    /// # Panics
    ///
    /// If there is no such segment.
    #[inline]
    #[must_use]
    pub fn payload(&self, n: usize) -> Range<usize> {
        let start = self.len + n * self.size;
        assert!(start <= self.total, "segment {n} of {}", self.count());
        start..self.total.min(start + self.size)
    }

    /// The headers of segment `n`. In the place of the transport checksum is the sum of the pseudo
    /// header; see [`checksum`](Self::checksum) and [`complete`](Self::complete).
    ///
    /// # Panics
    ///
    /// If there is no such segment.
    pub fn headers(&mut self, n: usize) -> &[u8] {
        let payload = self.payload(n).len();
        let last = n + 1 == self.count();
        let Headers { l3, l4, v6, transport, .. } = self.at;
        let head = &mut self.bytes;
        if self.fragments {
            let more = if last { 0 } else { 0x2000 };
            // At most 64 KiB / 8.
            let offset = (n * self.size / 8) as u16;
            head[l3 + 6..l3 + 8].copy_from_slice(&(offset | more).to_be_bytes());
            self.at.write_length(head, self.len + payload);
            return &head[..self.len];
        }
        if !v6 {
            head[l3 + 4..l3 + 6].copy_from_slice(&self.id.wrapping_add(n as u16).to_be_bytes());
        }
        self.at.write_length(head, self.len + payload);
        match transport {
            Transport::Tcp => {
                let sequence = self.sequence.wrapping_add((n * self.size) as u32);
                head[l4 + 4..l4 + 8].copy_from_slice(&sequence.to_be_bytes());
                let not_here = if last { 0 } else { tcp::FIN | tcp::PSH } | if n == 0 { 0 } else { tcp::CWR };
                head[l4 + tcp::FLAGS] = self.flags & !not_here;
            }
            Transport::Udp => {
                let len = (udp::LEN + payload) as u16;
                head[l4 + udp::LENGTH..l4 + udp::LENGTH + 2].copy_from_slice(&len.to_be_bytes());
            }
        }
        let pseudo = self.at.pseudo(head, self.len - l4 + payload).value();
        let place = l4 + transport.checksum();
        head[place..place + 2].copy_from_slice(&pseudo.to_be_bytes());
        &head[..self.len]
    }

    /// The headers of segment `n` with the transport checksum computed; `payload` is the sum of its
    /// payload. For fragments as [`headers`](Self::headers): the checksum of a fragmented datagram
    /// is in the first fragment's payload, where the caller has completed it before.
    ///
    /// # Panics
    ///
    /// If there is no such segment.
    pub fn complete(&mut self, n: usize, payload: Sum) -> &[u8] {
        self.headers(n);
        if !self.fragments {
            let (l4, place) = (self.at.l4, self.at.l4 + self.at.transport.checksum());
            let mut sum = Sum::default();
            sum.add(&self.bytes[l4..self.len]);
            sum.add_word(payload.value());
            self.bytes[place..place + 2].copy_from_slice(&sum.checksum().to_be_bytes());
        }
        &self.bytes[..self.len]
    }

    /// The state of the checksum of a segment with these [`headers`](Self::headers).
    #[must_use]
    pub fn checksum(&self) -> Checksum {
        if self.fragments {
            return Checksum::Unknown;
        }
        // Both are below `MAX_HEADERS`.
        Checksum::Partial { start: self.at.l4 as u16, offset: self.at.transport.checksum() as u16 }
    }

    /// Whether the segments are IP fragments of one datagram, whose checksum is that of the whole.
    #[must_use]
    pub fn is_fragments(&self) -> bool {
        self.fragments
    }
}

impl fmt::Debug for SegmentPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SegmentPlan({} of {} bytes behind {})", self.count(), self.size, self.len)
    }
}

impl<M: Mapped> Packet<M> {
    /// Cuts the packet into the segments that its [`Gso`] describes.
    ///
    /// Payload is passed on by reference, headers are copied into pages that `page` returns: one
    /// for each segment. If `complete` is set, the segments' checksums are computed, which reads
    /// the payload; if not they are [`Checksum::Partial`], for a device that computes them. A
    /// packet of one segment stays as it is, except `meta` and the checksum.
    ///
    /// # Errors
    ///
    /// [`NotSegmented`] returns the packet.
    pub fn segment(
        self,
        complete: bool,
        mut page: impl FnMut() -> Option<Page<M>>,
    ) -> Result<Segments<M>, NotSegmented<M>> {
        let mut packet = self;
        match packet.plan(complete, &mut page) {
            Ok((plan, pages)) => Ok(Segments::new(packet, plan, pages, complete)),
            Err(error) => Err(NotSegmented { packet, error }),
        }
    }

    /// All parts that can fail: the plan, and a page for each segment.
    fn plan(
        &mut self,
        complete: bool,
        page: &mut impl FnMut() -> Option<Page<M>>,
    ) -> Result<(SegmentPlan, Vec<Page<M>>), SegmentError> {
        let mut head = [0; MAX_HEADERS];
        let head = &mut head[..MAX_HEADERS.min(self.len())];
        self.copy_to(0, head).map_err(ChecksumError::from)?;
        let plan = SegmentPlan::new(head, self.len(), self.meta)?;
        let count = plan.count();
        // One segment has a checksum like any frame, and fragments have the one of their datagram.
        if plan.fragments || (count == 1 && complete) {
            self.complete_checksum(&mut *page)?;
        }
        if count == 1 {
            return Ok((plan, Vec::new()));
        }
        if plan.most_pieces(self.fragments().map(Frag::len)) > MAX_FRAGS {
            return Err(SegmentError::TooManyFrags);
        }
        let mut pages = Vec::with_capacity(count);
        while pages.len() < count {
            match page().filter(|page| page.len() >= HEADROOM + MAX_HEADERS) {
                Some(page) => pages.push(page),
                None => return Err(SegmentError::NoPages { needed: count, had: pages.len() }),
            }
        }
        Ok((plan, pages))
    }
}

impl SegmentPlan {
    /// The most fragments that the payload of a segment touches.
    fn most_pieces(&self, fragments: impl Iterator<Item = usize>) -> usize {
        let (mut skip, mut left) = (self.len, self.size);
        let (mut pieces, mut most) = (0, 0);
        for mut len in fragments {
            let skipped = skip.min(len);
            (skip, len) = (skip - skipped, len - skipped);
            while len > 0 {
                let now = len.min(left);
                pieces += 1;
                most = most.max(pieces);
                (len, left) = (len - now, left - now);
                if left == 0 {
                    (left, pieces) = (self.size, 0);
                }
            }
        }
        most
    }
}

/// The segments of a packet, in order. See [`Packet::segment`]. Segments that are left are
/// dropped.
#[derive(Debug)]
pub struct Segments<M: Mapped> {
    plan: SegmentPlan,
    /// The packet itself, if it is one segment.
    whole: Option<Packet<M>>,
    /// Payload that is in no segment yet.
    current: Option<Frag<M>>,
    rest: vec::IntoIter<Frag<M>>,
    pages: vec::IntoIter<Page<M>>,
    next: usize,
    complete: bool,
}

impl<M: Mapped> Segments<M> {
    fn new(mut packet: Packet<M>, plan: SegmentPlan, pages: Vec<Page<M>>, complete: bool) -> Self {
        let mut this = Self {
            whole: None,
            current: None,
            rest: Vec::new().into_iter(),
            pages: pages.into_iter(),
            next: 0,
            complete,
            plan,
        };
        if this.plan.count() == 1 {
            packet.meta.gso = None;
            this.whole = Some(packet);
        } else {
            let pulled = packet.pull(this.plan.len);
            debug_assert!(pulled.is_ok());
            let (head, frags) = packet.into_fragments();
            this.current = Some(head);
            this.rest = frags.collect::<Vec<_>>().into_iter();
        }
        this
    }

    /// Takes the next `len` bytes of payload.
    fn take(&mut self, mut len: usize) -> Frags<M> {
        let mut taken = Frags::NONE;
        while len > 0 {
            let Some(mut frag) = self.current.take().or_else(|| self.rest.next()) else { break };
            if frag.len() > len {
                let piece = frag.split_to(len);
                self.current = Some(std::mem::replace(&mut frag, piece));
            }
            len -= frag.len();
            if frag.len() > 0 {
                // `most_pieces` has checked that there is room.
                let pushed = taken.push(frag);
                debug_assert!(pushed.is_ok());
            }
        }
        taken
    }

    fn segment(&mut self, mut page: Page<M>) -> Result<Packet<M>, OutOfRange> {
        let n = self.next;
        self.next += 1;
        let (headers, payload) = (self.plan.len, self.plan.payload(n).len());
        let frags = self.take(payload);
        let completes = self.complete && !self.plan.fragments;
        let bytes = if completes {
            let sum = sum(frags.as_slice().iter(), 0, payload)?;
            self.plan.complete(n, sum)
        } else {
            self.plan.headers(n)
        };
        page.copy_from(HEADROOM, bytes)?;
        let head = page.freeze_range(HEADROOM..HEADROOM + headers);
        let checksum = if completes { Checksum::Verified } else { self.plan.checksum() };
        // No longer than the packet was.
        Ok(Packet::from_parts(head, frags, (headers + payload) as u32, Meta { checksum, gso: None }))
    }
}

impl<M: Mapped> Iterator for Segments<M> {
    type Item = Packet<M>;

    fn next(&mut self) -> Option<Packet<M>> {
        if let Some(whole) = self.whole.take() {
            self.next = 1;
            return Some(whole);
        }
        let page = self.pages.next()?;
        let segment = self.segment(page);
        debug_assert!(segment.is_ok());
        segment.ok()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.pages.len() + usize::from(self.whole.is_some());
        (left, Some(left))
    }
}

impl<M: Mapped> ExactSizeIterator for Segments<M> {}
