//! A device that reports false values about long chains and about split points. Each case ends in a
//! named error and a stopped queue, or in a counted frame. Delivered frames lie within the buffers,
//! and no page of either kind is lost.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use netmem_packet::SplitFrame;
use netmem_testing::driver::hostile::{Behaviour, DeviceRing, FEATURES, FORMATS, Hostile};
use netmem_testing::driver::split::{DeviceMemory, assert_split_closed, bind, take};
use netmem_testing::driver::*;
use netmem_virtio::driver::{DeviceFault, NetOptions, RxMode, SplitOptions, VirtioNet, VirtioSplitRx, VirtioTx};
use netmem_virtio::net::{VnetHdr, feature};
use netmem_virtio::virtqueue::{DESC_INDIRECT, Desc};

/// The protocol feature of a device that splits frames.
const SPLITS: u64 = 1 << 62;
const HEAD: u32 = 12 + 114;

struct Harness {
    device: Hostile,
    ring: DeviceRing,
    rx: VirtioSplitRx,
    tx: VirtioTx,
    net: VirtioNet,
    accounting: Accounting,
    memory: DeviceMemory,
}

impl Harness {
    fn new(rings: u64, splits: bool, order: u8) -> Self {
        let memory = DeviceMemory::of_order(1024 >> order, order);
        let protocol = 1 | if splits { SPLITS } else { 0 };
        let (device, backend) =
            Hostile::new(Behaviour { features: FEATURES | rings, protocol, ..Behaviour::default() });
        let accounting = Accounting::default();
        let options = accounting.count(memory.add(NetOptions::new(RxMode::Big)).ring_features(rings));
        let (net, mut pairs) = VirtioNet::probe(backend, options).unwrap();
        let pair = pairs.remove(0);
        let rx = bind(pair.rx, &memory.split().header_bytes(SplitOptions::TCP_V6));
        assert_eq!(rx.splits_headers(), splits);
        Self { ring: device.ring(0), device, rx, tx: pair.tx, net, accounting, memory }
    }

    /// The segments of a chain, of whichever kind.
    fn chain(&self, head: u16) -> Vec<Desc> {
        let chain = self.ring.chain(head);
        if chain[0].flags & DESC_INDIRECT == 0 {
            return chain;
        }
        assert_eq!(chain.len(), 1);
        let table = self.device.read(chain[0].addr, chain[0].len as usize);
        let entry = |bytes: &[u8]| Desc {
            addr: u64::from_le_bytes(bytes[..8].try_into().unwrap()),
            len: u32::from_le_bytes(bytes[8..12].try_into().unwrap()),
            flags: 0,
            next: 0,
        };
        table.chunks(16).map(entry).collect()
    }

    /// Uses the next chain, with this header and these bytes in the parts, and claims a length.
    fn deliver(&mut self, header: VnetHdr, head: &[u8], payload: &[u8], len: u32) {
        let id = self.ring.take().unwrap();
        let chain = self.chain(id);
        self.device.write(chain[0].addr, &header.to_bytes());
        self.device.write(chain[0].addr + 12, head);
        let mut rest = payload;
        for d in &chain[1..] {
            let (now, later) = rest.split_at(rest.len().min(d.len as usize));
            self.device.write(d.addr, now);
            rest = later;
        }
        self.ring.add_used(id.into(), len);
    }

    #[track_caller]
    fn close(self) {
        assert_split_closed(&self.rx.close().unwrap(), 0);
        drop((self.tx, self.net));
        self.accounting.assert_balanced();
        // Every page was returned.
        assert_eq!(self.memory.free_pages(), self.memory.pages());
    }
}

fn split_at(bytes: u16) -> VnetHdr {
    VnetHdr { hdr_len: bytes, ..VnetHdr::PLAIN }
}

/// Formats of rings, each with tables of descriptors and without.
fn rings() -> impl Iterator<Item = u64> {
    FORMATS.into_iter().flat_map(|format| [format, format | feature::INDIRECT_DESC])
}

/// Proves NET-6 and MEM-11, as do all tests here: chains are what an honest device expects, and
/// frames are where it has put them.
#[test]
fn chains_have_seventeen_parts() {
    for (rings, order) in rings().flat_map(|rings| [(rings, 0), (rings, 4)]) {
        for splits in [true, false] {
            let mut harness = Harness::new(rings, splits, order);
            let pages = 16 >> order;
            let id = harness.ring.take().unwrap();
            // DPDK's vhost mistakes a table in a packed ring for a buffer.
            let tables = rings & feature::INDIRECT_DESC != 0 && (splits || rings & feature::RING_PACKED == 0);
            assert_eq!(harness.ring.chain(id)[0].flags & DESC_INDIRECT != 0, tables, "{rings:#x} {splits}");
            let lens: Vec<_> = harness.chain(id).iter().map(|d| d.len).collect();
            assert_eq!(lens, [vec![HEAD], vec![4096 << order; pages.max(1)]].concat(), "{rings:#x}");
            // Room for the longest frame, and its header.
            assert!(lens.iter().sum::<u32>() >= 65_562);
            harness.ring.add_used(id.into(), 0);
            for n in [0, 1, 4096, 4097, 8192, 60_000, 65_536] {
                let (head, data) = (frame(1, if splits { 54 } else { 114 }), frame(n, n as usize));
                let len = if n == 0 { 12 + head.len() as u32 } else { HEAD + n as u32 };
                harness.deliver(split_at(if splits { 54 } else { 0 }), &head, &data, len);
                let got = take(&mut harness.rx);
                assert_eq!(harness.memory.bytes(&got[0]), [head, data].concat());
            }
            assert_eq!((harness.rx.stats().short, harness.rx.stats().frames), (1, 7));
            harness.close();
        }
    }
}

/// Lengths beyond the chain stop the queue. Lengths within it determine the frame, whatever the
/// other fields are.
#[test]
fn lengths_beyond_the_chain() {
    let have = HEAD + 65_536;
    for rings in rings() {
        for len in [have + 1, 1 << 20, 1 << 31, u32::MAX] {
            let mut harness = Harness::new(rings, true, 0);
            harness.deliver(split_at(54), &frame(1, 54), &[], len);
            assert_eq!(take(&mut harness.rx).len(), 0);
            assert_eq!(harness.rx.stats().stopped, Some(DeviceFault::BadLength { len, have }));
            harness.close();
        }
    }
}

/// A place of the split that cannot be: the frame is counted, and what it was in is posted again,
/// all of it.
#[test]
fn splits_that_cannot_be() {
    for rings in rings() {
        let mut harness = Harness::new(rings, true, 0);
        let before = (harness.rx.posted(), harness.rx.pool_stats().1.allocated());
        let gso = |header: VnetHdr| VnetHdr {
            flags: VnetHdr::NEEDS_CSUM,
            gso_type: VnetHdr::GSO_TCPV4,
            gso_size: 1000,
            csum_start: 34,
            csum_offset: 16,
            ..header
        };
        let lies = [
            // Before the end of an Ethernet header, or none.
            (split_at(0), HEAD + 100),
            (split_at(13), HEAD + 100),
            // Behind the host part.
            (split_at(115), HEAD + 100),
            (split_at(u16::MAX), HEAD + 100),
            // Behind what was written, or before it, where there is no payload.
            (split_at(54), 12 + 53),
            (split_at(54), 12 + 55),
            (split_at(114), HEAD - 1),
            // A segment whose header cannot be true of it: its checksum is behind its end, or it is
            // too many.
            (VnetHdr { csum_start: 400, ..gso(split_at(54)) }, HEAD + 100),
            (VnetHdr { gso_size: 1, ..gso(split_at(54)) }, HEAD + 60_000),
            (gso(split_at(115)), HEAD + 60_000),
            (gso(split_at(54)), 12 + 70),
        ];
        for (header, len) in lies {
            harness.deliver(header, &frame(1, 114), &frame(2, 100), len);
        }
        assert_eq!(take(&mut harness.rx).len(), 0);
        let s = harness.rx.stats();
        assert_eq!((s.bad_header, s.frames, s.stopped), (lies.len() as u64, 0, None));
        assert_eq!((harness.rx.posted(), harness.rx.pool_stats().1.allocated()), before);
        // The next frame is received.
        harness.deliver(split_at(54), &frame(3, 54), &frame(4, 10_000), HEAD + 10_000);
        let got = take(&mut harness.rx);
        assert_eq!(harness.memory.bytes(&got[0]), [frame(3, 54), frame(4, 10_000)].concat());
        drop(got);
        harness.close();
    }
}

/// Headers, lengths and index change all the time while the driver polls. In each case, delivered
/// frames lie within the buffers, and no page is lost.
#[test]
fn everything_changes_between_two_reads() {
    for seed in 0..8 {
        let mut harness = Harness::new(feature::INDIRECT_DESC, seed % 4 != 0, 0);
        let stop = AtomicBool::new(false);
        let posted = harness.ring.available();
        let heads: Vec<u16> = (0..posted).map(|i| harness.ring.split().avail_entry(i)).collect();
        let parts: Vec<u64> = heads.iter().map(|&head| harness.chain(head)[0].addr).collect();
        let (device, ring, rx) = (&harness.device, harness.device.ring(0), &mut harness.rx);
        let (mut frames, mut held) = (0, Vec::new());
        std::thread::scope(|s| {
            let stop = &stop;
            s.spawn(move || {
                let (mut rng, mut used) = (Rng(seed), 0_u16);
                while !stop.load(Relaxed) {
                    let at = rng.below(parts.len() as u64) as usize;
                    device.write(parts[at] + rng.below(12), &[rng.below(120) as u8]);
                    let id = heads[usize::from(used) % heads.len()];
                    let most = if rng.below(500) == 0 { 90_000 } else { 65_536 + 100 };
                    ring.set_used_entry_of(used, id, 26 + rng.below(most));
                    if ring.lag(used) > 1 {
                        used = used.wrapping_add(1);
                        ring.split().set_used_idx(used);
                    }
                }
            });
            for round in 0..2000 {
                rx.poll(|poll| {
                    poll.receive(64, &mut |f: SplitFrame| {
                        assert!((14..=114).contains(&f.head().len()) && f.payload().len() <= 65_536);
                        assert_eq!(f.payload().fragments().map(|frag| frag.len()).sum::<usize>(), f.payload().len());
                        frames += 1;
                        held.push(f);
                    })
                });
                if round % 7 == 0 {
                    held.clear();
                }
            }
            stop.store(true, Relaxed);
        });
        assert_eq!(harness.rx.stats().frames, frames);
        drop(held);
        harness.close();
    }
}
