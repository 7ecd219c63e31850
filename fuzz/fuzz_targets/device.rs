//! The device against a driver, and a front end, that lie.
//!
//! The bytes are a sequence of messages, of writes into the shared memory, and of the device's
//! passes, on one thread. The device neither panics nor waits, no descriptor is left open, and it
//! writes nothing outside of the memory that it was given. Two devices may be connected to each
//! other, each with a driver that lies.
#![no_main]

use libfuzzer_sys::fuzz_target;
use netmem_fuzz::{Input, file, next_descriptor};
use netmem_virtio::device::port::{Cross, Echo, Gen, Port, PortError, Steering};
use netmem_virtio::device::{NetDevice, Options};
use netmem_virtio::fuzz::FrontEnd;
use netmem_virtio::net::feature;
use netmem_virtio::virtqueue::{Desc, Event, PackedDesc, PackedLayout, PackedRing, Position, SplitLayout, SplitRing};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use rustix::mm::{MapFlags, ProtFlags, mmap};
use std::slice;

/// Guest and user addresses differ from each other and from this process's, so that mixing them up
/// shows.
const GUEST: u64 = 0x1_0000_0000;
const USER: u64 = 0x7000_0000_0000;
/// The file: a page of canaries, the memory of the driver, a page of canaries.
const FILE: usize = 96 << 10;
const PAGE: usize = 4096;
const BEGIN: usize = PAGE;
const END: usize = FILE - PAGE;
const CANARY: u8 = 0xca;
const RING: usize = 2048;
const RINGS: usize = 5;
const SIZE: u16 = 32;
const BUFFERS: usize = RINGS * RING;

fuzz_target!(|data: &[u8]| {
    MEMORIES.with(|memories| memories.iter().for_each(Memory::clear));
    let before = next_descriptor();
    let mut input = Input(data);
    let shape = input.u8();
    let options = Options {
        max_pairs: 1 + usize::from(shape & 1),
        serve_control: shape & 2 != 0,
        mac: Some([2; 6]),
        mtu: Some(1500),
        ..Options::default()
    };
    let bits = [feature::RING_PACKED, feature::EVENT_IDX, feature::INDIRECT_DESC, feature::IN_ORDER];
    let ring = bits.iter().enumerate().filter(|(i, _)| shape >> (4 + i) & 1 != 0).map(|(_, bit)| bit).sum();
    match shape >> 2 & 3 {
        0 => run(&mut input, options, ring, [|_| Gen::new(1500, None)]),
        1 if options.max_pairs == 1 => {
            run(
                &mut input,
                options,
                ring,
                Cross::cable().map(|end| {
                    let mut end = Some(end);
                    move |_| Ok(end.take().expect("one pair"))
                }),
            );
        }
        1 => {
            let mut ports = Steering::new().spread(Echo::new(), options.max_pairs).expect("descriptors").into_iter();
            run(&mut input, options, ring, [|_| Ok(ports.next().expect("a port for each pair"))]);
        }
        2 => run(&mut input, options, ring, [|_| Gen::new(9000, Some(40))]),
        _ => run(&mut input, options, ring, [|_| Ok(Echo::new())]),
    }
    assert_eq!(next_descriptor(), before, "a descriptor was left open");
});

/// The file that is shared, mapped here.
struct Memory {
    fd: OwnedFd,
    base: *mut u8,
}

impl Memory {
    fn map() -> Self {
        let fd = file(FILE as u64);
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping.
        let base = unsafe { mmap(std::ptr::null_mut(), FILE, prot, MapFlags::SHARED, &fd, 0) };
        let base = base.expect("a mapping").cast::<u8>();
        Self { fd, base }
    }

    /// All zero, between canaries.
    fn clear(&self) {
        // SAFETY: inside of the mapping.
        unsafe {
            self.base.write_bytes(CANARY, BEGIN);
            self.base.add(BEGIN).write_bytes(0, END - BEGIN);
            self.base.add(END).write_bytes(CANARY, FILE - END);
        }
    }

    fn ring(&self, index: usize) -> SplitRing {
        assert!(SplitLayout::new(SIZE).total <= RING);
        // SAFETY: inside of the mapping, aligned, and only used while it is there.
        unsafe { SplitRing::from_layout(self.base.add(BEGIN + index * RING), SIZE) }
    }

    fn packed(&self, index: usize) -> PackedRing {
        assert!(PackedLayout::new(SIZE).total <= RING);
        // SAFETY: as above.
        unsafe { PackedRing::from_layout(self.base.add(BEGIN + index * RING), SIZE) }
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= END - BEGIN);
        // SAFETY: inside of the mapping; the device runs on this thread, and not now.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.base.add(BEGIN + at), bytes.len()) };
    }

    fn check(&self) {
        // SAFETY: as in `write`.
        let all = unsafe { slice::from_raw_parts(self.base, FILE) };
        assert!(all[..BEGIN].iter().chain(&all[END..]).all(|&b| b == CANARY), "written outside of the table");
    }
}

thread_local! {
    /// One for each driver, and for all inputs: a file is made and mapped once.
    static MEMORIES: [Memory; 2] = [(); 2].map(|()| Memory::map());
}

/// Anywhere behind the rings, with room for some bytes.
fn buffer(input: &mut Input) -> usize {
    BUFFERS + 16 * (usize::from(input.u16()) % ((END - BEGIN - BUFFERS) / 16 - 16))
}

fn u32s(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_ne_bytes()).collect()
}

fn u64s(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_ne_bytes()).collect()
}

/// A front end that does most things as it should.
struct Driver<'a> {
    front: FrontEnd,
    memory: &'a Memory,
    packed: bool,
    /// The available index, or the bits of the position of a packed ring.
    avail: [u16; RINGS],
    /// Whether a message could have made memory known that is not the driver's.
    tainted: bool,
}

impl Driver<'_> {
    fn clone_fd(&self) -> OwnedFd {
        self.memory.fd.try_clone().expect("a descriptor")
    }

    fn features(&mut self, features: u64) {
        self.front.send(2, &features.to_ne_bytes(), vec![]);
    }

    /// The memory as one region, or as several that meet.
    fn table(&mut self, pieces: usize) {
        let each = (END - BEGIN) / pieces / PAGE * PAGE;
        let mut payload = u32s(&[pieces as u32, 0]);
        for i in 0..pieces {
            let at = i * each;
            let len = if i + 1 == pieces { END - BEGIN - at } else { each };
            payload.extend(u64s(&[GUEST + at as u64, len as u64, USER + at as u64, (BEGIN + at) as u64]));
        }
        let fds = (0..pieces).map(|_| self.clone_fd()).collect();
        self.front.send(5, &payload, fds);
    }

    fn start(&mut self, ring: usize, base: u16) {
        let (index, at) = (ring as u32, USER + (ring * RING) as u64);
        let (split, packed) = (SplitLayout::new(SIZE), PackedLayout::new(SIZE));
        let (used, avail) = if self.packed { (packed.device, packed.driver) } else { (split.used, split.avail) };
        if self.packed {
            // A position that the ring has, most likely.
            self.avail[ring] = base & !0x7fff | base % SIZE | if base == 0 { 0x8000 } else { 0 };
        } else {
            self.avail[ring] = base;
            self.memory.ring(ring).set_avail_idx(base);
        }
        self.front.send(8, &u32s(&[index, SIZE.into()]), vec![]);
        self.front.send(10, &u32s(&[index, self.avail[ring].into()]), vec![]);
        let parts = u64s(&[at, at + used as u64, at + avail as u64, 0]);
        self.front.send(9, &[u32s(&[index, 0]), parts].concat(), vec![]);
        let event = || vec![eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd")];
        if ring < 2 {
            self.front.send(14, &u64s(&[index.into()]), event());
            self.front.send(13, &u64s(&[index.into()]), event());
        }
        self.front.send(12, &u64s(&[index.into()]), event());
        self.front.send(18, &u32s(&[index, 1]), vec![]);
    }

    /// Any message: each field a number that is likely to matter.
    fn message(&mut self, input: &mut Input) {
        let request = u32::from(input.u8() % 48);
        let near = [GUEST, USER, BEGIN as u64, (END - BEGIN) as u64, FILE as u64, 4096, SIZE.into(), BUFFERS as u64];
        // The length of the message, or another.
        let (halves, words) = match request {
            8 | 10 | 11 | 18 => (2, 0),
            5 => (2, 4),
            9 => (2, 4),
            2 | 12..=14 | 16 | 19 | 20 | 39 => (0, 1),
            6 => (0, 2),
            24 | 25 => (3, 0),
            37 | 38 => (0, 5),
            31 | 32 => (0, 3),
            _ => (input.below(4), input.below(4)),
        };
        let mut payload = Vec::new();
        if request == 5 {
            payload.extend(u32s(&[1, 0]));
        } else {
            (0..halves).for_each(|_| payload.extend((input.number(&near) as u32).to_ne_bytes()));
        }
        (0..words).for_each(|_| payload.extend(input.number(&near).to_ne_bytes()));
        if matches!(request, 24 | 25) && payload.len() >= 8 {
            let n = u32::from_ne_bytes(payload[4..8].try_into().expect("four bytes")).min(256);
            payload.extend(std::iter::repeat_n(0, n as usize));
        }
        let choice = input.u8();
        let wanted = usize::from(matches!(request, 5 | 6 | 7 | 12..=14 | 32 | 37));
        let count = if choice < 200 { wanted } else { usize::from(choice) % 4 };
        let fds = (0..count).map(|_| match choice & 3 {
            0 => eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd"),
            1 => file(0),
            _ => self.clone_fd(),
        });
        let fds = fds.collect();
        // Regions, logs and records of what is in flight may lie anywhere in the file.
        self.tainted |= matches!(request, 5 | 6 | 32 | 37);
        self.front.send(request, &payload, fds);
    }

    fn describe(&mut self, input: &mut Input, rings: usize) {
        let index = input.below(rings);
        let near = [GUEST, GUEST + (END - BEGIN) as u64, GUEST + BUFFERS as u64, USER, 12, 26, 1500];
        let id = u16::from(input.u8()) % SIZE;
        let shape = input.u8();
        let len = if shape & 12 == 0 { input.number(&near) as u32 } else { u32::from(input.u8()) * 12 + 12 };
        let addr = match shape & 3 {
            0 => input.number(&near),
            // It ends near the end of the memory.
            1 => (GUEST + (END - BEGIN) as u64 + u64::from(input.u8() >> 1)).wrapping_sub(len.into()).wrapping_sub(64),
            _ => GUEST + buffer(input) as u64,
        };
        // Most buffers are written by the device on even rings, and read on odd ones.
        let write = if index % 2 == 0 { 2 } else { 0 };
        // Every eighth or so refers to a table, which is what `Input` has written there.
        let table = if shape & 48 == 32 && shape & 12 == 4 { 4 } else { 0 };
        let flags = if shape & 48 == 0 { input.u16() } else { write | table | u16::from(shape & 64 != 0) };
        let next = if shape & 128 == 0 { id.wrapping_add(1) % SIZE } else { input.number(&[SIZE.into()]) as u16 };
        if self.packed {
            let (ring, at) = (self.memory.packed(index), Position::from_bits(self.avail[index]));
            let turn = if shape & 48 == 0 { 0 } else { at.available() };
            ring.set_desc(at.offset(), PackedDesc { addr, len, id: next, flags: flags | turn });
            if shape & 16 != 0 || flags & 1 != 0 {
                self.avail[index] = at.step(1, SIZE).bits();
            }
            return;
        }
        let ring = self.memory.ring(index);
        ring.set_desc(id, Desc { addr, len, flags, next });
        if shape & 16 != 0 {
            ring.set_avail_entry(self.avail[index], id);
            self.avail[index] = self.avail[index].wrapping_add(1);
            ring.set_avail_idx(self.avail[index]);
        }
    }
}

fn run<P: Port, const N: usize>(
    input: &mut Input,
    options: Options,
    ring: u64,
    ports: [impl FnMut(usize) -> Result<P, PortError>; N],
) {
    MEMORIES.with(|memories| session(input, &options, ring, ports, memories));
}

/// A device for each of `ports`, with a driver in a memory of its own.
fn session<P: Port, const N: usize>(
    input: &mut Input,
    options: &Options,
    ring: u64,
    ports: [impl FnMut(usize) -> Result<P, PortError>; N],
    memories: &[Memory; 2],
) {
    let rings = 2 * options.max_pairs + usize::from(options.serve_control);
    let mut memories = memories.iter();
    let mut guests = ports.map(|port| {
        let mut device = NetDevice::new(options.clone(), port).expect("a device");
        let driver = connect(input, &mut device, ring, rings, memories.next().expect("a memory"));
        (device, driver)
    });
    while !input.is_empty() {
        let guest = if N > 1 { input.below(N) } else { 0 };
        let (device, driver) = &mut guests[guest];
        step(input, device, driver, rings);
    }
    guests.iter_mut().for_each(|(device, _)| _ = device.poll());
    let mut guests = guests.map(|(device, driver)| {
        let (tainted, memory) = (driver.tainted, driver.memory);
        drop(driver);
        (device, tainted, memory)
    });
    for (device, tainted, memory) in &mut guests {
        assert_eq!(device.poll(), 0, "there is no front end any more");
        if !*tainted {
            memory.check();
        }
    }
}

/// A driver that has started its rings.
fn connect<'a, P: Port>(
    input: &mut Input,
    device: &mut NetDevice<P>,
    ring: u64,
    rings: usize,
    memory: &'a Memory,
) -> Driver<'a> {
    let front = FrontEnd::new(device);
    let packed = ring & feature::RING_PACKED != 0;
    let mut driver = Driver { front, memory, packed, avail: [0; RINGS], tainted: false };
    let shape = input.u8();
    if shape & 1 == 0 {
        // The protocol features of a front end that wants all of them.
        let all = [0x1f_ffff, 0x1_ffff, 0x9_920f, 0x1_920f, 0x920f, 9];
        driver.front.send(16, &u64s(&[all[usize::from(shape >> 5) % 6]]), vec![]);
    }
    let offloads = if shape & 2 == 0 { 0 } else { netmem_virtio::device::port::ALL_OFFLOADS };
    let merge = if shape & 4 == 0 { feature::MRG_RXBUF } else { 0 };
    let control = if shape & 8 == 0 { feature::MQ | feature::CTRL_VQ } else { 0 };
    let offered = device.control().offered();
    driver.features((feature::VERSION_1 | feature::VHOST_USER_PROTOCOL | offloads | merge | control | ring) & offered);
    driver.table(1 + usize::from(shape >> 4 & 3));
    for ring in 0..rings {
        driver.start(ring, 0);
    }
    driver
}

/// One message, write or pass.
fn step<P: Port>(input: &mut Input, device: &mut NetDevice<P>, driver: &mut Driver<'_>, rings: usize) {
    let (memory, packed) = (driver.memory, driver.packed);
    match input.below(16) {
        0..8 => driver.describe(input, rings),
        8 => {
            let n = input.below(64);
            let at = buffer(input);
            memory.write(at, input.bytes(n));
        }
        9..12 => _ = device.poll(),
        12 => driver.message(input),
        13 => {
            // A ring is stopped, and started again where it was or elsewhere.
            let ring = input.below(rings);
            driver.front.send(11, &u32s(&[ring as u32, 0]), vec![]);
            let base = if input.u8() & 1 == 0 { driver.avail[ring] } else { input.u16() };
            driver.start(ring, base);
        }
        14 => {
            let (index, shape) = (input.below(rings), input.u8());
            if packed {
                let (ring, word) = (memory.packed(index), input.u16());
                match shape & 1 {
                    0 => ring.set_driver_event(Event { position: word, flags: u16::from(shape >> 1 & 3) }),
                    _ => {
                        // Flags that flip.
                        let d = ring.used_desc(word % SIZE);
                        let turn = PackedDesc::AVAIL | PackedDesc::USED;
                        ring.set_used_desc(word % SIZE, PackedDesc { flags: d.flags ^ (word & turn), ..d });
                    }
                }
                return;
            }
            let ring = memory.ring(index);
            match shape & 3 {
                0 => ring.set_avail_idx(input.u16()),
                1 => ring.set_avail_flags(input.u16()),
                2 => ring.set_used_idx(input.u16()),
                _ => ring.set_avail_entry(input.u8().into(), input.number(&[SIZE.into()]) as u16),
            }
        }
        _ => {
            driver.table(1 + input.below(4));
        }
    }
}
