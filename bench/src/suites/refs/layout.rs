//! The place of an object's count: next to members that other threads read all the time, or on a
//! cache line of its own.
//!
//! The object is like the kernel's `dst_entry`, the entry of a route: a few members are written
//! once and read for every packet by every CPU. One thread gets and puts the count; all others read
//! the members. If the count is next to the members, each get and each put invalidates the cache
//! line away from every reader.

use super::counts::{BATCH, Count};
use crate::error::BenchError;
use crate::harness::{Harness, each};
use crate::report::{Head, Sample};
use crate::rounds::Benchmark;
use netmem_refs::OwnLine;
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering, compiler_fence};

/// Members that are read for each packet, like a route's device, metrics, expiry and flags.
const READ: usize = 4;

/// An object in one of the layouts.
pub(super) trait Object<C>: Send + Sync {
    const LAYOUT: &'static str;
    fn new(count: C) -> Self;
    fn members(&self) -> &[AtomicU64; READ];
    fn count(&self) -> &C;
}

/// Members and count on one cache line.
#[repr(C, align(128))]
pub(super) struct Beside<C> {
    members: [AtomicU64; READ],
    count: C,
}

impl<C: Count> Object<C> for Beside<C> {
    const LAYOUT: &'static str = "beside";

    fn new(count: C) -> Self {
        const { assert!(size_of::<C>() <= 64 - READ * 8, "the count shares the members' line") };
        Self { members: members(), count }
    }

    #[inline(always)]
    fn members(&self) -> &[AtomicU64; READ] {
        &self.members
    }

    #[inline(always)]
    fn count(&self) -> &C {
        &self.count
    }
}

/// The count on a cache line of its own, behind the members.
#[repr(C, align(128))]
pub(super) struct Alone<C> {
    members: [AtomicU64; READ],
    count: OwnLine<C>,
}

impl<C: Count> Object<C> for Alone<C> {
    const LAYOUT: &'static str = "alone";

    fn new(count: C) -> Self {
        Self { members: members(), count: OwnLine::new(count) }
    }

    #[inline(always)]
    fn members(&self) -> &[AtomicU64; READ] {
        &self.members
    }

    #[inline(always)]
    fn count(&self) -> &C {
        &self.count
    }
}

fn members() -> [AtomicU64; READ] {
    std::array::from_fn(|i| AtomicU64::new(i as u64 + 1))
}

/// One layout with one count.
pub(super) struct Layout<C, O> {
    heads: Vec<Head>,
    object: Option<O>,
    /// Blocks of the writer and of each reader.
    blocks: [u64; 2],
    count: std::marker::PhantomData<C>,
}

impl<C: Count, O: Object<C>> Layout<C, O> {
    pub(super) fn new(threads: usize) -> Self {
        let head = |what: &str, per| Head {
            name: format!("layout_{}_{}_{what}", O::LAYOUT, C::NAME.trim_end_matches("_batched")),
            section: "layout",
            threads,
            per,
            unit: "ns",
            layout: Some(O::LAYOUT),
            ..Head::default()
        };
        let heads = vec![head("read", "read"), head("pair", "get+put")];
        Self { heads, object: None, blocks: [1; 2], count: std::marker::PhantomData }
    }

    /// The first thread writes the count, all others read the members.
    fn work(&self, thread: usize, blocks: u64) -> bool {
        match &self.object {
            Some(object) if thread == 0 => write::<C, O>(black_box(object), blocks),
            Some(object) => read::<C, O>(black_box(object), blocks),
            None => false,
        }
    }

    fn unbalanced(&self) -> BenchError {
        BenchError::Unbalanced(self.heads[0].name.clone())
    }
}

#[inline(never)]
fn write<C: Count, O: Object<C>>(object: &O, blocks: u64) -> bool {
    (0..blocks).all(|_| C::batch(|batch| (0..black_box(BATCH)).all(|_| object.count().pair(batch))))
}

#[inline(never)]
fn read<C: Count, O: Object<C>>(object: &O, blocks: u64) -> bool {
    let mut sum = 0u64;
    for _ in 0..blocks {
        for _ in 0..black_box(BATCH) {
            for member in object.members() {
                sum = sum.wrapping_add(member.load(Ordering::Relaxed));
            }
            // Keeps the compiler from reusing the values of the read before.
            compiler_fence(Ordering::SeqCst);
        }
    }
    black_box(sum);
    true
}

impl<C: Count, O: Object<C>> Benchmark for Layout<C, O> {
    fn heads(&self) -> Vec<Head> {
        self.heads.clone()
    }

    fn prepare(&mut self, harness: &Harness) -> Result<(), BenchError> {
        let threads = self.heads[0].threads;
        self.object = Some(O::new(C::new()?));
        let blocks = harness.calibrate(threads, &|thread, blocks| self.work(thread, blocks))?;
        let blocks = blocks.ok_or_else(|| self.unbalanced())?;
        let readers = &blocks[1..];
        self.blocks = [blocks[0], (readers.iter().sum::<u64>() / readers.len().max(1) as u64).max(1)];
        Ok(())
    }

    fn measure(&mut self, harness: &Harness) -> Result<Vec<Sample>, BenchError> {
        let mut blocks = vec![self.blocks[1]; self.heads[0].threads];
        blocks[0] = self.blocks[0];
        let timed = harness.crew(&blocks, &|thread, blocks| self.work(thread, blocks))?;
        let timed = timed.ok_or_else(|| self.unbalanced())?;
        let done: Vec<u64> = blocks.iter().map(|n| n * BATCH as u64).collect();
        Ok(vec![each(harness, &timed[1..], &done[1..]), each(harness, &timed[..1], &done[..1])])
    }
}
