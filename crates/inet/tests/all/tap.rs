//! A stack over the embedded virtio-net device, with the kernel's stack as peer behind a tap.
//!
//! ```text
//!   sockets of std (threads) ── kernel ── tap ── virtio-net device (thread)
//!                                                  └── virtio-net driver ── Stack (this thread)
//! ```

use crate::kernel_peer::{address, connect, drive, echo, host};
use netmem_inet::{Sockets, Stack, StackOptions, Time};
use netmem_pool::{PeerShared, PoolOptions};
use netmem_testing::{installed, skip};
use netmem_virtio::device::port::Tap;
use netmem_virtio::device::{NetDevice, Options};
use netmem_virtio::driver::{NetOptions, Offload, RxMode, VirtioNet};
use netmem_virtio::{Spin, VhostUser};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

/// Runs `peer` on a thread with the kernel's sockets, and calls `serve` after each poll of the
/// stack. Ends when `peer` returns.
fn beside_the_kernel(
    net: u8,
    options: NetOptions,
    peer: impl FnOnce() + Send + 'static,
    serve: impl FnMut(&Sockets<PeerShared>),
) {
    if let Err(why) = installed(&["ip"]) {
        return skip(&why);
    }
    let name = format!("nmst{}n{net}", std::process::id() % 1_000_000);
    let mut taps = match Tap::open(&name, 1, true) {
        Ok(taps) => taps,
        Err(error) => return skip(&format!("no tap devices here: {error}")),
    };
    for v6 in [false, true] {
        let addr = format!("{}/{}", address(net, v6, false), if v6 { 64 } else { 24 });
        let mut args = vec!["addr", "add", &addr, "dev", &name];
        args.extend(v6.then_some("nodad"));
        assert!(Command::new("ip").args(&args).status().unwrap().success(), "ip {args:?}");
    }
    let mut device = NetDevice::new(Options::default(), |_| Ok(taps.remove(0))).unwrap();
    let control = device.control();
    let (front, back) = UnixStream::pair().unwrap();
    let connection = control.serve(back).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let flag = stop.clone();
    let running = thread::spawn(move || device.run(&flag, Spin::default()));
    let options = options.pages(2048).tx_pages(1024);
    let (driver, mut pairs) = VirtioNet::probe(VhostUser::own_device(front).unwrap(), options).unwrap();
    let pool = Arc::new(driver.tx_pool(PoolOptions::new("tx")).unwrap());
    let pair = pairs.remove(0);

    let beginning = Instant::now();
    let now = || Time::ZERO + beginning.elapsed();
    let mut stack = Stack::new(&host(net), pair.rx, pair.tx, pool.clone(), StackOptions::default(), now()).unwrap();
    drive(&mut stack, now, peer, serve);
    let (rx, tx) = stack.into_queues();
    drop(tx);
    let closed = rx.close().unwrap();
    assert_eq!(closed.outstanding, 0, "received pages are home");
    let pool = Arc::into_inner(pool).unwrap().close();
    assert_eq!(pool.outstanding, 0, "sent pages are home");
    drop((pairs, driver));
    stop.store(true, Ordering::Relaxed);
    control.wake();
    running.join().unwrap().unwrap();
    drop(connection);
}

#[test]
fn the_kernel_connects_with_offloads() {
    let options = NetOptions::new(RxMode::Mergeable).max_frame(65549);
    echo(1, |peer, serve| beside_the_kernel(1, options, peer, serve));
}

#[test]
fn the_kernel_connects_without_offloads() {
    let options = NetOptions::new(RxMode::Small).offloads(Offload::None);
    echo(2, |peer, serve| beside_the_kernel(2, options, peer, serve));
}

#[test]
fn the_stack_connects_to_the_kernel() {
    let options = NetOptions::new(RxMode::Mergeable).max_frame(65549);
    connect(3, |peer, serve| beside_the_kernel(3, options, peer, serve));
}
