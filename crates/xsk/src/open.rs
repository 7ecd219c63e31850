//! Opens a queue: makes its pool, fills its rings, and binds its socket.

use crate::binding::{Binding, Limits};
use crate::device_info::DeviceInfo;
use crate::error::XskError;
use crate::held;
use crate::left::LeftChunks;
use crate::netlink::XdpFeatures;
use crate::options::{Mode, QueueOptions};
use crate::queue_key::{QueueAddress, QueueKey};
use crate::quirks::Quirk;
use crate::receive::Receive;
use crate::rx::XskRx;
use crate::socket::{NotOpened, Retry, TxRings, Unbound, XskSocket, failed, poll_busily};
use crate::sys;
use crate::tx::XskTx;
use crate::umem::Umem;
use crate::umem_memory::UmemMemory;
use crate::wait_set::WaitSet;
use crate::watch::Watch;
use netmem_pool::{PagePool, PoolOptions, Provider};
use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;
use std::{fs, io};

/// The fill level, unless the device's ring or the options require more.
const LEVEL: u32 = 1024;

impl<M: UmemMemory> Umem<M> {
    /// Opens queue `queue` of an interface: a socket with this UMEM, and a pool for received
    /// frames, which allocates its pages from `provider`. The two halves can be moved to two
    /// threads.
    ///
    /// Frames arrive when an XDP program on the interface redirects them to the socket. The
    /// interface is looked up in the network namespace of the calling thread.
    ///
    /// A UMEM can have sockets on many queues and interfaces. The first socket determines the mode,
    /// need-wakeup and multi-buffer frames of all sockets. For interfaces that cannot share these
    /// settings, make another [`Umem`] of the same region. Frames are then passed between both
    /// without a copy, and the kernel pins the memory twice.
    ///
    /// # Errors
    ///
    /// See [`XskError`]. If there is an error, nothing stays open.
    pub fn open(
        &self,
        ifindex: u32,
        queue: u32,
        provider: Arc<dyn Provider<M>>,
        mut options: QueueOptions,
    ) -> Result<(XskRx<M>, XskTx<M>), XskError> {
        self.check_provider(&provider)?;
        held::release_gone();
        let target = Target::find(ifindex, queue, &mut options)?;
        let name = options.name.take().unwrap_or_else(|| format!("{}:{queue}", target.interface));
        let mut pool = PoolOptions::new(name).cache(options.cache).build(provider.clone(), Some(self.domain()))?;
        let opened = self.bind(target, &mut pool, None, options)?;
        let short = opened.short();
        let queues = opened.queues(self, pool, provider);
        short.map_or(Ok(queues), Err)
    }

    /// Opens queue `queue` of an interface to send only. No XDP program is needed, and the frames
    /// that the interface receives go to the kernel.
    ///
    /// In copy mode, no page is posted to receive into: the UMEM needs pages only for what is sent.
    /// `options` for receiving (`rx_ring`, `fill`, `cache`) have no effect.
    ///
    /// Warning: do not [insert](crate::Program::insert) the socket into a map. The kernel would
    /// drop the frames that a program redirects to it.
    ///
    /// A driver in zero-copy mode receives all frames of the queue into the UMEM, also those for
    /// the kernel. Where the driver may choose that mode, and the options do not require
    /// [`Mode::Copy`], the queue therefore has chunks like any other, and `provider` needs the
    /// pages for them. Where it may not, the socket is bound in copy mode, and sockets that are
    /// opened later with this UMEM have that mode, too.
    ///
    /// A [`ClosedQueue`](crate::ClosedQueue) needs both halves of a socket. To open this queue
    /// again, drop it, and call this function again: the counters then begin at zero.
    ///
    /// # Errors
    ///
    /// As for [`open`](Self::open). [`XskError::Mode`] if the UMEM's first socket is in zero-copy
    /// mode, and the options require copy mode or the driver has no zero-copy.
    pub fn open_tx(
        &self,
        ifindex: u32,
        queue: u32,
        provider: Arc<dyn Provider<M>>,
        options: QueueOptions,
    ) -> Result<XskTx<M>, XskError> {
        let here = options.socket.as_ref().is_none_or(|socket| sys::is_of_this_namespace(socket.as_fd()));
        let features = here.then(|| Limits::of(ifindex)).and_then(|limits| limits.features);
        if options.mode != Some(Mode::Copy) && features.as_ref().is_none_or(XdpFeatures::zero_copy) {
            let (rx, tx) = self.open(ifindex, queue, provider, options)?;
            return Ok(tx.keep_filled(rx));
        }
        let options = QueueOptions { transmit_only: true, ..options.rx_ring(2).cache(0) };
        // Nothing is posted, so nothing is left of the receive queue.
        self.open(ifindex, queue, provider, options).map(|(_, tx)| tx)
    }

    fn check_provider(&self, provider: &Arc<dyn Provider<M>>) -> Result<(), XskError> {
        let mut ours = true;
        provider.each(&mut |region| ours &= std::ptr::eq(region, Arc::as_ptr(self.region())));
        if ours { Ok(()) } else { Err(XskError::Provider) }
    }

    /// Makes a socket, posts chunks of the pool, and binds the socket. `left` are the chunks of the
    /// queue's last socket if the queue is opened again: their pages return to the pool when the
    /// kernel is done with them. If there is an error, nothing is changed.
    pub(crate) fn bind(
        &self,
        target: Target,
        pool: &mut PagePool<M>,
        mut left: Option<&mut LeftChunks<M>>,
        mut options: QueueOptions,
    ) -> Result<Opened<M>, XskError> {
        let Target { interface, ifindex, queue, device, watch } = target;
        let quirks = device.quirks();
        let level = if options.transmit_only { 0 } else { device.level(options.fill.unwrap_or(LEVEL)) };
        let fd = Unbound::descriptor(&mut options)?;
        let (binding, features) = self.prepare(&fd, ifindex, &quirks, &options)?;
        // In copy mode the timer is not used.
        let sets = WaitSet::receive(watch.clone()).and_then(|rx| Ok((rx, WaitSet::transmit(watch)?)));
        let (receives, mut sends) = sets.map_err(failed("make an epoll set"))?;

        let key = QueueKey::new(fd.as_fd(), ifindex, queue);
        let address = QueueAddress { interface: interface.clone(), ifindex, queue };
        // Before pages are allocated for a socket that cannot be bound.
        self.check(&self.sockets(), key, &address, &options)?;
        warn(ifindex, &interface, &quirks);
        let entries = level.checked_next_power_of_two().unwrap_or(u32::MAX).max(2);
        let (unbound, rings) = Unbound::new(fd, entries, &options)?;
        // Before the socket is bound, because a driver fills its own ring then.
        let mut receive = Receive::new(self, rings.receive, level);
        pool.poll(|napi| receive.refill(napi));
        // The missing pages may be those that are kept until the queue is bound.
        let kept = left.is_some() || held::any(key);
        let short = receive.short().filter(|_| !kept);
        let socket = match self.bind_socket(unbound, (key, address), &options, &binding, short) {
            Ok(socket) => socket,
            Err(NotOpened { error, was_bound }) => {
                // The socket is closed. If it was never bound, it has received nothing, and all
                // chunks are returned.
                pool.poll(|_| if was_bound { receive.abandon(key).keep(self.number()) } else { receive.unpost() });
                return Err(error);
            }
        };
        held::released(key);
        if let Some(left) = &mut left {
            left.bound(key, pool);
        }
        if receive.short().is_some() {
            pool.poll(|napi| receive.refill(napi));
        }
        sends.set_mode(socket.mode());
        let (mode, multi_buffer) = (socket.mode(), socket.is_multi_buffer());
        let reason = socket.copy_reason().map(|reason| reason.to_string());
        let reason = reason.as_deref();
        netmem_pool::trace::info!(interface, queue, %mode, reason, multi_buffer, level, "AF_XDP socket bound");
        Ok(Opened { receive, transmit: rings.transmit, receives, sends, socket, features })
    }

    /// Registers the memory with a socket, unless another one has, and binds the socket. It is one
    /// of the UMEM's sockets from then on. `short` is the error of a socket with too few chunks.
    ///
    /// The lock is held until the socket is bound, because other sockets can share the memory only
    /// with a bound socket. No code of the user's runs meanwhile: a provider may open a queue of
    /// the same UMEM, or have a lock of its own that is held around a call of [`open`](Self::open).
    fn bind_socket(
        &self,
        unbound: Unbound,
        (key, address): (QueueKey, QueueAddress),
        options: &QueueOptions,
        binding: &Binding,
        short: Option<XskError>,
    ) -> Result<Arc<XskSocket>, NotOpened> {
        let mut sockets = self.sockets();
        let first = self.check(&sockets, key, &address, options)?;
        // Before the kernel pins the memory.
        if let Some(error) = short {
            return Err(error.into());
        }
        if first.is_none() {
            // The kernel may still count the memory for a socket that was closed.
            let retry = if sockets.is_empty() { Retry::Once } else { Retry::Patient };
            self.register(unbound.as_fd(), retry)?;
        }
        let socket = Arc::new(unbound.bind(address, options, binding, first.as_deref(), Retry::Patient)?);
        sockets.retain(|socket| socket.strong_count() > 0);
        sockets.push(Arc::downgrade(&socket));
        Ok(socket)
    }

    /// Checks whether a socket can be bound to a queue besides the UMEM's other sockets. Returns
    /// the one with which it shares the memory.
    fn check(
        &self,
        sockets: &[Weak<XskSocket>],
        key: QueueKey,
        address: &QueueAddress,
        options: &QueueOptions,
    ) -> Result<Option<Arc<XskSocket>>, XskError> {
        let (interface, queue) = (&address.interface, address.queue);
        // The kernel's error would be that of a queue that does not exist: a second socket of the
        // UMEM may have no fill ring of its own on this queue.
        let is_open = |socket: Arc<XskSocket>| socket.key() == key && !socket.is_gone();
        if sockets.iter().filter_map(Weak::upgrade).any(is_open) {
            return Err(XskError::Busy { interface: interface.clone(), queue });
        }
        let first = sockets.iter().find_map(|socket| socket.upgrade().filter(|socket| !socket.is_gone()));
        match (&first, options.required_mode()) {
            (Some(first), Some(mode)) if mode != first.mode() => {
                Err(XskError::Mode { interface: interface.clone(), queue, mode })
            }
            _ => Ok(first),
        }
    }

    /// Determines how a socket is to be bound, and sets the options that it needs before.
    fn prepare(
        &self,
        fd: &OwnedFd,
        ifindex: u32,
        quirks: &[&Quirk],
        options: &QueueOptions,
    ) -> Result<(Binding, Option<XdpFeatures>), XskError> {
        // Elsewhere, this index is another interface.
        let here = sys::is_of_this_namespace(fd.as_fd());
        let limits = if here { Limits::of(ifindex) } else { Limits::default() };
        let binding = Binding::new(options, quirks, limits, self.frame_capacity());
        if let Some(poll) = options.busy_poll {
            poll_busily(fd.as_fd(), poll)?;
        }
        // In copy mode, the kernel counts this size for a frame. The buffer must not limit the
        // ring, and a waiting sender is woken only while at most half of the buffer is in use.
        sys::grow_send_buffer(fd.as_fd(), options.tx as usize * (2 * self.chunk_size() + 1024));
        Ok((binding, limits.features))
    }
}

/// A bound socket, and the parts of its queues but the pool.
pub(crate) struct Opened<M: UmemMemory> {
    receive: Receive<M>,
    transmit: TxRings,
    receives: WaitSet,
    sends: WaitSet,
    pub(crate) socket: Arc<XskSocket>,
    features: Option<XdpFeatures>,
}

impl<M: UmemMemory> Opened<M> {
    /// The error of a queue with fewer chunks than the fill level.
    fn short(&self) -> Option<XskError> {
        self.receive.short()
    }

    pub(crate) fn queues(
        self,
        umem: &Umem<M>,
        pool: PagePool<M>,
        provider: Arc<dyn Provider<M>>,
    ) -> (XskRx<M>, XskTx<M>) {
        let Self { receive, transmit, receives, sends, socket, features } = self;
        let tx = XskTx::new(umem.clone(), socket.clone(), transmit, sends, provider.clone(), features);
        (XskRx::new(pool, receive, receives, socket, provider, umem.clone()), tx)
    }
}

/// The queue that is opened, and its device.
pub(crate) struct Target {
    /// The interface's name, or its index if the name is unknown.
    interface: String,
    ifindex: u32,
    queue: u32,
    device: DeviceInfo,
    /// Reports the end of the interface. `None` in another network namespace.
    watch: Option<Arc<Watch>>,
}

impl Target {
    /// Finds the interface, unless a helper has sent its properties.
    pub(crate) fn find(ifindex: u32, queue: u32, options: &mut QueueOptions) -> Result<Self, XskError> {
        let device = match options.device.take() {
            Some(device) => device,
            None => DeviceInfo::find(ifindex, options.socket.as_ref().map(AsFd::as_fd))?,
        };
        let interface = device.name.clone().unwrap_or_else(|| ifindex.to_string());
        let in_use = device.queues.map(|(rx, tx)| rx.max(tx));
        if in_use.is_some_and(|in_use| queue >= in_use) {
            return Err(XskError::NoQueue { interface, queue, in_use });
        }
        let watch = match options.watch.take() {
            Some(watch) => Some(watch),
            // Elsewhere, this index is another interface.
            None if device.name.is_none() => None,
            None => Some(Arc::new(Watch::new(ifindex).map_err(failed("watch for the end of the interface"))?)),
        };
        Ok(Self { interface, ifindex, queue, device, watch })
    }
}

/// Lets the driver of an interface leave interrupts off while its queues have busy polling. After
/// `empty_polls` polls in a row without work, the interrupt is switched on again. When `timeout`
/// has passed after the last poll, the driver polls by itself. This applies to all queues of the
/// interface, until the values are written again: (0, 0) switches it off. Needs root.
///
/// # Errors
///
/// The system's error when `napi_defer_hard_irqs` or `gro_flush_timeout` in
/// `/sys/class/net/INTERFACE` is written.
pub fn defer_interrupts(interface: &str, empty_polls: u32, timeout: Duration) -> io::Result<()> {
    if interface.contains('/') || interface.is_empty() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let write = |name, value: u128| fs::write(format!("/sys/class/net/{interface}/{name}"), value.to_string());
    write("gro_flush_timeout", timeout.as_nanos())?;
    write("napi_defer_hard_irqs", empty_polls.into())
}

/// The interfaces of whose drivers' quirks this process has warned. A program may open an interface
/// many times, as a measurement does for each run: the user is warned once.
static WARNED: Mutex<BTreeSet<(u32, String)>> = Mutex::new(BTreeSet::new());
/// The most interfaces that are remembered. If a process opens more of them, it warns again.
const REMEMBERED: usize = 1024;

/// Logs the known quirks of the driver as warnings, once for each interface.
fn warn(ifindex: u32, interface: &str, quirks: &[&Quirk]) {
    if quirks.is_empty() {
        return;
    }
    let mut warned = WARNED.lock().unwrap_or_else(PoisonError::into_inner);
    if warned.len() == REMEMBERED {
        warned.clear();
    }
    if !warned.insert((ifindex, interface.to_owned())) {
        return;
    }
    // The subscriber that receives the warnings is code of the user's.
    drop(warned);
    for quirk in quirks {
        netmem_pool::trace::warn!(interface, driver = quirk.driver, source = quirk.source, "{}", quirk.text);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::fake;
    use crate::options::UmemOptions;
    use crate::testing::{in_namespace, ip};
    use netmem_pool::{KernelShared, RawPage, Region, RegionOptions, RegionProvider};
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU32, Ordering};

    /// A queue that only sends has no chunks, and must not share a UMEM in zero-copy mode.
    #[test]
    fn a_queue_without_chunks_is_not_in_zero_copy_mode() {
        in_namespace(|| {
            ip("link add mode0 type veth peer name mode1");
            let ifindex = crate::netlink::Interface::by_name("mode0").unwrap().index;
            let region = RegionOptions::new(64).huge_pages(false).build::<KernelShared>().unwrap();
            let memory = RegionProvider::new(region);
            let umem = Umem::new(memory.region().clone(), &UmemOptions::new()).unwrap();
            let first = fake::socket(Mode::ZeroCopy);
            umem.sockets().push(Arc::downgrade(&first));
            for options in [QueueOptions::new(), QueueOptions::new().mode(Mode::Copy)] {
                let opened = umem.open_tx(ifindex, 0, memory.clone(), options);
                assert!(matches!(opened, Err(XskError::Mode { queue: 0, mode: Mode::Copy, .. })), "{opened:?}");
            }
        });
    }

    /// A provider of the user's, which opens another queue of the UMEM when it is called.
    #[derive(Debug)]
    struct Calls {
        memory: Arc<RegionProvider<KernelShared>>,
        umem: OnceLock<Umem<KernelShared>>,
        ifindex: u32,
        opened: Mutex<Vec<(XskRx, XskTx)>>,
        /// Calls of `alloc` and `release`.
        calls: [AtomicU32; 2],
    }

    impl Calls {
        /// Opens queue 1, unless it is open.
        fn call(&self, which: usize) {
            let umem = self.umem.get().unwrap();
            // Without this check, the test would not end.
            assert!(!umem.is_locked(), "the UMEM is locked");
            if self.calls[which].fetch_add(1, Ordering::Relaxed) == 0 {
                self.opened.lock().unwrap().clear();
                let opened = umem.open(self.ifindex, 1, self.memory.clone(), QueueOptions::new().fill(16));
                self.opened.lock().unwrap().push(opened.unwrap());
            }
        }
    }

    // SAFETY: it has the pages of the other provider.
    unsafe impl Provider<KernelShared> for Calls {
        fn alloc(&self, pages: &mut [Option<RawPage<KernelShared>>]) -> usize {
            self.call(0);
            self.memory.alloc(pages)
        }

        unsafe fn release(&self, page: RawPage<KernelShared>) {
            self.call(1);
            // SAFETY: the caller's; all pages come from there.
            unsafe { self.memory.release(page) }
        }

        fn page_size(&self) -> usize {
            self.memory.page_size()
        }

        fn each(&self, f: &mut dyn FnMut(&Region<KernelShared>)) {
            self.memory.each(f);
        }
    }

    /// While a queue is opened, the user's provider is called for pages that are posted, and for
    /// pages that the kernel returns. It opens another queue of the same UMEM in both calls.
    #[test]
    fn a_provider_opens_a_queue_while_another_is_opened() {
        in_namespace(|| {
            ip("link add calls0 numrxqueues 2 numtxqueues 2 type veth peer name calls1 numrxqueues 2 numtxqueues 2");
            let ifindex = crate::netlink::Interface::by_name("calls0").unwrap().index;
            let region = RegionOptions::new(256).huge_pages(false).build::<KernelShared>().unwrap();
            let memory = RegionProvider::new(region);
            let umem = Umem::new(memory.region().clone(), &UmemOptions::new()).unwrap();
            let provider = Arc::new(Calls {
                memory,
                umem: umem.clone().into(),
                ifindex,
                opened: Mutex::default(),
                calls: Default::default(),
            });
            let open = |queue| umem.open(ifindex, queue, provider.clone(), QueueOptions::new().fill(16).cache(0));
            let calls = || provider.calls.each_ref().map(|calls| calls.load(Ordering::Relaxed));
            let queues = open(0).unwrap();
            assert!(calls()[0] > 0 && provider.opened.lock().unwrap().len() == 1);
            // The posted pages are kept until the queue is bound again.
            drop(queues);
            let released = calls()[1];
            let queues = open(0).unwrap();
            assert!(calls()[1] > released, "no page was released while the queue was opened");
            assert_eq!(provider.opened.lock().unwrap()[0].0.socket().queue(), 1);
            drop((queues, provider.opened.lock().unwrap().drain(..).collect::<Vec<_>>()));
        });
    }
}
