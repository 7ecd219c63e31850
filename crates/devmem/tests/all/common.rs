//! A binding that counts its references, and helpers of the tests.
#![allow(dead_code, reason = "not every test does everything")]

use netmem_devmem::{DeliverError, Pages, Returner, Token, TokenRange, TokenTable};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering};

/// A binding with any number of pages. Pages below 2^17 have a count of their own; the others share
/// one.
pub(crate) struct Device {
    id: u64,
    pages: u32,
    refs: Vec<AtomicU32>,
    beyond: AtomicU32,
    /// The number of references to all pages.
    out: AtomicI64,
    unbound: AtomicBool,
    /// The number of puts without a reference.
    too_many: AtomicU32,
}

pub(crate) type Binding = Arc<Device>;

pub(crate) fn binding(pages: u32) -> Binding {
    static IDS: AtomicU64 = AtomicU64::new(100);
    Arc::new(Device {
        id: IDS.fetch_add(1, Ordering::Relaxed),
        pages,
        refs: (0..pages.min(1 << 17)).map(|_| AtomicU32::new(0)).collect(),
        beyond: AtomicU32::new(0),
        out: AtomicI64::new(0),
        unbound: AtomicBool::new(false),
        too_many: AtomicU32::new(0),
    })
}

impl Device {
    fn refs(&self, index: u32) -> &AtomicU32 {
        self.refs.get(index as usize).unwrap_or(&self.beyond)
    }

    /// Acquires a reference to a page, as a received fragment has one.
    pub(crate) fn get(&self, index: u32) {
        assert!(!self.unbound.load(Ordering::Relaxed), "a fragment of a binding that is unbound");
        self.out.fetch_add(1, Ordering::Relaxed);
        self.refs(index).fetch_add(1, Ordering::Relaxed);
    }

    /// The number of references that were not put yet.
    pub(crate) fn out(&self) -> i64 {
        self.out.load(Ordering::Acquire)
    }

    pub(crate) fn unbind(&self) {
        self.unbound.store(true, Ordering::Release);
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let (out, too_many) = (*self.out.get_mut(), *self.too_many.get_mut());
        assert!(std::thread::panicking() || (out, too_many) == (0, 0), "{out} out, {too_many} put too often");
    }
}

// SAFETY: ids are given out once, the pages never change, and `get` fails if the binding is
// unbound.
unsafe impl Pages for Device {
    fn id(&self) -> u64 {
        self.id
    }

    fn pages(&self) -> u32 {
        self.pages
    }

    unsafe fn put(&self, index: u32, n: u32) {
        let before = self.refs(index).fetch_sub(n, Ordering::AcqRel);
        if before < n || index >= self.pages {
            self.too_many.fetch_add(1, Ordering::Relaxed);
        }
        self.out.fetch_sub(n.into(), Ordering::AcqRel);
    }

    fn drained(&self) -> bool {
        self.unbound.load(Ordering::Acquire) && self.out() == 0
    }
}

pub(crate) fn deliver(table: &mut TokenTable<Binding>, binding: &Binding, index: u32) -> Result<Token, DeliverError> {
    let one = table.reserve(binding, index)?;
    binding.get(index);
    // SAFETY: the reference was taken just above.
    Ok(unsafe { one.commit() })
}

pub(crate) fn received(table: &mut TokenTable<Binding>, binding: &Binding, index: u32) -> u32 {
    deliver(table, binding, index).expect("there is room").0
}

pub(crate) fn range(start: u32, count: u32) -> TokenRange {
    TokenRange { start, count }
}

pub(crate) fn give(returner: &Returner<Binding>, start: u32, count: u32) -> usize {
    returner.return_tokens(&[range(start, count)]).expect("one range")
}
