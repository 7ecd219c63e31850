//! The three races of `ring.rs`, in all interleavings (loom).

#![allow(clippy::unwrap_used)]

use crate::ring::{Consumer, Producer, RingPointers};
use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use std::ptr::NonNull;

/// A ring of two entries, and the bytes of three frames.
struct Memory {
    producer: AtomicU32,
    consumer: AtomicU32,
    flags: AtomicU32,
    entries: [AtomicU64; 2],
    frames: [UnsafeCell<u64>; 3],
}

// SAFETY: loom checks every access to the frames; the rest is atomics.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn new() -> Arc<Self> {
        let zero = || AtomicU32::new(0);
        let entries = [(); 2].map(|()| AtomicU64::new(u64::MAX));
        let frames = [(); 3].map(|()| UnsafeCell::new(0));
        Arc::new(Self { producer: zero(), consumer: zero(), flags: zero(), entries, frames })
    }

    fn pointers(&self) -> RingPointers<AtomicU64> {
        RingPointers {
            producer: NonNull::from(&self.producer),
            consumer: NonNull::from(&self.consumer),
            flags: NonNull::from(&self.flags),
            entries: NonNull::from(&self.entries).cast(),
        }
    }
}

/// Entry against index, and place against index: three frames through two places, each read as it
/// was written.
#[test]
fn entries_and_places_against_indices() {
    loom::model(|| {
        let memory = Memory::new();
        let kernel = memory.clone();
        let thread = thread::spawn(move || {
            // SAFETY: the memory lives as long as the thread; this is the only consumer.
            let mut ring = unsafe { Consumer::<u64>::new(kernel.pointers(), 2) };
            for i in 0..3 {
                while ring.available(1).unwrap() == 0 {
                    thread::yield_now();
                }
                assert_eq!(ring.consume(), i);
                // SAFETY: loom checks that no thread writes.
                kernel.frames[i as usize].with(|frame| assert_eq!(unsafe { *frame }, i + 1));
                ring.release();
            }
        });
        // SAFETY: as above; this is the only producer.
        let mut ring = unsafe { Producer::<u64>::new(memory.pointers(), 2) };
        for i in 0..3 {
            while ring.free(1).unwrap() == 0 {
                thread::yield_now();
            }
            // SAFETY: loom checks that no thread reads.
            memory.frames[i as usize].with_mut(|frame| unsafe { *frame = i + 1 });
            ring.push(i);
            ring.publish();
        }
        thread.join().unwrap();
    });
}

/// Index against flag: an entry that is published while the kernel goes to sleep is seen by the
/// kernel, or the kernel is woken.
#[test]
fn a_kick_is_not_lost() {
    loom::model(|| {
        let memory = Memory::new();
        let kernel = memory.clone();
        let thread = thread::spawn(move || {
            kernel.flags.store(1, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            kernel.producer.load(Ordering::Acquire) == 1
        });
        // SAFETY: the memory lives as long as the ring; this is the only producer.
        let mut ring = unsafe { Producer::<u64>::new(memory.pointers(), 2) };
        ring.push(0);
        ring.publish();
        let kicks = ring.needs_wakeup();
        assert!(thread.join().unwrap() || kicks);
    });
}
