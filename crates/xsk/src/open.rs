//! Opens a queue: makes its pool, fills its rings, and binds its socket.

use crate::binding::{Binding, Limits};
use crate::device_info::DeviceInfo;
use crate::error::XskError;
use crate::held;
use crate::options::QueueOptions;
use crate::queue_key::{QueueAddress, QueueKey};
use crate::quirks::Quirk;
use crate::receive::Receive;
use crate::rx::XskRx;
use crate::socket::{BindRetry, RxRings, Unbound, XskSocket, failed, poll_busily};
use crate::sys;
use crate::tx::XskTx;
use crate::umem::Umem;
use crate::umem_memory::UmemMemory;
use crate::wait_set::WaitSet;
use crate::watch::Watch;
use netmem_pool::{PagePool, PoolOptions, Provider};
use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};
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
        let mut ours = true;
        provider.each(&mut |region| ours &= std::ptr::eq(region, Arc::as_ptr(self.region())));
        if !ours {
            return Err(XskError::Provider);
        }
        held::release_gone();
        let target = Target::find(ifindex, queue, &mut options)?;
        let quirks = target.device.quirks();
        let level = target.device.level(options.fill.unwrap_or(LEVEL));
        let name = options.name.take().unwrap_or_else(|| format!("{}:{queue}", target.interface));
        let pool = PoolOptions::new(name).cache(options.cache).build(provider.clone(), Some(self.domain()))?;

        let fd = Unbound::descriptor(&mut options)?;
        // Elsewhere, this index is another interface.
        let here = sys::is_of_this_namespace(fd.as_fd());
        let limits = if here { Limits::of(ifindex) } else { Limits::default() };
        let binding = Binding::new(&options, &quirks, limits, self.frame_capacity());
        if let Some(poll) = options.busy_poll {
            poll_busily(fd.as_fd(), poll)?;
        }
        // In copy mode, the kernel counts this size for a frame. The buffer must not limit the
        // ring, and a waiting sender is woken only while at most half of the buffer is in use.
        sys::grow_send_buffer(fd.as_fd(), options.tx as usize * (2 * self.chunk_size() + 1024));

        // The lock is held until the socket is bound, because other sockets can share the memory
        // only with a bound socket.
        let mut sockets = self.sockets().lock().unwrap_or_else(PoisonError::into_inner);
        sockets.retain(|socket| socket.strong_count() > 0);
        let first = sockets.iter().find_map(|socket| socket.upgrade().filter(|socket| !socket.is_gone()));
        warn(ifindex, &target.interface, &quirks);
        if first.is_none() {
            self.register(&fd)?;
        }
        let entries = level.checked_next_power_of_two().unwrap_or(u32::MAX).max(2);
        let (unbound, rings) = Unbound::new(fd, entries, &options)?;
        let key = QueueKey::new(unbound.as_fd(), ifindex, queue);
        let filled = Filled::new(self, &provider, pool, rings.receive, (level, key));
        let address = QueueAddress { interface: target.interface.clone(), ifindex, queue };
        let bind = |unbound: Unbound| unbound.bind(address, &options, &binding, first.as_deref(), BindRetry::Patient);
        let (filled, socket) = filled.bind(unbound, bind)?;
        held::released(key);
        let filled = filled.complete()?;
        let watch = target.watch;
        let sets = WaitSet::receive(watch.clone()).and_then(|rx| Ok((rx, WaitSet::transmit(socket.mode(), watch)?)));
        let (receives, sends) = match sets {
            Ok(sets) => sets,
            Err(error) => {
                filled.close();
                return Err(failed("make an epoll set")(error));
            }
        };
        sockets.push(Arc::downgrade(&socket));
        drop(sockets);
        let (mode, multi_buffer) = (socket.mode(), socket.is_multi_buffer());
        let reason = socket.copy_reason().map(|reason| reason.to_string());
        let reason = reason.as_deref();
        netmem_pool::trace::info!(interface = %target.interface, queue, %mode, reason, multi_buffer, level, "AF_XDP socket bound");
        let (pool, receive) = (filled.pool, filled.receive);
        let (transmit, features) = (rings.transmit, limits.features);
        let tx = XskTx::new(self.clone(), socket.clone(), transmit, sends, provider.clone(), features);
        Ok((XskRx::new(pool, receive, receives, socket, provider, self.clone()), tx))
    }
}

/// The queue that is opened, and its device.
struct Target {
    /// The interface's name, or its index if the name is unknown.
    interface: String,
    device: DeviceInfo,
    /// Reports the end of the interface. `None` in another network namespace.
    watch: Option<Arc<Watch>>,
}

impl Target {
    /// Finds the interface, unless a helper has sent its properties.
    fn find(ifindex: u32, queue: u32, options: &mut QueueOptions) -> Result<Self, XskError> {
        let device = match options.device.take() {
            Some(device) => device,
            None => DeviceInfo::find(ifindex, options.socket.as_ref().map(AsFd::as_fd))?,
        };
        let interface = device.name.clone().unwrap_or_else(|| ifindex.to_string());
        if device.queues.is_some_and(|(rx, tx)| queue >= rx.max(tx)) {
            return Err(XskError::NoQueue { interface, queue });
        }
        let watch = match options.watch.take() {
            Some(watch) => Some(watch),
            // Elsewhere, this index is another interface.
            None if device.name.is_none() => None,
            None => Some(Arc::new(Watch::new(ifindex).map_err(failed("watch for the end of the interface"))?)),
        };
        Ok(Self { interface, device, watch })
    }
}

/// A receive queue whose fill ring is full, while its socket is bound.
struct Filled<'a, M: UmemMemory> {
    umem: &'a Umem<M>,
    provider: &'a Arc<dyn Provider<M>>,
    pool: PagePool<M>,
    receive: Receive<M>,
    level: u32,
    key: QueueKey,
}

impl<'a, M: UmemMemory> Filled<'a, M> {
    /// Posts chunks up to the fill level, as far as there are pages. This is done before the socket
    /// is bound, because a driver fills its own ring then.
    fn new(
        umem: &'a Umem<M>,
        provider: &'a Arc<dyn Provider<M>>,
        mut pool: PagePool<M>,
        rings: RxRings,
        (level, key): (u32, QueueKey),
    ) -> Self {
        let mut receive = Receive::new(umem, rings, level);
        pool.poll(|napi| receive.refill(napi));
        Self { umem, provider, pool, receive, level, key }
    }

    /// The error of a queue with fewer chunks than the fill level.
    fn short(&self) -> Option<XskError> {
        let (got, want) = (self.receive.posted() as usize, self.level as usize);
        (got < want).then_some(XskError::Pages { want, got })
    }

    /// Binds the socket. If that fails, the socket is closed, has received nothing, and all chunks
    /// are returned.
    fn bind(
        mut self,
        unbound: Unbound,
        bind: impl FnOnce(Unbound) -> Result<XskSocket, XskError>,
    ) -> Result<(Self, Arc<XskSocket>), XskError> {
        // The missing pages may be those that are kept until the queue is bound.
        let bound = match self.short().filter(|_| !held::any(self.key)) {
            None => bind(unbound),
            Some(error) => {
                drop(unbound);
                Err(error)
            }
        };
        match bound {
            Ok(socket) => Ok((self, Arc::new(socket))),
            Err(error) => {
                self.pool.poll(|_| self.receive.unpost());
                Err(error)
            }
        }
    }

    /// Posts the chunks that were missing, whose pages the bound queue has released.
    fn complete(mut self) -> Result<Self, XskError> {
        if self.short().is_some() {
            self.pool.poll(|napi| self.receive.refill(napi));
        }
        match self.short() {
            None => Ok(self),
            Some(error) => {
                self.close();
                Err(error)
            }
        }
    }

    /// Closes a queue whose socket was bound. No page has left the pool but those that the kernel
    /// has.
    fn close(self) {
        let Self { umem, provider, pool, mut receive, key, .. } = self;
        let (_, pages) = receive.close(pool);
        held::keep_posted(key, umem.number(), (provider, umem.region()), pages);
    }
}

/// Lets the driver of an interface leave interrupts off while the queues are polled busily. After
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
    for quirk in quirks {
        netmem_pool::trace::warn!(interface, driver = quirk.driver, source = quirk.source, "{}", quirk.text);
    }
}
