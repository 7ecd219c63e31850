//! A stress test of a socket. It receives from bindings that are made and unbound, while threads
//! return valid tokens and made-up ones. The socket is closed in the middle of this, over and over.
//! Every reference is returned once, and every binding is released.
//!
//! `NETMEM_STRESS_OPS` is the least number of fragments.

use crate::common::{Binding, binding};
use netmem_devmem::{Returner, TokenRange, TokenStats, TokenTable};
use netmem_testing::stress_ops;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, Weak};
use std::thread;

const RETURNERS: usize = 3;
const PAGES: u32 = 3000;
/// The number of fragments that a socket receives, and the number that is handed over at a time.
const LIFE: u64 = 40_000;
const HANDED: u64 = 20;

#[derive(Default)]
struct Totals {
    freed: AtomicU64,
    foreign: AtomicU64,
    excess: AtomicU64,
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

type Batch = (Vec<TokenRange>, Returner<Binding>);

/// A returning thread: returns the tokens that it gets, some of them twice, and made-up numbers.
fn return_all(batches: &Mutex<Receiver<Batch>>, totals: &Totals, seed: u64) {
    let mut random = Random(seed);
    loop {
        let next = batches.lock().expect("no thread panics while it holds the lock").recv();
        let Ok((mut ranges, returner)) = next else { return };
        match random.below(8) {
            0 => ranges.extend_from_within(..ranges.len() / 2),
            1 => ranges.push(TokenRange { start: random.below(1 << 32) as u32, count: random.below(50) as u32 }),
            2 => ranges.push(TokenRange { start: ranges[0].start.wrapping_sub(20), count: 40 }),
            // This handle is kept until the socket is closed.
            3 => continue,
            _ => (),
        }
        let freed = returner.return_tokens(&ranges).expect("fewer than 128");
        totals.freed.fetch_add(freed as u64, Ordering::Relaxed);
    }
}

fn receive(table: &mut TokenTable<Binding>, bindings: &[Binding], random: &mut Random) -> Vec<TokenRange> {
    let mut receive = table.receive();
    let mut ranges: Vec<TokenRange> = Vec::new();
    for _ in 0..HANDED {
        let binding = &bindings[random.below(bindings.len() as u64) as usize];
        // Use some pages again and again, so that returns race with receives.
        let among = if random.below(2) == 0 { 2 } else { PAGES.into() };
        let index = random.below(among) as u32;
        let token = receive.reserve(binding, index).expect("there is room");
        binding.get(index);
        ranges.push(token.into());
    }
    // SAFETY: each reference was taken above.
    unsafe { receive.commit() };
    ranges
}

#[test]
fn books_balance_whatever_happens() {
    let (ops, totals) = (stress_ops(1_000_000), Totals::default());
    let mut every_binding: Vec<Weak<crate::common::Device>> = Vec::new();
    let (mut received, mut rebound, mut closed_full) = (0, 0_u64, 0_u64);
    let (sender, batches): (SyncSender<Batch>, _) = sync_channel(64);
    let batches = Mutex::new(batches);
    thread::scope(|scope| {
        for n in 0..RETURNERS {
            let (batches, totals) = (&batches, &totals);
            scope.spawn(move || return_all(batches, totals, 0x9E37_79B9 + n as u64));
        }
        let mut random = Random(0x2545_F491_4F6C_DD1D);
        while received < ops {
            let mut table = TokenTable::new();
            let mut bindings: Vec<Binding> = (0..1 + random.below(12)).map(|_| binding(PAGES)).collect();
            every_binding.extend(bindings.iter().map(Arc::downgrade));
            for n in 0..LIFE / HANDED {
                let ranges = receive(&mut table, &bindings, &mut random);
                received += HANDED;
                sender.send((ranges, table.returner())).expect("the other end is there");
                if n % 100 == 99 {
                    // Another binding replaces it; the old one is released when its last page is
                    // returned.
                    let at = random.below(bindings.len() as u64) as usize;
                    let old = std::mem::replace(&mut bindings[at], binding(PAGES));
                    every_binding.push(Arc::downgrade(&bindings[at]));
                    old.unbind();
                    rebound += 1;
                }
            }
            let TokenStats { foreign, excess, .. } = table.stats();
            totals.foreign.fetch_add(foreign, Ordering::Relaxed);
            totals.excess.fetch_add(excess, Ordering::Relaxed);
            closed_full += u64::from(bindings.iter().any(|binding| binding.out() > 0));
        }
        drop(sender);
    });
    // The remaining bindings are released after a grace period, which threads of other tests can
    // delay.
    while every_binding.iter().any(|binding| binding.strong_count() > 0) {
        netmem_refs::rcu::flush();
        std::thread::yield_now();
    }
    let of = |total: &AtomicU64| total.load(Ordering::Relaxed);
    let (freed, foreign, excess) = (of(&totals.freed), of(&totals.foreign), of(&totals.excess));
    println!(
        "{received} received, {freed} returned, {foreign} foreign, {excess} in excess, {rebound} bindings replaced"
    );
    // The drop of a binding checks that all its pages were returned.
    assert!(freed <= received);
    // Check that the stress happened.
    assert!(freed > received / 4 && foreign > 0 && excess > 0 && rebound > 0 && closed_full > 0);
}
