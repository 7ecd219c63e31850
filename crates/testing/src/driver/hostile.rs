//! A vhost-user back end that a test controls: the messages are answered on a thread,
//! the driver's memory and rings are the test's to write at will.

mod back_end;
mod ring;

pub use back_end::{Behaviour, FEATURES, FORMATS, OnStop, WITHOUT_CONTROL};
pub use ring::{DeviceRing, PackedWords};

use super::{Accounting, DropAll, close_clean, receive};
use crate::vhost_user::back::Peer;
use back_end::{Backend, Mapped, State};
use netmem_virtio::VhostUser;
use netmem_virtio::driver::{DeviceFault, NetOptions, QueuePair, RxMode, VirtioNet};
use netmem_virtio::net::{VnetHdr, feature};
use netmem_virtio::virtqueue::{PackedRing, SplitRing};
use std::fs::File;
use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

/// The backend, in the hands of the test.
pub struct Hostile {
    backend: Arc<Backend>,
    stream: UnixStream,
    thread: Option<JoinHandle<()>>,
}

impl Hostile {
    pub fn new(behaviour: Behaviour) -> (Self, VhostUser) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let this = Self::over(theirs, behaviour);
        (this, VhostUser::own_device(ours).unwrap())
    }

    pub fn over(stream: UnixStream, behaviour: Behaviour) -> Self {
        let backend = Arc::new(Backend {
            behaviour: Mutex::new(behaviour),
            state: Mutex::default(),
            changed: Condvar::new(),
            features: AtomicU64::new(0),
            status: AtomicU64::new(0),
            mtu: AtomicU64::new(0),
            messages: Mutex::default(),
        });
        let (peer, handler) = (Peer::new(stream.try_clone().unwrap()), Arc::clone(&backend));
        let thread = std::thread::spawn(move || {
            while let Some(message) = peer.receive()
                && handler.handle(&peer, message).is_some()
            {}
            peer.hang_up();
        });
        Self { backend, stream, thread: Some(thread) }
    }

    pub fn behave(&self, change: impl FnOnce(&mut Behaviour)) {
        change(&mut self.backend.behaviour.lock().unwrap());
    }

    /// Sends bytes that no message asked for.
    pub fn send(&self, bytes: &[u8]) {
        (&self.stream).write_all(bytes).unwrap();
    }

    /// Dies: the connection ends, nothing is answered any more.
    pub fn kill(&mut self) {
        self.stream.shutdown(Shutdown::Both).unwrap();
        self.release();
        self.thread.take().unwrap().join().unwrap();
    }

    /// Lets what hangs go on.
    pub fn release(&self) {
        self.backend.state.lock().unwrap().released = true;
        self.backend.changed.notify_all();
    }

    /// The rings that were asked to stop, in order.
    pub fn stops(&self) -> Vec<u32> {
        self.backend.state.lock().unwrap().stops.clone()
    }

    /// The rings that were enabled or disabled, in order.
    pub fn enabled(&self) -> Vec<(u32, bool)> {
        self.backend.state.lock().unwrap().enabled.clone()
    }

    pub fn negotiated(&self) -> u64 {
        self.backend.features.load(Relaxed)
    }

    /// The device status as the driver has set it.
    pub fn status(&self) -> u64 {
        self.backend.status.load(Relaxed)
    }

    /// The MTU that the driver has set.
    pub fn mtu(&self) -> u64 {
        self.backend.mtu.load(Relaxed)
    }

    /// The messages that came, in order.
    pub fn messages(&self) -> Vec<&'static str> {
        self.backend.messages.lock().unwrap().clone()
    }

    /// The kick descriptors of all rings, as the backend has them.
    pub fn kicks(&self) -> Vec<File> {
        self.backend.state.lock().unwrap().kicks.iter().map(|kick| kick.try_clone().unwrap()).collect()
    }

    /// The call descriptors, in the order in which they came.
    pub fn calls(&self) -> Vec<File> {
        self.backend.state.lock().unwrap().calls.iter().map(|call| call.try_clone().unwrap()).collect()
    }

    /// Ring `index` as a device sees it. A driver that gets no acknowledgements does not wait until
    /// the backend has heard of it: this does.
    pub fn ring(&self, index: usize) -> DeviceRing {
        let told = |state: &State| {
            let known = |user: &u64| state.memory.iter().any(|m| (m.user..m.user + m.len as u64).contains(user));
            state.rings.get(index).is_some_and(|ring| ring.parts.iter().all(known))
        };
        let state = loop {
            let state = self.backend.state.lock().unwrap();
            if told(&state) {
                break state;
            }
            drop(state);
            std::thread::yield_now();
        };
        let at = state.rings[index];
        let host = |user: u64| {
            let m = state.memory.iter().find(|m| (m.user..m.user + m.len as u64).contains(&user)).unwrap();
            // SAFETY: just found to lie in the mapping.
            unsafe { m.base.add((user - m.user) as usize) }
        };
        let [desc, avail, used] = at.parts.map(host);
        let packed = self.negotiated() & feature::RING_PACKED != 0;
        // SAFETY: the driver laid the ring out, and the mapping stays while the test has the
        // backend.
        unsafe {
            match packed {
                true => DeviceRing::packed_ring(PackedRing::from_parts(desc, avail, used, at.size)),
                false => DeviceRing::split_ring(SplitRing::from_parts(desc, avail, used, at.size)),
            }
        }
    }

    /// Answers the next command on the control queue. Returns class, command and argument.
    pub fn answer_command(&self, ring: &mut DeviceRing, verdict: u8) -> [u8; 4] {
        let mut head = None;
        super::until(|| {
            head = ring.take();
            head.is_some()
        });
        let head = head.unwrap();
        let chain = ring.chain(head);
        let asked = [self.read(chain[0].addr, 2), self.read(chain[1].addr, 2)].concat();
        self.write(chain[2].addr, &[verdict]);
        ring.add_used(u32::from(head), 1);
        asked.try_into().unwrap()
    }

    fn host(&self, addr: u64, len: usize) -> *mut u8 {
        let state = self.backend.state.lock().unwrap();
        let m = state.memory.iter().find(|m| addr >= m.guest && addr + len as u64 <= m.guest + m.len as u64);
        let m = m.unwrap_or_else(|| panic!("{len} bytes at {addr:#x} are in no region"));
        // SAFETY: just found to lie in the mapping.
        unsafe { m.base.add((addr - m.guest) as usize) }
    }

    /// Writes where a descriptor points.
    pub fn write(&self, addr: u64, bytes: &[u8]) {
        let to = self.host(addr, bytes.len());
        for (i, b) in bytes.iter().enumerate() {
            // SAFETY: `host` found room for all of them.
            unsafe { to.add(i).write_volatile(*b) };
        }
    }

    /// The same if that is anywhere.
    pub fn try_write(&self, addr: u64, bytes: &[u8]) {
        let state = self.backend.state.lock().unwrap();
        let fits = |m: &&Mapped| addr >= m.guest && bytes.len() as u64 <= (m.guest + m.len as u64).saturating_sub(addr);
        let found = state.memory.iter().any(|m| fits(&m));
        drop(state);
        if found {
            self.write(addr, bytes);
        }
    }

    pub fn read(&self, addr: u64, len: usize) -> Vec<u8> {
        let from = self.host(addr, len);
        // SAFETY: `host` found all of them.
        (0..len).map(|i| unsafe { from.add(i).read_volatile() }).collect()
    }

    /// The mapped regions: address in this process, length.
    pub fn regions(&self) -> Vec<(usize, usize)> {
        self.backend.state.lock().unwrap().memory.iter().map(|m| (m.base.addr(), m.len)).collect()
    }

    /// Tries to shrink every memory file.
    pub fn truncate(&self) -> Vec<rustix::io::Result<()>> {
        let state = self.backend.state.lock().unwrap();
        state.memory.iter().map(|m| rustix::fs::ftruncate(&m.file, 0)).collect()
    }

    /// Delivers a plain frame as an honest device would: into one chain, or into as many as it
    /// needs.
    pub fn deliver(&self, ring: &mut DeviceRing, frame: &[u8]) {
        self.deliver_with(ring, VnetHdr::PLAIN, frame);
    }

    /// The same with a header of the test's, of which the number of buffers is filled in. Returns
    /// the first chain.
    pub fn deliver_with(&self, ring: &mut DeviceRing, header: VnetHdr, frame: &[u8]) -> u16 {
        let wire = [&header.to_bytes(), frame].concat();
        let (mut rest, mut chains) = (&wire[..], Vec::new());
        while !rest.is_empty() {
            let head = ring.take().expect("the driver has posted buffers");
            let before = rest.len();
            for d in ring.chain(head) {
                let (now, later) = rest.split_at(rest.len().min(d.len as usize));
                self.write(d.addr, now);
                rest = later;
            }
            chains.push((head, (before - rest.len()) as u32));
        }
        let count = chains.len() as u16;
        let first = chains[0].0;
        self.write(ring.chain(first)[0].addr + 10, &count.to_le_bytes());
        chains.into_iter().for_each(|(head, len)| ring.write(u32::from(head), len));
        ring.publish();
        first
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        let _ = self.stream.shutdown(Shutdown::Both);
        self.release();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

/// A driver and the test in the place of its device.
pub struct Harness {
    pub device: Hostile,
    pub ring: DeviceRing,
    pub tx: DeviceRing,
    pub net: VirtioNet,
    pub pair: QueuePair,
    pub accounting: Accounting,
}

impl Harness {
    pub fn new(options: NetOptions) -> Self {
        Self::with(Behaviour::default(), options)
    }

    /// With these features of rings.
    pub fn in_format(format: u64, options: NetOptions) -> Self {
        let behaviour = Behaviour { features: FEATURES | format, ..Behaviour::default() };
        Self::with(behaviour, options.ring_features(format))
    }

    /// As [`in_format`](Self::in_format), in a domain that needs no syncs.
    pub fn coherent(format: u64, options: NetOptions) -> Self {
        let behaviour = Behaviour { features: FEATURES | format, ..Behaviour::default() };
        let accounting = Accounting::coherent();
        Self::over(behaviour, accounting.count(options.ring_features(format)), accounting)
    }

    pub fn with(behaviour: Behaviour, options: NetOptions) -> Self {
        let accounting = Accounting::default();
        Self::over(behaviour, accounting.count(options), accounting)
    }

    /// A second device in this one's domain.
    pub fn beside(&self, behaviour: Behaviour, options: NetOptions) -> Self {
        Self::over(behaviour, self.accounting.share(options), self.accounting.clone())
    }

    /// A device whose domain is in the options already.
    pub fn over(behaviour: Behaviour, options: NetOptions, accounting: Accounting) -> Self {
        let (device, backend) = Hostile::new(behaviour);
        let (net, mut pairs) = VirtioNet::probe(backend, options).unwrap();
        Self { ring: device.ring(0), tx: device.ring(1), device, net, pair: pairs.remove(0), accounting }
    }

    pub fn deliver(&mut self, frame: &[u8]) {
        self.device.deliver(&mut self.ring, frame);
    }

    /// Pages are with the device, and nowhere else.
    #[track_caller]
    pub fn assert_all_posted(&mut self, mode: RxMode) {
        let expected = if mode == RxMode::Big { 0 } else { self.pair.rx.posted() as u64 };
        assert_eq!(self.pair.rx.pool_stats().inflight(), expected);
    }

    #[track_caller]
    pub fn close(self) {
        close_clean(self.pair);
        drop(self.net);
        self.accounting.assert_balanced();
    }

    /// The receive queue has stopped for this reason, and does nothing any more; every page is
    /// accounted for.
    #[track_caller]
    pub fn assert_stopped(mut self, error: DeviceFault) {
        let before = self.pair.rx.stats();
        assert_eq!(before.stopped, Some(error));
        assert!(before.errors().any(|e| e == (error.name(), 1)), "{before:?}");
        // Whatever else the ring holds.
        for n in [0, 1, 2] {
            self.ring.publish_garbage(n);
            assert_eq!(receive(&mut self.pair.rx, &mut DropAll::default()), 0);
        }
        assert_eq!(self.pair.rx.stats(), before);
        self.close();
    }
}
