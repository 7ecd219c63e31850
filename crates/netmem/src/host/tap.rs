//! A host behind a tap: the device, its driver, and a stack for each queue.

use super::{Apart, Behind, Driven, Drives, OpenError, Opened, Queue, SPIN, check, check_mtu};
use netmem_inet::wire::Mac;
use netmem_inet::{Address, Host, Interface};
use netmem_packet::Wait;
use netmem_pool::{PoolOptions, TrustedPeer};
use netmem_virtio::Spin;
use netmem_virtio::device::port::{PortError, Tap, TapError};
use netmem_virtio::device::{Connection, Control, DeviceError, InProcess, NetDevice, Options, Worker};
use netmem_virtio::driver::{NetError, NetOptions, QueuePair, RxMode, VirtioRx, VirtioTx};
use std::io;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Bytes of an IP packet, unless the options have another number.
const MTU: u16 = 1500;
/// The largest MTU of the options.
const LARGEST: u16 = 9216;
/// Bytes of the longest frame beyond its IP packet: the Ethernet header, a VLAN tag and the
/// checksum. The driver also accepts large segments.
const FRAME: usize = 22;
/// Receive pages of a queue: for the ring, the cache, and what connections and their users hold.
const RECEIVED: usize = 4096;
/// Pages of a queue for headers and for payload that is copied.
const SENT: usize = 2048;

/// A queue of a host behind a tap.
pub type TapQueue = Queue<VirtioRx<TrustedPeer>, VirtioTx<TrustedPeer>, TapDevice>;
/// A stack behind a tap, on the thread that drives it.
pub type TapStack = Driven<VirtioRx<TrustedPeer>, VirtioTx<TrustedPeer>, TapDevice>;

/// The part of the device that serves one queue of the tap.
#[derive(Debug)]
pub struct TapDevice {
    worker: Worker<Tap>,
    shared: Arc<Shared>,
}

/// What the queues share, until the last of them is gone.
#[derive(Debug)]
struct Shared {
    /// None after the device has failed.
    connection: Mutex<Option<Connection>>,
    control: Control,
}

/// How a host behind a tap is opened: [`on_tap`] with the options that it has chosen.
#[derive(Clone, Debug)]
pub struct TapOptions {
    mtu: u16,
    user_pages: usize,
}

impl Default for TapOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl TapOptions {
    /// The options of [`on_tap`].
    #[must_use]
    pub fn new() -> Self {
        Self { mtu: MTU, user_pages: 0 }
    }

    /// Bytes of an IP packet: 576 to 9216, and 1280 at least if the host has an address of IPv6.
    /// The kernel's end of the tap is set to the same MTU by `ip link set NAME mtu BYTES`.
    #[must_use]
    pub fn mtu(mut self, bytes: u16) -> Self {
        self.mtu = bytes;
        self
    }

    /// Pages of each queue that the program allocates from [`Queue::user_pool`], and sends by
    /// reference; 0 by default. Headers and copied payload have others, so a program that holds all
    /// of these pages delays no acknowledgement.
    #[must_use]
    pub fn user_pages(mut self, pages: usize) -> Self {
        self.user_pages = pages;
        self
    }

    /// As [`on_tap`].
    ///
    /// # Errors
    ///
    /// [`OpenError`]; nothing is left behind.
    pub fn open(
        &self,
        name: &str,
        queues: u16,
        addresses: &[Address],
    ) -> Result<Opened<TrustedPeer, TapQueue>, OpenError> {
        check(addresses)?;
        let mtu = self.mtu;
        check_mtu(mtu, LARGEST, addresses)?;
        let mac = mac(addresses[0].addr);
        let mut taps = Tap::open(name, queues.into(), true)?.into_iter();
        let options = Options { mac: Some(mac), mtu: Some(mtu), max_pairs: queues.into(), ..Options::default() };
        let missing = || PortError::Tap { name: name.to_owned(), source: TapError::Queues { asked: queues.into() } };
        let device = NetDevice::new(options, |_| taps.next().ok_or_else(missing))?;
        let control = device.control();
        let workers = device.workers(queues.into())?;
        let each = usize::from(queues);
        let options = NetOptions::new(RxMode::Mergeable).pairs(queues).max_frame(usize::from(mtu) + FRAME);
        let InProcess { pairs, net, connection } =
            control.connect(options.pages(each * RECEIVED).tx_pages(each * (SENT + self.user_pages)))?;
        let pool = |limit| net.tx_pool(PoolOptions::new(name).limit(limit)).map(Arc::new);
        let pools = (0..queues).map(|_| {
            let user_pool = (self.user_pages > 0).then(|| pool(self.user_pages)).transpose()?;
            Ok::<_, NetError>((pool(SENT)?, user_pool))
        });
        let pools = pools.collect::<Result<Vec<_>, _>>()?;
        let host = Host::new(Interface { mac: Mac(mac), mtu, addresses: addresses.to_vec() });
        let shared = Arc::new(Shared { connection: Mutex::new(Some(connection)), control });
        let beginning = Instant::now();
        let queues =
            pairs.into_iter().zip(workers).zip(pools).map(|((QueuePair { rx, tx }, worker), (pool, user_pool))| {
                let behind = TapDevice { worker, shared: shared.clone() };
                Queue { host: host.clone(), rx, tx, pool, user_pool, behind, beginning }
            });
        let queues = queues.collect();
        Ok(Opened { host, queues })
    }
}

/// Opens a host behind the tap `name`, which is made if there is none, with these addresses and so
/// many queues. The tap goes when the last queue is dropped, unless it was there before.
///
/// The kernel is the peer on the other side of the tap, or what the kernel has bridged it with. The
/// stack's Ethernet address is made of its first address. The MTU is 1500, unless [`TapOptions`]
/// open the host. Each stack can hold 2048 received pages
/// ([`StackOptions::pages`](netmem_inet::StackOptions::pages)).
///
/// Needs CAP_NET_ADMIN, unless the tap was made for this user. A tap of several queues that is
/// there already was made with the flag `multi_queue`.
///
/// # Errors
///
/// [`OpenError`]; nothing is left behind.
pub fn on_tap(name: &str, queues: u16, addresses: &[Address]) -> Result<Opened<TrustedPeer, TapQueue>, OpenError> {
    TapOptions::new().open(name, queues, addresses)
}

/// A locally administered Ethernet address, made of an IP address.
fn mac(addr: IpAddr) -> [u8; 6] {
    let [a, b, c, d] = match addr {
        IpAddr::V4(addr) => addr.octets(),
        IpAddr::V6(addr) => addr.octets().last_chunk().copied().unwrap_or_default(),
    };
    [0x02, 0x6e, a, b, c, d]
}

impl Behind for TapDevice {}

impl Drives for TapDevice {
    fn poll(&mut self) -> usize {
        self.worker.poll()
    }

    fn pause(&mut self, work: usize, stack: &mut dyn Wait, at_most: Option<Duration>) -> io::Result<()> {
        self.worker.turn(work, Spin::For(SPIN), &mut [stack], at_most).map_err(|error| match error {
            DeviceError::Queue(error) => error,
            other => io::Error::other(other),
        })
    }

    fn apart(self) -> io::Result<Apart> {
        let Self { mut worker, shared } = self;
        let stop = Arc::new(AtomicBool::new(false));
        let (flag, device) = (stop.clone(), shared.clone());
        let run = move || {
            if let Err(error) = worker.run(&flag, Spin::For(SPIN)) {
                netmem_pool::trace::warn!(%error, "the device behind a stack has stopped");
                // The stack's queues then stop, and report it.
                drop(device.connection.lock().unwrap_or_else(PoisonError::into_inner).take());
            }
        };
        let thread = std::thread::Builder::new().name("netmem-device".to_owned()).spawn(run)?;
        Ok(Apart(Box::new(Thread { stop, shared, thread: Some(thread) })))
    }
}

/// The thread of a device. It ends when this is dropped.
#[derive(Debug)]
struct Thread {
    stop: Arc<AtomicBool>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Thread {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.shared.control.wake();
        if let Some(Err(panic)) = self.thread.take().map(JoinHandle::join)
            && !std::thread::panicking()
        {
            std::panic::resume_unwind(panic);
        }
    }
}
