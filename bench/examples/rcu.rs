//! What a read-side guard costs, and how retired memory is reclaimed, in the two libraries that `netmem-refs` could
//! stand on. The table in `docs/rcuref.md` is this program's output:
//!
//! ```text
//! cargo run --release -p netmem-bench --example rcu
//! ```

use crossbeam_epoch as epoch;
use seize::Guard as _;
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Barrier, LazyLock};
use std::thread;
use std::time::{Duration, Instant};

static SEIZE: LazyLock<seize::Collector> = LazyLock::new(seize::Collector::new);

/// Objects retired and not yet freed, and the most that there were.
static WAITING: AtomicU64 = AtomicU64::new(0);
static PEAK: AtomicU64 = AtomicU64::new(0);

struct Object([u64; 8]);

impl Object {
    fn retiring() -> *mut Self {
        PEAK.fetch_max(WAITING.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
        Box::into_raw(Box::new(Self([7; 8])))
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        assert_eq!(black_box(self.0[3]), 7);
        WAITING.fetch_sub(1, Ordering::Relaxed);
    }
}

/// One of the two libraries, as `netmem-refs` would use it.
#[derive(Clone, Copy, PartialEq)]
enum Library {
    Seize,
    /// With a flush after each retired object, so that it does not wait for others.
    SeizeFlush,
    Epoch,
    EpochFlush,
}

impl Library {
    const ALL: [(&'static str, Self); 4] = [
        ("seize", Self::Seize),
        ("seize, flushed", Self::SeizeFlush),
        ("crossbeam-epoch", Self::Epoch),
        ("crossbeam-epoch, flushed", Self::EpochFlush),
    ];

    fn enter_and_leave(self) {
        match self {
            Self::Seize | Self::SeizeFlush => drop(black_box(SEIZE.enter())),
            Self::Epoch | Self::EpochFlush => drop(black_box(epoch::pin())),
        }
    }

    fn retire(self) {
        let object = Object::retiring();
        match self {
            Self::Seize | Self::SeizeFlush => {
                let guard = SEIZE.enter();
                // SAFETY: the object was never shared, and came from a box.
                unsafe { guard.defer_retire(object, seize::reclaim::boxed) };
                if self == Self::SeizeFlush {
                    // A batch goes only with an entry for each active thread: room for both of ours.
                    // SAFETY: frees nothing.
                    unsafe { guard.defer_retire(&raw mut *Box::leak(Box::new(())), |_, _| ()) };
                    guard.flush();
                }
            }
            Self::Epoch | Self::EpochFlush => {
                let guard = epoch::pin();
                // SAFETY: the object was never shared, and came from a box.
                unsafe { guard.defer_unchecked(move || drop(Box::from_raw(object))) };
                if self == Self::EpochFlush {
                    guard.flush();
                }
            }
        }
    }

    fn hold<R>(self, hold: impl FnOnce() -> R) -> R {
        match self {
            Self::Seize | Self::SeizeFlush => {
                let _guard = SEIZE.enter();
                hold()
            }
            Self::Epoch | Self::EpochFlush => {
                let _guard = epoch::pin();
                hold()
            }
        }
    }
}

const PAIRS: u32 = 5_000_000;

fn nanoseconds(mut run: impl FnMut()) -> f64 {
    let mut runs: Vec<f64> = (0..5)
        .map(|_| {
            let start = Instant::now();
            (0..PAIRS).for_each(|_| run());
            start.elapsed().as_secs_f64() * 1e9 / f64::from(PAIRS)
        })
        .collect();
    runs.sort_by(f64::total_cmp);
    runs[2]
}

/// Nanoseconds per pair on each of two threads at once, the slower's.
fn two_threads(library: Library) -> f64 {
    let barrier = Barrier::new(2);
    thread::scope(|scope| {
        let run = || {
            barrier.wait();
            nanoseconds(|| library.enter_and_leave())
        };
        let (one, two) = (scope.spawn(run), scope.spawn(run));
        one.join().unwrap_or(f64::NAN).max(two.join().unwrap_or(f64::NAN))
    })
}

struct Load {
    retired: f64,
    peak: u64,
    left: u64,
}

/// Retires for half a second while another thread enters and leaves, or stays in one guard throughout.
fn under_load(library: Library, stalled: bool) -> Load {
    WAITING.store(0, Ordering::Relaxed);
    PEAK.store(0, Ordering::Relaxed);
    let (stop, ready) = (AtomicBool::new(false), Barrier::new(2));
    let retired = thread::scope(|scope| {
        scope.spawn(|| {
            if stalled {
                library.hold(|| {
                    ready.wait();
                    while !stop.load(Ordering::Relaxed) {
                        thread::sleep(Duration::from_millis(1));
                    }
                });
            } else {
                ready.wait();
                while !stop.load(Ordering::Relaxed) {
                    library.enter_and_leave();
                }
            }
        });
        ready.wait();
        let (start, mut retired) = (Instant::now(), 0_u32);
        while start.elapsed() < Duration::from_millis(500) {
            (0..64).for_each(|_| library.retire());
            retired += 64;
        }
        let seconds = start.elapsed().as_secs_f64();
        stop.store(true, Ordering::Relaxed);
        f64::from(retired) / seconds
    });
    // Whoever reads goes on reading; nobody retires any more.
    (0..10_000).for_each(|_| library.enter_and_leave());
    Load { retired, peak: PEAK.load(Ordering::Relaxed), left: WAITING.load(Ordering::Relaxed) }
}

fn main() {
    println!("guard, ns per enter and leave      one   nested   two threads");
    for (name, library) in [Library::ALL[0], Library::ALL[2]] {
        let one = nanoseconds(|| library.enter_and_leave());
        let nested = library.hold(|| nanoseconds(|| library.enter_and_leave()));
        println!("{name:<31} {one:>6.1} {nested:>8.1} {:>13.1}", two_threads(library));
    }
    println!("\none thread retires, the other    retires/s     peak waiting   left after 10,000 more guards");
    for (what, stalled) in [("enters and leaves", false), ("stays in one guard", true)] {
        println!("{what}:");
        for (name, library) in Library::ALL {
            let load = under_load(library, stalled);
            println!("  {name:<26} {:>11.0} {:>16} {:>31}", load.retired, load.peak, load.left);
        }
    }
}
