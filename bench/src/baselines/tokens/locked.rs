//! Ids in a map behind a lock. The lock is taken once for a batch, or for each fragment.

use super::id_map::IdMap;
use super::kind::{BATCH, Fragment, Receive, Return, Tokens, each, key, page};
use super::niovs::Niovs;
use netmem_devmem::{Pages, TokenRange};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The fair variant, as in Linux: ids are taken 16 at a time and returned 16 at a time. Their pages
/// are put without the lock.
#[derive(Debug)]
pub struct LockedMap;

/// The naive variant: the lock is taken for each fragment.
#[derive(Debug)]
pub struct LockedEach;

/// Invariant: each key in the map stands for a reference to its page, and the map owns that
/// reference.
struct Shared<P> {
    bindings: Box<[P]>,
    map: Mutex<IdMap<u32>>,
}

impl<P: Pages> Shared<P> {
    fn open(bindings: Box<[P]>) -> Arc<Self> {
        Arc::new(Self { bindings, map: Mutex::new(IdMap::new()) })
    }

    #[inline]
    fn lock(&self) -> MutexGuard<'_, IdMap<u32>> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    fn put(&self, key: u32) {
        let Fragment { binding, index } = page(key);
        // SAFETY: the key was in the map (the invariant), and the caller has removed it from there.
        unsafe { self.bindings[binding as usize].put(index, 1) };
    }
}

/// A handle of a socket. `EACH`: whether it locks for each fragment.
pub struct Locked<const EACH: bool, P = Arc<Niovs>>(Arc<Shared<P>>);

impl<const EACH: bool, P: Pages> Locked<EACH, P> {
    /// A new socket's handle, over pages of these bindings, at most 255. What was received and is
    /// not returned before the last handle goes is out for good.
    ///
    /// # Safety
    ///
    /// Each fragment that is [received](Receive::receive) is a page of its binding. The caller has
    /// a reference to it, which becomes the map's.
    #[must_use]
    pub unsafe fn over(bindings: Box<[P]>) -> Self {
        Self(Shared::open(bindings))
    }
}

impl<const EACH: bool, P> Clone for Locked<EACH, P> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<const EACH: bool, P> std::fmt::Debug for Locked<EACH, P> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Locked").finish_non_exhaustive()
    }
}

fn open<const EACH: bool>(bindings: &[Arc<Niovs>]) -> (Locked<EACH>, Locked<EACH>) {
    // A put of these pages releases nothing.
    let shared = Shared::open(bindings.into());
    (Locked(shared.clone()), Locked(shared))
}

impl Tokens for LockedMap {
    type Receiver = Locked<false>;
    type Returner = Locked<false>;

    fn open(bindings: &[Arc<Niovs>]) -> (Self::Receiver, Self::Returner) {
        open(bindings)
    }
}

impl Tokens for LockedEach {
    type Receiver = Locked<true>;
    type Returner = Locked<true>;

    fn open(bindings: &[Arc<Niovs>]) -> (Self::Receiver, Self::Returner) {
        open(bindings)
    }
}

impl<const EACH: bool, P: Pages> Receive for Locked<EACH, P> {
    #[inline]
    fn receive(&mut self, fragments: &[Fragment], tokens: &mut [u32]) {
        let batch = if EACH { 1 } else { BATCH };
        for (fragments, tokens) in fragments.chunks(batch).zip(tokens.chunks_mut(batch)) {
            let mut map = self.0.lock();
            fragments.iter().zip(tokens).for_each(|(fragment, token)| *token = map.insert(key(*fragment)));
        }
    }
}

impl<const EACH: bool, P: Pages> Return for Locked<EACH, P> {
    #[inline]
    fn return_tokens(&self, ranges: &[TokenRange]) -> usize {
        let mut freed = 0;
        if EACH {
            for token in each(ranges) {
                let found = self.0.lock().remove(token);
                if let Some(key) = found {
                    self.0.put(key);
                    freed += 1;
                }
            }
            return freed;
        }
        let (mut keys, mut n) = ([0; BATCH], 0);
        let mut map = self.0.lock();
        for token in each(ranges) {
            if let Some(key) = map.remove(token) {
                keys[n] = key;
                n += 1;
                if n == BATCH {
                    drop(map);
                    keys.iter().for_each(|key| self.0.put(*key));
                    freed += n;
                    n = 0;
                    map = self.0.lock();
                }
            }
        }
        drop(map);
        keys[..n].iter().for_each(|key| self.0.put(*key));
        freed + n
    }
}
