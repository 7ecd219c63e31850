//! One thread receives 16 fragments at a time. Either this thread returns them, or all other
//! threads do.

use super::order::{Order, PAGES};
use crate::error::BenchError;
use crate::harness::{Harness, Timed};
use crate::timing::{self, Work};
use netmem_bench::baselines::tokens::{BATCH, Fragment, Receive, Return, Tokens};
use netmem_devmem::TokenRange;
use rtrb::{Consumer, Producer, RingBuffer};
use std::hint::spin_loop;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Batches that are in flight at a time, on one thread or for all returners together: 1024
/// fragments.
const OUT: usize = 64;

/// The tokens of fragments that were received together.
type Batch = [u32; BATCH];

/// A kind of tokens, and the threads that return fragments. Every run uses a socket of its own.
pub(super) struct Circuit<T> {
    way: &'static str,
    order: Arc<Order>,
    returners: usize,
    of: PhantomData<T>,
}

impl<T: Tokens> Circuit<T> {
    pub(super) fn new(way: &'static str, order: Arc<Order>, returners: usize) -> Self {
        Self { way, order, returners, of: PhantomData }
    }
}

impl<T: Tokens> Work for Circuit<T> {
    /// Every page is received once before the timed part.
    fn run(&mut self, harness: &Harness, blocks: u64) -> Result<Timed, BenchError> {
        let (receiver, returner) = T::open(&self.order.bindings);
        let mut batches = self.order.batches();
        let (warm, counted) = (PAGES as usize / BATCH, (blocks * timing::BATCH) as usize / BATCH);
        let (timed, received, freed) = match self.returners {
            0 => {
                let mut alone = Alone { receiver, returner, out: vec![None; OUT], at: 0 };
                let (timed, freed) = harness.alone(|| {
                    alone.run((&mut batches).take(warm));
                    harness.time(|| alone.run(batches.take(counted)))
                })?;
                (timed, counted, freed)
            }
            returners => {
                let (rings, ends): (Vec<_>, Vec<_>) =
                    (0..returners).map(|_| RingBuffer::new((OUT / returners).max(1))).unzip();
                let freed = AtomicU64::new(0);
                let others = ends.into_iter().map(|ring| {
                    let (returner, freed) = (returner.clone(), &freed);
                    move |ended: &AtomicBool| {
                        freed.fetch_add(give_all_back(ring, &returner, ended), Ordering::Relaxed);
                    }
                });
                let mut sender = Sender { receiver, rings, at: 0 };
                let timed = harness.served(others.collect(), || {
                    sender.run((&mut batches).take(warm));
                    harness.time(|| sender.run(batches.take(counted))).0
                })?;
                (timed, warm + counted, freed.into_inner())
            }
        };
        let received = (received * BATCH) as u64;
        if freed == received { Ok(timed) } else { Err(BenchError::Tokens { way: self.way, received, freed }) }
    }
}

fn return_tokens(returner: &impl Return, tokens: &Batch) -> u64 {
    returner.return_tokens(&tokens.map(|start| TokenRange { start, count: 1 })) as u64
}

/// One thread that returns a batch after [`OUT`] further batches.
struct Alone<R, G> {
    receiver: R,
    returner: G,
    out: Vec<Option<Batch>>,
    at: usize,
}

impl<R: Receive, G: Return> Alone<R, G> {
    /// The result is how many fragments were freed.
    fn run<'a>(&mut self, batches: impl Iterator<Item = &'a [Fragment]>) -> u64 {
        let mut freed = 0;
        for fragments in batches {
            self.at = if self.at + 1 < self.out.len() { self.at + 1 } else { 0 };
            let place = &mut self.out[self.at];
            if let Some(tokens) = place {
                freed += return_tokens(&self.returner, tokens);
            }
            self.receiver.receive(fragments, place.insert([0; BATCH]));
        }
        freed
    }
}

/// Sends the batches that it received to the other threads in turn.
struct Sender<R> {
    receiver: R,
    rings: Vec<Producer<Batch>>,
    at: usize,
}

impl<R: Receive> Sender<R> {
    /// Returns when all batches have been taken, or when a thread that receives them has ended.
    fn run<'a>(&mut self, batches: impl Iterator<Item = &'a [Fragment]>) {
        let mut tokens = [0; BATCH];
        for fragments in batches {
            self.receiver.receive(fragments, &mut tokens);
            loop {
                // A full ring is skipped, because its returner is behind.
                self.at = if self.at + 1 < self.rings.len() { self.at + 1 } else { 0 };
                let ring = &mut self.rings[self.at];
                if ring.push(tokens).is_ok() {
                    break;
                }
                if ring.is_abandoned() {
                    return;
                }
                spin_loop();
            }
        }
        for ring in &self.rings {
            while ring.slots() < ring.buffer().capacity() && !ring.is_abandoned() {
                spin_loop();
            }
        }
    }
}

/// Returns the tokens of the batches from a ring until the sender has ended and the ring is empty.
/// The result is how many fragments were freed.
fn give_all_back(mut ring: Consumer<Batch>, returner: &impl Return, ended: &AtomicBool) -> u64 {
    let mut freed = 0;
    loop {
        // The flag is read before the ring: everything that was sent before the end is then seen in
        // the ring.
        let last = ended.load(Ordering::Acquire);
        match ring.pop() {
            Ok(tokens) => freed += return_tokens(returner, &tokens),
            Err(_) if last => return freed,
            Err(_) => spin_loop(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::hand_over::HandOver;
    use super::super::order::Sequence;
    use super::*;
    use netmem_bench::baselines::tokens::{HashedCounts, LockedEach, LockedMap, Niovs, Ranges, RcuCounts};

    fn runs<T: Tokens>(order: &Arc<Order>) {
        for returners in [0, 1, 3] {
            let timed = Circuit::<T>::new("test", order.clone(), returners).run(&Harness::for_tests(), 20).unwrap();
            assert!(timed.ns > 0);
        }
    }

    /// More returners than most machines that run this test have CPUs. Proves MEM-6: as many
    /// fragments are freed as were received.
    #[test]
    fn all_that_is_received_is_given_back_by_somebody() {
        for order in [(Sequence::InOrder, 1), (Sequence::Mixed, 8)] {
            let order = Arc::new(Order::new(order.0, order.1));
            runs::<LockedEach>(&order);
            runs::<LockedMap>(&order);
            runs::<HashedCounts>(&order);
            runs::<RcuCounts>(&order);
            runs::<Ranges>(&order);
            runs::<HandOver>(&order);
        }
    }

    /// Frees nothing.
    struct Lossy;

    #[derive(Clone)]
    struct Side;

    impl Tokens for Lossy {
        type Receiver = Side;
        type Returner = Side;

        fn open(_: &[Arc<Niovs>]) -> (Side, Side) {
            (Side, Side)
        }
    }

    impl Receive for Side {
        fn receive(&mut self, _: &[Fragment], _: &mut [u32]) {}
    }

    impl Return for Side {
        fn return_tokens(&self, _: &[TokenRange]) -> usize {
            0
        }
    }

    #[test]
    fn what_is_lost_is_an_error() {
        let order = Arc::new(Order::new(Sequence::InOrder, 1));
        for (returners, received) in [(0, 1280), (1, 1280 + u64::from(PAGES))] {
            let error =
                Circuit::<Lossy>::new("lossy", order.clone(), returners).run(&Harness::for_tests(), 20).unwrap_err();
            assert!(error.to_string().contains(&format!("lossy: {received} fragments")), "{error}");
        }
    }

    #[test]
    fn a_sender_does_not_wait_for_returners_that_are_gone() {
        let order = Order::new(Sequence::InOrder, 1);
        let (rings, ends): (Vec<_>, Vec<_>) = (0..2).map(|_| RingBuffer::new(4)).unzip();
        drop(ends);
        Sender { receiver: Side, rings, at: 0 }.run(order.batches().take(100));
    }
}
