//! The virtio-net device: the counterpart of the driver, in the same process or behind a vhost-user socket.
//!
//! ```text
//!   front end ── vhost-user messages ──> Control (its own thread) ─┐
//!                                                                  ├─ one mutex: rings, features, memory table
//!   Port ─ frames ─> Device::poll (the caller's thread) ───────────┘
//!        <─ frames ─        │ copies, in order, 256 frames a pass
//!                     the driver's memory
//! ```
//!
//! A [`NetDevice`] has one [`port::Port`] per queue pair and moves frames between them and the rings of the one front end
//! that its [`Control`] serves. The driver is not trusted: whatever it writes is checked on a private copy, and a ring
//! that breaks a rule is stopped and counted ([`DriverFault`], [`Stats`]) while the others go on.

mod config;
mod control;
mod copy;
mod ctrl;
mod error;
#[cfg(fuzzing)]
pub(crate) mod fuzz;
pub(crate) mod inflight;
pub(crate) mod log;
mod mapping;
pub mod memory;
pub mod port;
mod rarp;
mod run;
mod rx;
mod state;
mod stats;
mod tx;
mod udp;

use std::sync::Arc;
use std::time::Instant;

use netmem_pool::sigbus;

use self::config::Config;
pub use self::control::{Connection, Control};
pub use self::error::DeviceError;
use self::memory::{MemoryLimits, MemoryTable};
use self::port::{MAX_WIRE, Port, PortError};
use self::rx::Scratch;
use self::state::{Shared, State};
use self::stats::Tally;
pub use self::stats::{DropReason, Stats};
use crate::net::feature;
use crate::virtqueue::Negotiated;
pub use crate::virtqueue::fault::DriverFault;

/// The most queue pairs of a device: vhost-user numbers rings in one byte.
pub const MAX_PAIRS: usize = 127;

/// What a device offers.
#[derive(Clone, Debug)]
pub struct Options {
    /// Queue pairs, 1 to [`MAX_PAIRS`]. Pair `i` has rings `2 i` (to the driver) and `2 i + 1` (from it).
    pub max_pairs: usize,
    /// Features ([`feature`]) that are not to be offered although the port could do with them.
    pub withhold: u64,
    /// The MAC address to offer.
    pub mac: Option<[u8; 6]>,
    /// The MTU to offer.
    pub mtu: Option<u16>,
    /// The speed to tell, in Mbit/s and both directions at once. It limits nothing.
    pub speed: Option<u32>,
    /// Whether there is a control queue, ring `2 x max_pairs`. Front ends such as QEMU and DPDK answer control commands
    /// themselves and must not see one here.
    pub serve_control: bool,
    /// Whether memory is refused whose file can be shortened: files that are not sealed with `F_SEAL_SHRINK`. With the
    /// [handler](netmem_pool::sigbus) of SIGBUS, shortening stops the rings and ends nothing.
    pub require_sealed: bool,
    /// The most bytes of memory that a front end may have mapped here, and so the most that it can make this process
    /// allocate. By default, and at most, [`memory::MAX_BYTES`].
    pub max_memory: Option<u64>,
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
            require_sealed: false,
            max_memory: None,
        }
    }
}

impl Options {
    fn memory_limits(&self) -> MemoryLimits {
        MemoryLimits { require_sealed: self.require_sealed, max_bytes: self.max_memory }
    }

    fn offered<P: Port>(&self) -> u64 {
        let bit = |on, bit| if on { bit } else { 0 };
        let offered = feature::VERSION_1
            | feature::MRG_RXBUF
            | feature::STATUS
            | feature::LOG_ALL
            | feature::VHOST_USER_PROTOCOL
            | P::FEATURES
            | bit(self.max_pairs > 1, feature::MQ)
            | bit(self.serve_control, feature::CTRL_VQ | feature::GUEST_ANNOUNCE)
            | bit(self.mac.is_some(), feature::MAC)
            | bit(self.mtu.is_some(), feature::MTU)
            | bit(self.speed.is_some(), feature::SPEED_DUPLEX);
        offered & !self.withhold
    }
}

/// The data side of a device. One thread at a time polls it.
#[derive(Debug)]
pub struct NetDevice<P> {
    shared: Arc<Shared>,
    ports: Vec<P>,
    /// What the ports know of.
    told: Told,
    /// What [`sigbus::faults`] said after the last pass.
    faults: u64,
    scratch: Scratch,
    /// One frame from the driver.
    wire: Box<[u8]>,
}

impl<P: Port> NetDevice<P> {
    /// A device without a front end; `port` makes the port of each queue pair.
    ///
    /// # Errors
    ///
    /// [`DeviceError::Pairs`], or what `port` answers.
    pub fn new(options: Options, port: impl FnMut(usize) -> Result<P, PortError>) -> Result<Self, DeviceError> {
        if !(1..=MAX_PAIRS).contains(&options.max_pairs) {
            return Err(DeviceError::Pairs { asked: options.max_pairs, max: MAX_PAIRS });
        }
        let ports = (0..options.max_pairs).map(port).collect::<Result<_, _>>()?;
        let offered = options.offered::<P>();
        let shared = Arc::new(Shared::new(options, offered)?);
        let wire = vec![0; MAX_WIRE].into();
        Ok(Self { shared, ports, told: Told::default(), faults: sigbus::faults(), scratch: Scratch::default(), wire })
    }

    /// The control side: serves front ends.
    #[must_use]
    pub fn control(&self) -> Control {
        Control::new(Arc::clone(&self.shared))
    }

    /// What the device counts. Cheap to read at any time, from anywhere.
    #[must_use]
    pub fn stats(&self) -> Arc<Stats> {
        Arc::clone(&self.shared.stats)
    }

    /// The ports, one per queue pair.
    pub fn ports(&mut self) -> &mut [P] {
        &mut self.ports
    }

    /// One bounded pass over all rings; says how many frames (and commands) it moved. Never blocks: where the control
    /// side is at work it does nothing.
    ///
    /// Cost: two atomic read-modify-writes and two clock readings a pass, one barrier per ring that moved, and a system
    /// call where the driver wants an interrupt.
    pub fn poll(&mut self) -> usize {
        let Some(mut state) = self.shared.try_lock() else {
            std::thread::yield_now();
            return 0;
        };
        let start = Instant::now();
        let mut tally = Tally::default();
        if state.news {
            self.told.catch_up(&mut state, &mut self.ports, &self.shared.stats);
        }
        for (pair, port) in self.ports.iter_mut().enumerate() {
            let mut room = Room { scratch: &mut self.scratch, wire: &mut self.wire };
            pass(&mut state, pair, port, &mut room, &self.shared.stats, &mut tally);
        }
        if self.shared.options.serve_control {
            let max_pairs = self.ports.len() as u16;
            command(&mut state, max_pairs, &self.shared.config, &self.shared.stats, &mut tally);
        }
        if sigbus::faults() != self.faults {
            self.faults = sigbus::faults();
            state.look_for_lost(&self.shared.stats);
        }
        drop(state);
        self.shared.stats.add(&tally);
        let moved = tally.moved();
        if moved > 0 {
            let ns = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
            self.shared.stats.busy_ns.fetch_add(ns, std::sync::atomic::Ordering::Relaxed);
        }
        moved
    }
}

/// What the ports have been told of the front end.
#[derive(Debug, Default)]
struct Told {
    features: Negotiated,
    left: u64,
}

impl Told {
    /// Tells the ports what the control side has changed, and announces a guest that has moved here.
    #[cold]
    fn catch_up<P: Port>(&mut self, state: &mut State, ports: &mut [P], stats: &Stats) {
        state.news = false;
        if state.left != self.left {
            self.left = state.left;
            let waited = ports.iter_mut().map(Port::left).sum();
            stats.add_drops(DropReason::FrontEndLeft, waited);
        }
        if state.features != self.features {
            self.features = state.features;
            for port in &mut *ports {
                if let Err(e) = port.negotiated(self.features.bits()) {
                    tracing::warn!("offloads not set: {e}");
                }
            }
        }
        if let (Some(mac), Some(port)) = (state.announce.take(), ports.first_mut())
            && port.send(&rarp::request(mac))
        {
            stats.announced.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        }
    }
}

/// Private memory that the passes share.
struct Room<'a> {
    scratch: &'a mut Scratch,
    wire: &'a mut [u8],
}

/// Both rings of one pair.
#[inline]
fn pass<P: Port>(state: &mut State, pair: usize, port: &mut P, room: &mut Room<'_>, stats: &Stats, tally: &mut Tally) {
    let (rx, tx) = (2 * pair, 2 * pair + 1);
    let deliver = state.enabled(rx) && !state.unused(pair);
    let accepts = state.enabled(tx).then_some(state.offloads);
    let State { rings, memory, .. } = state;
    port.served(deliver && rings[rx].queue.is_some());
    if let (true, Some(q)) = (deliver, &mut rings[rx].queue) {
        let result = rx::receive(q, memory, port, room.scratch, tally);
        after(rings, memory, rx, result, stats, tally);
    }
    if let Some(q) = &mut rings[tx].queue {
        let result = tx::transmit(q, memory, port, accepts, room.scratch, room.wire, tally);
        after(rings, memory, tx, result, stats, tally);
    }
}

/// The control queue.
fn command(state: &mut State, max_pairs: u16, config: &Config, stats: &Stats, tally: &mut Tally) {
    let index = state.rings.len() - 1;
    if !state.enabled(index) {
        return;
    }
    let State { rings, memory, pairs, features, .. } = state;
    if let Some(q) = &mut rings[index].queue {
        let result = ctrl::command(q, memory, pairs, max_pairs, *features, config, tally);
        after(rings, memory, index, result, stats, tally);
    }
}

/// Tells the driver what a ring gave back, and takes a broken ring out of service.
#[inline]
fn after(
    rings: &mut [state::Ring],
    memory: &MemoryTable,
    index: usize,
    result: Result<(), DriverFault>,
    stats: &Stats,
    tally: &mut Tally,
) {
    let ring = &mut rings[index];
    if let Some(q) = &mut ring.queue
        && q.should_notify()
        && let Some(call) = &ring.call
    {
        call.signal();
        tally.calls += 1;
    }
    if let Err(e) = result {
        // What a page that is gone reads as is no fault of the ring's.
        let fault = match memory.lost() {
            0 => e,
            accesses => DriverFault::MemoryLost { accesses },
        };
        ring.broken(index, fault, stats);
    }
}
