//! A receive queue reports when it has too few buffers posted.

use netmem_packet::{Packet, Poll, RxQueue};
use netmem_pool::PeerShared;
use netmem_testing::driver::*;
use netmem_virtio::device::port::Gen;
use netmem_virtio::driver::{NetOptions, RxMode};

/// In every mode: short while the user keeps all pages, and not when they are back.
#[test]
fn a_queue_is_short_while_its_pages_are_kept() {
    for mode in MODES {
        let mut device_thread = DeviceThread::one(Gen::new(100, None).unwrap());
        let (net, mut pairs) = device_thread.probe(NetOptions::new(mode).ring_size(64).pages(256));
        let mut pair = pairs.remove(0);
        assert!(!pair.rx.poll(|poll| poll.is_short()), "{mode}: it is full at first");
        let mut kept = Vec::new();
        let mut posted_when_short = None;
        until(|| {
            let short = pair.rx.poll(|poll| {
                poll.receive(4, &mut |p: Packet<PeerShared>| kept.push(p));
                poll.is_short()
            });
            if short && posted_when_short.is_none() {
                posted_when_short = Some(pair.rx.posted());
            }
            pair.rx.posted() == 0
        });
        // Big mode has few buffers, of many pages each.
        let least = if mode == RxMode::Big { 0 } else { 5 };
        assert!(posted_when_short >= Some(least), "{mode}: {posted_when_short:?}");
        drop(kept);
        until(|| {
            !pair.rx.poll(|poll| {
                poll.receive(64, &mut |_: Packet<PeerShared>| {});
                poll.is_short()
            })
        });
        close_clean(pair);
        drop(net);
    }
}
