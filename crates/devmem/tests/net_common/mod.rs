//! A device of ours on a thread of its own, and its queues, which are polled here and restarted there.
#![allow(dead_code, unreachable_pub, missing_docs, reason = "not every test does everything")]

use netmem_devmem::{BindingRef, Endpoint, FlowQueue, Netdev, Queues, Sender};
use netmem_pool::{
    Device as DeviceMemory, DmaDomain, PeerShared, PoolOptions, Provider, Region, RegionOptions, RegionProvider,
};
use netmem_virtio::VhostUser;
use netmem_virtio::device::port::Port;
use netmem_virtio::device::{Connection, Control, NetDevice, Options};
use netmem_virtio::driver::{
    NetError, NetOptions, RestartError, RxMode, SplitOptions, VirtioNet, VirtioRx, VirtioSplitRx, VirtioSplitTx,
};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::thread::JoinHandle;

/// A receive queue as it is at the moment.
pub enum Rx {
    Host(VirtioRx),
    Split(VirtioSplitRx),
    Gone,
}

impl Rx {
    #[track_caller]
    pub fn host(&mut self) -> &mut VirtioRx {
        let Self::Host(rx) = self else { panic!("it receives into device memory") };
        rx
    }

    #[track_caller]
    pub fn split(&mut self) -> &mut VirtioSplitRx {
        let Self::Split(rx) = self else { panic!("it receives into host memory") };
        rx
    }

    /// Polls into the table of sockets. How many frames there were.
    #[track_caller]
    pub fn poll(&mut self, queue: &mut FlowQueue) -> usize {
        self.split().poll(|poll| poll.receive(64, queue))
    }
}

/// The receive queues of a device: handles, so that threads can poll them while somebody restarts them.
#[derive(Clone)]
pub struct RxQueues {
    queues: Arc<[Mutex<Rx>]>,
    header_bytes: u16,
    /// Frames that had arrived and were lost by restarts.
    unread: Arc<AtomicU64>,
}

impl RxQueues {
    #[track_caller]
    pub fn get(&self, queue: usize) -> MutexGuard<'_, Rx> {
        self.queues[queue].lock().expect("nobody panics with it")
    }

    pub fn unread(&self) -> u64 {
        self.unread.load(Ordering::Relaxed)
    }

    fn lost(&self, unread: u16) {
        self.unread.fetch_add(unread.into(), Ordering::Relaxed);
    }

    /// Restarts a queue with pages of `memory`.
    pub fn use_device(&self, queue: usize, memory: Arc<dyn Provider<DeviceMemory>>) -> Result<(), NetError> {
        let rx = &mut *self.get(queue);
        let Rx::Host(old) = std::mem::replace(rx, Rx::Gone) else { panic!("it receives into host memory") };
        let options = SplitOptions::new(memory).cache(16).header_bytes(self.header_bytes);
        match old.restart_split(&options) {
            Ok(restarted) => {
                self.lost(restarted.unread);
                *rx = Rx::Split(restarted.queue);
                Ok(())
            }
            Err(RestartError::Unchanged { queue, source }) => {
                *rx = Rx::Host(*queue);
                Err(source)
            }
            Err(RestartError::Stopped { source, .. }) => Err(source),
        }
    }

    /// Restarts a queue with host memory.
    pub fn use_host(&self, queue: usize) -> Result<(), NetError> {
        let rx = &mut *self.get(queue);
        let Rx::Split(old) = std::mem::replace(rx, Rx::Gone) else { panic!("it receives into device memory") };
        match old.restart(None) {
            Ok(restarted) => {
                self.lost(restarted.unread);
                *rx = Rx::Host(restarted.queue);
                Ok(())
            }
            Err(RestartError::Unchanged { queue, source }) => {
                *rx = Rx::Split(*queue);
                Err(source)
            }
            Err(RestartError::Stopped { source, .. }) => Err(source),
        }
    }
}

impl Queues for RxQueues {
    type Error = NetError;

    fn queues(&self) -> usize {
        self.queues.len()
    }

    fn attach(&mut self, queue: usize, memory: Arc<dyn Provider<DeviceMemory>>) -> Result<(), NetError> {
        self.use_device(queue, memory)
    }

    fn detach(&mut self, queue: usize) -> Result<(), NetError> {
        self.use_host(queue)
    }
}

/// A device with a queue pair for each of its ports.
pub struct Lab {
    pub net: Netdev<RxQueues>,
    pub tx: Vec<VirtioSplitTx<BindingRef>>,
    pub device: VirtioNet,
    pub control: Control,
    domain: Arc<dyn DmaDomain>,
    host: Arc<RegionProvider<PeerShared>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    _connection: Connection,
}

impl Lab {
    /// Its driver knows `regions`, and leaves so many bytes of each frame that goes there in host memory.
    pub fn new<P: Port + 'static>(ports: Vec<P>, regions: &[&Arc<Region<DeviceMemory>>], header_bytes: u16) -> Self {
        let pairs = ports.len() as u16;
        let mut ports = ports.into_iter();
        let several = Options { max_pairs: pairs.into(), serve_control: pairs > 1, ..Options::default() };
        let mut device = NetDevice::new(several, |_| Ok(ports.next().expect("one for each"))).expect("a device");
        let (control, stop) = (device.control(), Arc::new(AtomicBool::new(false)));
        let flag = stop.clone();
        let thread = Some(std::thread::spawn(move || device.run(&flag).expect("it runs until it is told to stop")));
        let (ours, theirs) = UnixStream::pair().expect("sockets");
        let connection = control.serve(theirs).expect("a connection");
        let pages = 2048 * usize::from(pairs);
        let host = RegionOptions::new(pages).huge_pages(false).build::<PeerShared>().expect("host memory");
        let host = RegionProvider::new(host);
        let seen = Arc::new(OnceLock::new());
        let keep = seen.clone();
        let mut options = NetOptions::new(RxMode::Small)
            .pairs(pairs)
            .memory(host.region().clone(), host.clone())
            .domain(move |table| {
                let domain: Arc<dyn DmaDomain> = Arc::new(table);
                assert!(keep.set(domain.clone()).is_ok());
                domain
            });
        for &region in regions {
            options = options.device_memory(region.clone());
        }
        let backend = VhostUser::own_device(ours).expect("the device answers");
        let (mut device, queues) = VirtioNet::probe(backend, options).expect("a driver");
        if pairs > 1 {
            device.set_active_pairs(pairs).expect("the device has as many");
        }
        let (rx, tx) = queues.into_iter().map(|pair| (Mutex::new(Rx::Host(pair.rx)), pair.tx.into_split())).unzip();
        let (rx, domain): (Vec<_>, _) = (rx, seen.get().expect("the driver asked for it").clone());
        let net = Netdev::new(RxQueues { queues: rx.into(), header_bytes, unread: Arc::default() });
        Self { net, tx, device, control, domain, host, stop, thread, _connection: connection }
    }

    pub fn queues(&mut self) -> RxQueues {
        self.net.queues_mut().clone()
    }

    pub fn sender(&self, binding: &netmem_devmem::Binding, local: Endpoint, peer: Endpoint) -> Sender {
        let headers = PoolOptions::new("headers").build(self.host.clone(), Some(self.domain.clone())).expect("a pool");
        Sender::new(binding, &self.domain, headers, local, peer).expect("the device knows the binding")
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
