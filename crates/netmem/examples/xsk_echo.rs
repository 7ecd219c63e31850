//! A UDP echo server on AF_XDP: one thread for each queue, and workers that answer. Frames return
//! to their pool from every thread.
//!
//!     cargo run --release -p netmem --all-features --example xsk_echo -- eth1 [PORT [WORKERS]]
//!
//! The XDP program redirects UDP to the port (7) only. The kernel has all other traffic of the
//! interface: it keeps its addresses, answers ARP and neighbour solicitations, and can be logged in
//! to. Needs CAP_NET_RAW, CAP_BPF and CAP_NET_ADMIN. Ends with standard input.
//!
//! ```text
//!   queue's thread: rx ──► worker: swaps addresses, ports ──► queue's thread: tx ── completed ─┐
//!                   ▲         └── no echo request: dropped here ──┐                            │
//!                   └─────────────────── the pool ◄───────────────┴────────────────────────────┘
//! ```

use anyhow::Context;
use netmem::net::{Packet, Poll, PollThenSleep, RxQueue, TxBulk, TxQueue, Wait};
use netmem::pool::KernelShared;
use netmem::xdp::{Filter, ProgramOptions, QueueOptions, Rule, Xsk, XskOptions, XskRx, XskTx};
use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

/// The most packets that a worker holds, or that are on their way to it.
const EACH: usize = 256;

/// Turns a request into its answer, in the page that it came in: addresses and ports change places.
/// The checksums stay as they were, because the same words are summed up. Returns false if it is no
/// UDP packet to `port`.
fn answer(packet: &mut Packet<KernelShared>, port: u16) -> bool {
    let head = &packet.head()[..];
    let Some((kind, rest)) = head.get(12..).and_then(|rest| rest.split_first_chunk::<2>()) else { return false };
    // Where the addresses of the IP header are, how long one is, and where the UDP header begins.
    let (addresses, len, udp) = match (u16::from_be_bytes(*kind), rest) {
        (0x0800, [first, ..]) if rest.len() >= 20 && rest[9] == 17 => (14 + 12, 4, 14 + usize::from(first & 0xf) * 4),
        (0x86dd, _) if rest.len() >= 40 && rest[6] == 17 => (14 + 8, 16, 14 + 40),
        _ => return false,
    };
    let Some(ports) = head.get(udp..udp + 4).filter(|ports| ports[2..] == port.to_be_bytes()) else { return false };
    let mac = [&head[6..12], &head[..6]].concat();
    let ip = [&head[addresses + len..addresses + 2 * len], &head[addresses..addresses + len]].concat();
    let ports = [&ports[2..], &ports[..2]].concat();
    // The page has no other holder, so it can be written.
    [(0, mac), (addresses, ip), (udp, ports)].iter().all(|(at, bytes)| packet.write_at(*at, bytes).is_ok())
}

/// A worker's result for a packet: the answer, or `None` if it has dropped the packet.
type Done = Option<Packet<KernelShared>>;

fn work(requests: &Receiver<Packet<KernelShared>>, done: &SyncSender<Done>, port: u16) {
    while let Ok(mut packet) = requests.recv() {
        let outcome = answer(&mut packet, port).then_some(packet);
        if done.send(outcome).is_err() {
            return;
        }
    }
}

/// A queue's thread. Packets go to the workers in turns.
fn serve(
    mut rx: XskRx,
    tx: XskTx,
    workers: &[SyncSender<Packet<KernelShared>>],
    done: &Receiver<Done>,
    stop: &AtomicBool,
) -> anyhow::Result<String> {
    let (mut next, mut out, mut received, mut answered) = (0, 0, 0_u64, 0_u64);
    let mut bulk = TxBulk::holding(tx, EACH * workers.len());
    let mut pause = PollThenSleep::new(Duration::from_micros(50));
    while !stop.load(Ordering::Relaxed) {
        // No more than the workers may have: `send` then finds room.
        let budget = EACH * workers.len() - out;
        let work = rx.poll(|poll| {
            bulk.target().complete();
            let got = poll.receive(budget.min(64), &mut |packet: Packet<KernelShared>| {
                received += 1;
                out += usize::from(workers[next].send(packet).is_ok());
                next = (next + 1) % workers.len();
            });
            let mut back = 0;
            while let Ok(outcome) = done.try_recv() {
                (back, out) = (back + 1, out - 1);
                if let Some(packet) = outcome {
                    answered += 1;
                    bulk.push(packet);
                }
            }
            bulk.flush();
            got + back
        });
        // While workers have packets, this thread does not sleep: a channel wakes nothing that
        // waits for a queue.
        let mut waits: Vec<&mut dyn Wait> = vec![&mut rx];
        let at_most = Duration::from_millis(100);
        pause.turn(work + out + bulk.held(), &mut waits, Some(at_most))?;
    }
    Ok(format!("{received} received, {answered} answered, {} not sent", bulk.stats().dropped))
}

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let interface = arguments.first().context("usage: xsk_echo INTERFACE [PORT [WORKERS]]")?;
    let port = arguments.get(1).map_or(Ok(7), |port| port.parse())?;
    let workers: usize = arguments.get(2).map_or(Ok(2), |workers| workers.parse())?;
    let rule = Rule { protocol: Some(17), port: Some(port), ..Rule::default() };
    let program = ProgramOptions { filter: Filter::new([rule])?, ..ProgramOptions::default() };
    let xsk: Xsk = Xsk::open(XskOptions::new(interface).program(program), |_| QueueOptions::new())?;
    let Xsk { program, pairs, umem, .. } = xsk;
    eprintln!("ready: UDP port {port}, {} queues of {interface}, {workers} workers for each", pairs.len());

    // Standard input ends the program, and so does a queue that cannot go on.
    let stop = Arc::new(AtomicBool::new(false));
    let flag = stop.clone();
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        flag.store(true, Ordering::Relaxed);
    });
    let reports = std::thread::scope(|scope| {
        let mut queues = Vec::new();
        for (rx, tx) in pairs {
            let (to_queue, done) = sync_channel(EACH * workers.max(1));
            let mut to_workers = Vec::new();
            for _ in 0..workers.max(1) {
                let (to_worker, requests) = sync_channel(EACH * workers.max(1));
                to_workers.push(to_worker);
                let to_queue = to_queue.clone();
                scope.spawn(move || work(&requests, &to_queue, port));
            }
            drop(to_queue);
            let stop = &stop;
            queues.push(scope.spawn(move || {
                let served = serve(rx, tx, &to_workers, &done, stop);
                stop.store(true, Ordering::Relaxed);
                served
            }));
        }
        let joined =
            queues.into_iter().map(|queue| queue.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        joined.collect::<anyhow::Result<Vec<String>>>()
    });
    // The kernel has the port again.
    drop(program);
    drop(umem);
    for (number, report) in reports?.into_iter().enumerate() {
        println!("queue {number}: {report}");
    }
    Ok(())
}
