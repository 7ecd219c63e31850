//! What a device offers, and what it accepts of a front end.
//!
//! Every option is fixed when the device is made, because a front end relies on the offer for as
//! long as it is connected.

use std::sync::Arc;

use crate::guest_memory::{MemoryLimits, import};
use crate::net::feature;
use crate::virtqueue::Negotiated;

/// The most queue pairs of a device: vhost-user numbers rings in one byte.
pub const MAX_PAIRS: usize = 127;

/// All offloads that a device offers. If the port, or the driver that receives a frame, lacks one,
/// it is done in software.
pub const ALL_OFFLOADS: u64 = feature::GUEST_OFFLOADS | feature::HOST_OFFLOADS & !feature::HOST_UFO;

/// What a device offers.
#[derive(Clone, Debug)]
pub struct Options {
    /// Queue pairs, 1 to [`MAX_PAIRS`]. Pair `i` has rings `2 i` (to the driver) and `2 i + 1`
    /// (from it).
    pub max_pairs: usize,
    /// Features ([`feature`]) that are not offered, although the port could use them.
    pub withhold: u64,
    /// The MAC address to offer.
    pub mac: Option<[u8; 6]>,
    /// The MTU to offer.
    pub mtu: Option<u16>,
    /// The speed to report, in Mbit/s, for both directions together. It limits nothing.
    pub speed: Option<u32>,
    /// Whether the device answers the control queue, ring `2 x max_pairs`. Front ends such as QEMU,
    /// DPDK and Cloud Hypervisor answer control commands themselves. For their sake the feature is
    /// offered with several pairs in any case: multiple queues need it, and Cloud Hypervisor offers
    /// its guest only what the back end offers.
    pub serve_control: bool,
    /// Whether a driver that asks for it gets frames that are split behind their headers. If not,
    /// the device fills every chain in order, as foreign devices do.
    pub split_headers: bool,
    /// Whether to refuse memory that can be shortened: files that are not sealed with
    /// `F_SEAL_SHRINK`. If such memory is accepted and shortened, the rings stop, and the process
    /// continues if the [handler](netmem_pool::sigbus) of SIGBUS is installed.
    pub require_sealed: bool,
    /// Whether to accept memory in files of any kind. By default the device accepts files of kernel
    /// memory alone: memfds, files on tmpfs and hugetlbfs, dma-bufs, and what the
    /// [`importer`](Self::importer) imports.
    ///
    /// **Warning**: an access to another file waits for its file system. If the front end serves
    /// that file system (FUSE) and does not answer, a thread of the device waits without a limit,
    /// and with it every later front end. So frames between this device and another one
    /// ([`Cross`](super::port::Cross)) are never copied directly, but by way of the cable.
    pub any_memory_file: bool,
    /// The most bytes of memory that a front end may have mapped here, and so the most that it can
    /// make this process allocate. By default, and at most, [`crate::guest_memory::MAX_BYTES`].
    pub max_memory: Option<u64>,
    /// Imports memory that cannot be mapped, such as that of a GPU: see
    /// [`import`](crate::guest_memory::import). Without an importer the device refuses files
    /// without a size. With one, it refuses them if [`require_sealed`](Self::require_sealed) is
    /// set, because they cannot be sealed.
    pub importer: Option<Arc<dyn import::Importer>>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            max_pairs: 1,
            withhold: 0,
            mac: None,
            mtu: None,
            speed: None,
            serve_control: false,
            split_headers: true,
            require_sealed: false,
            any_memory_file: false,
            max_memory: None,
            importer: None,
        }
    }
}

impl Options {
    pub(super) fn memory_limits(&self) -> MemoryLimits {
        let importer = self.importer.clone();
        let Self { require_sealed, any_memory_file, .. } = *self;
        MemoryLimits { require_sealed, any_memory_file, max_bytes: self.max_memory, importer }
    }

    pub(super) fn offered(&self) -> u64 {
        let bit = |on, bit| if on { bit } else { 0 };
        let offered = feature::VERSION_1
            | feature::MRG_RXBUF
            | feature::STATUS
            | feature::LOG_ALL
            | feature::VHOST_USER_PROTOCOL
            | ALL_OFFLOADS
            | Negotiated::RING
            | bit(self.max_pairs > 1, feature::MQ)
            | bit(self.max_pairs > 1 || self.serve_control, feature::CTRL_VQ)
            | bit(self.serve_control, feature::GUEST_ANNOUNCE)
            | bit(self.mac.is_some(), feature::MAC)
            | bit(self.mtu.is_some(), feature::MTU)
            | bit(self.speed.is_some(), feature::SPEED_DUPLEX);
        feature::with_needs(offered & !self.withhold)
    }
}
