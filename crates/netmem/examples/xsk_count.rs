//! Counts the packets that come in by an interface, by protocol, and drops them.
//!
//!     cargo run --release -p netmem --all-features --example xsk_count -- eth1 [SECONDS]
//!
//! All frames of the interface are redirected from the kernel while it runs. Needs CAP_NET_RAW,
//! CAP_BPF and CAP_NET_ADMIN. Without SECONDS it ends with standard input.
//!
//! The verdict of the handler's program decides in the receive pass, so a frame's page is posted
//! again at once.

use anyhow::Context;
use netmem::net::{Handler, Packet, Poll, PollThenSleep, RxQueue, Verdict, Wait, XdpFrame};
use netmem::pool::KernelShared;
use netmem::xdp::{QueueOptions, Xsk, XskOptions, XskRx};
use std::collections::BTreeMap;
use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Packets and bytes by the Ethernet type, which is the protocol.
#[derive(Default)]
struct Count {
    by_type: BTreeMap<u16, (u64, u64)>,
}

impl Handler<KernelShared> for Count {
    fn run(&mut self, frame: &mut XdpFrame<KernelShared>) -> Verdict {
        let Ok([high, low]) = frame.read_at::<2>(12) else { return Verdict::Aborted };
        let (packets, bytes) = self.by_type.entry(u16::from_be_bytes([high, low])).or_default();
        *packets += 1;
        *bytes += frame.len() as u64;
        Verdict::Drop
    }

    fn pass(&mut self, _: Packet<KernelShared>) {}
}

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let interface = arguments.next().context("usage: xsk_count INTERFACE [SECONDS]")?;
    let seconds: Option<u64> = arguments.next().map(|seconds| seconds.parse()).transpose()?;
    let mut xsk: Xsk = Xsk::open(XskOptions::new(&interface), |_| QueueOptions::new())?;
    // Nothing is sent.
    let mut queues: Vec<XskRx> = xsk.pairs.drain(..).map(|(rx, _)| rx).collect();
    let mode = queues.first().map(|rx| rx.socket().mode().to_string()).unwrap_or_default();
    eprintln!("ready: {} queues of {interface}, {mode}", queues.len());

    let over = Arc::new(AtomicBool::new(false));
    let flag = over.clone();
    std::thread::spawn(move || {
        match seconds {
            Some(seconds) => std::thread::sleep(Duration::from_secs(seconds)),
            None => _ = std::io::stdin().read_to_end(&mut Vec::new()),
        }
        flag.store(true, Ordering::Relaxed);
    });
    let (mut count, mut pause) = (Count::default(), PollThenSleep::new(Duration::from_micros(50)));
    // What came before the end is counted: the rings are emptied once more. Frames may go on to
    // come, so there is a bound.
    let mut rest: usize = queues.iter().map(XskRx::posted).sum();
    loop {
        let last = over.load(Ordering::Relaxed);
        let work = queues.iter_mut().map(|rx| rx.poll(|poll| poll.receive(256, &mut count))).sum();
        if last {
            rest = rest.saturating_sub(work);
            if work == 0 || rest == 0 {
                break;
            }
        }
        let mut waits: Vec<&mut dyn Wait> = queues.iter_mut().map(|rx| rx as &mut dyn Wait).collect();
        pause.turn(work, &mut waits, Some(Duration::from_millis(100)))?;
    }
    for (kind, (packets, bytes)) in &count.by_type {
        let name = match kind {
            0x0800 => "IPv4",
            0x0806 => "ARP",
            0x8100 => "VLAN",
            0x86dd => "IPv6",
            _ => "other",
        };
        println!("{name} (0x{kind:04x}): {packets} packets, {bytes} bytes");
    }
    for rx in &queues {
        let drops = rx.drops()?;
        let lost = drops.ring_full + drops.no_buffer;
        println!("queue {}: {} received, {lost} lost before the ring", rx.socket().queue(), rx.stats().frames);
    }
    Ok(())
}
