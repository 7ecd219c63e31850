//! Two ways for a page to return from a borrower. With the return hook, the borrower drops the
//! page. With a queue, the borrower only shows that it is done: the page waits in the queue, and
//! the owner examines the queue's head. The tables in `docs/notes/lent-pages.md` are the output of
//! this program:
//!
//! ```text
//! cargo run --release -p netmem-bench --example lent_queue
//! ```

mod queue;
#[cfg(test)]
mod tests;

use netmem_pool::{Page, PagePool, PoolOptions, Private, RegionOptions, RegionProvider};
use queue::{BusyHead, BusyPage, LentQueue};
use rtrb::{Producer, RingBuffer};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::cell::Cell;
use std::hint::{black_box, spin_loop};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Pages that may be lent at a time.
const WINDOW: usize = 256;
/// Pages that change hands at a time.
const BATCH: usize = 32;
/// A run is short, so that on a busy machine many of the runs are undisturbed. Therefore there are
/// many runs.
const PAGES: usize = 20_000;
const ROUNDS: usize = 151;

const NAMES: [&str; 3] = ["return hook", "queue, a flag for each page", "queue, one counter"];

/// What a borrower that is only polled shows. Each value has a cache line of its own.
#[repr(align(64))]
struct Line<T>(T);

struct Shown {
    busy: Vec<Line<AtomicBool>>,
    done: Line<AtomicU64>,
}

impl Shown {
    fn new() -> Self {
        let busy = (0..WINDOW).map(|_| Line(AtomicBool::new(false))).collect();
        Self { busy, done: Line(AtomicU64::new(0)) }
    }

    fn flag(&self, n: u64) -> &AtomicBool {
        &self.busy[n as usize % WINDOW].0
    }
}

/// A pool that never runs out of pages: the return path is measured, not the provider.
fn pool(window: usize) -> PagePool<Private> {
    let pages = window + 2 * BATCH;
    let region = RegionOptions::new(pages).build().expect("a few pages can be had");
    let options = PoolOptions::new("bench").cache(2 * BATCH).prefill(pages);
    options.build(RegionProvider::new(region), None).expect("there are as many")
}

/// The word of a page that is written and read. It is not the first word, because the first words
/// of all pages would share one set of the cache.
fn word(page: &Page<Private>) -> usize {
    page.as_ptr().addr() + page.index() as usize % 64 * 64
}

/// What the owner sends to the borrower.
enum Sent {
    /// A page, which the borrower drops.
    Page(Page<Private>),
    /// The address and the number of a page that the owner keeps.
    Flag(usize, u64),
    Counter(usize, u64),
}

impl Sent {
    /// The borrower's work: reads a word and is done with the page.
    #[inline(always)]
    fn used(self, shown: &Shown) {
        // SAFETY: the pages are mapped throughout the measurement, and their owner does not touch
        // lent pages.
        let read = |at: usize| unsafe { black_box((at as *const u64).read_volatile()) };
        match self {
            Self::Page(page) => {
                read(word(&page));
            }
            Self::Flag(at, n) => {
                read(at);
                shown.flag(n).store(false, Ordering::Release);
            }
            Self::Counter(at, n) => {
                read(at);
                shown.done.0.store(n + 1, Ordering::Release);
            }
        }
    }
}

/// Allocates pages and sends each, until there is none or `most` pages were sent. Returns how many.
trait Owner {
    fn lend(&mut self, most: usize, send: impl FnMut(Sent)) -> usize;
}

struct Hook(PagePool<Private>);

impl Owner for Hook {
    fn lend(&mut self, most: usize, mut send: impl FnMut(Sent)) -> usize {
        self.0.poll(|napi| {
            for n in 0..most {
                let Some(page) = napi.alloc() else { return n };
                write(&page);
                send(Sent::Page(page));
            }
            most
        })
    }
}

struct Waiting<B: FnMut() -> bool, Q: FnMut(u64) -> B> {
    pool: PagePool<Private>,
    window: usize,
    queue: LentQueue<Private, B>,
    next: u64,
    question: Q,
    sent: fn(usize, u64) -> Sent,
}

impl<B: FnMut() -> bool, Q: FnMut(u64) -> B> Owner for Waiting<B, Q> {
    fn lend(&mut self, most: usize, mut send: impl FnMut(Sent)) -> usize {
        self.pool.poll(|napi| {
            // Refill only when pages are needed: if the head is looked at late, it is looked at
            // rarely.
            if self.queue.len() + most > self.window {
                while let Some(page) = self.queue.take() {
                    drop(page);
                }
            }
            let most = most.min(self.window - self.queue.len());
            for n in 0..most {
                let Some(page) = napi.alloc() else { return n };
                write(&page);
                let (at, number) = (word(&page), self.next);
                let lent = self.queue.lend(page, (self.question)(number));
                debug_assert!(lent.is_ok());
                self.next += 1;
                send((self.sent)(at, number));
            }
            most
        })
    }
}

#[inline(always)]
fn write(page: &Page<Private>) {
    // SAFETY: a word of a page that this owner has.
    unsafe { (word(page) as *mut u64).write_volatile(7) };
}

/// Runs `with` on the owner of variant `which`. The owner lends at most `window` pages at a time.
fn owner<R>(which: usize, window: usize, shown: &Shown, with: impl Measure<R>) -> R {
    fn waiting<B: FnMut() -> bool>(
        window: usize,
        question: impl FnMut(u64) -> B,
        sent: fn(usize, u64) -> Sent,
    ) -> impl Owner {
        let queue = LentQueue::new(window, BusyHead::Keep);
        Waiting { pool: pool(window), window, queue, next: 0, question, sent }
    }
    let flag = |n: u64| {
        let flag = shown.flag(n);
        flag.store(true, Ordering::Relaxed);
        move || flag.load(Ordering::Acquire)
    };
    // Like a driver: the borrower writes this cache line, so the owner reads it only when it has
    // used up the last value.
    let seen = Cell::new(0);
    let counter = |n: u64| {
        let seen = &seen;
        move || {
            if seen.get() <= n {
                seen.set(shown.done.0.load(Ordering::Acquire));
            }
            seen.get() <= n
        }
    };
    match which {
        0 => with.run(Hook(pool(window))),
        1 => with.run(waiting(window, flag, Sent::Flag)),
        _ => with.run(waiting(window, counter, Sent::Counter)),
    }
}

trait Measure<R> {
    fn run(self, owner: impl Owner) -> R;
}

/// Both roles in turns on one thread: the cost in instructions, with all data in the cache. Returns
/// ns per page of owner and borrower.
struct InTurns<'s>(&'s Shown);

impl Measure<[f64; 2]> for InTurns<'_> {
    fn run(self, mut owner: impl Owner) -> [f64; 2] {
        let mut sent = Vec::with_capacity(BATCH);
        let mut times = [Duration::ZERO; 2];
        let mut moved = 0;
        // The first pages are the warm-up.
        for batch in 0..PAGES / BATCH {
            let start = Instant::now();
            let n = owner.lend(BATCH, |s| sent.push(s));
            let middle = Instant::now();
            sent.drain(..).for_each(|s| s.used(self.0));
            let end = Instant::now();
            if batch > 100 {
                moved += n;
                times[0] += middle - start;
                times[1] += end - middle;
            }
        }
        times.map(|t| t.as_secs_f64() * 1e9 / moved as f64)
    }
}

/// The borrower is on another CPU, and receives pages by a ring. Returns ns per page from start
/// to end, and ns per page in which the owner worked and did not wait.
struct Apart<'s> {
    to: Producer<Sent>,
    start: &'s Barrier,
}

impl Measure<[f64; 2]> for Apart<'_> {
    fn run(mut self, mut owner: impl Owner) -> [f64; 2] {
        self.start.wait();
        let (start, mut worked, mut left) = (Instant::now(), Duration::ZERO, PAGES);
        while left > 0 {
            // The ring has as many places as pages may be lent.
            let most = self.to.slots().min(BATCH).min(left);
            let before = Instant::now();
            let n = owner.lend(most, |s| self.to.push(s).unwrap_or_else(|_| unreachable!("there were slots")));
            if n == 0 {
                spin_loop();
            } else {
                worked += before.elapsed();
                left -= n;
            }
        }
        while self.to.slots() < WINDOW {
            spin_loop();
        }
        let whole = start.elapsed();
        [whole, worked].map(|t| t.as_secs_f64() * 1e9 / PAGES as f64)
    }
}

fn apart(which: usize, cpus: [usize; 2]) -> [f64; 2] {
    let (to, mut from) = RingBuffer::<Sent>::new(WINDOW);
    let (shown, start) = (Shown::new(), Barrier::new(2));
    thread::scope(|s| {
        s.spawn(|| {
            pin(cpus[1]);
            start.wait();
            let mut n = 0;
            while n < PAGES {
                match from.pop() {
                    Ok(sent) => {
                        sent.used(&shown);
                        n += 1;
                    }
                    Err(_) => spin_loop(),
                }
            }
        });
        pin(cpus[0]);
        owner(which, WINDOW, &shown, Apart { to, start: &start })
    })
}

fn pin(cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu);
    if let Err(error) = sched_setaffinity(None, &set) {
        eprintln!("cannot run on CPU {cpu}: {error}; the figures are of wherever the system puts us");
    }
}

/// The median, and the quartiles around it.
fn spread(mut values: Vec<f64>) -> String {
    values.sort_by(f64::total_cmp);
    let at = |quarter: usize| values[(values.len() - 1) * quarter / 4];
    format!("{:.2} ({:.2}..{:.2})", at(2), at(1), at(3))
}

/// Runs all variants in turns, forwards and backwards. Prints the columns, and the ratio of `cost`
/// of the columns within each round.
fn table(title: &str, columns: [&str; 3], cost: fn([f64; 2]) -> f64, mut measure: impl FnMut(usize) -> [f64; 2]) {
    let mut rounds = vec![[[0.0; 2]; NAMES.len()]; ROUNDS];
    for (n, round) in rounds.iter_mut().enumerate() {
        for i in 0..NAMES.len() {
            let which = if n % 2 == 0 { i } else { NAMES.len() - 1 - i };
            round[which] = measure(which);
        }
    }
    println!("\n{title}");
    println!("{:<28} {:>26} {:>26} {:>26}", "ns a page", columns[0], columns[1], columns[2]);
    for (which, name) in NAMES.iter().enumerate() {
        let column = |c: usize| spread(rounds.iter().map(|r| r[which][c]).collect());
        let ratio = spread(rounds.iter().map(|r| cost(r[which]) / cost(r[0])).collect());
        println!("{name:<28} {:>26} {:>26} {ratio:>26}", column(0), column(1));
    }
}

/// The effect of a borrower that keeps one page in a thousand for long: the most pages that are
/// out, and how often there was no page to send. No time is measured: a step is a page.
fn slow_head() {
    const STEPS: u64 = 1_000_000;
    const SOON: u64 = 64;
    const LATE: u64 = 20_000;
    const POOL: usize = 1024;
    println!("\none page in 1000 stays out for {LATE} steps, the others for {SOON}; {POOL} pages");
    println!("{:<28} {:>26} {:>26}", "", "most pages out", "steps without a page");
    for (which, name) in ["return hook", "queue, keep", "queue, release after 100"].into_iter().enumerate() {
        let region = RegionOptions::new(POOL).build().expect("a few pages can be had");
        let mut pool = PoolOptions::new("slow").build(RegionProvider::new(region), None).expect("nothing is asked for");
        let (mut most, mut none) = (0, 0);
        // For each page number: when the borrower is done with the page. `dropped` has the pages
        // that the borrower drops itself at that time.
        let done: Vec<AtomicU64> = (0..POOL).map(|_| AtomicU64::new(0)).collect();
        let (now, dropped) = (AtomicU64::new(0), Arc::new(Mutex::new(Vec::<Page<Private>>::new())));
        let given_up = dropped.clone();
        let mut queue = match which {
            2 => {
                let to = move |page: BusyPage<'_, _>| {
                    given_up.lock().unwrap_or_else(PoisonError::into_inner).push(page.into_page());
                };
                LentQueue::new(POOL, BusyHead::Release { after: 100, to: Box::new(to) })
            }
            _ => LentQueue::new(POOL, BusyHead::Keep),
        };
        for n in 0..STEPS {
            now.store(n, Ordering::Relaxed);
            let busy = |page: &Page<Private>| done[page.index() as usize].load(Ordering::Relaxed) > n;
            dropped.lock().unwrap_or_else(PoisonError::into_inner).retain(busy);
            // Refill: each head that is done is returned to the pool.
            while let Some(page) = queue.take() {
                drop(page);
            }
            let Some(page) = pool.alloc() else {
                none += 1;
                continue;
            };
            let until = &done[page.index() as usize];
            until.store(if n.is_multiple_of(1000) { n + LATE } else { n + SOON }, Ordering::Relaxed);
            if which == 0 {
                dropped.lock().unwrap_or_else(PoisonError::into_inner).push(page);
            } else {
                let lent = queue.lend(page, || until.load(Ordering::Relaxed) > now.load(Ordering::Relaxed));
                lent.expect("the queue is as long as there are pages");
            }
            most = most.max(dropped.lock().unwrap_or_else(PoisonError::into_inner).len() + queue.len());
        }
        println!("{name:<28} {most:>26} {none:>26}");
    }
}

fn main() {
    let allowed = sched_getaffinity(None).unwrap_or_else(|_| CpuSet::new());
    let cpus: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu)).collect();
    let first = cpus.first().copied().unwrap_or(0);
    pin(first);
    let columns = ["owner", "borrower", "both, over the hook"];
    table(
        "owner and borrower in turns on one CPU",
        columns,
        |[a, b]| a + b,
        |which| {
            let shown = Shown::new();
            owner(which, BATCH, &shown, InTurns(&shown))
        },
    );
    let columns = ["from start to end", "the owner's share", "his share, over the hook"];
    match cpus[..] {
        [one, two, ..] => {
            table("owner and borrower on a CPU each", columns, |[_, owner]| owner, |which| apart(which, [one, two]))
        }
        _ => println!("\none CPU: nothing to say of two"),
    }
    slow_head();
}
