//! The driver's options: their checks, and the layout of buffers that follows from them.

use super::buffer_layout::{BufferLayout, RX_BATCH};
use super::error::NetError;
use super::modes::{Offload, RxMode};
use crate::net::{OFFLOAD_FRAME, STANDARD_FRAME, VnetHdr, feature};
use crate::virtqueue::{self, Negotiated};
use netmem_packet::MAX_FRAGS;
use netmem_pool::{
    Device, DmaDomain, PAGE_SIZE, PeerMemory, PeerShared, Provider, Region, RegionError, RegionOptions, RegionProvider,
    TrustedPeer, VhostDomain,
};
use std::fmt;
use std::sync::Arc;

type GivenMemory<M> = (Arc<Region<M>>, Arc<dyn Provider<M>>);
type WrapDomain = Box<dyn FnOnce(VhostDomain) -> Arc<dyn DmaDomain>>;

/// The driver's options for a device. Start with [`NetOptions::new`], or with
/// [`NetOptions::trust_peer`].
///
/// `M` is the kind of memory of the receive pages, and so of the packets.
pub struct NetOptions<M: PeerMemory = PeerShared> {
    pub(super) mode: RxMode,
    pub(super) pairs: u16,
    pub(super) ring_size: u16,
    pub(super) max_frame: usize,
    pub(super) offloads: Offload,
    pub(super) headroom: u32,
    pub(super) per_page: Option<u32>,
    pub(super) pages: Option<usize>,
    pub(super) tx_pages: usize,
    pub(super) lock: bool,
    pub(super) reserved_huge_pages: bool,
    pub(super) cache: usize,
    pub(super) premapped: bool,
    pub(super) memory: Option<GivenMemory<M>>,
    pub(super) domain: Option<WrapDomain>,
    pub(super) device_memory: Vec<Arc<Region<Device>>>,
    pub(super) late: bool,
    /// Features of rings that are asked for.
    pub(super) rings: u64,
    /// Makes a region of this kind. For a trusted peer it contains the user's promise.
    build: fn(RegionOptions) -> Result<Region<M>, RegionError>,
}

impl NetOptions {
    /// One queue pair, rings of 256, frames up to 1518 bytes (in big-packet mode, up to 65549),
    /// premapped buffers, room for XDP in front of each frame.
    #[must_use]
    pub fn new(mode: RxMode) -> Self {
        Self::of_kind(mode, RegionOptions::build)
    }

    /// The same options for a device in this process.
    ///
    /// # Errors
    ///
    /// [`NetError::InProcessMemory`]: the options have memory of the user, whose file other
    /// processes may have.
    #[cfg(feature = "device")]
    pub(crate) fn in_process(self) -> Result<NetOptions<TrustedPeer>, NetError> {
        let Self { mode, pairs, ring_size, max_frame, offloads, headroom, per_page, pages, tx_pages, .. } = self;
        let Self { lock, reserved_huge_pages, cache, premapped, memory, domain, device_memory, late, rings, .. } = self;
        if memory.is_some() {
            return Err(NetError::InProcessMemory);
        }
        let (memory, build) = (None, RegionOptions::build_in_process);
        Ok(NetOptions {
            mode,
            pairs,
            ring_size,
            max_frame,
            offloads,
            headroom,
            per_page,
            pages,
            tx_pages,
            lock,
            reserved_huge_pages,
            cache,
            premapped,
            memory,
            domain,
            device_memory,
            late,
            rings,
            build,
        })
    }
}

impl NetOptions<TrustedPeer> {
    /// The same for a device that the user trusts: received packets are `Packet<TrustedPeer>`,
    /// whose fragments are slices and turn into `Bytes` without a copy. For a device in this
    /// process, `Control::connect` of the feature `device` does this without a promise of the user.
    ///
    /// The driver checks this device's ring entries, lengths and headers as it checks any other's.
    /// What is trusted is that the device does not write to a buffer after it has returned the
    /// buffer.
    ///
    /// ```
    /// use netmem_packet::{Packet, Poll, RxQueue};
    /// use netmem_pool::TrustedPeer;
    /// use netmem_virtio::VhostUser;
    /// use netmem_virtio::device::{NetDevice, Options, port::Gen};
    /// use netmem_virtio::driver::{NetOptions, RxMode, VirtioNet};
    /// use std::os::unix::net::UnixStream;
    ///
    /// let mut device = NetDevice::new(Options::default(), |_| Gen::new(60, Some(3)))?;
    /// let (ours, theirs) = UnixStream::pair()?;
    /// let connection = device.control().serve(theirs)?;
    /// // SAFETY: the device is the one above, in this process. It writes only posted buffers.
    /// let options = unsafe { NetOptions::trust_peer(RxMode::Small) };
    /// let (net, mut pairs) = VirtioNet::probe(VhostUser::own_device(ours)?, options)?;
    /// device.poll();
    /// pairs[0].rx.poll(|poll| {
    ///     poll.receive(64, &mut |packet: Packet<TrustedPeer>| {
    ///         let ether_type = &packet.head()[12..14];
    ///         assert_eq!(ether_type.len(), 2);
    ///     })
    /// });
    /// # drop((net, connection));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Safety
    ///
    /// The backend that is probed with these options, and each party to which it passes the memory,
    /// writes to a buffer only while the buffer is posted: until the backend has returned it, or
    /// has confirmed that the ring was stopped. If the program passes on the file of the device's
    /// [region](super::VirtioNet::region), or maps it a second time (with `Region::from_fd`, for
    /// instance), the same holds for each party that can write the file by that. A backend that
    /// breaks the promise changes bytes under a `&[u8]`, which is undefined behaviour here. (A
    /// backend that dies without a confirmation breaks no promise: what was posted to it is
    /// quarantined.)
    #[must_use]
    pub unsafe fn trust_peer(mode: RxMode) -> Self {
        Self::of_kind(mode, |options| {
            let region = options.build::<PeerShared>()?;
            // SAFETY: the region's file goes to the backend alone, for which the caller promises
            // the same.
            Ok(unsafe { region.trust_peer() })
        })
    }
}

impl<M: PeerMemory> NetOptions<M> {
    fn of_kind(mode: RxMode, build: fn(RegionOptions) -> Result<Region<M>, RegionError>) -> Self {
        Self {
            mode,
            pairs: 1,
            ring_size: 256,
            max_frame: if mode == RxMode::Big { OFFLOAD_FRAME } else { STANDARD_FRAME },
            offloads: Offload::All,
            headroom: 256,
            per_page: None,
            pages: None,
            tx_pages: 0,
            lock: false,
            reserved_huge_pages: false,
            cache: 512,
            premapped: true,
            memory: None,
            domain: None,
            device_memory: Vec::new(),
            late: false,
            rings: 0,
            build,
        }
    }

    /// The number of queue pairs, 1 by default. All of them are in use after
    /// [`VirtioNet::probe`](super::VirtioNet::probe), until
    /// [`VirtioNet::set_active_pairs`](super::VirtioNet::set_active_pairs) lowers the number.
    #[must_use]
    pub fn pairs(mut self, pairs: u16) -> Self {
        self.pairs = pairs;
        self
    }

    /// Entries in each ring: a power of two.
    #[must_use]
    pub fn ring_size(mut self, entries: u16) -> Self {
        self.ring_size = entries;
        self
    }

    /// Asks for these features of rings ([`Negotiated::RING`]): packed rings, event index, tables
    /// of descriptors, use in order, in any combination. The device must have all of them. By
    /// default rings are split, and have none of these features.
    ///
    /// ```
    /// use netmem_virtio::driver::{NetOptions, RxMode};
    /// use netmem_virtio::net::feature;
    ///
    /// let features = feature::RING_PACKED | feature::EVENT_IDX;
    /// let options = NetOptions::new(RxMode::Mergeable).ring_features(features);
    /// ```
    ///
    /// | feature | what it changes |
    /// | --- | --- |
    /// | `RING_PACKED` | descriptors, available and used entries share cache lines |
    /// | `EVENT_IDX` | each side is notified only of the next entry that it waits for |
    /// | `INDIRECT_DESC` | a transmitted packet of several fragments takes one entry of the ring |
    /// | `IN_ORDER` | the device may use a batch of buffers with one entry |
    #[must_use]
    pub fn ring_features(mut self, mask: u64) -> Self {
        self.rings = mask;
        self
    }

    /// The longest frame, in bytes, as long as the device has not cut it into segments. 9018 is
    /// that of an MTU of 9000. Beyond 1518, and with [`Offload::All`], segments are asked for too.
    #[must_use]
    pub fn max_frame(mut self, bytes: usize) -> Self {
        self.max_frame = bytes;
        self
    }

    /// Which offloads to ask the device for; [`Offload::All`] by default. The device may have
    /// fewer: see [`VirtioNet::features`](super::VirtioNet::features).
    ///
    /// | | sent frames | received frames |
    /// | --- | --- | --- |
    /// | [`Offload::None`] | none | none |
    /// | [`Offload::Checksum`] | checksums | checksums, in mergeable and big-packet mode |
    /// | [`Offload::All`] | checksums, segments | checksums and segments, where they fit |
    ///
    /// Segments fit in mergeable mode with a [`max_frame`](Self::max_frame) of more than 1518, and
    /// in big-packet mode with the longest frames, which needs a device that has them. Received
    /// frames of small mode have none, because a segment fits no buffer and headers are not read. A
    /// device with device memory always has checksums in both directions.
    #[must_use]
    pub fn offloads(mut self, offloads: Offload) -> Self {
        self.offloads = offloads;
        self
    }

    /// Bytes kept free in front of each frame for programs that add headers; 256 unless the caller
    /// asks for another number, and none in big-packet mode, whose buffers are whole pages. Without
    /// headroom and in small mode, buffers share pages as far as the frame size lets them. In
    /// mergeable mode, headroom makes each buffer of a frame shorter; where segments are asked for,
    /// at most 448 bytes are possible.
    #[must_use]
    pub fn headroom(mut self, bytes: u16) -> Self {
        self.headroom = u32::from(bytes).next_multiple_of(64);
        self
    }

    /// Buffers in a page in small mode, instead of the number that follows from the headroom. In
    /// the other modes buffers are whole pages.
    #[must_use]
    pub fn buffers_per_page(mut self, buffers: u16) -> Self {
        self.per_page = Some(u32::from(buffers.max(1)));
        self
    }

    /// Receive pages for all queues together. By default each queue gets four rings' worth, and its
    /// pool's cache.
    #[must_use]
    pub fn pages(mut self, pages: usize) -> Self {
        self.pages = Some(pages);
        self
    }

    /// Pages set aside for the pools of [`VirtioNet::tx_pool`](super::VirtioNet::tx_pool): packets
    /// that the program makes itself. They are in the same region as the receive pages, and neither
    /// side can use up the pages of the other. None by default. With [`memory`](Self::memory), they
    /// are allocated from that provider.
    #[must_use]
    pub fn tx_pages(mut self, pages: usize) -> Self {
        self.tx_pages = pages;
        self
    }

    /// Whether the memory is locked in RAM (`RLIMIT_MEMLOCK`).
    #[must_use]
    pub fn lock(mut self, lock: bool) -> Self {
        self.lock = lock;
        self
    }

    /// Whether the pages are allocated from the huge pages that the administrator has reserved, if
    /// there are enough of them: [`RegionOptions::reserved_huge_pages`]. Off by default. The rings
    /// never are.
    #[must_use]
    pub fn reserved_huge_pages(mut self, reserved: bool) -> Self {
        self.reserved_huge_pages = reserved;
        self
    }

    /// Pages in each pool's array cache; 0 for a page per packet.
    #[must_use]
    pub fn cache(mut self, pages: usize) -> Self {
        self.cache = pages;
        self
    }

    /// Whether buffers are posted by DMA address (the default), or by this process's addresses, the
    /// pool then mapping nothing.
    #[must_use]
    pub fn premapped(mut self, premapped: bool) -> Self {
        self.premapped = premapped;
        self
    }

    /// Allocates receive pages from this provider, whose memory is this region. Not for big-packet
    /// mode, whose pages are from no pool. Several devices may have the same provider. Each of them
    /// can then transmit frames that the others have received.
    #[must_use]
    pub fn memory(mut self, region: Arc<Region<M>>, provider: Arc<dyn Provider<M>>) -> Self {
        self.memory = Some((region, provider));
        self
    }

    /// Makes another DMA domain of the device's memory table. Devices whose pages come from one
    /// region ([`memory`](Self::memory)) can share one domain: build the second with the domain of
    /// the first. Frames are then redirected between them without being mapped again.
    #[must_use]
    pub fn domain(mut self, wrap: impl FnOnce(VhostDomain) -> Arc<dyn DmaDomain> + 'static) -> Self {
        self.domain = Some(Box::new(wrap));
        self
    }

    /// Adds a region of device memory to the device's memory table, so that queues can be
    /// [restarted](super::VirtioRx::restart_split) with a provider of its pages and frames be
    /// [sent](super::VirtioTx::into_split) from it. Can be called for several regions.
    ///
    /// Regions are added before the first ring starts, because a backend may keep the table that it
    /// has then. The device must compute and verify checksums, because the driver cannot checksum
    /// device memory. The mode determines which frames the queues of such a device receive, into
    /// either memory:
    ///
    /// | mode | received frames | a chain of device memory |
    /// | --- | --- | --- |
    /// | small | up to [`max_frame`](Self::max_frame), no segments | a host part and a page |
    /// | big-packet | segments, up to 65549 bytes | a host part, and 16 x 4 KiB or 64 KiB |
    ///
    /// In big-packet mode a chain has an entry of the ring for each page. With tables of
    /// descriptors ([`ring_features`](Self::ring_features), `INDIRECT_DESC`), it has one.
    #[must_use]
    pub fn device_memory(mut self, region: Arc<Region<Device>>) -> Self {
        self.device_memory.push(region);
        self
    }

    /// Prepares the device for device memory that is added while it runs, by
    /// [`VirtioNet::add_device_memory`](super::VirtioNet::add_device_memory) or when a binding is
    /// attached. The rules of [`device_memory`](Self::device_memory) about the mode and checksums
    /// apply. The back end needs the protocol feature `CONFIGURE_MEM_SLOTS`, as our own has.
    #[must_use]
    pub fn late_device_memory(mut self) -> Self {
        self.late = true;
        self
    }

    /// Whether received frames may come with offloads although their mode has no place for
    /// segments.
    pub(super) fn checksums(&self) -> bool {
        self.late || !self.device_memory.is_empty()
    }

    /// Whether receive queues may have chains of many segments: those of device memory in
    /// big-packet mode.
    pub(super) fn has_long_chains(&self) -> bool {
        self.mode == RxMode::Big && self.checksums()
    }

    /// Validates the options, and returns how buffers lie in pages. `ours`: whether the back end is
    /// Netmem's own device.
    pub(super) fn check(&self, ours: bool) -> Result<BufferLayout, NetError> {
        let min = if self.mode == RxMode::Big { 32 } else { 2 };
        let max = virtqueue::MAX_SIZE;
        if !self.ring_size.is_power_of_two() || self.ring_size < min || self.ring_size > max {
            return Err(NetError::RingSize { size: self.ring_size, min, max });
        }
        if self.rings & !Negotiated::RING != 0 {
            return Err(NetError::RingFeatures { extra: self.rings & !Negotiated::RING });
        }
        if self.mode == RxMode::Big && self.memory.is_some() {
            return Err(NetError::GivenMemory);
        }
        if self.checksums() && (self.mode == RxMode::Mergeable || !self.premapped) {
            return Err(NetError::DeviceMemory { mode: self.mode });
        }
        if self.pairs == 0 {
            return Err(NetError::Pairs { asked: 0, max: u16::MAX / 2 });
        }
        if self.max_frame > self.mode.max_frame() {
            let (asked, mode) = (self.max_frame, self.mode);
            return Err(NetError::FrameSize { asked, mode, max: mode.max_frame() });
        }
        let page = PAGE_SIZE as u32;
        let frame = self.least_in_a_buffer();
        let need = (VnetHdr::LEN + frame) as u32;
        let headroom = self.headroom;
        // Bytes of a buffer that neither headroom nor frame use.
        let spare = |buffer: u32| {
            let taken = headroom + need;
            buffer.checked_sub(taken).ok_or(NetError::Headroom { headroom, frame, buffer })
        };
        // Bytes in front of a buffer whose header ends a cache line.
        let apart = |spare: u32| if spare >= 64 { 64 - VnetHdr::LEN as u32 } else { 0 };
        let layout = match self.mode {
            RxMode::Small => {
                let splits = if headroom == 0 { page / need.next_multiple_of(64) } else { 1 };
                let per_page = self.per_page.unwrap_or(splits);
                let spare = spare(page / per_page / 64 * 64)?;
                // As far as there is room, the header ends a cache line. One that is read begins
                // it.
                let read = self.checksums();
                let skew = if read { 0 } else { apart(spare) };
                let (first, colour_mask) = (headroom + skew, colours(spare - skew));
                BufferLayout { first, colour_mask, len: need, per_page }
            }
            RxMode::Mergeable => {
                // Each buffer is shorter by all colours, so that frames of several buffers get few.
                let most = if self.max_frame > STANDARD_FRAME { 192 } else { u32::MAX };
                let spare = spare(page)?;
                let skew = if ours { 0 } else { apart(spare) };
                let first = headroom + skew;
                let colour_mask = colours(spare - skew).min(most);
                BufferLayout { first, colour_mask, len: page - first - colour_mask, per_page: 1 }
            }
            // Chains of whole pages.
            RxMode::Big => BufferLayout { first: 0, colour_mask: 0, len: page, per_page: 1 },
        };
        // `Receive::read_group` sums the bytes of a batch in 32 bits.
        debug_assert!(layout.len.checked_mul(RX_BATCH.into()).is_some(), "{layout:?}");
        Ok(layout)
    }

    /// Bytes of a frame that a buffer must hold: a standard frame, or in mergeable mode a part of
    /// the longest frame, which must fit the fragments of a packet.
    fn least_in_a_buffer(&self) -> usize {
        if self.mode != RxMode::Mergeable {
            return self.max_frame.max(STANDARD_FRAME);
        }
        let segments = self.offloads == Offload::All && self.max_frame > STANDARD_FRAME;
        let longest = if segments { OFFLOAD_FRAME } else { self.max_frame };
        let part = (VnetHdr::LEN + longest).div_ceil(MAX_FRAGS + 1).saturating_sub(VnetHdr::LEN);
        part.max(STANDARD_FRAME)
    }

    /// Where receive pages come from.
    pub(super) fn page_source(&mut self) -> Result<PageSource<M>, RegionError> {
        if let Some((region, provider)) = self.memory.take() {
            return Ok(PageSource::Given(region, provider));
        }
        let per_queue = 4 * usize::from(self.ring_size) + self.cache;
        let pages = self.pages.unwrap_or(usize::from(self.pairs) * per_queue).saturating_add(self.tx_pages);
        let options = RegionOptions::new(pages).lock(self.lock).reserved_huge_pages(self.reserved_huge_pages);
        let region = (self.build)(options)?;
        Ok(PageSource::Own(RegionProvider::new(region)))
    }

    /// The longest packet that can be received, in bytes: a frame without its Ethernet header and
    /// VLAN tag.
    pub(super) fn mtu(&self) -> u64 {
        let overhead = STANDARD_FRAME - 1500;
        self.max_frame.max(STANDARD_FRAME).saturating_sub(overhead).min(usize::from(u16::MAX)) as u64
    }

    /// The features that the driver needs, and those that it accepts if the device offers them.
    pub(super) fn features(&self, control: bool) -> (u64, u64) {
        let segments = feature::GUEST_CSUM | feature::GUEST_TSO4 | feature::GUEST_TSO6;
        let mut need = feature::VERSION_1 | self.rings;
        let mut want = match self.offloads {
            Offload::None => 0,
            Offload::Checksum => feature::CSUM,
            Offload::All => feature::HOST_OFFLOADS & !feature::HOST_UFO,
        };
        if self.mode == RxMode::Mergeable {
            need |= feature::MRG_RXBUF;
        }
        match self.offloads {
            Offload::Checksum if self.mode != RxMode::Small => want |= feature::GUEST_CSUM,
            // A segment fits the chains of big-packet mode only if they are for the longest.
            Offload::All if self.mode == RxMode::Big && self.max_frame < OFFLOAD_FRAME => want |= feature::GUEST_CSUM,
            Offload::All if self.max_frame > STANDARD_FRAME => {
                want |= feature::GUEST_OFFLOADS;
                if self.mode == RxMode::Big {
                    need |= segments;
                }
            }
            _ => {}
        }
        if self.checksums() {
            need |= CHECKSUMS;
        }
        if self.pairs > 1 {
            let multi = feature::MQ | feature::CTRL_VQ;
            if control { need |= multi } else { want |= multi }
        }
        (need, want)
    }
}

/// What a device with device memory must do.
pub(super) const CHECKSUMS: u64 = feature::CSUM | feature::GUEST_CSUM;

/// Where receive pages come from.
pub(super) enum PageSource<M: PeerMemory> {
    Own(Arc<RegionProvider<M>>),
    Given(Arc<Region<M>>, Arc<dyn Provider<M>>),
}

impl<M: PeerMemory> PageSource<M> {
    pub(super) fn region(&self) -> Arc<Region<M>> {
        match self {
            Self::Own(provider) => provider.region().clone(),
            Self::Given(region, _) => region.clone(),
        }
    }

    pub(super) fn provider(&self) -> Arc<dyn Provider<M>> {
        match self {
            Self::Own(provider) => provider.clone(),
            Self::Given(_, provider) => provider.clone(),
        }
    }
}

/// The mask of the colours for which `spare` bytes leave room. Colours are offsets in multiples of
/// 64; their number is a power of two, at most 32, which is half of the sets of a first-level
/// cache.
fn colours(spare: u32) -> u32 {
    let count = spare / 64 + 1;
    ((1 << count.ilog2().min(5)) - 1) * 64
}

impl<M: PeerMemory> fmt::Debug for NetOptions<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NetOptions({}, {} pairs, rings of {})", self.mode, self.pairs, self.ring_size)
    }
}

#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// The header of a mergeable buffer ends a cache line if the back end is foreign, and begins
    /// one if it is ours. In both cases the longest frame that was asked for fits, with the last
    /// colour.
    #[test]
    fn the_header_of_a_mergeable_buffer_ends_a_line_of_a_foreign_back_end() {
        for (headroom, max_frame) in [(0, 1518), (64, 1518), (256, 1518), (0, 9018), (256, 9018), (256, OFFLOAD_FRAME)]
        {
            let options = NetOptions::new(RxMode::Mergeable).headroom(headroom).max_frame(max_frame);
            for (ours, offset) in [(true, 0), (false, 64 - VnetHdr::LEN as u32)] {
                let layout = options.check(ours).unwrap();
                let what = format!("headroom {headroom}, frames of {max_frame}, ours {ours}: {layout:?}");
                assert_eq!(layout.first % 64, offset, "{what}");
                assert!(layout.first >= headroom.into(), "{what}");
                assert_eq!(layout.first + layout.colour_mask + layout.len, PAGE_SIZE as u32, "{what}");
                assert!(layout.len as usize * (MAX_FRAGS + 1) >= VnetHdr::LEN + max_frame, "{what}");
            }
        }
        // Where there is no room for that, the header begins a line.
        let options =
            NetOptions::new(RxMode::Mergeable).headroom((PAGE_SIZE - VnetHdr::LEN - STANDARD_FRAME) as u16 / 64 * 64);
        assert_eq!(options.check(false).unwrap().first % 64, 0);
    }
}
