//! A vhost-user backend that does what a test tells it to: the messages are answered on a thread, the driver's memory and
//! rings are the test's to write at will.

use std::fs::File;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

use super::{Books, DropAll, close_clean, receive};
use netmem_virtio::VhostUser;
use netmem_virtio::driver::{DeviceFault, NetOptions, QueuePair, RxMode, VirtioNet};
use netmem_virtio::net::{VnetHdr, feature};
use netmem_virtio::ring::{Desc, SplitRing};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight, VhostUserLog,
    VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{BackendReqHandler, Error, GpuBackend, Result, VhostUserBackendReqHandler};

/// All that the driver could want.
pub const FEATURES: u64 = feature::VERSION_1
    | feature::VHOST_USER_PROTOCOL
    | feature::MRG_RXBUF
    | feature::CSUM
    | feature::GUEST_CSUM
    | feature::GUEST_TSO4
    | feature::GUEST_TSO6
    | feature::GUEST_UFO
    | feature::HOST_TSO4
    | feature::HOST_TSO6
    | feature::CTRL_VQ
    | feature::MQ;

/// What the backend does when a ring is to be stopped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnStop {
    /// Says where it stood.
    #[default]
    Answer,
    /// Answers nothing and hangs up.
    Refuse,
    /// Answers nothing, until [`Hostile::release`].
    Hang,
}

#[derive(Clone, Debug)]
pub struct Behaviour {
    pub features: u64,
    pub pairs: u64,
    pub on_stop: OnStop,
    /// The message, by name, at which it fails.
    pub fail_at: Option<&'static str>,
    /// Whether answers to requests are confirmed.
    pub acks: bool,
}

impl Default for Behaviour {
    fn default() -> Self {
        Self { features: FEATURES, pairs: 1, on_stop: OnStop::Answer, fail_at: None, acks: true }
    }
}

struct Mapped {
    guest: u64,
    user: u64,
    len: usize,
    base: *mut u8,
    file: File,
}

// SAFETY: a mapping of its own; tests write it through volatile and atomic accesses.
unsafe impl Send for Mapped {}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: mapped by `set_mem_table`, and the rings are not used after it.
        unsafe { munmap(self.base.cast(), self.len).unwrap() };
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct RingAt {
    size: u16,
    parts: [u64; 3],
}

#[derive(Default)]
struct State {
    memory: Vec<Mapped>,
    rings: Vec<RingAt>,
    /// Call descriptors, kept open and never used.
    calls: Vec<Option<File>>,
    kicks: Vec<File>,
    stops: Vec<u32>,
    enabled: Vec<(u32, bool)>,
    released: bool,
}

struct Backend {
    behaviour: Mutex<Behaviour>,
    state: Mutex<State>,
    changed: Condvar,
    features: AtomicU64,
}

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
        });
        let mut requests = BackendReqHandler::from_stream(stream.try_clone().unwrap(), Arc::clone(&backend));
        let end = stream.try_clone().unwrap();
        let thread = std::thread::spawn(move || {
            while requests.handle_request().is_ok() {}
            let _ = end.shutdown(Shutdown::Both);
        });
        Self { backend, stream, thread: Some(thread) }
    }

    pub fn behave(&self, change: impl FnOnce(&mut Behaviour)) {
        change(&mut self.backend.behaviour.lock().unwrap());
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
        self.backend.features.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// The kick descriptors of all rings, as the backend has them.
    pub fn kicks(&self) -> Vec<File> {
        self.backend.state.lock().unwrap().kicks.iter().map(|kick| kick.try_clone().unwrap()).collect()
    }

    /// Ring `index` as a device sees it. A driver that gets no acknowledgements does not wait until the backend has heard of
    /// it: this does.
    pub fn ring(&self, index: usize) -> DeviceRing {
        let told = |state: &State| {
            let known = |user: &u64| state.memory.iter().any(|m| (m.user..m.user + m.len as u64).contains(user));
            state.rings[index].parts.iter().all(known)
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
        // SAFETY: the driver laid the ring out, and the mapping stays while the test has the backend.
        let ring = unsafe { SplitRing::from_parts(desc, avail, used, at.size) };
        DeviceRing { ring, size: at.size, seen: 0, used: 0 }
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

    /// Delivers a plain frame as an honest device would: into one chain, or into as many as it needs.
    pub fn deliver(&self, ring: &mut DeviceRing, frame: &[u8]) {
        self.deliver_with(ring, VnetHdr::PLAIN, frame);
    }

    /// The same with a header of the test's, of which the number of buffers is filled in.
    pub fn deliver_with(&self, ring: &mut DeviceRing, header: VnetHdr, frame: &[u8]) {
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
        self.write(ring.ring.desc(chains[0].0).addr + 10, &count.to_le_bytes());
        chains.into_iter().for_each(|(head, len)| ring.write(u32::from(head), len));
        ring.show();
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
pub struct Bench {
    pub device: Hostile,
    pub ring: DeviceRing,
    pub tx: DeviceRing,
    pub net: VirtioNet,
    pub pair: QueuePair,
    pub books: Books,
}

impl Bench {
    pub fn new(options: NetOptions) -> Self {
        Self::with(Behaviour::default(), options)
    }

    pub fn with(behaviour: Behaviour, options: NetOptions) -> Self {
        let books = Books::default();
        Self::over(behaviour, books.keep(options), books)
    }

    /// A second device in this one's domain.
    pub fn beside(&self, behaviour: Behaviour, options: NetOptions) -> Self {
        Self::over(behaviour, self.books.share(options), self.books.clone())
    }

    /// A device whose domain is in the options already.
    pub fn over(behaviour: Behaviour, options: NetOptions, books: Books) -> Self {
        let (device, backend) = Hostile::new(behaviour);
        let (net, mut pairs) = VirtioNet::probe(backend, options).unwrap();
        Self { ring: device.ring(0), tx: device.ring(1), device, net, pair: pairs.remove(0), books }
    }

    pub fn deliver(&mut self, frame: &[u8]) {
        self.device.deliver(&mut self.ring, frame);
    }

    /// Pages are with the device, and nowhere else.
    #[track_caller]
    pub fn assert_home(&mut self, mode: RxMode) {
        let expected = if mode == RxMode::Big { 0 } else { self.pair.rx.posted() as u64 };
        assert_eq!(self.pair.rx.pool_stats().inflight(), expected);
    }

    #[track_caller]
    pub fn close(self) {
        close_clean(self.pair);
        drop(self.net);
        self.books.assert_balanced();
    }

    /// The receive queue has stopped for this reason, and does nothing any more; every page is accounted for.
    #[track_caller]
    pub fn assert_stopped(mut self, error: DeviceFault) {
        let before = self.pair.rx.stats();
        assert_eq!(before.stopped, Some(error));
        assert!(before.errors().any(|e| e == (error.name(), 1)), "{before:?}");
        // Whatever else it says.
        for idx in [0, self.ring.used.wrapping_add(1), u16::MAX] {
            self.ring.ring.set_used_idx(idx);
            assert_eq!(receive(&mut self.pair.rx, &mut DropAll::default()), 0);
        }
        assert_eq!(self.pair.rx.stats(), before);
        self.close();
    }
}

/// A ring from the device's side, with nothing checked.
pub struct DeviceRing {
    pub ring: SplitRing,
    pub size: u16,
    /// Heads taken from the available ring.
    pub seen: u16,
    /// Chains given back.
    pub used: u16,
}

impl DeviceRing {
    /// Chains that the driver has made available and that were not taken yet.
    pub fn available(&self) -> u16 {
        self.ring.avail_idx().wrapping_sub(self.seen)
    }

    /// Takes the next available head.
    pub fn take(&mut self) -> Option<u16> {
        (self.available() > 0).then(|| {
            self.seen = self.seen.wrapping_add(1);
            self.ring.avail_entry(self.seen.wrapping_sub(1))
        })
    }

    /// Claims to have used `id`, and shows it.
    pub fn give(&mut self, id: u32, len: u32) {
        self.write(id, len);
        self.show();
    }

    /// Claims to have used `id`, and does not show it yet.
    pub fn write(&mut self, id: u32, len: u32) {
        self.ring.set_used_entry(self.used, id, len);
        self.used = self.used.wrapping_add(1);
    }

    pub fn show(&self) {
        self.ring.set_used_idx(self.used);
    }

    /// Writes any used entry.
    pub fn set_used_entry_of(&self, position: u16, id: u16, len: u64) {
        self.ring.set_used_entry(position, u32::from(id), len as u32);
    }

    /// Chains that the driver has made available beyond `used` that came back.
    pub fn lag(&self, used: u16) -> u16 {
        self.ring.avail_idx().wrapping_sub(used)
    }

    /// The chain that begins at `head`.
    pub fn chain(&self, head: u16) -> Vec<Desc> {
        let mut chain = vec![self.ring.desc(head)];
        while chain[chain.len() - 1].flags & netmem_virtio::ring::DESC_NEXT != 0 {
            assert!(chain.len() <= usize::from(self.size), "a chain without end");
            chain.push(self.ring.desc(chain[chain.len() - 1].next));
        }
        chain
    }
}

fn no<T>() -> Result<T> {
    Err(Error::InvalidParam)
}

impl Backend {
    fn check(&self, message: &'static str) -> Result<()> {
        if self.behaviour.lock().unwrap().fail_at == Some(message) { no() } else { Ok(()) }
    }

    fn ring(&self, index: u32, change: impl FnOnce(&mut RingAt)) -> Result<()> {
        let mut state = self.state.lock().unwrap();
        let index = index as usize;
        if state.rings.len() <= index {
            state.rings.resize(index + 1, RingAt::default());
        }
        change(&mut state.rings[index]);
        Ok(())
    }
}

impl VhostUserBackendReqHandler for Backend {
    fn set_owner(&self) -> Result<()> {
        self.check("SET_OWNER")
    }
    fn reset_owner(&self) -> Result<()> {
        Ok(())
    }
    fn reset_device(&self) -> Result<()> {
        no()
    }
    fn get_features(&self) -> Result<u64> {
        self.check("GET_FEATURES")?;
        Ok(self.behaviour.lock().unwrap().features)
    }
    fn set_features(&self, features: u64) -> Result<()> {
        self.features.store(features, std::sync::atomic::Ordering::Relaxed);
        self.check("SET_FEATURES")
    }
    fn set_mem_table(
        &self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _: Option<bool>,
    ) -> Result<Option<Vec<u64>>> {
        self.check("SET_MEM_TABLE")?;
        let mut state = self.state.lock().unwrap();
        state.memory = std::iter::zip(regions, files)
            .map(|(r, file)| {
                let (len, prot) = (r.memory_size as usize, ProtFlags::READ | ProtFlags::WRITE);
                // SAFETY: a new mapping of a foreign file.
                let base =
                    unsafe { mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, &file, r.mmap_offset).unwrap() };
                Mapped { guest: r.guest_phys_addr, user: r.user_addr, len, base: base.cast(), file }
            })
            .collect();
        Ok(None)
    }
    fn set_vring_num(&self, index: u32, num: u32) -> Result<()> {
        self.check("SET_VRING_NUM")?;
        self.ring(index, |r| r.size = num as u16)
    }
    fn set_vring_addr(
        &self,
        index: u32,
        _: VhostUserVringAddrFlags,
        desc: u64,
        used: u64,
        avail: u64,
        _: u64,
    ) -> Result<()> {
        self.check("SET_VRING_ADDR")?;
        self.ring(index, |r| r.parts = [desc, avail, used])
    }
    fn set_vring_base(&self, _: u32, _: u32) -> Result<()> {
        self.check("SET_VRING_BASE")
    }
    fn get_vring_base(&self, index: u32) -> Result<VhostUserVringState> {
        let on_stop = self.behaviour.lock().unwrap().on_stop;
        let mut state = self.state.lock().unwrap();
        state.stops.push(index);
        match on_stop {
            OnStop::Answer => {}
            OnStop::Refuse => return no(),
            OnStop::Hang => drop(self.changed.wait_while(state, |s| !s.released).unwrap()),
        }
        Ok(VhostUserVringState::new(index, 0))
    }
    fn set_vring_kick(&self, _: u8, fd: Option<File>) -> Result<()> {
        self.check("SET_VRING_KICK")?;
        self.state.lock().unwrap().kicks.extend(fd);
        Ok(())
    }
    fn set_vring_call(&self, _: u8, fd: Option<File>) -> Result<()> {
        self.check("SET_VRING_CALL")?;
        self.state.lock().unwrap().calls.push(fd);
        Ok(())
    }
    fn set_vring_err(&self, _: u8, _: Option<File>) -> Result<()> {
        Ok(())
    }
    fn get_protocol_features(&self) -> Result<VhostUserProtocolFeatures> {
        self.check("GET_PROTOCOL_FEATURES")?;
        let acks = self.behaviour.lock().unwrap().acks;
        let more = if acks { VhostUserProtocolFeatures::REPLY_ACK } else { VhostUserProtocolFeatures::empty() };
        Ok(VhostUserProtocolFeatures::MQ | more)
    }
    fn set_protocol_features(&self, _: u64) -> Result<()> {
        self.check("SET_PROTOCOL_FEATURES")
    }
    fn get_queue_num(&self) -> Result<u64> {
        self.check("GET_QUEUE_NUM")?;
        Ok(self.behaviour.lock().unwrap().pairs)
    }
    fn set_vring_enable(&self, index: u32, enable: bool) -> Result<()> {
        self.check("SET_VRING_ENABLE")?;
        self.state.lock().unwrap().enabled.push((index, enable));
        Ok(())
    }
    fn get_config(&self, _: u32, _: u32, _: VhostUserConfigFlags) -> Result<Vec<u8>> {
        no()
    }
    fn set_config(&self, _: u32, _: &[u8], _: VhostUserConfigFlags) -> Result<()> {
        no()
    }
    fn set_gpu_socket(&self, _: GpuBackend) -> Result<()> {
        no()
    }
    fn get_shared_object(&self, _: VhostUserSharedMsg) -> Result<File> {
        no()
    }
    fn get_inflight_fd(&self, _: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        no()
    }
    fn set_inflight_fd(&self, _: &VhostUserInflight, _: File) -> Result<()> {
        no()
    }
    fn get_max_mem_slots(&self) -> Result<u64> {
        no()
    }
    fn add_mem_region(&self, _: &VhostUserSingleMemoryRegion, _: File, _: Option<bool>) -> Result<Option<u64>> {
        no()
    }
    fn remove_mem_region(&self, _: &VhostUserSingleMemoryRegion) -> Result<()> {
        no()
    }
    fn set_device_state_fd(
        &self,
        _: VhostTransferStateDirection,
        _: VhostTransferStatePhase,
        _: File,
    ) -> Result<Option<File>> {
        no()
    }
    fn check_device_state(&self) -> Result<()> {
        no()
    }
    fn get_shmem_config(&self) -> Result<VhostUserShMemConfig> {
        no()
    }
    fn set_log_base(&self, _: &VhostUserLog, _: File) -> Result<()> {
        no()
    }
}
