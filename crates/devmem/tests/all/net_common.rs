//! Our device, on a thread of its own or in another process, and the queues of its driver, which
//! are polled and restarted.
#![allow(dead_code, unreachable_pub, missing_docs, reason = "not every test does everything")]

use netmem_devmem::{BindingRef, Endpoint, FlowQueue, Netdev, Sender};
use netmem_pool::{Device as DeviceMemory, PoolOptions, Region};
use netmem_virtio::VhostUser;
use netmem_virtio::device::port::Port;
use netmem_virtio::device::{Connection, Control, NetDevice, Options};
use netmem_virtio::driver::{EitherRx, NetOptions, RxMode, VirtioNet, VirtioRxQueues, VirtioSplitTx};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, MutexGuard};
use std::thread::JoinHandle;

/// The receive queues of a device, for tests. If a queue does not exist or is in a wrong state, the
/// test fails.
pub trait InTests {
    fn queue(&self, queue: usize) -> MutexGuard<'_, EitherRx>;

    /// Polls a queue that receives into device memory, and delivers the frames to the table of
    /// sockets. Returns the number of frames.
    fn poll(&self, queue: usize, into: &mut FlowQueue) -> usize;
}

impl InTests for VirtioRxQueues {
    #[track_caller]
    fn queue(&self, queue: usize) -> MutexGuard<'_, EitherRx> {
        self.get(queue).expect("there is such a queue")
    }

    #[track_caller]
    fn poll(&self, queue: usize, into: &mut FlowQueue) -> usize {
        let mut rx = self.queue(queue);
        rx.split().expect("it receives into device memory").poll(|poll| poll.receive(64, into))
    }
}

/// The driver of a device, and the device, if it is in this process. `H` is the type of the holder
/// in a fragment that is sent.
pub struct Harness<H = BindingRef> {
    pub net: Netdev<VirtioRxQueues>,
    pub tx: Vec<VirtioSplitTx<H>>,
    pub device: VirtioNet,
    here: Option<Here>,
}

/// A device on a thread of this process.
struct Here {
    control: Control,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    _connection: Connection,
}

impl<H: 'static> Harness<H> {
    /// A device with a queue pair for each of its ports. Its driver knows `regions`, and leaves so
    /// many bytes of each frame that goes there in host memory.
    pub fn new<P: Port + 'static>(ports: Vec<P>, regions: &[&Arc<Region<DeviceMemory>>], header_bytes: u16) -> Self {
        let know = |options: NetOptions| regions.iter().fold(options, |o, &region| o.device_memory(region.clone()));
        Self::with(ports, header_bytes, know)
    }

    /// `options` makes the last changes to the driver's options.
    pub fn with<P: Port + 'static>(
        ports: Vec<P>,
        header_bytes: u16,
        options: impl FnOnce(NetOptions) -> NetOptions,
    ) -> Self {
        let pairs = ports.len() as u16;
        let mut ports = ports.into_iter();
        let several = Options { max_pairs: pairs.into(), serve_control: pairs > 1, ..Options::default() };
        let mut device = NetDevice::new(several, |_| Ok(ports.next().expect("one for each"))).expect("a device");
        let (control, stop) = (device.control(), Arc::new(AtomicBool::new(false)));
        let flag = stop.clone();
        let thread = std::thread::spawn(move || {
            device.run(&flag, netmem_virtio::Spin::default()).expect("it runs until it is told to stop")
        });
        let (ours, theirs) = UnixStream::pair().expect("sockets");
        let connection = control.serve(theirs).expect("a connection");
        let here = Here { control, stop, thread: Some(thread), _connection: connection };
        let mut harness = Self::of(ours, pairs, header_bytes, options);
        harness.here = Some(here);
        harness
    }

    /// The driver of a device in another process.
    pub fn of(ours: UnixStream, pairs: u16, header_bytes: u16, options: impl FnOnce(NetOptions) -> NetOptions) -> Self {
        Self::on(VhostUser::own_device(ours).expect("the device answers"), pairs, header_bytes, options)
    }

    /// The driver of any back end.
    pub fn on(
        backend: VhostUser,
        pairs: u16,
        header_bytes: u16,
        options: impl FnOnce(NetOptions) -> NetOptions,
    ) -> Self {
        let options = options(NetOptions::new(RxMode::Small).pairs(pairs).tx_pages(1024));
        let (device, queues) = VirtioNet::probe(backend, options).expect("a driver");
        let (rx, tx): (Vec<_>, _) = queues.into_iter().map(|pair| (pair.rx, pair.tx.into_split())).unzip();
        let net = Netdev::new(VirtioRxQueues::new(rx).header_bytes(header_bytes).cache(16));
        Self { net, tx, device, here: None }
    }

    /// The device, which must be in this process.
    pub fn control(&self) -> Control {
        self.here.as_ref().expect("it is here").control.clone()
    }

    pub fn queues(&mut self) -> VirtioRxQueues {
        self.net.queues_mut().clone()
    }
}

impl Harness {
    pub fn sender(&self, binding: &netmem_devmem::Binding, local: Endpoint, peer: Endpoint) -> Sender {
        let headers = self.device.tx_pool(PoolOptions::new("headers")).expect("a pool");
        let domain = self.device.domain().expect("it has one");
        Sender::new(binding, domain, headers, local, peer).expect("the device knows the binding")
    }
}

impl<H> Drop for Harness<H> {
    fn drop(&mut self) {
        // The connection ends after the driver.
        let Some(here) = &mut self.here else { return };
        here.stop.store(true, Ordering::Relaxed);
        here.control.wake();
        let ended = here.thread.take().map_or(Ok(()), JoinHandle::join);
        assert!(std::thread::panicking() || ended.is_ok(), "the device has failed");
    }
}

pub fn endpoint(mac: u8, addr: &str) -> Endpoint {
    Endpoint { mac: [mac; 6], addr: addr.parse().expect("an address") }
}
