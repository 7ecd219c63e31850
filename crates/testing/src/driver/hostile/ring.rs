//! A ring from the device's side, in either format, with nothing checked: the test writes what it
//! wants.

use netmem_virtio::virtqueue::{DESC_NEXT, DESC_WRITE, Desc, PackedDesc, PackedRing, Position, SplitRing};
use std::collections::HashMap;

/// A ring from the device's side, with nothing checked.
pub struct DeviceRing {
    words: Words,
    pub size: u16,
    /// Heads taken from the available ring, of a split ring.
    pub seen: u16,
    /// Used elements that were written.
    pub used: u16,
}

enum Words {
    Split(SplitRing),
    Packed(PackedWords),
}

/// A packed ring, and where the device is in it.
pub struct PackedWords {
    pub ring: PackedRing,
    /// The position of the next chain.
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

    /// A used descriptor at the next place, which moves by the descriptors of the chain, or of any
    /// if there is none of this id.
    fn put(&mut self, id: u16, len: u32) -> (u16, PackedDesc) {
        let like = self.chains.get(&id).or_else(|| self.chains.values().next());
        let (at, span) = (self.used, like.map_or(1, Vec::len) as u16);
        self.used = at.step(span, self.ring.size());
        (at.offset(), PackedDesc { addr: 0, len, id, flags: at.used() | DESC_WRITE })
    }
}

impl DeviceRing {
    pub(super) fn split_ring(ring: SplitRing) -> Self {
        Self { size: ring.size(), words: Words::Split(ring), seen: 0, used: 0 }
    }

    pub(super) fn packed_ring(ring: PackedRing) -> Self {
        Self { size: ring.size(), words: Words::Packed(PackedWords::new(ring)), seen: 0, used: 0 }
    }

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

    /// Whether at least `n` chains are there, as far as that costs little to find out.
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
    pub fn add_used(&mut self, id: u32, len: u32) {
        self.write(id, len);
        self.publish();
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

    pub fn publish(&mut self) {
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
    pub fn publish_garbage(&mut self, n: u16) {
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
