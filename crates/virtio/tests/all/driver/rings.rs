//! The driver on our own device, in both ring formats and with every combination of the features of
//! rings.

use netmem_packet::{Packet, TxQueue};
use netmem_pool::{PAGE_SIZE, PeerShared, PoolOptions, SharedPool};
use netmem_testing::driver::*;
use netmem_virtio::device::port::Echo;
use netmem_virtio::driver::{NetError, NetOptions, QueuePair, RxMode, VirtioNet};
use netmem_virtio::net::feature;
use netmem_virtio::virtqueue::Negotiated;

const FEATURES: [u64; 4] = [feature::RING_PACKED, feature::EVENT_IDX, feature::INDIRECT_DESC, feature::IN_ORDER];

/// Every combination.
fn combinations() -> impl Iterator<Item = u64> {
    (0..16).map(|n| FEATURES.iter().enumerate().filter(|(i, _)| n >> i & 1 == 1).map(|(_, bit)| bit).sum())
}

/// A packet of these bytes in fragments of random lengths, with room in front for a header or
/// without. `None` if there are too few pages.
fn packet(pool: &SharedPool<PeerShared>, rng: &mut Rng, bytes: &[u8]) -> Option<Packet<PeerShared>> {
    let mut rest = bytes;
    let mut packet: Option<Packet<PeerShared>> = None;
    while !rest.is_empty() {
        let room = if rng.below(2) == 0 { 0 } else { 64 };
        let most = (PAGE_SIZE - 64) as u64;
        let n = if bytes.len() > 4096 { most } else { 14 + rng.below(2000) };
        let (piece, behind) = rest.split_at((n as usize).min(rest.len()));
        rest = behind;
        let mut page = pool.alloc()?;
        page.copy_from(room, piece).unwrap();
        let frag = page.freeze_range(room..room + piece.len());
        match &mut packet {
            None => packet = Some(Packet::new(frag)),
            Some(packet) => packet.push(frag).unwrap(),
        }
    }
    packet
}

/// Every length of a standard frame, in some order, and longer ones up to `max`.
fn every_length(seed: u64, max: usize) -> Vec<Vec<u8>> {
    let mut rng = Rng(seed);
    let mut lengths: Vec<usize> = (14..=1518).collect();
    if max > 1518 {
        lengths.extend((0..60).map(|_| 1519 + rng.below(max as u64 - 1518) as usize).chain([1519, max]));
    }
    (1..lengths.len()).for_each(|at| lengths.swap(at, rng.below(at as u64 + 1) as usize));
    lengths.into_iter().enumerate().map(|(n, len)| frame(seed << 32 | n as u64, len)).collect()
}

/// Frames of every length, of random bytes, go through an echo in several fragments and come back
/// byte for byte, in every mode and with each kind of rings, and every page is returned.
#[test]
fn frames_of_every_length_come_back_in_every_ring() {
    for (n, rings) in (0..).zip(combinations()) {
        for (mode, max) in [(RxMode::Small, 1518), (RxMode::Mergeable, 65549), (RxMode::Big, 65549)] {
            let mut device_thread = DeviceThread::one(Echo::new());
            let accounting = Accounting::default();
            let options = NetOptions::new(mode).max_frame(max).ring_size(128).tx_pages(512).ring_features(rings);
            let (net, mut pairs) = device_thread.probe(accounting.count(options));
            assert_eq!(net.features() & Negotiated::RING, rings);
            let QueuePair { mut rx, mut tx } = pairs.remove(0);
            let pool = net.tx_pool(PoolOptions::new("tx")).unwrap();
            // With no other feature, and with all: every length. Some lengths with the others.
            let all = [0, 1, 14, 15].contains(&n);
            let (want, mut rng) = (if all { every_length(n, max) } else { frames(150, max) }, Rng(n));
            let (mut sent, mut back, mut waits) = (0, 0, None);
            until(|| {
                while sent < want.len()
                    && let Some(packet) = waits.take().or_else(|| packet(&pool, &mut rng, &want[sent]))
                {
                    match tx.send(packet) {
                        Ok(()) => sent += 1,
                        Err(packet) => {
                            waits = Some(packet);
                            break;
                        }
                    }
                }
                tx.flush();
                tx.complete();
                receive(&mut rx, &mut |packet: Packet<PeerShared>| {
                    let mut got = packet.to_vec();
                    let (to, from) = got[..12].split_at_mut(6);
                    to.swap_with_slice(from);
                    assert!(got == want[back], "{rings:#x}, {mode}: frame {back} of {} bytes", want[back].len());
                    back += 1;
                });
                back == want.len() && tx.posted() == 0
            });
            assert_eq!((rx.stats().stopped, tx.stats().stopped), (None, None));
            assert_eq!(device_thread.stats.queue_errors().map(|(_, n)| n).sum::<u64>(), 0);
            assert_closed(&pool.close(), 0);
            close_clean(QueuePair { rx, tx });
            drop(net);
            accounting.assert_balanced();
        }
    }
}

/// A feature that the back end lacks is an error that names it, and one that is no feature of rings
/// is refused.
#[test]
fn missing_ring_features() {
    for bit in FEATURES {
        let (_device, backend) = hostile::Hostile::new(hostile::Behaviour::default());
        let error = VirtioNet::probe(backend, NetOptions::new(RxMode::Small).ring_features(bit)).unwrap_err();
        let NetError::Backend(source) = error else { panic!("{error:?}") };
        let text = source.to_string();
        assert!(text.contains(feature::name(bit)) && text.ends_with("which was asked for"), "{text}");
    }
    let (_device, backend) = hostile::Hostile::new(hostile::Behaviour::default());
    let options = NetOptions::new(RxMode::Small).ring_features(feature::MQ | feature::EVENT_IDX);
    let error = VirtioNet::probe(backend, options).unwrap_err();
    assert!(matches!(error, NetError::RingFeatures { extra: feature::MQ }), "{error:?}");
}
