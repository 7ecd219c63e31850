//! Loom's models of token tables. `MODELS.md` lists what each model proves, and which
//! changes make it fail.

use super::pages::Pages;
use super::receive::TokenTable;
use super::returner::Returner;
use super::token::TokenRange;
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use loom::thread;

/// A binding of two pages.
pub(crate) struct Device {
    /// The number of references to the binding's pages.
    pub(crate) out: AtomicU32,
    unbound: AtomicBool,
    /// The contents of a page: the receiver writes them, and a thread that puts a page reads them.
    contents: UnsafeCell<u32>,
    /// Each use of the binding reads this flag, and the end of the binding writes it.
    alive: UnsafeCell<bool>,
    gone: Arc<AtomicBool>,
}

#[derive(Clone)]
pub(crate) struct Handle(pub(crate) Arc<Device>);

// SAFETY: loom checks the cells.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

// SAFETY: a model has one binding, and no thread gets a reference once the binding is unbound.
unsafe impl Pages for Handle {
    fn id(&self) -> u64 {
        7
    }

    fn pages(&self) -> u32 {
        2
    }

    unsafe fn put(&self, index: u32, n: u32) {
        assert!(index < 2);
        self.0.touch();
        // SAFETY: loom checks that no thread writes.
        self.0.contents.with(|at| assert_eq!(unsafe { *at }, 1));
        assert!(self.0.out.fetch_sub(n, Ordering::AcqRel) >= n, "more puts than references");
        self.0.touch();
    }

    fn drained(&self) -> bool {
        self.0.touch();
        self.0.unbound.load(Ordering::Acquire) && self.0.out.load(Ordering::Acquire) == 0
    }
}

impl Device {
    fn touch(&self) {
        // SAFETY: loom checks that no thread writes.
        self.alive.with(|alive| assert!(unsafe { *alive }));
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: loom checks that no other thread reads or writes.
        self.alive.with_mut(|alive| unsafe { *alive = false });
        self.gone.store(true, Ordering::Relaxed);
        let out = self.out.load(Ordering::Relaxed);
        assert!(std::thread::panicking() || out == 0, "the binding was dropped with pages out");
    }
}

pub(crate) fn binding() -> Handle {
    Handle(Arc::new(Device {
        out: AtomicU32::new(0),
        unbound: AtomicBool::new(false),
        contents: UnsafeCell::new(0),
        alive: UnsafeCell::new(true),
        gone: Arc::new(AtomicBool::new(false)),
    }))
}

/// Writes data to the page, as a driver does once.
pub(crate) fn fill(binding: &Handle) {
    // SAFETY: loom checks the cell.
    binding.0.contents.with_mut(|at| unsafe { *at = 1 });
}

fn receive(table: &mut TokenTable<Handle>, binding: &Handle, pages: &[u32]) {
    binding.0.out.fetch_add(pages.len() as u32, Ordering::Relaxed);
    let mut receive = table.receive();
    for &index in pages {
        assert_eq!(receive.reserve(binding, index).unwrap().0, 1 + index);
    }
    // SAFETY: the references were counted above.
    unsafe { receive.commit() };
}

fn return_tokens(returner: &Returner<Handle>, token: u32) -> usize {
    returner.return_tokens(&[TokenRange { start: token, count: 1 }]).unwrap()
}

/// Return against return: if two threads return a token that was received once, exactly one frees
/// it.
#[test]
fn return_against_return() {
    loom::model(|| {
        let (binding, mut table) = (binding(), TokenTable::new());
        fill(&binding);
        receive(&mut table, &binding, &[0]);
        let returner = table.returner();
        let other = thread::spawn(move || return_tokens(&returner, 1));
        let freed = return_tokens(&table.returner(), 1);
        assert_eq!(freed + other.join().unwrap(), 1);
        assert_eq!(binding.0.out.load(Ordering::Relaxed), 0);
        assert_eq!(table.stats().excess, 1);
    });
}

/// Return against receive of the same page: no reference is lost, and none is dropped twice.
#[test]
fn return_against_receive() {
    loom::model(|| {
        let (binding, mut table) = (binding(), TokenTable::new());
        fill(&binding);
        receive(&mut table, &binding, &[0]);
        let returner = table.returner();
        let other = thread::spawn(move || {
            assert_eq!(return_tokens(&returner, 1), 1, "it was received");
            1 + return_tokens(&returner, 1)
        });
        receive(&mut table, &binding, &[0, 0]);
        let freed = other.join().unwrap();
        assert_eq!(binding.0.out.load(Ordering::Relaxed) as usize, 3 - freed);
        let returner = table.returner();
        assert_eq!((freed..4).map(|_| return_tokens(&returner, 1)).sum::<usize>(), 3 - freed);
    });
}

/// Two returns against a receive of the same page: a thread that has seen the earlier number of
/// deliveries does not take a page that the other thread has returned meanwhile.
#[test]
fn two_returns_against_receive() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(|| {
        let (binding, mut table) = (binding(), TokenTable::new());
        fill(&binding);
        receive(&mut table, &binding, &[0]);
        let others = [1, 2].map(|times| {
            let returner = table.returner();
            thread::spawn(move || (0..times).map(|_| return_tokens(&returner, 1)).sum::<usize>())
        });
        receive(&mut table, &binding, &[0]);
        let freed = others.map(|other| other.join().unwrap()).iter().sum::<usize>();
        assert_eq!(binding.0.out.load(Ordering::Relaxed) as usize, 2 - freed);
        drop(table);
        assert_eq!(binding.0.out.load(Ordering::Relaxed), 0);
    });
}

/// A larger directory against a return: a token that was received is found while the receiver
/// replaces the directory, and a token whose block is added meanwhile is ignored or freed.
#[test]
fn larger_directory_against_return() {
    loom::model(|| {
        let (binding, mut table) = (binding(), TokenTable::new());
        fill(&binding);
        receive(&mut table, &binding, &[0]);
        let returner = table.returner();
        let other = thread::spawn(move || {
            assert_eq!(return_tokens(&returner, 1), 1, "it was received");
            1 + return_tokens(&returner, 2)
        });
        // The first directory has room for one block.
        receive(&mut table, &binding, &[1]);
        let freed = other.join().unwrap();
        assert_eq!(binding.0.out.load(Ordering::Relaxed) as usize, 2 - freed);
        assert_eq!(return_tokens(&table.returner(), 2), 2 - freed);
    });
}

/// A guess against the first receive: a guessed token is foreign, or the returning thread sees what
/// the receiver did with the page.
#[test]
fn guess_against_first_receive() {
    loom::model(|| {
        let (binding, mut table) = (binding(), TokenTable::new());
        let returner = table.returner();
        let other = thread::spawn(move || return_tokens(&returner, 2));
        let one = table.reserve(&binding, 1).unwrap();
        // The receiver fills the page after all its steps that the other thread could see, except
        // the addition to the count.
        fill(&binding);
        binding.0.out.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the reference was counted above.
        assert_eq!(unsafe { one.commit() }.0, 2);
        let freed = other.join().unwrap();
        assert_eq!(binding.0.out.load(Ordering::Relaxed) as usize, 1 - freed);
    });
}

/// Last handle against return: the handle that is dropped last drops all references that the
/// table holds. Then all pages are returned.
#[test]
fn last_handle_against_return() {
    loom::model(|| {
        let (binding, mut table) = (binding(), TokenTable::new());
        fill(&binding);
        receive(&mut table, &binding, &[0, 1, 1, 1]);
        let returner = table.returner();
        let other = thread::spawn(move || assert_eq!(return_tokens(&returner, 2), 1));
        drop(table);
        other.join().unwrap();
        assert_eq!(binding.0.out.load(Ordering::Relaxed), 0);
        assert_eq!(Arc::strong_count(&binding.0), 1, "the socket's handle is gone");
    });
}

/// Last put against the teardown of a binding: the binding is dropped once, after the put has
/// returned, while the socket lives.
#[test]
fn last_put_against_teardown() {
    loom::model(|| {
        let (binding, mut table) = (binding(), TokenTable::new());
        fill(&binding);
        receive(&mut table, &binding, &[0]);
        let returner = table.returner();
        let other = thread::spawn(move || assert_eq!(return_tokens(&returner, 1), 1));
        binding.0.unbound.store(true, Ordering::Release);
        let gone = binding.0.gone.clone();
        drop(binding);
        table.release_drained();
        other.join().unwrap();
        table.release_drained();
        assert!(gone.load(Ordering::Relaxed), "the socket still holds the binding");
        assert_eq!(table.stats().bindings, 0);
    });
}
