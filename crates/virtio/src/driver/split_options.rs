//! The options of a queue that receives into device memory, and the final counters of its pools.

use crate::net::VnetHdr;
use netmem_pool::{Device, PoolClosed, Provider};
use std::sync::Arc;

/// The options of a queue of split frames. Start with [`SplitOptions::new`].
#[derive(Clone, Debug)]
pub struct SplitOptions {
    pub(super) provider: Arc<dyn Provider<Device>>,
    pub(super) header_bytes: u16,
    pub(super) cache: usize,
    pub(super) keeps_receiving: bool,
}

impl SplitOptions {
    /// Headers of UDP over IPv4: Ethernet, IPv4 without options, UDP.
    pub const UDP_V4: u16 = 14 + 20 + 8;
    /// Headers of UDP over IPv6: Ethernet, IPv6 without extensions, UDP.
    pub const UDP_V6: u16 = 14 + 40 + 8;
    /// Headers of TCP over IPv4 with all options of TCP: Ethernet, IPv4 without options, 60 bytes
    /// of TCP.
    pub const TCP_V4: u16 = 14 + 20 + 60;
    /// Headers of TCP over IPv6 with all options of TCP: Ethernet, IPv6 without extensions, 60
    /// bytes of TCP.
    pub const TCP_V6: u16 = 14 + 40 + 60;
    /// Pages of device memory in a pool's array cache, unless the caller asks for another number.
    pub(super) const CACHE: usize = 512;
    /// The most bytes of headers in a host part.
    pub(super) const MAX_HEADER_BYTES: u16 = 1024 - VnetHdr::LEN as u16;

    /// Payload goes to pages of `provider`. The host parts have room for 114 bytes of each frame
    /// ([`TCP_V6`](Self::TCP_V6)), which is enough for the headers of TCP and of UDP over both IPs.
    #[must_use]
    pub fn new(provider: Arc<dyn Provider<Device>>) -> Self {
        Self { provider, header_bytes: Self::TCP_V6, cache: Self::CACHE, keeps_receiving: false }
    }

    /// How many bytes of a frame the host parts have room for. Choose the longest headers of the
    /// frames that are steered to this queue. From 14 to 1012; 114 by default. If the headers of a
    /// TCP frame are longer, it cannot be received, because the rest of its headers is in device
    /// memory.
    ///
    /// Our own [device](crate::device) splits a TCP or UDP frame behind its headers, if they fit; a
    /// frame without payload, and one of another protocol, goes to the host part as far as there is
    /// room. A foreign device does not parse headers. It fills the host part and then the pages. If
    /// headers are shorter than the host part, the first bytes of payload are in the host part. For
    /// a queue that receives only datagrams on such a device, use [`UDP_V4`](Self::UDP_V4) or
    /// [`UDP_V6`](Self::UDP_V6), so that the whole payload is in device memory.
    #[must_use]
    pub fn header_bytes(mut self, bytes: u16) -> Self {
        self.header_bytes = bytes;
        self
    }

    /// Whether frames are received also when no page of device memory is left: their payload is
    /// then dropped, and counted ([`RxStats::payload_dropped`](super::RxStats::payload_dropped),
    /// [`SplitFrame::lost`](netmem_packet::SplitFrame::lost)). Use this for TCP: acknowledgements
    /// and window updates must be received in any case, and the peer sends lost payload again. Up
    /// to 4 such buffers are posted while the device has no others; one page is set aside for what
    /// is dropped. By default a queue without pages posts no buffers, and its frames wait in the
    /// device or are dropped there.
    #[must_use]
    pub fn keep_receiving(mut self, keep: bool) -> Self {
        self.keeps_receiving = keep;
        self
    }

    /// Pages of device memory in the pool's array cache; 512 by default.
    #[must_use]
    pub fn cache(mut self, pages: usize) -> Self {
        self.cache = pages;
        self
    }
}

/// The final counters of a queue's pools.
#[derive(Clone, Copy, Debug)]
#[must_use]
#[non_exhaustive]
pub struct SplitClosed {
    /// The pool of host parts, in pages of host memory.
    pub host: PoolClosed,
    /// The pool of device memory.
    pub device: PoolClosed,
}
