//! A driver inside a mio event loop: two receive queues and a message from another thread, all
//! waited for by one `epoll_wait`.
//!
//!     cargo run -p netmem --all-features --example sleep_mio
//!
//! mio reports edges. A queue's descriptor can be registered so, because `arm` checks the queue
//! again after it has requested a notification: the loop goes to sleep only if every queue returned
//! that it waits.

use mio::unix::SourceFd;
use mio::{Events, Interest, Token, Waker};
use netmem::device::port::Gen;
use netmem::device::{InProcess, NetDevice, Options};
use netmem::net::{Armed, Packet, Poll, RxQueue, Wait};
use netmem::pool::TrustedPeer;
use netmem::virtio::{NetOptions, RxMode, Spin, VirtioRx};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Frames that the device generates for each queue.
const FRAMES: u64 = 20_000;
const QUEUES: u16 = 2;
/// The token of the other thread's message; queues have their numbers.
const MESSAGE: Token = Token(usize::MAX);

/// Polls a queue until it has nothing, and then arms it. Returns how many frames there were, or why
/// the queue has stopped.
fn drain(rx: &mut VirtioRx<TrustedPeer>) -> std::io::Result<u64> {
    let mut frames = 0;
    loop {
        let n = rx.poll(|poll| poll.receive(64, &mut |packet: Packet<TrustedPeer>| drop(packet)));
        frames += n as u64;
        if n == 0 && rx.arm()? == Armed::Waits {
            return Ok(frames);
        }
    }
}

fn main() -> anyhow::Result<()> {
    // A device of two queue pairs in this process, on a thread of its own, and a driver that is
    // connected with it.
    let options = Options { max_pairs: QUEUES.into(), serve_control: true, ..Options::default() };
    let mut device = NetDevice::new(options, |_| Gen::new(200, Some(FRAMES)))?;
    let (control, stop) = (device.control(), Arc::new(AtomicBool::new(false)));
    let flag = stop.clone();
    let device = std::thread::spawn(move || device.run(&flag, Spin::default()));
    let InProcess { pairs, net, connection } = control.connect(NetOptions::new(RxMode::Small).pairs(QUEUES))?;
    let (mut queues, senders): (Vec<_>, Vec<_>) = pairs.into_iter().map(|pair| (pair.rx, pair.tx)).unzip();

    let mut poll = mio::Poll::new()?;
    for (number, rx) in queues.iter().enumerate() {
        let source = rx.as_fd().as_raw_fd();
        poll.registry().register(&mut SourceFd(&source), Token(number), Interest::READABLE)?;
    }
    // Any thread can end the loop.
    let waker = Waker::new(poll.registry(), MESSAGE)?;

    let (mut frames, mut wakeups, mut over) = ([0; QUEUES as usize], 0_u64, false);
    let mut events = Events::with_capacity(8);
    // Queues are armed before the first sleep. What came before they were registered is found here.
    for (number, rx) in queues.iter_mut().enumerate() {
        frames[number] += drain(rx)?;
    }
    std::thread::scope(|scope| {
        let mut told = false;
        while !over {
            if !told && frames.iter().all(|&n| n == FRAMES) {
                told = true;
                scope.spawn(|| waker.wake());
            }
            poll.poll(&mut events, None)?;
            wakeups += 1;
            for event in &events {
                match event.token() {
                    MESSAGE => over = true,
                    Token(number) => frames[number] += drain(&mut queues[number])?,
                }
            }
        }
        Ok::<_, std::io::Error>(())
    })?;
    println!("{frames:?} frames in two queues; a message of another thread ended the loop after {wakeups} wake-ups");

    drop((queues, senders, net, connection));
    stop.store(true, Ordering::Relaxed);
    control.wake();
    device.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
    Ok(())
}
