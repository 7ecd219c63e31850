//! The example in the documentation of `stack` is the server here, with a client of the kernel
//! behind a tap.

#[allow(unreachable_pub, reason = "it is a program in the documentation")]
#[path = "../../src/stack/example.rs"]
mod example;

use netmem_inet::wire::Mac;
use netmem_inet::{Host, Interface, Stack, StackOptions, Time};
use netmem_pool::PoolOptions;
use netmem_testing::pausing;
use netmem_testing::{installed, skip};
use netmem_virtio::Spin;
use netmem_virtio::device::port::Tap;
use netmem_virtio::device::{InProcess, NetDevice, Options};
use netmem_virtio::driver::{NetOptions, QueuePair, RxMode};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// A client that pauses gets back all that it sent.
#[test]
fn the_example_keeps_what_is_not_read() {
    if let Err(why) = installed(&["ip"]) {
        return skip(&why);
    }
    let name = format!("nmex{}", std::process::id() % 1_000_000);
    let mut taps = match Tap::open(&name, 1, true) {
        Ok(taps) => taps,
        Err(error) => return skip(&format!("no tap devices here: {error}")),
    };
    let ip = Command::new("ip").args(["addr", "add", "198.18.12.1/24", "dev", &name]).status().unwrap();
    assert!(ip.success(), "ip addr add");
    let mut device = NetDevice::new(Options::default(), |_| Ok(taps.remove(0))).unwrap();
    let (control, stop_device) = (device.control(), Arc::new(AtomicBool::new(false)));
    let flag = stop_device.clone();
    let running = thread::spawn(move || device.run(&flag, Spin::default()));
    let options = NetOptions::new(RxMode::Mergeable).max_frame(1522).pages(4096).tx_pages(1024);
    let InProcess { mut pairs, net, connection } = control.connect(options).unwrap();
    let QueuePair { rx, tx } = pairs.remove(0);
    let pool = Arc::new(net.tx_pool(PoolOptions::new("tx")).unwrap());
    let addresses = vec!["198.18.12.2/24".parse().unwrap()];
    let host = Host::new(Interface { mac: Mac([2, 0, 0, 0, 18, 12]), mtu: 1500, addresses });
    let mut stack = Stack::new(&host, rx, tx, pool, StackOptions::default(), Time::ZERO).unwrap();

    let (stop, waker) = (Arc::new(AtomicBool::new(false)), stack.waker());
    let flag = stop.clone();
    let client = thread::spawn(move || {
        let echoed = std::panic::catch_unwind(|| pausing::echo_after_a_pause(([198, 18, 12, 2], 7).into()));
        flag.store(true, Ordering::Relaxed);
        waker.wake();
        echoed.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
    example::serve(&mut stack, &stop).unwrap();
    client.join().unwrap();
    drop((stack, net, connection));
    stop_device.store(true, Ordering::Relaxed);
    control.wake();
    running.join().unwrap().unwrap();
}
