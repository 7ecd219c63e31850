//! A veth pair, or a pair of NICs in zero-copy mode: a queue of ours on one end, and a raw packet
//! socket of the kernel on the other.

use crate::namespace::{command, ip, nics};
use netmem_packet::{Packet, Poll, RxQueue, TxQueue};
use netmem_pool::{KernelShared, PagePool, PoolOptions, RegionOptions, RegionProvider};
use netmem_xsk::{
    InterfaceInfo, Mode, Program, ProgramOptions, QueueOptions, Umem, UmemMemory, UmemOptions, XskError, XskRx, XskTx,
};
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Makes a veth pair in the namespace of this thread, with `queues` queues at each end, no offloads
/// and no IPv6 (which would send by itself), and sets it up. `ours` and `theirs` are names that are
/// in no other namespace of the tests.
pub fn veth(ours: &str, theirs: &str, queues: u32, mtu: u32) {
    std::fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1").unwrap();
    let of = format!("numrxqueues {queues} numtxqueues {queues} mtu {mtu}");
    ip(&format!("link add {ours} {of} type veth peer name {theirs} {of}"));
    for end in [ours, theirs] {
        command(&format!("ethtool -K {end} tx off rx off gso off tso off gro off txvlan off rxvlan off"));
        ip(&format!("link set {end} up"));
    }
}

/// A pair of interfaces of one queue that are connected: ours, and the peer's. A veth pair, or the
/// [`nics`] that are given.
pub fn wire(mtu: u32) -> (String, String) {
    nics().unwrap_or_else(|| {
        let (ours, theirs) = (name("o"), name("t"));
        veth(&ours, &theirs, 1, mtu);
        (ours, theirs)
    })
}

/// The options for a queue on a [`wire`]: NICs are to be in zero-copy mode, and have no frames of
/// several buffers in it.
pub fn on_wire(options: QueueOptions) -> QueueOptions {
    if nics().is_some() { options.mode(Mode::ZeroCopy).multi_buffer(false) } else { options }
}

/// The longest frame on a [`wire`] with a large MTU: NICs have the usual one.
pub fn longest() -> usize {
    if nics().is_some() { 1514 } else { 9014 }
}

/// A name for an interface that no other test of this process has.
pub fn name(what: &str) -> String {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("x{what}{}x{}", std::process::id() % 100_000, NEXT.fetch_add(1, Ordering::Relaxed))
}

pub fn index(interface: &str) -> u32 {
    let name = std::ffi::CString::new(interface).unwrap();
    // SAFETY: a string that ends.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    assert!(index > 0, "{interface}");
    index
}

/// A raw packet socket on an interface: the kernel as the peer.
pub struct Raw(OwnedFd);

impl Raw {
    pub fn new(interface: &str) -> Self {
        let protocol = (libc::ETH_P_ALL as u16).to_be();
        // SAFETY: a new descriptor, or -1.
        let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, i32::from(protocol)) };
        assert!(fd >= 0, "{}", io::Error::last_os_error());
        // SAFETY: just made.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: made of integers.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = protocol;
        address.sll_ifindex = index(interface) as i32;
        let len = std::mem::size_of_val(&address) as u32;
        // SAFETY: an address of that length.
        let bound = unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), len) };
        assert_eq!(bound, 0, "{}", io::Error::last_os_error());
        for (level, option, value) in
            [(libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, 64 << 20), (libc::SOL_PACKET, libc::PACKET_IGNORE_OUTGOING, 1)]
        {
            let value: i32 = value;
            // SAFETY: an integer.
            let set = unsafe { libc::setsockopt(fd.as_raw_fd(), level, option, (&raw const value).cast(), 4) };
            assert_eq!(set, 0, "{}", io::Error::last_os_error());
        }
        Self(fd)
    }

    /// Sends a frame. Tries again if the interface had no room.
    #[track_caller]
    pub fn send(&self, frame: &[u8]) {
        until("room for a frame", || self.offer(frame).then_some(()));
    }

    /// Sends a frame, unless the interface has no room: a veth drops it then, counts it, and
    /// reports `ENOBUFS` (since Linux 6.7). This happens if the CPU that empties the ring of the
    /// other end is busy. Returns whether the frame was sent.
    #[track_caller]
    pub fn offer(&self, frame: &[u8]) -> bool {
        match self.try_send(frame) {
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => false,
            other => other.map(|()| true).unwrap(),
        }
    }

    pub fn try_send(&self, frame: &[u8]) -> io::Result<()> {
        // SAFETY: the frame's bytes.
        let sent = unsafe { libc::send(self.0.as_raw_fd(), frame.as_ptr().cast(), frame.len(), 0) };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// The next frame, if there is one.
    pub fn try_receive(&self) -> Option<Vec<u8>> {
        let mut frame = vec![0; 70_000];
        // SAFETY: so many bytes.
        let got = unsafe { libc::recv(self.0.as_raw_fd(), frame.as_mut_ptr().cast(), frame.len(), libc::MSG_DONTWAIT) };
        frame.truncate(usize::try_from(got).ok()?);
        Some(frame)
    }

    /// The next frame, which is on its way.
    #[track_caller]
    pub fn receive(&self) -> Vec<u8> {
        until("a frame at the peer", || self.try_receive())
    }
}

/// Tries until there is an answer. That there is one in the end is the assertion; a minute is far
/// more than it accepts.
#[track_caller]
pub fn until<T>(what: &str, mut f: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(answer) = f() {
            return answer;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "no {what}");
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// A frame of `len` bytes whose bytes follow from `seed`, with an EtherType for experiments.
pub fn frame(len: usize, seed: u64) -> Vec<u8> {
    let mut frame = vec![0; len];
    fastrand::Rng::with_seed(seed).fill(&mut frame);
    frame[..14].copy_from_slice(&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 0, 0, 0, 0, 1, 0x88, 0xb5]);
    frame
}

/// Opens a queue whose last socket was closed just now. The kernel releases the queue on a thread
/// of its own. [`Umem::open`] waits half a second for that, which is too short on a machine that is
/// busy.
#[track_caller]
pub fn reopen<M: UmemMemory>(
    interface: &str,
    umem: &Umem<M>,
    memory: &Arc<RegionProvider<M>>,
    options: impl Fn() -> QueueOptions,
) -> Result<(XskRx<M>, XskTx<M>), XskError> {
    until("a free queue", || match umem.open(index(interface), 0, memory.clone(), options()) {
        Err(XskError::Busy { .. }) => None,
        other => Some(other),
    })
}

/// Memory, and a UMEM on it.
pub fn memory<M: UmemMemory + netmem_pool::SystemMemory>(
    pages: usize,
    options: &UmemOptions,
) -> (Arc<RegionProvider<M>>, Umem<M>) {
    let memory = RegionProvider::new(RegionOptions::new(pages).huge_pages(false).build::<M>().unwrap());
    let umem = Umem::new(memory.region().clone(), options).unwrap();
    (memory, umem)
}

/// A veth pair with one queue of ours.
pub struct Harness<M: UmemMemory = KernelShared> {
    pub peer: Raw,
    pub rx: XskRx<M>,
    pub tx: XskTx<M>,
    pub program: Program,
    pub umem: Umem<M>,
    pub memory: Arc<RegionProvider<M>>,
    pub ours: String,
    pub theirs: String,
}

impl Harness {
    pub fn new(pages: usize, mtu: u32, umem: &UmemOptions, queue: QueueOptions) -> Self {
        let (memory, umem) = memory(pages, umem);
        Self::with(memory, umem, mtu, queue)
    }
}

impl<M: UmemMemory> Harness<M> {
    pub fn with(memory: Arc<RegionProvider<M>>, umem: Umem<M>, mtu: u32, queue: QueueOptions) -> Self {
        let (ours, theirs) = wire(mtu);
        let ifindex = index(&ours);
        let program = Program::attach(ifindex, &ProgramOptions::default()).unwrap();
        let (rx, tx) = umem.open(ifindex, 0, memory.clone(), on_wire(queue)).unwrap();
        if nics().is_some() {
            assert_eq!(rx.socket().mode(), Mode::ZeroCopy);
            assert_eq!(InterfaceInfo::of(&ours).unwrap().modes()[0], "zero-copy");
        }
        program.insert(0, rx.socket().as_fd()).unwrap();
        Self { peer: Raw::new(&theirs), rx, tx, program, umem, memory, ours, theirs }
    }

    /// Pages to send from.
    pub fn pool(&self, limit: usize) -> PagePool<M> {
        PoolOptions::new("tx").limit(limit).cache(64).build(self.memory.clone(), Some(self.umem.domain())).unwrap()
    }

    /// The next packet, which is on its way.
    #[track_caller]
    pub fn receive(&mut self) -> Packet<M> {
        receive(&mut self.rx)
    }

    /// Sends a packet, and waits until the kernel is done with it.
    #[track_caller]
    pub fn send(&mut self, packet: Packet<M>) {
        self.tx.send(packet).unwrap();
        self.tx.flush();
        until("completion", || {
            self.tx.complete();
            (self.tx.outstanding() == 0).then_some(())
        });
    }
}

/// The next packet of a queue, which is on its way.
#[track_caller]
pub fn receive<M: UmemMemory>(rx: &mut XskRx<M>) -> Packet<M> {
    until("a packet", || {
        let mut got = None;
        rx.poll(|poll| poll.receive(1, &mut |packet: Packet<M>| got = Some(packet)));
        got
    })
}
