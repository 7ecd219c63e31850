//! A driver inside tokio: a task that waits for its queues, while other tasks of the same thread
//! run.
//!
//!     cargo run -p netmem --all-features --example sleep_tokio
//!
//! Frames go to a device that sends them back, one at a time. The task polls, arms its queue, and
//! awaits the queue's descriptor; the thread sleeps in tokio's reactor meanwhile, or runs other
//! tasks.

use anyhow::Context;
use netmem::device::port::Echo;
use netmem::device::{InProcess, NetDevice, Options};
use netmem::net::{Armed, Packet, Poll, RxQueue, TxQueue, Wait};
use netmem::pool::TrustedPeer;
use netmem::virtio::{NetOptions, QueuePair, RxMode, Spin};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Frames that go to the device and come back.
const FRAMES: u64 = 1000;

/// Sends a frame, awaits it, and sends it again. Returns how often the task was woken.
async fn ping_pong(pair: &mut QueuePair<TrustedPeer>, back: &AtomicU64) -> anyhow::Result<u64> {
    // Tokio wants to own a descriptor: a second one for the same file.
    // SAFETY: the value owns its descriptor, which is open and the same until the value is dropped.
    let wake = unsafe { AsyncFd::register_with_interest(pair.rx.as_fd().try_clone_to_owned()?, Interest::READABLE) }?;
    let mut page = pair.rx.poll(|poll| poll.with_napi(|napi| napi.alloc())).context("no page")?;
    // From byte 64 of the page on: the header of virtio-net goes in front.
    page.copy_from(64, &[0x5a; 60])?;
    let mut frame = Some(Packet::new(page.freeze_range(64..124)));
    let mut woken = 0;
    while back.load(Ordering::Relaxed) < FRAMES {
        if let Some(frame) = frame.take() {
            pair.tx.send(frame).ok().context("the queue does not take the frame")?;
            pair.tx.flush();
        }
        let received = pair.rx.poll(|poll| {
            pair.tx.complete(); // in the poll: pages that were sent return to the pool's cache
            poll.receive(64, &mut |packet: Packet<TrustedPeer>| frame = Some(packet))
        });
        back.fetch_add(received as u64, Ordering::Relaxed);
        if received > 0 {
            continue;
        }
        if pair.rx.arm()? == Armed::Waits {
            // The readiness is forgotten here, before the queue is armed again, and not after.
            wake.readable().await?.clear_ready();
            pair.rx.disarm();
            woken += 1;
        }
    }
    Ok(woken)
}

fn main() -> anyhow::Result<()> {
    // A device in this process, on a thread that sleeps as well, and a driver that is connected
    // with it.
    let mut device = NetDevice::new(Options::default(), |_| Ok(Echo::new()))?;
    let (control, stop) = (device.control(), Arc::new(AtomicBool::new(false)));
    let flag = stop.clone();
    let device = std::thread::spawn(move || device.run(&flag, Spin::default()));
    let InProcess { mut pairs, net, connection } = control.connect(NetOptions::new(RxMode::Small))?;
    let mut pair = pairs.remove(0);

    let back = Arc::new(AtomicU64::new(0));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let woken = runtime.block_on(async {
        // Another task of this thread: it runs while the driver's waits.
        let seen = back.clone();
        let other = tokio::spawn(async move {
            let mut turns = 0_u64;
            while seen.load(Ordering::Relaxed) < FRAMES {
                turns += 1;
                tokio::task::yield_now().await;
            }
            turns
        });
        let woken = ping_pong(&mut pair, &back).await?;
        println!("the other task had {}", if other.await? > 0 { "its turns" } else { "no turn" });
        anyhow::Ok(woken)
    })?;
    println!("{} frames came back; the driver slept: {}", back.load(Ordering::Relaxed), woken > 0);

    drop((pair, net, connection));
    stop.store(true, Ordering::Relaxed);
    control.wake();
    device.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
    Ok(())
}
