//! What receiving a frame costs from Rust, as `c/receive_cost.c` measures it from C: groups of 64,
//! which are released in the queue's poll context. Only the polls that received a whole group are
//! timed. Median of 32,768 groups, and the tenth and ninetieth percentile, in nanoseconds a frame.
//!
//!     cargo run --release -p netmem-capi --example receive_cost -- OURS THEIRS

use anyhow::Context;
use netmem_packet::{Packet, Poll, RxQueue, TxQueue};
use netmem_pool::{Frag, KernelShared, PagePool, PoolOptions, RegionOptions, RegionProvider};
use netmem_xsk::{Interface, Program, ProgramOptions, QueueOptions, Umem, UmemOptions, XskRx, XskTx};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

const SAMPLES: usize = 1 << 15;
const GROUP: usize = 64;
const BURST: usize = 1024;
const FILL: u32 = 2048;

fn open(
    umem: &Umem<KernelShared>,
    memory: &Arc<RegionProvider<KernelShared>>,
    interface: &str,
) -> anyhow::Result<(Program, XskRx, XskTx)> {
    let index = Interface::by_name(interface)?.index;
    let program = Program::attach(index, &ProgramOptions::default())?;
    let (rx, tx) = umem.open(index, 0, memory.clone(), QueueOptions::new().fill(FILL))?;
    program.insert(0, rx.socket().as_fd())?;
    Ok((program, rx, tx))
}

/// Sends frames of 64 bytes.
fn send_burst(pool: &mut PagePool<KernelShared>, tx: &mut XskTx) -> anyhow::Result<()> {
    for _ in 0..BURST / GROUP {
        for _ in 0..GROUP {
            let mut page = pool.alloc().context("a page")?;
            page.as_mut_slice()[..64].fill(0xff);
            let mut packet = Packet::new(page.freeze_range(0..64));
            while let Err(refused) = tx.send(packet) {
                tx.flush();
                tx.complete();
                packet = refused;
            }
        }
        tx.flush();
        tx.complete();
    }
    Ok(())
}

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [ours, theirs] = &arguments[..] else { anyhow::bail!("usage: receive_cost OURS THEIRS") };
    let memory = RegionProvider::new(RegionOptions::new(16384).build::<KernelShared>()?);
    let umem = Umem::new(memory.region().clone(), &UmemOptions::new())?;
    let mut pool = PoolOptions::new("cost").build(memory.clone(), None)?;
    let (_near, mut rx, _tx) = open(&umem, &memory, ours)?;
    let (_far, _rx, mut tx) = open(&umem, &memory, theirs)?;

    let mut samples = Vec::with_capacity(SAMPLES);
    let mut frags: Vec<Frag<KernelShared>> = Vec::with_capacity(GROUP);
    while samples.len() < SAMPLES {
        send_burst(&mut pool, &mut tx)?;
        let mut got = 0;
        while got < BURST {
            let start = Instant::now();
            rx.poll(|poll| {
                poll.receive(GROUP, &mut |packet: Packet<_>| {
                    if let Ok(frag) = packet.into_head() {
                        frags.push(frag);
                    }
                })
            });
            let n = std::hint::black_box(&mut frags).len();
            rx.poll(|_| frags.clear());
            let spent = start.elapsed();
            if n == GROUP {
                samples.push(spent.as_nanos() as f64 / GROUP as f64);
            }
            got += n;
        }
    }
    samples.sort_by(f64::total_cmp);
    let at = |tenths| samples[samples.len() * tenths / 10];
    println!("Rust, groups of 64: {:.2} ns a frame ({:.2} to {:.2})", at(5), at(1), at(9));
    Ok(())
}
