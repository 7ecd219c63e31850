//! AF_XDP sockets in the map of a program that Aya has loaded: an echo server for UDP port 7.
//!
//!     clang --target=bpf -O2 -g -c tests/aya/udp_echo.bpf.c -o udp_echo.o
//!     cargo run -p netmem-tests --example xsk_aya -- eth1 udp_echo.o
//!
//! Aya owns the program, its map and its link; `XskOptions::map` puts the sockets into the map, and
//! loads nothing. The kernel has all other traffic of the interface. Needs CAP_NET_RAW, CAP_BPF and
//! CAP_NET_ADMIN. Ends with standard input.

use anyhow::{Context, bail};
use aya::Ebpf;
use aya::maps::Map;
use aya::programs::Xdp;
use aya::programs::xdp::XdpMode;
use netmem_packet::{Packet, Poll, PollThenSleep, RxQueue, TxBulk, TxQueue, Wait};
use netmem_pool::KernelShared;
use netmem_xsk::{Program, QueueOptions, Xsk, XskOptions};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Turns a request into its answer, in the page that it came in. The checksums stay as they were,
/// because the same words are summed up.
fn answer(packet: &mut Packet<KernelShared>) -> bool {
    // Addresses of Ethernet, addresses of IPv4, ports: the program passes no frame with options.
    [(0, 6), (26, 4), (34, 2)].iter().all(|&(at, len)| {
        let Some(both) = packet.head().get(at..at + 2 * len) else { return false };
        let swapped = [&both[len..], &both[..len]].concat();
        packet.write_at(at, &swapped).is_ok()
    })
}

/// Loads and attaches the program. Returns it, and the map of sockets that it owns.
fn load(interface: &str, object: &str) -> anyhow::Result<(Ebpf, Program)> {
    let mut ebpf = Ebpf::load_file(object)?;
    let program: &mut Xdp = ebpf.program_mut("udp_echo").context("no program udp_echo")?.try_into()?;
    program.load()?;
    program.attach(interface, XdpMode::default())?;
    let Some(Map::XskMap(sockets)) = ebpf.map("sockets") else { bail!("no map of sockets") };
    let sockets = Program::map(sockets.fd().as_fd().try_clone_to_owned()?)?;
    Ok((ebpf, sockets))
}

fn main() -> anyhow::Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [interface, object] = &words[..] else { bail!("usage: xsk_aya INTERFACE OBJECT") };
    let (ebpf, sockets) = load(interface, object)?;
    let mut xsk: Xsk = Xsk::open(XskOptions::new(interface).map(sockets), |_| QueueOptions::new())?;
    eprintln!("ready: UDP port 7, {} queues of {interface}", xsk.pairs.len());

    let stop = Arc::new(AtomicBool::new(false));
    let flag = stop.clone();
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        flag.store(true, Ordering::Relaxed);
    });
    let mut answered = 0_u64;
    let mut pause = PollThenSleep::new(Duration::from_micros(50));
    while !stop.load(Ordering::Relaxed) {
        let mut work = 0;
        for (rx, tx) in &mut xsk.pairs {
            tx.complete();
            let mut bulk = TxBulk::new(tx);
            work += rx.poll(|poll| {
                poll.receive(64, &mut |mut packet: Packet<KernelShared>| {
                    if answer(&mut packet) {
                        answered += 1;
                        bulk.push(packet);
                    }
                })
            });
            bulk.flush();
        }
        let mut waits: Vec<&mut dyn Wait> = xsk.pairs.iter_mut().map(|(rx, _)| rx as &mut dyn Wait).collect();
        pause.turn(work, &mut waits, Some(Duration::from_millis(100)))?;
    }
    // The sockets leave the map, and then the program leaves the interface.
    drop(xsk);
    drop(ebpf);
    println!("{answered} answered");
    Ok(())
}
