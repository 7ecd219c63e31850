//! The Linux kernel's UDP at the other end of a tap. Datagrams from the kernel land in device
//! memory, and the kernel receives datagrams that are sent from there.
//!
//! ```text
//!   network namespace of a thread, which ends with the thread
//!     std UdpSocket ◄──► kernel's UDP, both IPs ◄──► tap ◄──► device ◄──► queue ─► binding ─► Socket
//!                                                               ▲                    │
//!                                                               └────── Sender ◄─────┘
//! ```
//!
//! The datagrams that are sent and not received yet always fit into the tap's queue, so no datagram
//! may be lost. The tests need root, `/dev/net/tun` and `ip`. Without these they are skipped, which
//! they report.

use crate::kernel_common::{addresses, in_a_network, ip};
use crate::memory_common::{Memory, all, interface, until, worker};
use crate::net_common::{Harness, InTests, endpoint};
use etherparse::{NetSlice, SlicedPacket, TransportSlice};
use netmem_devmem::{
    Binding, FlowQueue, FlowTable, Fragment, Received, RecvError, Sender, Socket, SocketOptions, TokenRange,
};
use netmem_packet::{MAX_FRAGS, TxQueue};
use netmem_virtio::device::port::{Port, PortError, Steering, Tap};
use netmem_virtio::driver::{NetOptions, RxMode, SplitOptions};
use std::array;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;

/// The most datagrams in flight. The tap's queue holds 1000.
const WINDOW: usize = 64;
/// The UDP port of our socket.
const PORT: u16 = 9;

/// Runs `work` with a tap, in a network of its own. The kernel has the addresses 10.79.0.1 and
/// fd79::1 there, and routes .2 to the tap.
#[track_caller]
fn with_the_kernel(work: impl FnOnce(Tap) -> Result<(), String> + Send) {
    in_a_network(|| {
        let tap = tap("nm0")?;
        addresses("nm0")?;
        for there in ["10.79.0.2", "fd79::2"] {
            ip(&format!("neigh add {there} lladdr 02:00:00:00:00:02 dev nm0 nud permanent"))?;
        }
        work(tap)
    });
}

fn tap(name: &str) -> Result<Tap, String> {
    match Tap::open(name, 1, true) {
        Ok(mut taps) => Ok(taps.remove(0)),
        Err(PortError::Tap { source, .. }) => Err(format!("no tap devices here: {source}")),
        Err(other) => Err(other.to_string()),
    }
}

/// The kernel's socket of one address family, and the address of our socket.
struct Kernel {
    socket: UdpSocket,
    here: SocketAddr,
    ours: SocketAddr,
    mtu: usize,
}

impl Kernel {
    fn v4() -> Self {
        Self::new("10.79.0.1:7", "10.79.0.2:9")
    }

    fn v6() -> Self {
        Self::new("[fd79::1]:7", "[fd79::2]:9")
    }

    fn new(here: &str, ours: &str) -> Self {
        let socket = UdpSocket::bind(here).expect("a socket");
        socket.set_nonblocking(true).expect("it can be");
        let [here, ours] = [here, ours].map(|addr| addr.parse().expect("an address"));
        Self { socket, here, ours, mtu: 1500 }
    }

    /// The most bytes of payload in a frame.
    fn most(&self) -> usize {
        self.mtu - 8 - if self.here.is_ipv4() { 20 } else { 40 }
    }

    /// Sends a datagram from the kernel's socket.
    #[track_caller]
    fn send(&self, port: u16, bytes: &[u8]) {
        let sent = self.socket.send_to(bytes, SocketAddr::new(self.ours.ip(), port));
        assert_eq!(sent.expect("it is sent"), bytes.len());
    }

    /// Makes the socket send without checksums from now on.
    fn without_checksums(&self) {
        let (fd, on) = (self.socket.as_raw_fd(), 1);
        let (level, name) = match self.here {
            SocketAddr::V4(_) => (libc::SOL_SOCKET, libc::SO_NO_CHECK),
            SocketAddr::V6(_) => (libc::SOL_UDP, libc::UDP_NO_CHECK6_TX),
        };
        // SAFETY: the descriptor is open, and the pointer is that of a value with the given length.
        let rc = unsafe { libc::setsockopt(fd, level, name, (&raw const on).cast(), size_of_val(&on) as u32) };
        assert_eq!(rc, 0, "{}", io::Error::last_os_error());
    }

    #[track_caller]
    fn receive(&self) -> (Vec<u8>, SocketAddr) {
        let mut bytes = vec![0; 65536];
        let mut received = None;
        until(|| {
            received = match self.socket.recv_from(&mut bytes) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => None,
                other => Some(other.expect("a datagram")),
            };
            received.is_some()
        });
        let (len, from) = received.expect("it came");
        bytes.truncate(len);
        (bytes, from)
    }
}

/// Bytes that differ from those of every other seed.
fn random(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

/// A datagram as a user receives it.
struct Datagram {
    received: Received,
    bytes: Vec<u8>,
    /// The parts of it that are in device memory.
    device: Vec<DeviceFragment>,
}

struct DeviceFragment {
    binding: usize,
    part: (u64, u32),
    token: TokenRange,
}

/// Queues, each of which receives into a binding of its own.
struct Ours {
    memories: Vec<Memory>,
    bindings: Vec<Binding>,
    harness: Harness,
    table: FlowTable,
    queues: Vec<FlowQueue>,
}

impl Ours {
    fn new<P: Port + 'static>(ports: Vec<P>, header_bytes: u16) -> Self {
        Self::with(ports, header_bytes, |options| options)
    }

    fn with<P: Port + 'static>(
        ports: Vec<P>,
        header_bytes: u16,
        options: impl FnOnce(NetOptions) -> NetOptions,
    ) -> Self {
        let table = FlowTable::new(interface([2, 0, 0, 0, 0, 2], &["10.79.0.2", "fd79::2"]));
        let worker = worker();
        let memories: Vec<_> = ports.iter().map(|_| Memory::pages(512)).collect();
        let bind = |memory: &Memory| Binding::new(memory.fd(), 0, &worker).expect("a binding");
        let bindings: Vec<_> = memories.iter().map(bind).collect();
        let regions: Vec<_> = bindings.iter().map(|b| b.region()).collect();
        let mut harness: Harness = Harness::with(ports, header_bytes, |small| {
            regions.into_iter().fold(options(small), |options, region| options.device_memory(region.clone()))
        });
        for (queue, binding) in bindings.iter().enumerate() {
            harness.net.attach(binding, &[queue]).expect("it is free");
        }
        let queues = bindings.iter().map(|binding| table.queue(binding)).collect();
        Self { memories, bindings, harness, table, queues }
    }

    fn bind(&self, port: u16, options: &SocketOptions) -> Socket {
        self.table.bind(all(port), options).expect("it is free")
    }

    /// Makes a sender from .2, our address, to an address that the kernel has or has a route to.
    fn sender(&self, local: SocketAddr, peer: SocketAddr) -> Sender {
        let mut ends = [endpoint(0, &local.to_string()), endpoint(0, &peer.to_string())];
        (ends[0].mac, ends[1].mac) = ([2, 0, 0, 0, 0, 2], [2, 0, 0, 0, 0, 1]);
        self.harness.sender(&self.bindings[0], ends[0], ends[1])
    }

    /// Returns the next datagram of any of these sockets, and the socket's index.
    #[track_caller]
    fn receive(&mut self, sockets: &mut [Socket]) -> (usize, Datagram) {
        let mut out: [Fragment; 1 + MAX_FRAGS] = array::from_fn(|_| Fragment::Empty);
        let mut datagram = None;
        until(|| {
            for (queue, into) in self.queues.iter_mut().enumerate() {
                self.harness.queues().poll(queue, into);
            }
            datagram = sockets.iter_mut().enumerate().find_map(|(at, socket)| match socket.recv(&mut out) {
                Err(RecvError::Empty) => None,
                other => Some((at, other.expect("there is room for tokens"))),
            });
            datagram.is_some()
        });
        let (at, received) = datagram.expect("it came");
        assert!(received.end);
        let (mut bytes, mut device) = (Vec::new(), Vec::new());
        for fragment in out.into_iter().take(received.fragments) {
            let at = bytes.len();
            match fragment {
                Fragment::Linear(host) => {
                    bytes.resize(at + host.len(), 0);
                    host.copy_to(0, &mut bytes[at..]).expect("all of it");
                }
                Fragment::Device { binding, offset, len, token } => {
                    let which = self.bindings.iter().position(|b| b.id() == binding).expect("it is one of ours");
                    bytes.resize(at + len as usize, 0);
                    self.memories[which].read_exact_at(&mut bytes[at..], offset).expect("it is there");
                    device.push(DeviceFragment { binding: which, part: (offset, len), token: token.into() });
                }
                Fragment::Empty => panic!("nothing was received, and counted"),
            }
        }
        (at, Datagram { received, bytes, device })
    }

    /// Sends parts of the binding as a datagram, and waits until the device is done with them.
    #[track_caller]
    fn send(&mut self, sender: &mut Sender, parts: &[(u64, u32)]) {
        let tx = &mut self.harness.tx[0];
        sender.send(tx, parts).expect("there is room");
        tx.flush();
        until(|| tx.complete() == 1);
    }

    /// Checks that only `fragments` frames were dropped, as IP fragments, and that all pages are
    /// returned.
    #[track_caller]
    fn close(self, fragments: u64) {
        let Self { memories, bindings, mut harness, table, queues } = self;
        let t = table.stats();
        // The kernel's own IPv6 messages, such as neighbour discovery, are counted as `other`, as
        // `not_ours` or as headers in device memory.
        assert_eq!((t.fragments, t.malformed, t.no_socket, t.foreign), (fragments, 0, 0, 0), "{t:?}");
        let memory_of: Vec<_> = bindings.iter().map(Binding::reference).collect();
        bindings.into_iter().for_each(|binding| harness.net.unbind(binding).expect("the device goes on"));
        drop((harness, table, queues));
        assert!(memory_of.iter().all(|memory| memory.stats().in_use == 0));
        drop(memory_of);
        memories.iter().for_each(Memory::assert_gone);
    }
}

/// Sends datagrams of all lengths from the kernel's sockets in turn, and receives them. If the
/// payload is in device memory as a whole, it is sent back from where it landed.
fn there_and_back(tap: Tap, kernels: &[Kernel], header_bytes: u16) -> Result<(), String> {
    there_and_back_with(Ours::new(vec![tap], header_bytes), kernels, 4000, 1)
}

/// The same, with so many datagrams. The longest ones are in `pages` pages.
fn there_and_back_with(mut ours: Ours, kernels: &[Kernel], datagrams: u64, pages: usize) -> Result<(), String> {
    let mut socket = [ours.bind(PORT, &SocketOptions::new())];
    let returner = socket[0].returner();
    let sender = |kernel: &Kernel| ours.sender(kernel.ours, kernel.here).mtu(kernel.mtu as u16);
    let mut senders: Vec<_> = kernels.iter().map(sender).collect();
    let (mut rng, mut sent, mut n, mut back) = (fastrand::Rng::with_seed(1), VecDeque::new(), 0, 0);
    let (mut device, mut linear, mut most) = (0, 0, 0);
    // Longer datagrams fill the buffer of the kernel's socket sooner.
    let window = WINDOW * 1500 / kernels[0].mtu;
    while n < datagrams {
        for _ in 0..rng.usize(1..=window) {
            let which = rng.usize(..kernels.len());
            let kernel = &kernels[which];
            // Send the shortest and the longest datagrams, too.
            let len = match n % 50 {
                0..=2 => (n % 50) as usize,
                3 => kernel.most(),
                _ => rng.usize(..=kernel.most()),
            };
            let bytes = random(n, len);
            kernel.send(PORT, &bytes);
            sent.push_back((which, bytes));
            n += 1;
        }
        while let Some((which, bytes)) = sent.pop_front() {
            let (_, got) = ours.receive(&mut socket);
            // The kernel left the checksum to the device, so it counts as verified.
            assert!(got.received.verified);
            assert_eq!(got.received.peer, kernels[which].here);
            assert!(got.bytes == bytes, "{} bytes are not as they were sent", bytes.len());
            let in_device: usize = got.device.iter().map(|place| place.part.1 as usize).sum();
            linear += (bytes.len() - in_device) as u64;
            device += got.device.len() as u64;
            most = most.max(got.device.len());
            if in_device > 0 && in_device == bytes.len() {
                let parts: Vec<_> = got.device.iter().map(|place| place.part).collect();
                ours.send(&mut senders[which], &parts);
                assert!(kernels[which].receive() == (bytes, kernels[which].ours), "the kernel has something else");
                back += 1;
            }
            let tokens: Vec<_> = got.device.into_iter().map(|place| place.token).collect();
            assert_eq!(returner.return_tokens(&tokens), Ok(tokens.len()));
        }
    }
    let s = socket[0].stats();
    assert_eq!((s.fragments, s.linear_bytes, s.unverified, s.queue_full), (device, linear, 0, 0), "{s:?}");
    assert_eq!(s.headers_in_device, 0);
    assert!(back > datagrams / 3 && most == pages, "{back} were sent back, with up to {most} parts");
    drop((socket, returner, senders));
    ours.close(0);
    Ok(())
}

/// Proves MEM-1, MEM-3, MEM-8 and MEM-11: datagrams from the kernel land in device memory
/// unchanged, none is lost, and the kernel receives them back from where they landed.
#[test]
fn the_kernels_udp_over_ipv4() {
    with_the_kernel(|tap| there_and_back(tap, &[Kernel::v4()], SplitOptions::UDP_V4));
}

/// Proves the same for IPv6.
#[test]
fn the_kernels_udp_over_ipv6() {
    with_the_kernel(|tap| there_and_back(tap, &[Kernel::v6()], SplitOptions::UDP_V6));
}

/// Proves MEM-3 for both on one queue. Its host parts have the size of IPv6 headers, so 20 bytes of
/// a datagram over IPv4 are linear.
#[test]
fn the_kernels_udp_over_both() {
    with_the_kernel(|tap| there_and_back(tap, &[Kernel::v4(), Kernel::v6()], SplitOptions::UDP_V6));
}

/// Proves MEM-3 and MEM-8 for a link with an MTU of 9000: a datagram is in up to three pages, and
/// is sent back from these.
#[test]
fn the_kernels_udp_in_long_frames() {
    with_the_kernel(|tap| {
        ip("link set nm0 mtu 9000")?;
        let kernels = [Kernel::v4(), Kernel::v6()].map(|kernel| Kernel { mtu: 9000, ..kernel });
        let long = |_| NetOptions::new(RxMode::Big).max_frame(9014).tx_pages(1024);
        there_and_back_with(Ours::with(vec![tap], SplitOptions::UDP_V6, long), &kernels, 1500, 3)
    });
}

/// Proves MEM-4: four sockets receive datagrams from the kernel through two queues with two
/// bindings. Meanwhile their flows are steered between the queues.
#[test]
fn the_kernels_udp_steered() {
    const DATAGRAMS: u64 = 6000;
    const FLOWS: u16 = 4;
    with_the_kernel(|tap| {
        let (steering, kernels) = (Steering::new(), [Kernel::v4(), Kernel::v6()]);
        let mut ours = Ours::new(steering.spread(tap, 2).unwrap(), SplitOptions::UDP_V6);
        let mut sockets: Vec<_> = (0..FLOWS).map(|flow| ours.bind(PORT + flow, &SocketOptions::new())).collect();
        let returners: Vec<_> = sockets.iter().map(Socket::returner).collect();
        let (mut rng, mut sent, mut n) = (fastrand::Rng::with_seed(3), HashMap::new(), 0);
        let (mut used, mut held) = (HashMap::<_, u64>::new(), VecDeque::new());
        while n < DATAGRAMS {
            while sent.len() < WINDOW && n < DATAGRAMS {
                let (kernel, flow) = (&kernels[rng.usize(..2)], rng.u16(..FLOWS));
                steering.steer(PORT + rng.u16(..FLOWS), rng.u8(..2));
                let len = 8 + rng.usize(..=kernel.most() - 8);
                let mut bytes = random(n, len);
                bytes[..8].copy_from_slice(&n.to_le_bytes());
                kernel.send(PORT + flow, &bytes);
                sent.insert(n, (usize::from(flow), kernel.here, bytes));
                n += 1;
            }
            // Do not wait for all datagrams, so that some are in flight while more are sent.
            let upto = if n == DATAGRAMS { 0 } else { rng.usize(..WINDOW) };
            while sent.len() > upto {
                let (socket, got) = ours.receive(&mut sockets);
                let number = u64::from_le_bytes(*got.bytes.first_chunk().expect("a number"));
                let was = sent.remove(&number).expect("it was sent, and came once");
                assert!((socket, got.received.peer, got.bytes) == was, "{number} is not as it was sent");
                assert!(got.received.verified);
                let Some(DeviceFragment { binding, token, .. }) = got.device.into_iter().next() else { continue };
                *used.entry((socket, binding)).or_default() += 1;
                held.push_back((socket, token));
                if held.len() > 100 {
                    let (socket, token) = held.pop_front().expect("just looked");
                    assert_eq!(returners[socket].return_tokens(&[token]), Ok(1));
                }
            }
        }
        assert_eq!((used.len(), steering.dropped()), (2 * usize::from(FLOWS), 0));
        assert!(used.values().all(|&n| n > DATAGRAMS / 40), "{used:?}");
        drop((sockets, returners));
        ours.close(0);
        Ok(())
    });
}

/// Proves MEM-8: the kernel forwards datagrams from device memory to a tap that accepts no partial
/// checksums. It completes the checksum, and the result is right.
#[test]
fn the_kernel_completes_the_checksum() {
    with_the_kernel(|first| {
        let mut second = tap("nm1")?;
        ip("addr add 10.80.0.1/24 dev nm1")?;
        ip("-6 addr add fd80::1/64 dev nm1 nodad")?;
        for there in ["10.80.0.2", "fd80::2"] {
            ip(&format!("neigh add {there} lladdr 02:00:00:00:00:04 dev nm1 nud permanent"))?;
        }
        // The tap is in this thread's network.
        for switch in ["/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv6/conf/all/forwarding"] {
            std::fs::write(switch, "1").map_err(|e| format!("{switch} cannot be set: {e}"))?;
        }
        let mut ours = Ours::new(vec![first], SplitOptions::UDP_V4);
        for (local, peer) in [("10.79.0.2:9", "10.80.0.2:4791"), ("[fd79::2]:9", "[fd80::2]:4791")] {
            let mut sender = ours.sender(local.parse().unwrap(), peer.parse().unwrap());
            for n in 0..200 {
                let bytes = random(n, 1 + n as usize * 7);
                // An offset into which no datagram was ever received.
                ours.memories[0].write_all_at(&bytes, 500 * 4096 + n).unwrap();
                ours.send(&mut sender, &[(500 * 4096 + n, bytes.len() as u32)]);
                until(|| {
                    let Some(wire) = second.peek() else { return false };
                    assert_eq!(wire[0], 0, "nothing is left to be summed");
                    let whole = summed(&wire[12..]);
                    second.consume();
                    whole.inspect(|got| assert!(*got == bytes, "{n} is not as it was sent")).is_some()
                });
            }
        }
        ours.close(0);
        Ok(())
    });
}

/// The payload of a UDP datagram whose checksum is right.
#[track_caller]
fn summed(frame: &[u8]) -> Option<Vec<u8>> {
    let packet = SlicedPacket::from_ethernet(frame).expect("a frame");
    let Some(TransportSlice::Udp(udp)) = packet.transport else { return None };
    let sum = match packet.net.expect("it is over IP") {
        NetSlice::Ipv4(ip) => {
            let (source, destination) = (ip.header().source(), ip.header().destination());
            udp.to_header().calc_checksum_ipv4_raw(source, destination, udp.payload())
        }
        NetSlice::Ipv6(ip) => {
            let (source, destination) = (ip.header().source(), ip.header().destination());
            udp.to_header().calc_checksum_ipv6_raw(source, destination, udp.payload())
        }
        other => panic!("neither IPv4 nor IPv6: {other:?}"),
    };
    assert_eq!(udp.checksum(), sum.expect("it is no longer than a frame"));
    Some(udp.payload().to_vec())
}

/// Proves MEM-10: the device has verified no datagram that the kernel sends without a checksum.
/// Such datagrams are dropped and counted, or delivered marked. A datagram in several IP fragments
/// is dropped, and its frames are counted.
#[test]
fn datagrams_that_no_device_verified() {
    const EACH: u64 = 100;
    with_the_kernel(|tap| {
        let mut ours = Ours::new(vec![tap], SplitOptions::UDP_V6);
        let mut strict = ours.bind(PORT, &SocketOptions::new());
        let mut lax = [ours.bind(PORT + 1, &SocketOptions::new().unverified(true))];
        let mut rng = fastrand::Rng::with_seed(2);
        for kernel in [Kernel::v4(), Kernel::v6()] {
            kernel.send(PORT, &random(0, 3000));
            kernel.without_checksums();
            for n in 0..EACH {
                let bytes = random(n, rng.usize(1..=kernel.most()));
                kernel.send(PORT, &bytes);
                kernel.send(PORT + 1, &bytes);
                let (_, got) = ours.receive(&mut lax);
                assert!(!got.received.verified && got.bytes == bytes);
                for place in got.device {
                    assert_eq!(lax[0].returner().return_tokens(&[place.token]), Ok(1));
                }
            }
        }
        // Datagrams come in order, so those to the other socket have arrived, too.
        let s = strict.stats();
        assert_eq!((s.unverified, s.fragments, s.queued), (2 * EACH, 0, 0), "{s:?}");
        assert_eq!(strict.recv(&mut [Fragment::Empty]), Err(RecvError::Empty));
        assert_eq!(lax[0].stats().unverified, 2 * EACH);
        drop((strict, lax));
        // Two datagrams of 3008 bytes, in frames of 1500 bytes.
        ours.close(6);
        Ok(())
    });
}
