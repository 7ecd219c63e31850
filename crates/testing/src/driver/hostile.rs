//! A vhost-user backend that does what a test tells it to: the messages are answered on a thread, the driver's memory and
//! rings are the test's to write at will.

use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

use super::{Books, DropAll, close_clean, receive};
use netmem_virtio::VhostUser;
use netmem_virtio::driver::{DeviceFault, NetOptions, QueuePair, RxMode, VirtioNet};
use netmem_virtio::net::{VnetHdr, feature};
use netmem_virtio::virtqueue::{DESC_NEXT, DESC_WRITE, Desc, PackedDesc, PackedRing, Position, SplitRing};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::vhost_user::back::{Message, Peer, words};

/// Formats of rings, and both orders of use.
pub const FORMATS: [u64; 4] = [0, feature::IN_ORDER, feature::RING_PACKED, feature::RING_PACKED | feature::IN_ORDER];

/// All that the driver could want, but for features of rings.
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

/// The same without a control queue: a driver of several queue pairs does not wait for answers on
/// one.
pub const WITHOUT_CONTROL: u64 = FEATURES & !feature::CTRL_VQ;

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
    /// The message, by name, at which it fails: it says so, if asked to, and hangs up.
    pub fail_at: Option<&'static str>,
    /// Whether answers to requests are confirmed.
    pub acks: bool,
    /// Protocol features beside that.
    pub protocol: u64,
    /// Bits of the device status that it remembers.
    pub status: u64,
    /// What it answers when asked for its configuration space: the whole payload.
    pub config: Vec<u8>,
}

impl Default for Behaviour {
    fn default() -> Self {
        Self {
            features: FEATURES,
            pairs: 1,
            on_stop: OnStop::Answer,
            fail_at: None,
            acks: true,
            protocol: 1,
            status: 0xff,
            config: Vec::new(),
        }
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
    /// Call descriptors.
    calls: Vec<File>,
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
    status: AtomicU64,
    mtu: AtomicU64,
    /// The messages that came, by name.
    messages: Mutex<Vec<&'static str>>,
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

    /// The MTU that the driver has told.
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

    /// Ring `index` as a device sees it. A driver that gets no acknowledgements does not wait until the backend has heard of
    /// it: this does.
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
        // SAFETY: the driver laid the ring out, and the mapping stays while the test has the backend.
        let words = unsafe {
            match packed {
                true => Words::Packed(PackedWords::new(PackedRing::from_parts(desc, avail, used, at.size))),
                false => Words::Split(SplitRing::from_parts(desc, avail, used, at.size)),
            }
        };
        DeviceRing { words, size: at.size, seen: 0, used: 0 }
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
        ring.give(u32::from(head), 1);
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

    /// Delivers a plain frame as an honest device would: into one chain, or into as many as it needs.
    pub fn deliver(&self, ring: &mut DeviceRing, frame: &[u8]) {
        self.deliver_with(ring, VnetHdr::PLAIN, frame);
    }

    /// The same with a header of the test's, of which the number of buffers is filled in. Returns the first chain.
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
        ring.show();
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

    /// With these features of rings.
    pub fn in_format(format: u64, options: NetOptions) -> Self {
        let behaviour = Behaviour { features: FEATURES | format, ..Behaviour::default() };
        Self::with(behaviour, options.ring_features(format))
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
        for n in [0, 1, 2] {
            self.ring.say_anything(n);
            assert_eq!(receive(&mut self.pair.rx, &mut DropAll::default()), 0);
        }
        assert_eq!(self.pair.rx.stats(), before);
        self.close();
    }
}

/// A ring from the device's side, with nothing checked.
pub struct DeviceRing {
    words: Words,
    pub size: u16,
    /// Heads taken from the available ring, of a split ring.
    pub seen: u16,
    /// Chains given back.
    pub used: u16,
}

enum Words {
    Split(SplitRing),
    Packed(PackedWords),
}

/// A packed ring, and where the device is in it.
pub struct PackedWords {
    pub ring: PackedRing,
    /// The next chain to take.
    pub next: Position,
    /// The place of the next used descriptor.
    pub used: Position,
    /// The chains that were taken, by id.
    chains: HashMap<u16, Vec<Desc>>,
    /// The used descriptor that is written last.
    held: Option<(u16, PackedDesc)>,
}

impl PackedWords {
    fn new(ring: PackedRing) -> Self {
        Self { ring, next: Position::START, used: Position::START, chains: HashMap::new(), held: None }
    }

    /// The chain at a position: its id, its descriptors, and the place behind it.
    fn chain(&self, mut at: Position) -> Option<(u16, Vec<Desc>, Position)> {
        let mut chain = Vec::new();
        loop {
            let d = self.ring.desc(at.offset());
            if !d.is_available(at) || chain.len() == usize::from(self.ring.size()) {
                return None;
            }
            let flags = d.flags & PackedDesc::KIND;
            chain.push(Desc { addr: d.addr, len: d.len, flags, next: 0 });
            at = at.step(1, self.ring.size());
            if flags & DESC_NEXT == 0 {
                return Some((d.id, chain, at));
            }
        }
    }

    /// An id that the device has seen, if there is one.
    pub fn seen_id(&self, n: u64) -> Option<u16> {
        let mut ids: Vec<_> = self.chains.keys().copied().collect();
        ids.sort_unstable();
        (!ids.is_empty()).then(|| ids[n as usize % ids.len()])
    }

    /// A used descriptor at the next place, which moves by the descriptors of the chain, or of any if there is none of this id.
    fn put(&mut self, id: u16, len: u32) -> (u16, PackedDesc) {
        let like = self.chains.get(&id).or_else(|| self.chains.values().next());
        let (at, span) = (self.used, like.map_or(1, Vec::len) as u16);
        self.used = at.step(span, self.ring.size());
        (at.offset(), PackedDesc { addr: 0, len, id, flags: at.used() | DESC_WRITE })
    }
}

impl DeviceRing {
    /// The words of a split ring.
    pub fn split(&self) -> &SplitRing {
        match &self.words {
            Words::Split(ring) => ring,
            Words::Packed(_) => panic!("a packed ring"),
        }
    }

    pub fn is_packed(&self) -> bool {
        matches!(self.words, Words::Packed(_))
    }

    /// The words of a packed ring, and the device's places in it.
    pub fn packed(&mut self) -> &mut PackedWords {
        match &mut self.words {
            Words::Split(_) => panic!("a split ring"),
            Words::Packed(words) => words,
        }
    }

    /// Chains that the driver has made available and that were not taken yet.
    pub fn available(&self) -> u16 {
        match &self.words {
            Words::Split(ring) => ring.avail_idx().wrapping_sub(self.seen),
            Words::Packed(words) => {
                let (mut at, mut n) = (words.next, 0);
                while n < self.size
                    && let Some((_, _, behind)) = words.chain(at)
                {
                    (at, n) = (behind, n + 1);
                }
                n
            }
        }
    }

    /// Whether at least `n` chains are there, as far as that costs little to say.
    pub fn may_have(&self, n: u16) -> bool {
        match &self.words {
            Words::Split(_) => (n..=self.size).contains(&self.available()),
            Words::Packed(_) => true,
        }
    }

    /// Takes the next available head.
    pub fn take(&mut self) -> Option<u16> {
        match &mut self.words {
            Words::Split(_) => (self.available() > 0).then(|| {
                self.seen = self.seen.wrapping_add(1);
                self.split().avail_entry(self.seen.wrapping_sub(1))
            }),
            Words::Packed(words) => {
                let (id, chain, behind) = words.chain(words.next)?;
                words.chains.insert(id, chain);
                words.next = behind;
                Some(id)
            }
        }
    }

    /// Claims to have used `id`, and shows it.
    pub fn give(&mut self, id: u32, len: u32) {
        self.write(id, len);
        self.show();
    }

    /// Claims to have used `id`, and does not show it yet.
    pub fn write(&mut self, id: u32, len: u32) {
        match &mut self.words {
            Words::Split(ring) => ring.set_used_entry(self.used, id, len),
            Words::Packed(words) => {
                let used = words.put(id as u16, len);
                match words.held {
                    None => words.held = Some(used),
                    Some(_) => words.ring.set_used_desc(used.0, used.1),
                }
            }
        }
        self.used = self.used.wrapping_add(1);
    }

    pub fn show(&mut self) {
        match &mut self.words {
            Words::Split(ring) => ring.set_used_idx(self.used),
            Words::Packed(words) => {
                if let Some((at, d)) = words.held.take() {
                    words.ring.set_used_desc(at, d);
                }
            }
        }
    }

    /// Claims something that makes no sense, one of three kinds.
    pub fn say_anything(&mut self, n: u16) {
        match &self.words {
            Words::Split(ring) => ring.set_used_idx([0, self.used.wrapping_add(1), u16::MAX][usize::from(n)]),
            Words::Packed(words) => {
                // All of the ring is used, in this turn, in the next one, or by id 7 everywhere.
                let used = if n == 1 { 0 } else { Position::START.used() };
                for at in 0..self.size {
                    let id = if n == 2 { 7 } else { at };
                    words.ring.set_used_desc(at, PackedDesc { addr: 0, len: 100, id, flags: used });
                }
            }
        }
    }

    /// Writes any used entry.
    pub fn set_used_entry_of(&self, position: u16, id: u16, len: u64) {
        self.split().set_used_entry(position, u32::from(id), len as u32);
    }

    /// Chains that the driver has made available beyond `used` that came back.
    pub fn lag(&self, used: u16) -> u16 {
        self.split().avail_idx().wrapping_sub(used)
    }

    /// The chain that begins at `head`, and that was taken if the ring is packed.
    pub fn chain(&self, head: u16) -> Vec<Desc> {
        let ring = match &self.words {
            Words::Split(ring) => ring,
            Words::Packed(words) => return words.chains[&head].clone(),
        };
        let mut chain = vec![ring.desc(head)];
        while chain[chain.len() - 1].flags & DESC_NEXT != 0 {
            assert!(chain.len() <= usize::from(self.size), "a chain without end");
            chain.push(ring.desc(chain[chain.len() - 1].next));
        }
        chain
    }
}

impl Backend {
    fn ring(&self, index: u32, change: impl FnOnce(&mut RingAt)) {
        let mut state = self.state.lock().unwrap();
        let index = index as usize;
        if state.rings.len() <= index {
            state.rings.resize(index + 1, RingAt::default());
        }
        change(&mut state.rings[index]);
    }

    /// Does what a message asks for, and answers it. `None`: the connection is to end.
    fn handle(&self, peer: &Peer, mut m: Message) -> Option<()> {
        let behaviour = self.behaviour.lock().unwrap().clone();
        self.messages.lock().unwrap().push(m.name());
        let fails = behaviour.fail_at == Some(m.name());
        if fails && !m.confirm {
            return None;
        }
        match m.name() {
            _ if fails => {}
            "GET_FEATURES" => return peer.answer(&m, &words(&[behaviour.features])),
            "GET_PROTOCOL_FEATURES" => {
                return peer.answer(&m, &words(&[behaviour.protocol | if behaviour.acks { 1 << 3 } else { 0 }]));
            }
            "GET_CONFIG" => return peer.answer(&m, &behaviour.config),
            "GET_QUEUE_NUM" => return peer.answer(&m, &words(&[behaviour.pairs])),
            "GET_STATUS" => return peer.answer(&m, &words(&[self.status.load(Relaxed) & behaviour.status])),
            "GET_VRING_BASE" => {
                let index = m.u32(0);
                let mut state = self.state.lock().unwrap();
                state.stops.push(index);
                match behaviour.on_stop {
                    OnStop::Answer => {}
                    OnStop::Refuse => return None,
                    OnStop::Hang => drop(self.changed.wait_while(state, |s| !s.released).unwrap()),
                }
                return peer.answer(&m, &words(&[u64::from(index)]));
            }
            "SET_OWNER" | "SET_PROTOCOL_FEATURES" | "SET_VRING_BASE" => {}
            "SET_FEATURES" => self.features.store(m.u64(0), Relaxed),
            "SET_STATUS" => self.status.store(m.u64(0), Relaxed),
            "NET_SET_MTU" => self.mtu.store(m.u64(0), Relaxed),
            "SET_MEM_TABLE" => {
                let fds = std::mem::take(&mut m.fds);
                assert_eq!(fds.len(), m.u32(0) as usize);
                let map = |(i, fd): (usize, _)| {
                    let [guest, size, user, offset] = [0, 8, 16, 24].map(|at| m.u64(8 + 32 * i + at));
                    let (len, prot, file) = (size as usize, ProtFlags::READ | ProtFlags::WRITE, File::from(fd));
                    // SAFETY: a new mapping of a foreign file.
                    let base =
                        unsafe { mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, &file, offset).unwrap() };
                    Mapped { guest, user, len, base: base.cast(), file }
                };
                self.state.lock().unwrap().memory = fds.into_iter().enumerate().map(map).collect();
            }
            "SET_VRING_NUM" => self.ring(m.u32(0), |r| r.size = m.u32(4) as u16),
            "SET_VRING_ADDR" => self.ring(m.u32(0), |r| r.parts = [m.u64(8), m.u64(24), m.u64(16)]),
            "SET_VRING_KICK" | "SET_VRING_CALL" => {
                let mut state = self.state.lock().unwrap();
                let kept = if m.name() == "SET_VRING_KICK" { &mut state.kicks } else { &mut state.calls };
                kept.push(m.fds.remove(0).into());
                assert!(m.fds.is_empty());
            }
            "SET_VRING_ENABLE" => self.state.lock().unwrap().enabled.push((m.u32(0), m.u32(4) != 0)),
            other => panic!("the driver sent {other}"),
        }
        let answered = if m.confirm { peer.answer(&m, &words(&[u64::from(fails)])) } else { Some(()) };
        answered.filter(|()| !fails)
    }
}
