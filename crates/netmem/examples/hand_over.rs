//! Packets are received on one thread, kept for a while on another thread, and dropped there.
//!
//!     cargo run -p netmem --all-features --example hand_over
//!
//! Nothing special is needed for that: a packet can be sent to any thread, and dropping it returns
//! its pages to the pool of the queue that received them. The pool's statistics show the paths by
//! which they returned.

use anyhow::Context;
use netmem::device::port::Gen;
use netmem::device::{NetDevice, Options};
use netmem::net::{Packet, Poll, RxQueue};
use netmem::pool::TrustedPeer;
use netmem::virtio::{NetOptions, RxMode};
use std::collections::VecDeque;
use std::sync::mpsc::sync_channel;

/// Frames that the device generates.
const FRAMES: u64 = 50_000;
/// Packets that the other thread keeps before it drops the oldest.
const KEPT: usize = 100;

fn main() -> anyhow::Result<()> {
    // A virtio-net device in this process, and a driver that is connected with it.
    let mut device = NetDevice::new(Options::default(), |_| Gen::new(200, Some(FRAMES)))?;
    let mut driver = device.control().connect(NetOptions::new(RxMode::Small))?;
    let mut rx = driver.pairs.remove(0).rx;

    // The other thread. The channel is bounded: packets that are not dropped are pages that the
    // queue cannot use.
    let (packets, channel) = sync_channel::<Packet<TrustedPeer>>(64);
    let keeper = std::thread::spawn(move || {
        let (mut kept, mut bytes) = (VecDeque::new(), 0);
        for packet in channel {
            bytes += packet.len();
            kept.push_back(packet);
            if kept.len() > KEPT {
                kept.pop_front(); // dropped here: its page is returned from this CPU
            }
        }
        bytes
    });

    // This thread has the queue, and is the only one that allocates from its pool.
    let mut frames = 0;
    while frames < FRAMES as usize {
        device.poll(); // as a rule on a thread of its own
        frames += rx.poll(|poll| {
            poll.receive(64, &mut |packet| {
                // Fails only if the thread has ended; the packet is dropped then.
                let _ = packets.send(packet);
            })
        });
    }
    drop(packets);
    let bytes = keeper.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    println!("{frames} frames of {} bytes received here, kept and dropped on another thread", bytes / frames);

    // The queue stops and its pool closes: every page is accounted for.
    let closed = rx.close().context("the queue was running")?;
    let stats = closed.stats;
    println!(
        "pages: {} allocated, {} came back by magazines, {} one by one, {} are out",
        stats.allocated(),
        stats.recycle_ring,
        stats.recycle_ring_full,
        closed.outstanding
    );
    assert_eq!(closed.outstanding, 0);
    Ok(())
}
