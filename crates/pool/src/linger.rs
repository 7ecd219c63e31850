//! Pools whose owner is gone and some of whose pages are still out: who they are, how many pages, how long already.

use crate::remote::Left;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often a lingering pool is reported.
const EVERY: Duration = Duration::from_secs(60);

/// A pool that waits for its last pages.
#[derive(Clone, Debug)]
pub struct Lingering {
    /// The pool's name.
    pub name: String,
    /// Pages still out.
    pub pages: u64,
    /// Time since the pool's owner was dropped.
    pub age: Duration,
}

/// What is left to say of a pool after its owner has gone. Outlives the pool, so that it can be read at any time.
#[derive(Debug)]
pub(crate) struct Record {
    name: String,
    pub(crate) left: Arc<Left>,
}

static LINGERING: Mutex<Vec<(Arc<Record>, Instant)>> = Mutex::new(Vec::new());

impl Record {
    pub(crate) fn new(name: &str) -> Arc<Self> {
        Arc::new(Self { name: name.to_owned(), left: Left::new() })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The owner has gone: from now on the pool is listed, if pages are out.
    pub(crate) fn lingers(self: &Arc<Self>) {
        let pages = self.left.still_out();
        if pages == 0 {
            return;
        }
        tracing::warn!(pool = self.name, pages, "pool lingers until its last page is back");
        let mut list = LINGERING.lock().unwrap_or_else(PoisonError::into_inner);
        list.push((self.clone(), Instant::now()));
        // The reporter lives as long as there is something to report; without a thread to be had, nobody reports.
        if list.len() == 1 {
            let _ = std::thread::Builder::new().name("netmem-linger".into()).spawn(report);
        }
    }
}

/// The pools that linger now. Takes a lock.
#[must_use]
pub fn lingering() -> Vec<Lingering> {
    let list = LINGERING.lock().unwrap_or_else(PoisonError::into_inner);
    list.iter()
        .map(|(r, since)| Lingering { name: r.name.clone(), pages: r.left.still_out(), age: since.elapsed() })
        .filter(|l| l.pages > 0)
        .collect()
}

fn report() {
    loop {
        std::thread::sleep(EVERY);
        for l in lingering() {
            tracing::warn!(pool = l.name, pages = l.pages, age_s = l.age.as_secs(), "pool still lingers");
        }
        let mut list = LINGERING.lock().unwrap_or_else(PoisonError::into_inner);
        list.retain(|(r, _)| r.left.still_out() > 0);
        if list.is_empty() {
            return;
        }
    }
}
