//! Device memory behind a foreign device: DPDK's vhost, which knows nothing of it. Frames leave
//! from device memory, are sent back by testpmd, and arrive in device memory, whole; queues are
//! restarted in between.
//!
//! Needs `dpdk-testpmd` and two CPUs, and is skipped, saying so, without. No huge pages and no
//! privileges.

use std::sync::Arc;

use netmem_packet::{Checksum, DeviceFrag, Meta, Packet, SplitTxQueue, TxQueue};
use netmem_testing::driver::split::{DeviceMemory, assert_split_closed, bind, take};
use netmem_testing::driver::testpmd::Testpmd;
use netmem_testing::driver::*;
use netmem_virtio::VhostUser;
use netmem_virtio::driver::VirtioNet;

/// The Internet checksum.
fn sum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|w| u32::from(u16::from_be_bytes([w[0], w.get(1).copied().unwrap_or(0)])));
    let sum = words.sum::<u32>();
    let sum = (sum & 0xffff) + (sum >> 16);
    !(((sum & 0xffff) + (sum >> 16)) as u16)
}

/// Proves MEM-8 and MEM-11 on an unmodified backend.
#[test]
fn dpdk_fills_chains_in_order() {
    let _alone = crate::alone();
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("vhost.sock");
    let Some(_testpmd) = Testpmd::start(&socket, false) else { return };
    let (memory, accounting) = (DeviceMemory::new(1024), Accounting::default());
    let backend = VhostUser::connect(&socket).unwrap();
    let (net, mut pairs) = VirtioNet::probe(backend, accounting.count(memory.options().pages(2048))).unwrap();
    let pair = pairs.remove(0);
    let (mut rx, mut tx) = (bind(pair.rx, &memory.split()), pair.tx.into_split::<Arc<()>>());
    let binding = Arc::new(());
    let (mut rng, mut payload) = (Rng(3), Vec::new());
    for round in 0..20 {
        let base =
            rx.poll(|poll| poll.with_napi(|_, device| device.alloc().map(|p| p.dma_addr() - p.file_offset()))).unwrap();
        for i in 0..500_u64 {
            let want = frame(round * 1000 + i, 60 + rng.below(1459) as usize);
            let at = 3 << 20;
            memory.write(at, &want[42..]);
            let mut page = rx.poll(|poll| poll.with_napi(|host, _| host.alloc())).unwrap();
            page.copy_from(64, &want[..42]).unwrap();
            let mut packet = Packet::new(page.freeze_range(64..106));
            packet.meta = Meta { checksum: Checksum::Partial { start: 14, offset: 6 }, gso: None };
            payload.push(DeviceFrag { dma: base + at, len: want.len() as u32 - 42, holder: binding.clone() });
            tx.send_split(packet, &mut payload).unwrap();
            tx.flush();
            let mut got = Vec::new();
            until(|| {
                got.extend(take(&mut rx));
                !got.is_empty()
            });
            let mut swapped = want.clone();
            swapped[..12].rotate_left(6);
            // DPDK sums what was left to it, payload in device memory included.
            swapped[20..22].copy_from_slice(&sum(&want[14..]).to_be_bytes());
            assert_eq!((got.len(), got[0].head().len()), (1, 42));
            assert_eq!(memory.bytes(&got[0]), swapped, "frame {i} of round {round}");
            until(|| {
                tx.complete();
                tx.posted() == 0
            });
            assert_eq!(Arc::strong_count(&binding), 1);
        }
        let again = rx.restart_split(&memory.split().header_bytes(42)).unwrap();
        assert_split_closed(&again.closed, 0);
        rx = again.queue;
    }
    let unbound = rx.restart(None).unwrap();
    assert_split_closed(&unbound.closed, 0);
    drop(tx);
    assert_closed(&unbound.queue.close().unwrap(), 0);
    drop(net);
    assert_eq!(memory.free_pages(), 1024);
    accounting.assert_balanced();
}
