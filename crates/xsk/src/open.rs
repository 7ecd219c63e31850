//! Opens a queue: makes its pool, fills its rings, and binds its socket.

use crate::binding::{Binding, Limits};
use crate::device::Device;
use crate::error::XskError;
use crate::held::{self, Key};
use crate::options::QueueOptions;
use crate::quirks::Quirk;
use crate::rx::{Receive, XskRx};
use crate::socket::{Tries, Unbound, failed, poll_busily};
use crate::sys;
use crate::tx::XskTx;
use crate::umem::{Umem, UmemMemory};
use crate::waiting::Waiting;
use crate::watch::Watch;
use netmem_pool::{PoolOptions, Provider};
use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use std::{fs, io};

/// The fill level, unless the device's ring or the options require more.
const LEVEL: u32 = 1024;

impl<M: UmemMemory> Umem<M> {
    /// Opens queue `queue` of an interface: a socket with this UMEM, and a pool for received frames, which takes its
    /// pages from `provider`. The two halves can be moved to two threads.
    ///
    /// Frames arrive when an XDP program on the interface redirects them to the socket. The interface is looked up in
    /// the network namespace of the calling thread.
    ///
    /// A UMEM can have sockets on many queues and interfaces. The first socket determines the mode, need-wakeup and
    /// multi-buffer frames of all sockets. For interfaces that cannot share these settings, make another [`Umem`] of
    /// the same region. Frames are then passed between both without a copy, and the kernel pins the memory twice.
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
        let device = match options.device.take() {
            Some(device) => device,
            None => Device::find(ifindex, options.socket.as_ref().map(AsFd::as_fd))?,
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
        let quirks = device.quirks();
        let level = device.level(options.fill.unwrap_or(LEVEL));
        let name = options.name.take().unwrap_or_else(|| format!("{interface}:{queue}"));
        let mut pool = PoolOptions::new(name).cache(options.cache).build(provider.clone(), Some(self.domain()))?;

        let fd = Unbound::descriptor(&mut options)?;
        // Elsewhere, this index is another interface.
        let here = sys::is_of_this_namespace(fd.as_fd());
        let limits = if here { Limits::of(ifindex) } else { Limits::default() };
        let binding = Binding::new(&options, &quirks, limits, self.room());
        if let Some(poll) = options.busy_poll {
            poll_busily(fd.as_fd(), poll)?;
        }
        // In copy mode, the kernel counts this size for a frame. The buffer must not limit the ring, and a waiting
        // sender is woken only while at most half of the buffer is in use.
        sys::grow_send_buffer(fd.as_fd(), options.tx as usize * (2 * self.chunk_size() + 1024));

        // The lock is held until the socket is bound, because other sockets can share the memory only with a bound
        // socket.
        let mut sockets = self.sockets().lock().unwrap_or_else(PoisonError::into_inner);
        sockets.retain(|socket| socket.strong_count() > 0);
        let first = sockets.iter().find_map(|socket| socket.upgrade().filter(|socket| !socket.is_gone()));
        warn(ifindex, &interface, &quirks);
        if first.is_none() {
            self.register(&fd)?;
        }
        let entries = level.checked_next_power_of_two().unwrap_or(u32::MAX).max(2);
        let (unbound, rings) = Unbound::new(fd, entries, &options)?;
        let mut receive = Receive::new(self, rings.rx, rings.fill, level);
        // This is done before the socket is bound, because a driver fills its own ring then.
        pool.poll(|napi| receive.refill(napi));
        let key = Key::new(unbound.as_fd(), ifindex, queue);
        let short = |receive: &Receive<M>| {
            let (got, want) = (receive.posted() as usize, level as usize);
            (got < want).then_some(XskError::Pages { want, got })
        };
        // The missing pages may be those that are kept until the queue is bound.
        let bound = match short(&receive).filter(|_| !held::any(key)) {
            None => {
                let at = (interface.clone(), ifindex);
                unbound.bind(at, queue, &options, &binding, first.as_deref(), Tries::Patient)
            }
            Some(error) => {
                drop(unbound);
                Err(error)
            }
        };
        let socket = match bound {
            Ok(socket) => Arc::new(socket),
            Err(error) => {
                // The socket is closed, and has received nothing.
                pool.poll(|_| receive.unpost());
                return Err(error);
            }
        };
        held::released(key);
        let close = |mut receive: Receive<M>, pool| {
            // No page has left the pool but those that the kernel has.
            let (_, pages) = receive.close(pool);
            held::keep_posted(key, self.number(), (&provider, self.region()), pages);
        };
        if short(&receive).is_some() {
            pool.poll(|napi| receive.refill(napi));
            if let Some(error) = short(&receive) {
                close(receive, pool);
                return Err(error);
            }
        }
        let sets = Waiting::receive(watch.clone()).and_then(|rx| Ok((rx, Waiting::transmit(socket.mode(), watch)?)));
        let (receives, sends) = match sets {
            Ok(sets) => sets,
            Err(error) => {
                close(receive, pool);
                return Err(failed("make an epoll set")(error));
            }
        };
        sockets.push(Arc::downgrade(&socket));
        drop(sockets);
        let (mode, multi_buffer) = (socket.mode(), socket.is_multi_buffer());
        let reason = socket.copy_reason().map(tracing::field::display);
        tracing::info!(%interface, queue, %mode, reason, multi_buffer, level, "AF_XDP socket bound");
        let tx =
            XskTx::new(self.clone(), socket.clone(), rings.tx, rings.done, sends, provider.clone(), limits.features);
        Ok((XskRx::new(pool, receive, receives, socket, provider, self.clone()), tx))
    }
}

/// Lets the driver of an interface leave interrupts off while the queues are polled busily. After `empty_polls` polls
/// in a row without work, the interrupt is switched on again. When `timeout` has passed after the last poll, the driver
/// polls by itself. This applies to all queues of the interface, until the values are written again: (0, 0) switches it
/// off. Needs root.
///
/// # Errors
///
/// The system's error when `napi_defer_hard_irqs` or `gro_flush_timeout` in `/sys/class/net/INTERFACE` is written.
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
        tracing::warn!(interface, driver = quirk.driver, source = quirk.source, "{}", quirk.text);
    }
}
