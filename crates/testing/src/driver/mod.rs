//! What the driver's tests share: a device of ours on a thread of its own, programs, frames to
//! compare, and the accounts.

pub mod hostile;
pub mod split;
pub mod tcp;
pub mod testpmd;

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use netmem_packet::{BulkStats, Handler, Packet, Poll, Reach, RxQueue, TxBulk, TxQueue, Verdict, XdpFrame};
use netmem_pool::{
    CountingDomain, Direction, DmaDomain, MapError, PAGE_SIZE, PeerMemory, PeerShared, PoolClosed, RegionOptions,
    RegionProvider, VhostDomain,
};
use netmem_virtio::VhostUser;
use netmem_virtio::device::port::{ALL_OFFLOADS, Pcap, Play, Port};
use netmem_virtio::device::{Connection, Control, NetDevice, Options, Stats};
use netmem_virtio::driver::{NetOptions, QueuePair, RxMode, VirtioNet, VirtioRx, VirtioTx};
use netmem_virtio::net::VnetHdr;
use pcap_file::DataLink;
use pcap_file::pcap::{PcapHeader, PcapPacket, PcapWriter};

pub const MODES: [RxMode; 3] = [RxMode::Small, RxMode::Mergeable, RxMode::Big];

/// A device on its thread, which sleeps when there is nothing to do.
pub struct DeviceThread<P: Port + 'static> {
    pub stats: Arc<Stats>,
    pub control: Control,
    pub connection: Option<Connection>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<NetDevice<P>>>,
}

impl<P: Port + 'static> DeviceThread<P> {
    pub fn new(mut device: NetDevice<P>) -> Self {
        let (stats, control, stop) = (device.stats(), device.control(), Arc::new(AtomicBool::new(false)));
        let flag = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            device.run(&flag, netmem_virtio::Spin::default()).unwrap();
            device
        });
        Self { stats, control, connection: None, stop, thread: Some(thread) }
    }

    /// A device of one pair.
    pub fn one(port: P) -> Self {
        let mut port = Some(port);
        Self::new(NetDevice::new(Options::default(), |_| Ok(port.take().unwrap())).unwrap())
    }

    /// A connection to it. One at a time.
    pub fn connect(&mut self) -> VhostUser {
        let (ours, theirs) = UnixStream::pair().unwrap();
        self.connection = Some(self.control.serve(theirs).unwrap());
        VhostUser::own_device(ours).unwrap()
    }

    pub fn probe<M: PeerMemory>(&mut self, options: NetOptions<M>) -> (VirtioNet<M>, Vec<QueuePair<M>>) {
        let backend = self.connect();
        VirtioNet::probe(backend, options).unwrap()
    }

    /// The device back, its thread ended.
    pub fn stop(mut self) -> NetDevice<P> {
        self.halt().unwrap()
    }

    fn halt(&mut self) -> Option<NetDevice<P>> {
        self.stop.store(true, Ordering::Relaxed);
        self.control.wake();
        self.thread.take().map(|t| t.join().unwrap())
    }
}

impl<P: Port + 'static> Drop for DeviceThread<P> {
    fn drop(&mut self) {
        self.halt();
    }
}

/// A memory table that knows what is mapped: a page is mapped once at a time, a fragment that is to
/// be sent any number of times, each is unmapped as often, and what is synced is mapped in that
/// direction.
#[derive(Debug)]
pub struct CheckedDomain {
    table: VhostDomain,
    /// In which directions, by address and length: one for each time.
    mapped: Mutex<BTreeMap<(u64, usize), Vec<Direction>>>,
    synced: Arc<Synced>,
}

/// Bytes that were synced for either side.
#[derive(Debug, Default)]
pub struct Synced {
    pub cpu: AtomicU64,
    pub device: AtomicU64,
}

impl CheckedDomain {
    fn assert_mapped(&self, dma: u64, len: usize, direction: Direction) {
        let mapped = self.mapped.lock().unwrap();
        let mut below = mapped.range(..=(dma, usize::MAX)).rev().take_while(|((at, _), _)| dma - at < 1 << 21);
        let covers = below.any(|((at, size), directions)| {
            let allowed = directions.iter().any(|d| [direction, Direction::Bidirectional].contains(d));
            allowed && dma + len as u64 <= at + *size as u64
        });
        assert!(covers, "{len} bytes at {dma:#x} are synced and not mapped {direction:?}");
    }
}

impl DmaDomain for CheckedDomain {
    fn map(&self, addr: *mut u8, len: usize, direction: Direction) -> Result<u64, MapError> {
        let dma = self.table.map(addr, len, direction)?;
        let mut mapped = self.mapped.lock().unwrap();
        let directions = mapped.entry((dma, len)).or_default();
        directions.push(direction);
        assert!(directions.len() == 1 || len < PAGE_SIZE, "mapped while it was mapped");
        Ok(dma)
    }

    fn map_file(&self, file: BorrowedFd<'_>, offset: u64, len: usize, direction: Direction) -> Result<u64, MapError> {
        let dma = self.table.map_file(file, offset, len, direction)?;
        let before = self.mapped.lock().unwrap().insert((dma, len), vec![direction]);
        assert_eq!(before, None, "mapped while it was mapped");
        Ok(dma)
    }

    fn unmap(&self, dma: u64, len: usize) {
        let mut mapped = self.mapped.lock().unwrap();
        let directions = mapped.get_mut(&(dma, len)).expect("unmapped what was not mapped");
        directions.pop();
        if directions.is_empty() {
            mapped.remove(&(dma, len));
        }
    }

    fn sync_for_cpu(&self, dma: u64, len: usize) {
        self.assert_mapped(dma, len, Direction::FromDevice);
        self.synced.cpu.fetch_add(len as u64, Ordering::Relaxed);
    }

    fn sync_for_device(&self, dma: u64, len: usize, direction: Direction) {
        self.assert_mapped(dma, len, direction);
        self.synced.device.fetch_add(len as u64, Ordering::Relaxed);
    }
}

/// A counting domain that needs no syncs, so that received frames come in groups.
#[derive(Debug)]
struct Coherent(Arc<CountingDomain<CheckedDomain>>);

impl DmaDomain for Coherent {
    fn map(&self, addr: *mut u8, len: usize, direction: Direction) -> Result<u64, MapError> {
        self.0.map(addr, len, direction)
    }

    fn map_file(&self, file: BorrowedFd<'_>, offset: u64, len: usize, direction: Direction) -> Result<u64, MapError> {
        self.0.map_file(file, offset, len, direction)
    }

    fn unmap(&self, dma: u64, len: usize) {
        self.0.unmap(dma, len);
    }
}

/// Where a counting domain shows once the driver has made it.
#[derive(Clone, Default)]
pub struct Accounting {
    /// Whether the domain needs no syncs.
    coherent: bool,
    domain: Arc<OnceLock<Arc<CountingDomain<CheckedDomain>>>>,
    pub synced: Arc<Synced>,
}

impl Accounting {
    /// Of a domain that needs no syncs.
    pub fn coherent() -> Self {
        Self { coherent: true, ..Self::default() }
    }

    /// Puts the device of these options into the same domain.
    pub fn share<M: PeerMemory>(&self, options: NetOptions<M>) -> NetOptions<M> {
        let domain = Arc::clone(self.domain.get().unwrap());
        options.domain(move |_| domain)
    }

    /// Makes the device of these options count.
    pub fn count<M: PeerMemory>(&self, options: NetOptions<M>) -> NetOptions<M> {
        let this = self.clone();
        options.domain(move |table| {
            let ledger = CheckedDomain { table, mapped: Mutex::default(), synced: this.synced };
            let domain = Arc::new(CountingDomain::new(ledger));
            this.domain.set(Arc::clone(&domain)).unwrap();
            if this.coherent { Arc::new(Coherent(domain)) } else { domain }
        })
    }

    pub fn domain(&self) -> &Arc<CountingDomain<CheckedDomain>> {
        self.domain.get().unwrap()
    }

    /// Everything that was mapped was unmapped.
    #[track_caller]
    pub fn assert_balanced(&self) {
        let d = self.domain();
        assert!(d.maps() > 0);
        assert_eq!(d.maps(), d.unmaps());
    }
}

/// Options of devices that allocate their pages from the same memory.
pub fn common_memory(pages: usize) -> impl Fn(RxMode) -> NetOptions {
    let supply = RegionProvider::new(RegionOptions::new(pages).build::<PeerShared>().unwrap());
    move |mode| NetOptions::new(mode).memory(Arc::clone(supply.region()), supply.clone())
}

/// Every page was returned, or was quarantined; what was mapped was unmapped.
#[track_caller]
pub fn assert_closed(closed: &PoolClosed, quarantined: u64) {
    let s = closed.stats;
    assert_eq!(closed.outstanding, 0, "{s:?}");
    assert_eq!(s.quarantined, quarantined, "{s:?}");
    assert_eq!(s.allocated(), s.returned() + s.quarantined, "{s:?}");
    assert_eq!((s.inflight(), s.mapped), (0, s.unmapped), "{s:?}");
}

/// Stops a pair whose packets are all dropped, and checks its pool's accounts.
#[track_caller]
pub fn close_clean<M: PeerMemory>(pair: QueuePair<M>) {
    drop(pair.tx);
    assert_closed(&pair.rx.close().unwrap(), 0);
}

/// A program from closures: `run` decides, `pass` and `tx` take what it decided on, `tx` also what
/// it redirects.
pub struct Program<const LINEAR: bool, R, P, T> {
    pub run: R,
    pub pass: P,
    pub tx: T,
}

impl<const LINEAR: bool, M, R, P, T> Handler<M> for Program<LINEAR, R, P, T>
where
    M: PeerMemory,
    R: FnMut(&mut XdpFrame<M>) -> Verdict,
    P: FnMut(Packet<M>),
    T: FnMut(Packet<M>),
{
    const LINEAR: bool = LINEAR;

    fn run(&mut self, frame: &mut XdpFrame<M>) -> Verdict {
        (self.run)(frame)
    }

    fn pass(&mut self, packet: Packet<M>) {
        (self.pass)(packet);
    }

    fn tx(&mut self, packet: Packet<M>) {
        (self.tx)(packet);
    }

    fn redirect(&mut self, packet: Packet<M>) {
        (self.tx)(packet);
    }
}

/// What two devices have in common beside the region of their pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Domains {
    /// All.
    One,
    /// Nothing.
    Two,
    /// The target has no domain and uses this process's addresses.
    Plain,
}

pub const DOMAINS: [Domains; 3] = [Domains::One, Domains::Two, Domains::Plain];

/// Redirects every frame whose first byte is even; the program fails on the others.
pub struct Forward<'t> {
    pub bulk: TxBulk<&'t mut VirtioTx>,
    /// How the target reaches each fragment.
    pub reach: Vec<Vec<Reach>>,
    /// Panics instead.
    pub fail: bool,
}

impl<'t> Forward<'t> {
    pub fn to(target: &'t mut VirtioTx) -> Self {
        Self { bulk: TxBulk::new(target), reach: Vec::new(), fail: false }
    }
}

impl Handler<PeerShared> for Forward<'_> {
    fn run(&mut self, frame: &mut XdpFrame<PeerShared>) -> Verdict {
        let [first] = frame.read_at(0).unwrap();
        if self.fail {
            std::panic::resume_unwind(Box::new("as the test wants it"));
        }
        if first % 2 == 0 { Verdict::Redirect } else { Verdict::Aborted }
    }

    fn pass(&mut self, _: Packet<PeerShared>) {}

    fn redirect(&mut self, packet: Packet<PeerShared>) {
        let target = self.bulk.target();
        self.reach.push(packet.fragments().map(|f| target.reach(f)).collect());
        self.bulk.push(packet);
    }

    fn flush(&mut self) {
        self.bulk.flush();
    }
}

/// A port that passes on what the driver sends, a frame at a time: slower than the driver, whose
/// ring is full.
pub struct Slow(pub mpsc::Sender<Vec<u8>>);

impl Port for Slow {
    const WANTS_BYTES: bool = true;
    const FEATURES: u64 = ALL_OFFLOADS;

    fn peek(&mut self) -> Option<&[u8]> {
        None
    }

    fn consume(&mut self) {}

    fn send(&mut self, wire: &[u8]) -> bool {
        std::thread::yield_now();
        self.0.send(wire[VnetHdr::LEN..].to_vec()).is_ok()
    }
}

/// The statistics of a bulk.
pub fn bulk_stats(sent: u64, dropped: u64) -> BulkStats {
    let mut stats = BulkStats::default();
    (stats.sent, stats.dropped) = (sent, dropped);
    stats
}

/// Drops every frame, and counts them.
#[derive(Default)]
pub struct DropAll(pub u64);

impl Handler<PeerShared> for DropAll {
    fn run(&mut self, _: &mut XdpFrame<PeerShared>) -> Verdict {
        self.0 += 1;
        Verdict::Drop
    }

    fn pass(&mut self, _: Packet<PeerShared>) {}
}

/// After this time, a test that waits is taken for hung. The machine may have much else to do.
const PATIENCE: Duration = Duration::from_secs(if cfg!(tsan) { 600 } else { 120 });

/// Waits for what must happen; the time is only there so that a failure ends.
#[track_caller]
pub fn until(mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < PATIENCE, "it never happened");
        std::thread::yield_now();
    }
}

/// Runs a test on a thread of its own and fails if it hangs.
#[track_caller]
pub fn watched(test: impl FnOnce() + Send + 'static) {
    let (done, ended) = mpsc::channel::<()>();
    let thread = std::thread::spawn(move || {
        let _done = done;
        test();
    });
    assert_ne!(ended.recv_timeout(PATIENCE), Err(mpsc::RecvTimeoutError::Timeout), "a thread hangs");
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

/// Receives what there is, once.
pub fn receive<M: PeerMemory>(rx: &mut VirtioRx<M>, handler: &mut impl Handler<M>) -> usize {
    rx.poll(|poll| poll.receive(256, handler))
}

/// The packets of one poll, kept.
pub fn take<M: PeerMemory>(rx: &mut VirtioRx<M>) -> Vec<Packet<M>> {
    let mut packets = Vec::new();
    receive(rx, &mut |p| packets.push(p));
    packets
}

/// A generator of numbers (splitmix64).
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

/// A frame of `len` bytes that no other seed has.
pub fn frame(seed: u64, len: usize) -> Vec<u8> {
    let mut rng = Rng(seed);
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        bytes.extend_from_slice(&rng.next().to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// `n` frames of 60 to `max` bytes, both ends among them; most are short, as on a network.
pub fn frames(n: usize, max: usize) -> Vec<Vec<u8>> {
    let mut rng = Rng(max as u64);
    let size = |i: usize, rng: &mut Rng| match i {
        0 => 60,
        1 => max,
        _ if i.is_multiple_of(16) => 60 + rng.below(max as u64 - 59) as usize,
        _ => 60 + rng.below(max.min(1518) as u64 - 59) as usize,
    };
    (0..n).map(|i| frame(i as u64, size(i, &mut rng))).collect()
}

/// FNV-1a over lengths and bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Digest(u64);

impl Digest {
    pub fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    pub fn add(&mut self, bytes: &[u8]) {
        for b in (bytes.len() as u64).to_le_bytes().iter().chain(bytes) {
            self.0 = (self.0 ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3);
        }
    }

    pub fn of(frames: &[Vec<u8>]) -> Self {
        let mut digest = Self::new();
        frames.iter().for_each(|f| digest.add(f));
        digest
    }
}

/// A port that replays these frames.
pub fn pcap(frames: &[Vec<u8>], play: Play) -> Pcap {
    let header = PcapHeader { snaplen: 1 << 20, datalink: DataLink::ETHERNET, ..PcapHeader::default() };
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut w = PcapWriter::with_header(file.as_file(), header).unwrap();
    for f in frames {
        w.write_packet(&PcapPacket::new(Duration::from_secs(1), f.len() as u32, f)).unwrap();
    }
    Pcap::open(file.path(), play).unwrap()
}
