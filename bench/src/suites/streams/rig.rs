//! Our device with its ports, and a driver: our stack and smoltcp both run on them.

use super::memory::{Memory, SPARE};
use super::net::{ADDRESSES, TapNetwork};
use netmem::device::port::{ALL_OFFLOADS, Cross, Port, PortError, Tap, TapError};
use netmem::device::{Connection, NetDevice, Options, Worker};
use netmem::virtio::{NetOptions, Offload, QueuePair, RxMode, VhostUser, VirtioNet, feature};
use netmem_inet::Address;
use netmem_measure::endpoint;
use netmem_measure::threads::propagate;
use std::net::IpAddr;
use std::os::unix::net::UnixStream;

/// The MTU of Ethernet.
pub(super) const MTU: u16 = 1500;
/// Bytes of the headers of IPv4 and of TCP with timestamps.
pub(super) const HEADERS: u16 = 52;

/// Entries of each ring.
pub(super) const RING: u16 = 256;

/// The parameters of the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Link {
    pub(super) mtu: u16,
    pub(super) offloads: Offloads,
}

/// What the device does for the stacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Offloads {
    None,
    Checksums,
    /// Checksums and segmentation.
    All,
}

impl Offloads {
    /// The features that the device does not offer.
    fn withheld(self) -> u64 {
        match self {
            Self::None => ALL_OFFLOADS,
            Self::Checksums => ALL_OFFLOADS & !(feature::CSUM | feature::GUEST_CSUM),
            Self::All => 0,
        }
    }

    /// What the driver asks for.
    fn of_driver(self) -> Offload {
        match self {
            Self::None => Offload::None,
            Self::Checksums => Offload::Checksum,
            Self::All => Offload::All,
        }
    }
}

/// Device and driver. The device is polled by a thread of its own, or by the thread of an end.
pub(super) struct Rig<P> {
    pub(super) device: NetDevice<P>,
    pub(super) net: VirtioNet<endpoint::Mem>,
    /// One queue pair for each end.
    pub(super) pairs: Vec<QueuePair<endpoint::Mem>>,
    pub(super) connection: Connection,
}

/// Address and prefix of an end.
pub(super) fn address(end: usize) -> Address {
    Address { addr: IpAddr::V4(ADDRESSES[end]), prefix_len: 24 }
}

impl Rig<Cross> {
    /// Two queue pairs of one device, connected to each other.
    pub(super) fn cable(link: Link, memory: &Memory) -> anyhow::Result<Self> {
        let mut ends = Cross::cable().into_iter();
        let missing = || PortError::FrameSize { size: 0, min: 0, max: 0 };
        Self::new(|_| ends.next().ok_or_else(missing), 2, link, memory)
    }
}

impl Rig<Tap> {
    /// A queue pair behind a tap.
    pub(super) fn tap(tap: &TapNetwork, link: Link, memory: &Memory) -> anyhow::Result<Self> {
        let mut tap = Some(tap.open().map_err(anyhow::Error::msg)?);
        let missing = || PortError::Tap { name: String::new(), source: TapError::Queues { asked: 0 } };
        Self::new(|_| tap.take().ok_or_else(missing), 1, link, memory)
    }
}

impl<P: Port> Rig<P> {
    fn new(
        port: impl FnMut(usize) -> Result<P, PortError>,
        pairs: u16,
        link: Link,
        memory: &Memory,
    ) -> anyhow::Result<Self> {
        let options = Options {
            withhold: link.offloads.withheld(),
            max_pairs: pairs.into(),
            serve_control: pairs > 1,
            ..Options::default()
        };
        let mut device = NetDevice::new(options, port)?;
        let (front, back) = UnixStream::pair()?;
        let connection = device.control().serve(back)?;
        // The device's thread serves the control queue, and that thread does not run yet.
        let (net, queues) = while_polled(|| device.poll(), || driver(front, pairs, link, memory))?;
        Ok(Self { device, net, pairs: queues, connection })
    }
}

/// A device whose data side several threads serve, and its driver.
pub(super) struct Divided {
    /// Worker `n` of `w` serves the queue pairs `n`, `n + w` and so on.
    pub(super) workers: Vec<Worker<Cross>>,
    pub(super) net: VirtioNet<endpoint::Mem>,
    pub(super) pairs: Vec<QueuePair<endpoint::Mem>>,
    pub(super) connection: Connection,
}

impl Divided {
    /// So many cables, for so many workers. Cable `n` of `c` connects the queue pairs `n` and
    /// `n + c`.
    pub(super) fn cables(cables: u16, workers: usize, link: Link, memory: &Memory) -> anyhow::Result<Self> {
        let (firsts, seconds): (Vec<_>, Vec<_>) = (0..cables).map(|_| Cross::cable().into()).unzip();
        let mut ends = firsts.into_iter().chain(seconds);
        let missing = || PortError::FrameSize { size: 0, min: 0, max: 0 };
        let pairs = 2 * cables;
        let options = Options {
            withhold: link.offloads.withheld(),
            max_pairs: pairs.into(),
            serve_control: true,
            ..Options::default()
        };
        let device = NetDevice::new(options, |_| ends.next().ok_or_else(missing))?;
        let control = device.control();
        let mut workers = device.workers(workers)?;
        let (front, back) = UnixStream::pair()?;
        let connection = control.serve(back)?;
        let poll = || workers.iter_mut().map(Worker::poll).sum();
        let (net, queues) = while_polled(poll, || driver(front, pairs, link, memory))?;
        Ok(Self { workers, net, pairs: queues, connection })
    }
}

/// The driver of a device of this process.
fn driver(
    front: UnixStream,
    pairs: u16,
    link: Link,
    memory: &Memory,
) -> anyhow::Result<(VirtioNet<endpoint::Mem>, Vec<QueuePair<endpoint::Mem>>)> {
    let provider = memory.region().map_err(anyhow::Error::msg)?;
    // SAFETY: the back end is a device of this process, and no other process gets the file of the
    // region.
    let options = unsafe { NetOptions::<endpoint::Mem>::trust_peer(RxMode::Mergeable) }.reserved_huge_pages(true);
    let options = options
        .pairs(pairs)
        .ring_size(RING)
        .offloads(link.offloads.of_driver())
        .memory(provider.region().clone(), provider);
    // With this the driver accepts large segments, if offloads are on.
    let options = options.max_frame(endpoint::LARGE_FRAME).tx_pages(usize::from(pairs) * SPARE / 4 + memory.pages());
    Ok(VirtioNet::probe(VhostUser::own_device(front)?, options)?)
}

/// Runs `work` while another thread polls the device.
fn while_polled<T>(mut device: impl FnMut() -> usize + Send, work: impl FnOnce() -> T) -> T {
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let server = scope.spawn(|| {
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                device();
                std::thread::yield_now();
            }
        });
        let result = work();
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        propagate(server.join());
        result
    })
}
