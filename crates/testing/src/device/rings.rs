//! The driver's half of a ring, in either format: enough to test a device, and simple enough to be
//! checked by reading.

use std::collections::VecDeque;

use netmem_virtio::net::feature;
use netmem_virtio::virtqueue::{
    AVAIL_NO_INTERRUPT, DESC_INDIRECT, DESC_NEXT, DESC_WRITE, Desc, Event, PackedDesc, PackedLayout, PackedRing,
    Position, SplitLayout, SplitRing, USED_NO_NOTIFY, passed, passed_packed,
};

use super::{Addresses, BUFFERS, Driver, EventFd, GUEST, Memory, RING_ROOM, USER};

pub const WRITE: u16 = DESC_WRITE;
/// Bytes between two buffers.
const STRIDE: usize = 8192;
/// Where the tables begin, behind the buffers of a queue, and bytes of each.
const TABLES: usize = 1 << 20;
const TABLE: usize = 1024;

#[derive(Debug)]
enum Format {
    /// Chains made available, used elements taken, and the free descriptors.
    Split(SplitRing, u16, u16),
    Packed(PackedRing, Position, Position),
}

/// When the driver wants an interrupt.
#[derive(Clone, Copy)]
pub enum InterruptWish {
    Never,
    Always,
    /// When so many more chains, each of one descriptor, were used, and one more.
    After(u16),
}

/// A chain that the device has.
#[derive(Debug)]
struct Chain {
    id: u16,
    /// Descriptors in the ring.
    descs: Vec<u16>,
}

pub struct Queue {
    format: Format,
    index: usize,
    size: u16,
    features: u64,
    /// In the order in which they were posted.
    posted: VecDeque<Chain>,
    free: Vec<u16>,
    ids: Vec<u16>,
    /// The position up to which kicks were considered.
    kicked: (u16, Position),
    pub kick: EventFd,
    pub call: EventFd,
    pub err: EventFd,
}

impl Queue {
    /// Starts ring `index` of a connected driver, and enables it.
    pub fn start(driver: &mut Driver, index: usize, size: u16, features: u64) -> Self {
        let mut queue = Self::laid_out(&driver.memory, index, size, features);
        let base = if features & feature::RING_PACKED != 0 { 0x8000_8000 } else { 0 };
        queue.describe(driver, base);
        queue
    }

    /// The ring in memory, of which no device knows.
    pub fn laid_out(memory: &Memory, index: usize, size: u16, features: u64) -> Self {
        assert!(SplitLayout::new(size).total.max(PackedLayout::new(size).total) <= RING_ROOM);
        // SAFETY: inside of the mapping, aligned, with room for either format.
        let at = unsafe { memory.base.add(index * RING_ROOM) };
        let format = match features & feature::RING_PACKED != 0 {
            // SAFETY: as above.
            true => Format::Packed(unsafe { PackedRing::from_layout(at, size) }, Position::START, Position::START),
            // SAFETY: as above.
            false => Format::Split(unsafe { SplitRing::from_layout(at, size) }, 0, 0),
        };
        let fd = EventFd::new;
        Self {
            format,
            index,
            size,
            features,
            posted: VecDeque::new(),
            free: (0..size).rev().collect(),
            ids: (0..size).rev().collect(),
            kicked: (0, Position::START),
            kick: fd(),
            call: fd(),
            err: fd(),
        }
    }

    /// Makes the ring known to the device, which begins at `base`.
    pub fn describe(&mut self, driver: &Driver, base: u32) {
        let (index, at) = (self.index, USER + (self.index * RING_ROOM) as u64);
        let (used, avail) = match self.format {
            Format::Split(..) => (SplitLayout::new(self.size).used, SplitLayout::new(self.size).avail),
            Format::Packed(..) => (PackedLayout::new(self.size).device, PackedLayout::new(self.size).driver),
        };
        driver.front.set_vring_num(index, self.size).unwrap();
        driver.front.set_vring_base_bits(index, base).unwrap();
        let addresses = Addresses { desc: at, used: at + used as u64, avail: at + avail as u64, log: None };
        driver.front.set_vring_addr(index, addresses).unwrap();
        driver.front.set_vring_call(index, &self.call).unwrap();
        driver.front.set_vring_err(index, &self.err).unwrap();
        driver.front.set_vring_kick(index, &self.kick).unwrap();
        driver.front.set_vring_enable(index, true).unwrap();
    }

    /// The offset in memory of the buffer of chain `id`.
    pub fn offset(&self, id: u16) -> usize {
        BUFFERS + self.index * (2 << 20) + usize::from(id) * STRIDE
    }

    /// Its guest address.
    pub fn buffer(&self, id: u16) -> u64 {
        GUEST + self.offset(id) as u64
    }

    fn table(&self, id: u16) -> usize {
        BUFFERS + self.index * (2 << 20) + TABLES + usize::from(id) * TABLE
    }

    /// The raw words.
    pub fn packed(&self) -> &PackedRing {
        match &self.format {
            Format::Packed(ring, ..) => ring,
            Format::Split(..) => panic!("a split ring"),
        }
    }

    /// See [`packed`](Self::packed).
    pub fn split(&self) -> &SplitRing {
        match &self.format {
            Format::Split(ring, ..) => ring,
            Format::Packed(..) => panic!("a packed ring"),
        }
    }

    /// Where the next chain goes in a packed ring.
    pub fn position(&self) -> Position {
        match self.format {
            Format::Packed(_, next, _) => next,
            Format::Split(..) => panic!("a split ring"),
        }
    }

    /// An id that is free, if there is room for a chain of `parts`.
    pub fn vacant(&self, parts: usize) -> Option<u16> {
        let ids = if matches!(self.format, Format::Split(..)) { &self.free } else { &self.ids };
        if self.free.len() < parts { None } else { ids.last().copied() }
    }

    /// Posts chain `id` of (guest address, length, flags), by a table if `indirect` is set and was
    /// negotiated.
    pub fn post(&mut self, memory: &Memory, id: u16, parts: &[(u64, u32, u16)], indirect: bool) {
        let packed = matches!(self.format, Format::Packed(..));
        let mut parts = parts.to_vec();
        if indirect && self.features & feature::INDIRECT_DESC != 0 {
            let (at, n) = (self.table(id), parts.len());
            for (i, &(addr, len, flags)) in parts.iter().enumerate() {
                // In a packed ring, neither NEXT nor the id means anything in a table.
                let (a, b) = match packed {
                    true => (0xbeef, flags | if i % 2 == 0 { DESC_NEXT } else { 0 }),
                    false if i + 1 < n => (flags | DESC_NEXT, i as u16 + 1),
                    false => (flags, 0x7777),
                };
                let bytes = [&addr.to_le_bytes()[..], &len.to_le_bytes(), &a.to_le_bytes(), &b.to_le_bytes()].concat();
                memory.write(at + 16 * i, &bytes);
            }
            parts = vec![(GUEST + at as u64, 16 * n as u32, DESC_INDIRECT)];
        }
        self.post_as_is(id, &parts);
    }

    /// Posts chain `id` of these descriptors.
    pub fn post_as_is(&mut self, id: u16, parts: &[(u64, u32, u16)]) {
        self.ids.retain(|&other| other != id);
        let mut descs: Vec<u16> = self.free.split_off(self.free.len() - parts.len());
        descs.reverse();
        let last = parts.len() - 1;
        match &mut self.format {
            Format::Split(ring, avail, _) => {
                // The head is what the device calls the chain, so it has to be the id.
                if let Some(at) = descs.iter().position(|&d| d == id) {
                    descs.swap(0, at);
                } else {
                    let at = self.free.iter().position(|&d| d == id).expect("the head is free");
                    std::mem::swap(&mut descs[0], &mut self.free[at]);
                }
                for (i, &(addr, len, flags)) in parts.iter().enumerate() {
                    let (more, next) = if i < last { (DESC_NEXT, descs[i + 1]) } else { (0, 0) };
                    ring.set_desc(descs[i], Desc { addr, len, flags: flags | more, next });
                }
                ring.set_avail_entry(*avail, id);
                *avail = avail.wrapping_add(1);
                ring.set_avail_idx(*avail);
            }
            Format::Packed(ring, next, _) => {
                // The first descriptor is made available last.
                for i in (0..=last).rev() {
                    let ((addr, len, flags), at) = (parts[i], next.step(i as u16, self.size));
                    let more = if i < last { DESC_NEXT } else { 0 };
                    let id = if i == last { id } else { 0xdead };
                    ring.set_desc(at.offset(), PackedDesc { addr, len, id, flags: flags | more | at.available() });
                }
                *next = next.step(parts.len() as u16, self.size);
            }
        }
        self.posted.push_back(Chain { id, descs });
    }

    /// The used entries that are there, with their lengths; nothing is taken.
    pub fn entries(&self) -> Vec<u32> {
        let mut lens = Vec::new();
        match &self.format {
            Format::Split(ring, _, used) => {
                let mut at = *used;
                let mut chains = self.posted.iter();
                while at != ring.used_idx() {
                    let (id, len) = ring.used_entry(at);
                    lens.push(len);
                    loop {
                        at = at.wrapping_add(1);
                        if self.features & feature::IN_ORDER == 0 || u32::from(chains.next().unwrap().id) == id {
                            break;
                        }
                    }
                }
            }
            Format::Packed(ring, _, used) => {
                let (mut at, mut chains) = (*used, self.posted.iter());
                while chains.len() > 0 && ring.used_desc(at.offset()).is_used(at) {
                    let d = ring.used_desc(at.offset());
                    assert_eq!(d.flags & WRITE != 0, d.len > 0, "a length is valid where something was written");
                    lens.push(d.len);
                    loop {
                        let chain = chains.next().unwrap();
                        at = at.step(chain.descs.len() as u16, self.size);
                        if self.features & feature::IN_ORDER == 0 || chain.id == d.id {
                            break;
                        }
                    }
                }
            }
        }
        lens
    }

    /// The chains that came back, with the bytes written.
    pub fn take(&mut self) -> Vec<(u16, u32)> {
        let mut back = Vec::new();
        loop {
            let (id, len) = match &self.format {
                Format::Split(ring, _, used) if *used != ring.used_idx() => {
                    let (id, len) = ring.used_entry(*used);
                    (id as u16, len)
                }
                Format::Packed(ring, _, used) => match ring.used_desc(used.offset()) {
                    d if d.is_used(*used) && !self.posted.is_empty() => (d.id, d.len),
                    _ => return back,
                },
                Format::Split(..) => return back,
            };
            loop {
                let chain = self.posted.pop_front().expect("a chain that was posted");
                match &mut self.format {
                    Format::Split(_, _, used) => *used = used.wrapping_add(1),
                    Format::Packed(_, _, used) => *used = used.step(chain.descs.len() as u16, self.size),
                }
                self.free.extend(&chain.descs);
                self.ids.insert(0, chain.id);
                let last = chain.id == id;
                back.push((chain.id, if last { len } else { 0 }));
                if last {
                    break;
                }
                assert_ne!(self.features & feature::IN_ORDER, 0, "chain {} was expected, and {id} came", chain.id);
            }
        }
    }

    /// Sets when an interrupt is wanted.
    pub fn interrupts(&self, wish: InterruptWish) {
        let event_idx = self.features & feature::EVENT_IDX != 0;
        match (&self.format, wish) {
            (Format::Split(ring, ..), InterruptWish::Never) if !event_idx => ring.set_avail_flags(AVAIL_NO_INTERRUPT),
            (Format::Split(ring, ..), InterruptWish::Always) if !event_idx => ring.set_avail_flags(0),
            // The index is passed 2^15 elements from now.
            (Format::Split(ring, _, used), InterruptWish::Never) => ring.set_used_event(used.wrapping_add(1 << 15)),
            (Format::Split(ring, _, used), InterruptWish::Always) => ring.set_used_event(*used),
            (Format::Split(ring, _, used), InterruptWish::After(n)) => ring.set_used_event(used.wrapping_add(n)),
            (Format::Packed(ring, ..), InterruptWish::Never) => {
                ring.set_driver_event(Event { position: 0, flags: Event::DISABLE });
            }
            (Format::Packed(ring, ..), InterruptWish::Always) => {
                ring.set_driver_event(Event { position: 0, flags: Event::ENABLE });
            }
            (Format::Packed(ring, _, used), InterruptWish::After(n)) => {
                ring.set_driver_event(Event { position: used.step(n, self.size).bits(), flags: Event::AT });
            }
        }
    }

    /// Interrupts since the last call.
    pub fn calls(&self) -> u64 {
        self.call.read().unwrap_or(0)
    }

    /// Kicks the device if it wants that for what was posted since the last call. Whether it did.
    pub fn kick(&mut self) -> bool {
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        let event_idx = self.features & feature::EVENT_IDX != 0;
        let wanted = match &self.format {
            Format::Split(ring, avail, _) => {
                let old = std::mem::replace(&mut self.kicked.0, *avail);
                if event_idx {
                    passed(ring.avail_event(), old, *avail)
                } else {
                    ring.used_flags() & USED_NO_NOTIFY == 0
                }
            }
            Format::Packed(ring, next, _) => {
                let old = std::mem::replace(&mut self.kicked.1, *next);
                let event = ring.device_event();
                match event.kind() {
                    Event::DISABLE => false,
                    Event::AT => {
                        assert!(event_idx, "a position without the feature");
                        passed_packed(Position::from_bits(event.position), old, *next, self.size)
                    }
                    _ => true,
                }
            }
        };
        if wanted {
            self.kick.write(1).unwrap();
        }
        wanted
    }
}
