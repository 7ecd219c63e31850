//! The driver against a device that lies.
//!
//! The bytes are what a device does: frames delivered and marked as used as they should be,
//! headers, lengths, heads, indices and flags that are anything, and in between the driver's polls,
//! sends and drops. Both sides are on this thread. The answers that the driver waits for are in the
//! socket before it asks. Whatever the device does, each page is accounted for at the end, and
//! everything that was mapped is unmapped.
#![no_main]

use libfuzzer_sys::fuzz_target;
use netmem_fuzz::{Input, file, next_descriptor};
use netmem_packet::{Checksum, Gso, GsoKind, Handler, Packet, Poll, RxQueue, SplitFrame, TxQueue, Verdict, XdpFrame};
use netmem_pool::{
    CountingDomain, DmaDomain, PeerShared, PoolClosed, PoolOptions, Region, RegionProvider, VhostDomain,
};
use netmem_virtio::VhostUser;
use netmem_virtio::driver::{NetOptions, QueuePair, RestartError, RxMode, SplitOptions, VirtioNet, VirtioSplitRx};
use netmem_virtio::net::{VnetHdr, feature};
use netmem_virtio::virtqueue::{DESC_NEXT, Desc, SplitRing};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, OnceLock};

const GET_FEATURES: u32 = 1;
const SET_MEM_TABLE: u32 = 5;
const SET_VRING_ADDR: u32 = 9;
const GET_VRING_BASE: u32 = 11;
const GET_PROTOCOL_FEATURES: u32 = 15;

/// The protocol feature of a device that splits frames behind their headers.
const NETMEM_SPLIT: u32 = 1 << 30;

/// All that a driver could want of a device without protocol features, and more.
const OFFERED: u64 = feature::VERSION_1
    | feature::MRG_RXBUF
    | feature::CSUM
    | feature::GUEST_CSUM
    | feature::GUEST_TSO4
    | feature::GUEST_TSO6
    | feature::GUEST_UFO
    | feature::HOST_TSO4
    | feature::HOST_TSO6;

fuzz_target!(|data: &[u8]| {
    let before = next_descriptor();
    run(&mut Input(data));
    assert_eq!(next_descriptor(), before, "a descriptor was left open");
});

/// The device's end of the socket.
struct Socket(UnixStream);

impl Socket {
    fn answer(&mut self, request: u32, value: [u32; 2]) {
        let words = [request, 5, 8, value[0], value[1]];
        let bytes: Vec<u8> = words.into_iter().flat_map(u32::to_ne_bytes).collect();
        // The driver may have hung up.
        let _ = self.0.write_all(&bytes);
    }

    fn confirm_stop(&mut self, ring: u32) {
        self.answer(GET_VRING_BASE, [ring, 0]);
    }
}

/// Memory and rings as the driver has announced them. Addresses are this process's: both sides are
/// in it.
#[derive(Default)]
struct Announced {
    /// Bus address, length, address.
    regions: Vec<[u64; 3]>,
    rings: [Option<DeviceRing>; 2],
}

impl Announced {
    /// Reads the messages that the driver has sent since the last call.
    fn hear(&mut self, socket: &mut Socket, size: u16) {
        let mut bytes = vec![0; 16384];
        socket.0.set_nonblocking(true).expect("a socket");
        // Descriptors that are not asked for are closed by the kernel.
        let mut len = 0;
        while let Ok(n @ 1..) = socket.0.read(&mut bytes[len..]) {
            len += n;
        }
        socket.0.set_nonblocking(false).expect("a socket");
        let mut rest = &bytes[..len];
        while rest.len() >= 12 {
            let u32_at = |at: usize| u32::from_ne_bytes(rest[at..at + 4].try_into().expect("four bytes"));
            let u64_at = |at: usize| u64::from_ne_bytes(rest[at..at + 8].try_into().expect("eight bytes"));
            let (request, size_of_body) = (u32_at(0), u32_at(8) as usize);
            match request {
                SET_MEM_TABLE => {
                    let region = |i: usize| [u64_at(20 + 32 * i), u64_at(28 + 32 * i), u64_at(36 + 32 * i)];
                    self.regions = (0..u32_at(12) as usize).map(region).collect();
                }
                SET_VRING_ADDR => {
                    let [desc, used, avail] = [u64_at(20), u64_at(28), u64_at(36)].map(|at| at as usize as *mut u8);
                    // SAFETY: the driver's own ring, which is there until the end of the run; all
                    // accesses are atomic.
                    let ring = unsafe { SplitRing::from_parts(desc, avail, used, size) };
                    self.rings[u32_at(12) as usize % 2] = Some(DeviceRing { ring, size, seen: 0, used: 0 });
                }
                _ => {}
            }
            rest = &rest[12 + size_of_body..];
        }
    }

    /// Writes where a descriptor points, if that is anywhere.
    fn write(&self, addr: u64, bytes: &[u8], device_memory: &std::ops::Range<u64>) {
        if device_memory.contains(&addr) {
            return;
        }
        for &[bus, len, at] in &self.regions {
            if addr >= bus && addr - bus <= len && bytes.len() as u64 <= len - (addr - bus) {
                let to = (at + (addr - bus)) as usize as *mut u8;
                for (i, byte) in bytes.iter().enumerate() {
                    // SAFETY: in the region; a device may write there at any time.
                    unsafe { to.add(i).write_volatile(*byte) };
                }
                return;
            }
        }
    }
}

struct DeviceRing {
    ring: SplitRing,
    size: u16,
    seen: u16,
    used: u16,
}

impl DeviceRing {
    fn available(&self) -> u16 {
        self.ring.avail_idx().wrapping_sub(self.seen)
    }

    fn take(&mut self) -> Option<u16> {
        (1..=self.size).contains(&self.available()).then(|| {
            self.seen = self.seen.wrapping_add(1);
            self.ring.avail_entry(self.seen.wrapping_sub(1))
        })
    }

    fn write(&mut self, id: u32, len: u32) {
        self.ring.set_used_entry(self.used, id, len);
        self.used = self.used.wrapping_add(1);
    }

    fn show(&self) {
        self.ring.set_used_idx(self.used);
    }

    /// Something that no device should do.
    fn lie(&mut self, input: &mut Input) {
        let near = [self.size.into(), self.used.into(), self.seen.into(), 12, 26, 1530, 4096];
        match input.below(7) {
            0 => {
                self.write(input.number(&near) as u32, input.number(&near) as u32);
                self.show();
            }
            1 => self.ring.set_used_idx(self.used.wrapping_add(input.number(&near) as u16)),
            2 => {
                let id = self.ring.avail_entry(input.u8().into());
                self.write(id.into(), input.number(&near) as u32);
                self.show();
            }
            3 => self.ring.set_used_entry(input.u8().into(), input.number(&near) as u32, input.number(&near) as u32),
            4 => {
                let (addr, len) = (input.number(&near), input.number(&near) as u32);
                self.ring.set_desc(input.u8().into(), Desc { addr, len, flags: input.u16(), next: input.u16() });
            }
            5 => self.ring.set_used_flags(input.u16()),
            _ => {
                self.ring.set_avail_entry(input.u8().into(), input.u16());
                self.ring.set_avail_idx(input.number(&near) as u16);
            }
        }
    }
}

/// Gives a frame to the driver, with a header of the input's.
fn deliver(input: &mut Input, announced: &mut Announced, device_memory: &std::ops::Range<u64>) {
    let shape = input.u8();
    let buffers = if shape & 3 == 0 { 1 + u16::from(shape >> 2) % 20 } else { 1 };
    let mut header = VnetHdr { num_buffers: buffers, ..VnetHdr::PLAIN };
    if shape & 4 != 0 {
        header.flags = input.u8();
        header.gso_type = input.u8();
        header.hdr_len = input.number(&[14, 42, 114]) as u16;
        header.gso_size = input.number(&[1448]) as u16;
        header.csum_start = input.number(&[34]) as u16;
        header.csum_offset = input.number(&[16]) as u16;
        header.num_buffers = if input.u8() & 1 == 0 { buffers } else { input.number(&[]) as u16 };
    }
    for i in 0..buffers {
        let Some(head) = announced.rings[0].as_mut().and_then(DeviceRing::take) else { return };
        let len = input.number(&[26, 64, 1518, 1530, 4096]) as u32;
        let ring = announced.rings[0].as_ref().expect("a head was taken from it");
        let mut d = ring.ring.desc(head);
        let bytes = if i == 0 { header.to_bytes().to_vec() } else { vec![i as u8; 12] };
        announced.write(d.addr, &bytes, device_memory);
        let ring = announced.rings[0].as_mut().expect("a head was taken from it");
        if shape & 8 != 0 {
            // A length that fits: the whole chain, or one less.
            let mut have = d.len;
            for _ in 0..ring.size {
                if d.flags & DESC_NEXT == 0 {
                    break;
                }
                d = ring.ring.desc(d.next);
                have = have.saturating_add(d.len);
            }
            ring.write(head.into(), have.saturating_sub(len & 1));
        } else {
            ring.write(head.into(), len);
        }
    }
    if let Some(ring) = &announced.rings[0] {
        ring.show();
    }
}

/// What the program decides and does, by bytes.
struct Program<'p, 'i, const LINEAR: bool> {
    input: &'p mut Input<'i>,
    held: &'p mut Vec<Packet<PeerShared>>,
}

impl<const LINEAR: bool> Handler<PeerShared> for Program<'_, '_, LINEAR> {
    const LINEAR: bool = LINEAR;

    fn run(&mut self, frame: &mut XdpFrame<PeerShared>) -> Verdict {
        assert!(!LINEAR || !frame.is_multi_buffer());
        let choice = self.input.u8();
        if choice & 8 != 0 {
            let _ = frame.adjust_head(i32::from(self.input.u8() as i8));
            let _ = frame.adjust_tail(i32::from(self.input.u8() as i8));
        }
        let mut bytes = vec![0; frame.len()];
        frame.copy_to(0, &mut bytes).expect("all of the frame can be read");
        if let Checksum::Partial { start, offset } = frame.meta.checksum {
            assert!(usize::from(start) + usize::from(offset) + 2 <= frame.len());
        }
        assert!(frame.meta.gso.is_none_or(|gso| gso.size > 0));
        match choice & 7 {
            0 => Verdict::Drop,
            1 => Verdict::Aborted,
            2 => Verdict::Tx,
            3 => Verdict::Redirect,
            _ => Verdict::Pass,
        }
    }

    fn pass(&mut self, packet: Packet<PeerShared>) {
        assert_eq!(packet.to_vec().len(), packet.len());
        self.held.push(packet);
    }

    fn tx(&mut self, packet: Packet<PeerShared>) {
        self.held.push(packet);
    }
}

/// Everything that went out came back or was quarantined, but for what is still held.
fn closed(closed: &PoolClosed, held: bool) {
    let s = closed.stats;
    assert_eq!(s.allocated(), s.returned() + s.quarantined + closed.outstanding, "{s:?}");
    assert!(held || closed.outstanding == 0, "{s:?}: {} are out", closed.outstanding);
}

type Accounting = Arc<OnceLock<Arc<CountingDomain<VhostDomain>>>>;

fn options(input: &mut Input, accounting: Accounting) -> (RxMode, NetOptions) {
    let shape = input.u8();
    let (mode, options) = match shape % 6 {
        0 => (RxMode::Small, NetOptions::new(RxMode::Small)),
        1 => (RxMode::Small, NetOptions::new(RxMode::Small).buffers_per_page(2)),
        2 => (RxMode::Mergeable, NetOptions::new(RxMode::Mergeable)),
        3 => (RxMode::Mergeable, NetOptions::new(RxMode::Mergeable).max_frame(65549)),
        4 => (RxMode::Big, NetOptions::new(RxMode::Big).max_frame(9014)),
        _ => (RxMode::Small, NetOptions::new(RxMode::Small).headroom(256)),
    };
    let options = options.ring_size(32).pages(if shape & 64 == 0 { 72 } else { 24 }).tx_pages(8);
    let options = options.cache([16, 0][usize::from(shape >> 7)]).domain(move |table| {
        let domain = Arc::new(CountingDomain::new(table));
        let _ = accounting.set(Arc::clone(&domain));
        domain as Arc<dyn DmaDomain>
    });
    (mode, options)
}

fn run(input: &mut Input) {
    let accounting = Accounting::default();
    let (mode, mut options) = options(input, Arc::clone(&accounting));
    let shape = input.u8();
    // Some devices lack some features; where the driver needs one of them, `probe` fails.
    let offered = if shape & 1 == 0 { OFFERED } else { OFFERED & !input.number(&[]) };
    let split = (shape & 6 == 6 && mode != RxMode::Mergeable)
        .then(|| RegionProvider::new(Region::unmapped(file(64 * 4096), 0).expect("device memory")));
    // A device that reports where it has split a frame: see `NETMEM_SPLIT` in
    // docs/design/vhost-user.md.
    let splits = split.is_some() && shape & 8 != 0;
    let offered = if splits { offered | feature::VHOST_USER_PROTOCOL } else { offered };
    if let Some(provider) = &split {
        options = options.device_memory(provider.region().clone());
    }
    let (ours, theirs) = UnixStream::pair().expect("a socket pair");
    let mut socket = Socket(theirs);
    socket.answer(GET_FEATURES, [offered as u32, (offered >> 32) as u32]);
    if offered & feature::VHOST_USER_PROTOCOL != 0 {
        socket.answer(GET_PROTOCOL_FEATURES, [0, if splits { NETMEM_SPLIT } else { 0 }]);
    }
    let Ok(backend) = VhostUser::own_device(ours) else { unreachable!("the answer is there") };
    let Ok((net, mut pairs)) = VirtioNet::probe(backend, options) else { return };
    let mut announced = Announced::default();
    announced.hear(&mut socket, 32);
    let QueuePair { rx, tx } = pairs.pop().expect("a pair");
    match split {
        None => {
            host(input, &mut socket, &mut announced, rx, tx, &net);
            drop(net);
        }
        Some(provider) => {
            socket.confirm_stop(0);
            let options = SplitOptions::new(provider).header_bytes(SplitOptions::UDP_V4).cache(8);
            match rx.restart_split(&options) {
                Ok(restarted) => {
                    closed(&restarted.closed, false);
                    announced.hear(&mut socket, 32);
                    assert_eq!(restarted.queue.splits_headers(), splits);
                    payload(input, &mut socket, &mut announced, restarted.queue);
                }
                Err(RestartError::Stopped { closed: pools, .. }) => closed(&pools, false),
                Err(RestartError::Unchanged { queue, .. }) => drop(queue),
            }
            socket.confirm_stop(1);
            drop((tx, net));
        }
    }
    let domain = accounting.get().expect("the driver made it");
    assert_eq!(domain.maps(), domain.unmaps(), "what was mapped is unmapped");
}

/// A queue of host memory, and what is sent.
fn host(
    input: &mut Input,
    socket: &mut Socket,
    announced: &mut Announced,
    mut rx: netmem_virtio::driver::VirtioRx,
    mut tx: netmem_virtio::driver::VirtioTx,
    net: &VirtioNet,
) {
    let pool = net.tx_pool(PoolOptions::new("tx").cache(4)).expect("pages were set aside");
    let mut held: Vec<Packet<PeerShared>> = Vec::new();
    while !input.is_empty() {
        match input.below(16) {
            0..5 => deliver(input, announced, &(0..0)),
            5 => {
                let ring = usize::from(input.u8() & 3 == 0);
                if let Some(ring) = &mut announced.rings[ring] {
                    ring.lie(input);
                }
            }
            6..9 => {
                let budget = input.below(64) + 1;
                let linear = budget & 1 == 0;
                let held = &mut held;
                if linear {
                    rx.poll(|p| p.receive(budget, &mut Program::<true> { input, held }));
                } else {
                    rx.poll(|p| p.receive(budget, &mut Program::<false> { input, held }));
                }
            }
            9 => {
                if let Some(ring) = &mut announced.rings[1]
                    && let Some(head) = ring.take()
                {
                    ring.write(head.into(), 0);
                    ring.show();
                }
            }
            10..12 => {
                let Some(mut packet) = held.pop() else { continue };
                let choice = input.u8();
                if choice & 1 != 0 {
                    packet.meta.checksum = Checksum::Partial { start: input.u16(), offset: input.u16() };
                }
                if choice & 2 != 0 {
                    let kind = [GsoKind::TcpV4, GsoKind::TcpV6, GsoKind::UdpFragment, GsoKind::UdpSegment];
                    let kind = kind[usize::from(choice >> 6)];
                    packet.meta.gso = Some(Gso { kind, size: input.u16(), headers: input.u16(), ecn: choice & 4 != 0 });
                }
                let more = if choice & 8 != 0 { [held.pop(), held.pop()] } else { [None, None] };
                send(&mut tx, packet, more, &mut held);
                tx.flush();
            }
            12 => _ = tx.complete(),
            13 => {
                if let Some(page) = pool.alloc() {
                    let start = input.below(256);
                    held.push(Packet::new(page.freeze_range(start..start + 14 + input.below(256))));
                }
            }
            14 => held.truncate(input.below(16)),
            _ => {
                if let Some(p) = held.last() {
                    held.push(Packet::new(p.head().clone()));
                }
            }
        }
    }
    let s = rx.stats();
    assert_eq!(s.frames, s.passed + s.dropped + s.transmitted + s.redirected + s.aborted);
    end(socket, s.frames, &mut held);
    drop(tx);
    let early = held.is_empty();
    if let Some(pools) = rx.close() {
        closed(&pools, !early);
    }
    drop(pool);
    drop(held);
}

/// Sends a packet, alone or as a group with others. Those that are refused are held.
fn send(
    tx: &mut netmem_virtio::driver::VirtioTx,
    packet: Packet<PeerShared>,
    more: [Option<Packet<PeerShared>>; 2],
    held: &mut Vec<Packet<PeerShared>>,
) {
    if more.iter().all(Option::is_none) {
        held.extend(tx.send(packet).err());
        return;
    }
    let [second, third] = more;
    let mut group = [Some(packet), second, third];
    let sent = tx.send_group(&mut group);
    assert!(group[..sent].iter().all(Option::is_none), "what was sent has left the group");
    held.extend(group.into_iter().flatten());
}

/// The end comes in one of several ways: both rings are confirmed to have stopped, one of them, or
/// none.
fn end(socket: &mut Socket, choice: u64, held: &mut Vec<Packet<PeerShared>>) {
    if choice & 3 != 1 {
        socket.confirm_stop(1);
        if choice & 3 != 2 {
            socket.confirm_stop(0);
        }
    }
    socket.0.shutdown(std::net::Shutdown::Write).expect("a socket");
    if choice & 4 == 0 {
        held.clear();
    }
}

/// A queue whose payload goes to device memory.
fn payload(input: &mut Input, socket: &mut Socket, announced: &mut Announced, mut rx: VirtioSplitRx) {
    // The last region that was announced: no process has it mapped.
    let device = announced.regions.last().map_or(0..0, |&[bus, len, _]| bus..bus + len);
    let (room, splits) = (rx.header_bytes(), rx.splits_headers());
    let mut held: Vec<SplitFrame> = Vec::new();
    while !input.is_empty() {
        match input.below(8) {
            0..4 => deliver(input, announced, &device),
            4 => {
                if let Some(ring) = &mut announced.rings[0] {
                    ring.lie(input);
                }
            }
            5..7 => {
                let budget = input.below(64) + 1;
                rx.poll(|p| {
                    p.receive(budget, &mut |frame: SplitFrame| {
                        assert!(frame.meta.gso.is_none_or(|gso| gso.size > 0));
                        let mut head = vec![0; frame.head().len()];
                        frame.head().copy_to(0, &mut head).expect("the head can be read");
                        let payload = frame.payload();
                        assert!((14..=room).contains(&head.len()), "a head of {} bytes", head.len());
                        assert!(splits || payload.is_empty() || head.len() == room, "it is filled in order");
                        assert_eq!(payload.fragments().map(|frag| frag.len()).sum::<usize>(), payload.len());
                        held.push(frame);
                    })
                });
            }
            _ => held.truncate(input.below(16)),
        }
    }
    let keep = rx.stats().frames & 1 == 1;
    if rx.stats().frames & 2 == 0 {
        socket.confirm_stop(0);
    } else {
        socket.0.shutdown(std::net::Shutdown::Write).expect("a socket");
    }
    if !keep {
        held.clear();
    }
    let early = held.is_empty();
    if let Some(pools) = rx.close() {
        closed(&pools.host, !early);
        closed(&pools.device, !early);
    }
    drop(held);
}
