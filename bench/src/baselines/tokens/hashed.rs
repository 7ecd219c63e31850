//! A hash map of counts behind a lock. The lock is taken once for a batch.

use super::kind::{BATCH, Fragment, Receive, Return, Tokens, each, key, page};
use super::niovs::Niovs;
use netmem_devmem::TokenRange;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A count for each held page, in a hash map behind a lock.
#[derive(Debug)]
pub struct HashedCounts;

/// Fibonacci hashing: one multiplication, so that the cost of hashing is small.
#[derive(Default)]
struct Multiply(u64);

impl Hasher for Multiply {
    #[inline]
    fn finish(&self) -> u64 {
        self.0
    }

    #[inline]
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u32((*byte).into()));
    }

    #[inline]
    fn write_u32(&mut self, n: u32) {
        self.0 = (self.0 ^ u64::from(n)).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(32);
    }
}

type Counts = HashMap<u32, u32, BuildHasherDefault<Multiply>>;

struct Shared {
    bindings: Box<[Arc<Niovs>]>,
    counts: Mutex<Counts>,
}

/// A handle of a socket.
#[derive(Clone)]
pub struct Hashed(Arc<Shared>);

impl Hashed {
    #[inline]
    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.0.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    fn put(&self, key: u32) {
        let Fragment { binding, index } = page(key);
        self.0.bindings[binding as usize].put_one(index);
    }
}

impl std::fmt::Debug for Hashed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hashed").finish_non_exhaustive()
    }
}

impl Tokens for HashedCounts {
    type Receiver = Hashed;
    type Returner = Hashed;

    fn open(bindings: &[Arc<Niovs>]) -> (Hashed, Hashed) {
        let socket = Hashed(Arc::new(Shared { bindings: bindings.into(), counts: Mutex::default() }));
        (socket.clone(), socket)
    }
}

impl Receive for Hashed {
    #[inline]
    fn receive(&mut self, fragments: &[Fragment], tokens: &mut [u32]) {
        for (fragments, tokens) in fragments.chunks(BATCH).zip(tokens.chunks_mut(BATCH)) {
            let mut counts = self.lock();
            for (fragment, token) in fragments.iter().zip(tokens) {
                *token = key(*fragment);
                *counts.entry(*token).or_default() += 1;
            }
        }
    }
}

impl Return for Hashed {
    #[inline]
    fn return_tokens(&self, ranges: &[TokenRange]) -> usize {
        let (mut keys, mut n, mut freed) = ([0; BATCH], 0, 0);
        let mut counts = self.lock();
        for token in each(ranges) {
            if let Entry::Occupied(mut held) = counts.entry(token) {
                *held.get_mut() -= 1;
                if *held.get() == 0 {
                    held.remove();
                }
                keys[n] = token;
                n += 1;
                if n == BATCH {
                    drop(counts);
                    keys.iter().for_each(|key| self.put(*key));
                    freed += n;
                    n = 0;
                    counts = self.lock();
                }
            }
        }
        drop(counts);
        keys[..n].iter().for_each(|key| self.put(*key));
        freed + n
    }
}
