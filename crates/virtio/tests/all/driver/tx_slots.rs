//! Frames whose headers are in the slots of a transmit queue: what the device reads, and when a
//! slot is used again.

use netmem_packet::{Checksum, HeaderSlots, Meta, Packet, Poll, RxQueue, Sendable, SlotFrame, TxQueue};
use netmem_pool::PeerShared;
use netmem_testing::driver::hostile::{FORMATS, Harness};
use netmem_testing::driver::*;
use netmem_virtio::driver::{DeviceFault, NetOptions, RxMode, VirtioRx};
use netmem_virtio::net::{VnetHdr, feature};

/// A packet of fragments of these bytes, each in a page of its own.
fn packet(rx: &mut VirtioRx, parts: &[&[u8]]) -> Packet<PeerShared> {
    let mut frags = parts.iter().map(|bytes| {
        let mut page = rx.poll(|poll| poll.with_napi(|napi| napi.alloc())).unwrap();
        page.copy_from(64, bytes).unwrap();
        page.freeze_range(64..64 + bytes.len())
    });
    let mut packet = Packet::new(frags.next().unwrap());
    frags.for_each(|frag| packet.push(frag).unwrap());
    packet
}

/// Queues a frame whose first `headers` bytes are in a slot.
fn send(harness: &mut Harness, bytes: &[u8], headers: usize) -> Option<SlotFrame> {
    let payload = packet(&mut harness.pair.rx, &[&bytes[headers..]]);
    harness.pair.tx.send_behind(&bytes[..headers], payload).ok()
}

/// The bytes of a chain, as the device reads them now.
fn wire(harness: &Harness, head: u16) -> Vec<u8> {
    let chain = harness.tx.chain(head);
    chain.iter().flat_map(|desc| harness.device.read(desc.addr, desc.len as usize)).collect()
}

fn is_completed(harness: &Harness, frame: SlotFrame) -> bool {
    harness.pair.tx.header_slots().unwrap().completions().is_completed(frame)
}

/// The device reads its own header, the headers and the payload, in one descriptor more than the
/// payload has fragments. Nothing of the payload's pages is written, so that they may be shared.
#[test]
fn headers_are_in_front_of_payload() {
    for format in FORMATS {
        let mut harness = Harness::in_format(format, NetOptions::new(RxMode::Mergeable));
        let bytes = frame(1, 3000);
        let meta = Meta { checksum: Checksum::Partial { start: 34, offset: 16 }, gso: None };
        for (headers, meta) in [(1, Meta::default()), (54, meta), (HeaderSlots::ROOM, meta)] {
            let (first, second) = bytes[headers..].split_at(1000);
            let mut payload = packet(&mut harness.pair.rx, &[first, &[], second]);
            payload.meta = meta;
            let kept = payload.clone();
            let sent = harness.pair.tx.send_behind(&bytes[..headers], payload).unwrap();
            assert_eq!(harness.tx.available(), 0, "nothing is seen before it is flushed");
            harness.pair.tx.flush();
            let head = harness.tx.take().unwrap();
            let lens: Vec<_> = harness.tx.chain(head).iter().map(|desc| desc.len as usize).collect();
            assert_eq!(lens, [12 + headers, 1000, 2000 - headers], "{format:#x}");
            let all = wire(&harness, head);
            let header = VnetHdr::from_bytes(*all.first_chunk().unwrap());
            assert_eq!(all[12..], bytes);
            assert_eq!(header.flags, if meta == Meta::default() { 0 } else { VnetHdr::NEEDS_CSUM });
            assert!(!is_completed(&harness, sent));
            harness.tx.add_used(u32::from(head), 0);
            assert!(!is_completed(&harness, sent), "the queue has not read it");
            assert_eq!(harness.pair.tx.complete(), 1);
            assert!(is_completed(&harness, sent));
            assert_eq!(kept.to_vec(), bytes[headers..]);
        }
        // Of three frames.
        assert_eq!((harness.pair.tx.stats().frames, harness.pair.tx.stats().bytes), (3, 9000));
        harness.assert_all_posted(RxMode::Mergeable);
        harness.close();
    }
}

/// A slot is not used again before its descriptor is completed, in whatever order that happens.
/// Until then, the device reads the frame that was posted, and the frame is reported as pending.
#[test]
fn a_slot_is_used_again_when_its_descriptor_is() {
    for format in FORMATS {
        let in_order = format & feature::IN_ORDER != 0;
        let mut harness = Harness::in_format(format, NetOptions::new(RxMode::Small).ring_size(16).pages(1024));
        let mut pending: Vec<(u16, Vec<u8>, SlotFrame)> = Vec::new();
        let (mut done, mut number) = (Vec::new(), 0);
        let mut random = 1u32;
        for _ in 0..500 {
            // As many as there is room for.
            let mut sent = Vec::new();
            loop {
                let bytes = frame(number, 200);
                let Some(slot) = send(&mut harness, &bytes, 54) else { break };
                sent.push((bytes, slot));
                number += 1;
            }
            harness.pair.tx.flush();
            pending.extend(sent.into_iter().map(|(bytes, slot)| (harness.tx.take().unwrap(), bytes, slot)));
            assert!(pending.len() >= 7, "{format:#x}: the ring is full");
            for (head, bytes, slot) in &pending {
                assert!(wire(&harness, *head)[12..] == bytes[..], "{format:#x}: headers were overwritten");
                assert!(!is_completed(&harness, *slot));
            }
            assert!(done.iter().all(|&slot| is_completed(&harness, slot)));
            // The device completes some of them.
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            for n in 0..1 + (random >> 24) as usize % 3 {
                let at = if in_order { 0 } else { (random >> (8 + n)) as usize % pending.len() };
                let (head, _, slot) = pending.remove(at);
                harness.tx.add_used(u32::from(head), 0);
                done.push(slot);
            }
            harness.pair.tx.complete();
        }
        assert!(number > 900, "{number}");
        harness.close();
    }
}

/// What cannot be sent is returned as it was.
#[test]
fn payload_comes_back() {
    let mut harness = Harness::new(NetOptions::new(RxMode::Small).ring_size(4).pages(64));
    let bytes = frame(1, 300);
    let payload = packet(&mut harness.pair.rx, &[&bytes[150..]]);
    let payload = harness.pair.tx.send_behind(&bytes[..HeaderSlots::ROOM + 1], payload).unwrap_err();
    assert_eq!((payload.to_vec(), harness.pair.tx.posted()), (bytes[150..].to_vec(), 0));
    drop(payload);
    let slots = [(); 2].map(|()| send(&mut harness, &bytes, 54).unwrap());
    let payload = packet(&mut harness.pair.rx, &[&bytes[54..]]);
    let payload = harness.pair.tx.send_behind(&bytes[..54], payload).unwrap_err();
    assert_eq!((payload.to_vec(), harness.pair.tx.stats().full), (bytes[54..].to_vec(), 1));
    // The device completes a frame twice: the queue has stopped, and has what the device has.
    harness.pair.tx.flush();
    let heads = [(); 2].map(|()| harness.tx.take().unwrap());
    [heads[0], heads[0]].into_iter().for_each(|head| harness.tx.add_used(u32::from(head), 0));
    while harness.pair.tx.complete() > 0 {}
    assert_eq!(harness.pair.tx.stats().stopped, Some(DeviceFault::NotPosted { id: heads[0] }));
    assert_eq!(slots.map(|slot| is_completed(&harness, slot)), [true, false]);
    assert_eq!(harness.pair.tx.send_behind(&bytes[..54], payload).unwrap_err().to_vec(), bytes[54..]);
    // A queue that is gone has no frames.
    let completions = harness.pair.tx.header_slots().unwrap().completions();
    harness.close();
    assert!(slots.iter().all(|&slot| completions.is_completed(slot)));
}

/// Payload of another DMA domain is mapped while the device has the frame.
#[test]
fn payload_of_another_domain() {
    let memory = common_memory(4096);
    let mut from = Harness::new(memory(RxMode::Mergeable));
    let mut to = Harness::new(memory(RxMode::Mergeable));
    let bytes = frame(1, 2000);
    let payload = packet(&mut from.pair.rx, &[&bytes[54..700], &bytes[700..]]);
    let slot = to.pair.tx.send_behind(&bytes[..54], payload).unwrap();
    to.pair.tx.flush();
    let head = to.tx.take().unwrap();
    assert_eq!((wire(&to, head)[12..].to_vec(), to.tx.chain(head).len()), (bytes, 3));
    assert_eq!((to.pair.tx.stats().mapped, to.pair.tx.stats().bytes), (1, 2000));
    assert!(!is_completed(&to, slot));
    to.tx.add_used(u32::from(head), 0);
    assert_eq!(to.pair.tx.complete(), 1);
    assert!(is_completed(&to, slot));
    to.close();
    from.close();
}

/// A frame that is copied into its slot is one descriptor, and needs no page. Its slot is used
/// again when the device has completed it, in whatever order.
#[test]
fn a_copied_frame_is_one_descriptor() {
    for format in FORMATS {
        let in_order = format & feature::IN_ORDER != 0;
        let mut harness = Harness::in_format(format, NetOptions::new(RxMode::Small).ring_size(16).pages(64));
        let mut pending: Vec<(u16, Vec<u8>, SlotFrame)> = Vec::new();
        let (mut number, mut bytes_sent) = (0, 0);
        let pages = harness.pair.rx.pool_stats().inflight();
        for round in 0..100 {
            let mut sent = Vec::new();
            loop {
                let bytes = frame(number, 60 + number as usize % (HeaderSlots::ROOM - 59));
                match harness.pair.tx.send_copied(&bytes, Meta::default()) {
                    Ok(slot) => sent.push((bytes, slot)),
                    Err(why) => break assert_eq!(why, Sendable::Later),
                }
                number += 1;
                bytes_sent += 60 + (number - 1) % (HeaderSlots::ROOM as u64 - 59);
            }
            harness.pair.tx.flush();
            pending.extend(sent.into_iter().map(|(bytes, slot)| (harness.tx.take().unwrap(), bytes, slot)));
            assert_eq!(pending.len(), 16, "{format:#x}: the ring is full");
            for (head, bytes, slot) in &pending {
                assert!(wire(&harness, *head)[12..] == bytes[..], "{format:#x}: a frame was overwritten");
                assert!(harness.tx.chain(*head).len() == 1 && !is_completed(&harness, *slot));
            }
            let (head, _, slot) = pending.remove(if in_order { 0 } else { round % 16 });
            harness.tx.add_used(u32::from(head), 0);
            assert_eq!(harness.pair.tx.complete(), 1);
            assert!(is_completed(&harness, slot));
        }
        assert_eq!(harness.pair.rx.pool_stats().inflight(), pages, "{format:#x}: no page is used");
        let stats = harness.pair.tx.stats();
        assert_eq!((stats.frames, stats.bytes, stats.completed), (number, bytes_sent, 100), "{format:#x}");
        let too_long = [0; HeaderSlots::ROOM + 1];
        assert_eq!(harness.pair.tx.send_copied(&too_long, Meta::default()), Err(Sendable::Never));
        harness.close();
    }
}
