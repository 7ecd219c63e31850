//! Offload information: what a device reports about a frame in addition to its bytes.
//!
//! A checksum may be verified, unknown, or still to be computed; a frame may be a segment that was
//! never cut. A handler that edits bytes must keep this true, so it travels with the frame, and
//! edits adjust it.

/// The state of a frame's transport checksum.
///
/// The methods that edit a frame in place ([`Packet::pull`](crate::Packet::pull) and its like) keep
/// this true as far as lengths determine it: see [`Meta`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checksum {
    /// Not known: a receiver that depends on the checksum must verify it.
    #[default]
    Unknown,
    /// Verified: the device has verified it, or the sender guarantees it.
    Verified,
    /// Partial: it must still be computed from byte `start` to the frame's end, and stored at
    /// `start + offset`.
    Partial {
        /// Where the sum begins, in bytes from the frame's first.
        start: u16,
        /// Where it is stored, in bytes from `start`.
        offset: u16,
    },
}

/// The kind of a segment that was never cut to the MTU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GsoKind {
    /// TCP over IPv4.
    TcpV4,
    /// TCP over IPv6.
    TcpV6,
    /// A UDP datagram to be fragmented.
    UdpFragment,
    /// UDP datagrams of equal size.
    UdpSegment,
}

/// How to cut a frame that is larger than the MTU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gso {
    /// The kind of segment.
    pub kind: GsoKind,
    /// Bytes of payload per segment.
    pub size: u16,
    /// Bytes of headers in front of the payload; a hint.
    pub headers: u16,
    /// The segment carries explicit congestion notification.
    pub ecn: bool,
}

/// Offload information of a frame.
///
/// Edits of a [`Packet`](crate::Packet) or an [`XdpFrame`](crate::XdpFrame) adjust it:
///
/// | edit | [`Checksum::Partial`] | [`Checksum::Verified`] | [`Gso::headers`] |
/// | --- | --- | --- | --- |
/// | `n` bytes off the front | `start` is `n` less; `Verified` once `start` itself was removed: the payload never was on a wire | kept | `n` less, at least 0 |
/// | `n` bytes in front | `start` is `n` more | kept | `n` more |
/// | cut to a length | kept; `Unknown` once the place of the sum was cut off | kept | kept |
/// | bytes written, or added behind | kept | kept | kept |
///
/// An edit cannot know whether a checksum covers the changed bytes. If your code changes bytes
/// under a verified checksum, or puts another transport header in front, it must set the checksum's
/// new state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Meta {
    /// The transport checksum.
    pub checksum: Checksum,
    /// Set if the frame is a segment to be cut.
    pub gso: Option<Gso>,
}

impl Meta {
    /// Whether it has offsets in the frame. For most frames it has none; the check costs two
    /// comparisons.
    #[inline]
    pub(crate) fn has_offsets(&self) -> bool {
        matches!(self.checksum, Checksum::Partial { .. }) || self.gso.is_some()
    }

    /// Adjusts the offsets after `n` bytes were removed from the front of the frame.
    #[inline]
    pub(crate) fn pulled(&mut self, n: usize) {
        if self.has_offsets() {
            self.offsets_pulled(n);
        }
    }

    #[cold]
    fn offsets_pulled(&mut self, n: usize) {
        if let Checksum::Partial { start, .. } = &mut self.checksum {
            match usize::from(*start).checked_sub(n) {
                // It fits: it is less than it was.
                Some(now) => *start = now as u16,
                None => self.checksum = Checksum::Verified,
            }
        }
        if let Some(gso) = &mut self.gso {
            gso.headers = usize::from(gso.headers).saturating_sub(n) as u16;
        }
    }

    /// What it is with `n` bytes in front of the frame; `None` if an offset does not fit its type
    /// then.
    #[cold]
    pub(crate) fn prepended(mut self, n: usize) -> Option<Self> {
        let more = |offset: u16| u16::try_from(usize::from(offset).checked_add(n)?).ok();
        if let Checksum::Partial { start, .. } = &mut self.checksum {
            *start = more(*start)?;
        }
        if let Some(gso) = &mut self.gso {
            gso.headers = more(gso.headers)?;
        }
        Some(self)
    }

    /// Adjusts the checksum after the frame was cut to `len` bytes.
    pub(crate) fn truncated(&mut self, len: usize) {
        if let Checksum::Partial { start, offset } = self.checksum
            && usize::from(start) + usize::from(offset) + size_of::<u16>() > len
        {
            self.checksum = Checksum::Unknown;
        }
    }
}
