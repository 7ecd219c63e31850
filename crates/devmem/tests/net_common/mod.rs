//! A device of ours on a thread of its own, and its queues, which are polled here and restarted there.
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

/// The receive queues of a device, in the hands of tests: a queue that is not there, or not as it should be, is a failure.
pub trait InTests {
    fn queue(&self, queue: usize) -> MutexGuard<'_, EitherRx>;

    /// Polls a queue that receives into device memory into the table of sockets. How many frames there were.
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

/// A device with a queue pair for each of its ports.
pub struct Lab {
    pub net: Netdev<VirtioRxQueues>,
    pub tx: Vec<VirtioSplitTx<BindingRef>>,
    pub device: VirtioNet,
    pub control: Control,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    _connection: Connection,
}

impl Lab {
    /// Its driver knows `regions`, and leaves so many bytes of each frame that goes there in host memory.
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
        let thread = Some(std::thread::spawn(move || {
            device.run(&flag, netmem_virtio::Spin::default()).expect("it runs until it is told to stop")
        }));
        let (ours, theirs) = UnixStream::pair().expect("sockets");
        let connection = control.serve(theirs).expect("a connection");
        let options = options(NetOptions::new(RxMode::Small).pairs(pairs).tx_pages(1024));
        let backend = VhostUser::own_device(ours).expect("the device answers");
        let (mut device, queues) = VirtioNet::probe(backend, options).expect("a driver");
        if pairs > 1 {
            device.set_active_pairs(pairs).expect("the device has as many");
        }
        let (rx, tx): (Vec<_>, _) = queues.into_iter().map(|pair| (pair.rx, pair.tx.into_split())).unzip();
        let net = Netdev::new(VirtioRxQueues::new(rx).header_bytes(header_bytes).cache(16));
        Self { net, tx, device, control, stop, thread, _connection: connection }
    }

    pub fn queues(&mut self) -> VirtioRxQueues {
        self.net.queues_mut().clone()
    }

    pub fn sender(&self, binding: &netmem_devmem::Binding, local: Endpoint, peer: Endpoint) -> Sender {
        let headers = self.device.tx_pool(PoolOptions::new("headers")).expect("a pool");
        let domain = self.device.domain().expect("it has one");
        Sender::new(binding, domain, headers, local, peer).expect("the device knows the binding")
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.control.wake();
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(std::thread::panicking() || matches!(ended, Some(Ok(()))), "the device has failed");
    }
}

pub fn endpoint(mac: u8, addr: &str) -> Endpoint {
    Endpoint { mac: [mac; 6], addr: addr.parse().expect("an address") }
}
