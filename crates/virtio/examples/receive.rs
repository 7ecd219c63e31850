//! The least that receives: a device on a thread of its own, a driver polling it, frames dropped as
//! they come.
use anyhow::Context;
use netmem_packet::{Handler, Packet, Poll, RxQueue, Verdict, XdpFrame};
use netmem_pool::PeerShared;
use netmem_virtio::VhostUser;
use netmem_virtio::device::{NetDevice, Options, port::Gen};
use netmem_virtio::driver::{NetOptions, RxMode, VirtioNet};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

struct DropAll(u64);

impl Handler<PeerShared> for DropAll {
    fn run(&mut self, frame: &mut XdpFrame<PeerShared>) -> Verdict {
        let head: [u8; 14] = frame.read_at(0).unwrap_or_default();
        self.0 += u64::from(head[12]);
        Verdict::Drop
    }

    fn pass(&mut self, _: Packet<PeerShared>) {}
}

fn pin(cpu: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    let _ = rustix::thread::sched_setaffinity(None, &set);
}

fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().collect();
    let mode = if args.get(1).is_some_and(|m| m == "mergeable") { RxMode::Mergeable } else { RxMode::Small };
    let size = args.get(2).map_or(Ok(64), |s| s.parse()).context("the frame size")?;
    let ring = args.get(3).map_or(Ok(256), |s| s.parse()).context("the ring size")?;
    let mut device = NetDevice::new(Options::default(), |_| Gen::new(size, None))?;
    let (front, back) = UnixStream::pair()?;
    let connection = device.control().serve(back)?;
    static STOP: AtomicBool = AtomicBool::new(false);
    let stats = device.stats();
    let thread = std::thread::spawn(move || {
        pin(0);
        while !STOP.load(Ordering::Relaxed) {
            device.poll();
        }
    });
    pin(1);
    let (net, mut queues) = VirtioNet::probe(VhostUser::own_device(front)?, NetOptions::new(mode).ring_size(ring))?;
    println!("{net:?} {:?}", net.region());
    let mut pair = queues.remove(0);
    let mut program = DropAll(0);
    for _ in 0..4 {
        let (start, mut busy, mut frames) = (Instant::now(), Duration::ZERO, 0);
        let dev0 = (stats.busy_ns.load(Ordering::Relaxed), stats.rx_frames.load(Ordering::Relaxed));
        while start.elapsed() < Duration::from_millis(500) {
            let t = Instant::now();
            let n = pair.rx.poll(|poll| poll.receive(256, &mut program));
            if n > 0 {
                busy += t.elapsed();
                frames += n;
            }
        }
        let dev1 = (stats.busy_ns.load(Ordering::Relaxed), stats.rx_frames.load(Ordering::Relaxed));
        println!(
            "{:.2} Mpps, driver {:.1} ns, device {:.1} ns",
            frames as f64 / start.elapsed().as_secs_f64() / 1e6,
            busy.as_nanos() as f64 / frames as f64,
            (dev1.0 - dev0.0) as f64 / (dev1.1 - dev0.1) as f64
        );
    }
    println!("{:?}", pair.rx.stats());
    drop(pair.tx);
    println!("{:?}", pair.rx.close());
    drop(net);
    STOP.store(true, Ordering::Relaxed);
    let _ = thread.join();
    drop(connection);
    Ok(())
}
