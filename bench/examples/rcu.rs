//! What a read-side section costs, how retired memory is released, and what that makes of `RcuRef` against `RefCount`: the
//! two libraries that `netmem-refs` could stand on, and itself. The tables in `docs/design/rcuref.md` are this program's output:
//!
//! ```text
//! cargo run --release -p netmem-bench --example rcu
//! ```

use crossbeam_epoch as epoch;
use netmem_refs::{OwnLine, Owner, RcuRef, RefCount, rcu};
use seize::Guard as _;
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, LazyLock};
use std::thread;
use std::time::{Duration, Instant};

static SEIZE: LazyLock<seize::Collector> = LazyLock::new(seize::Collector::new);

/// Objects that are retired and not yet released, and the largest number of them so far.
#[derive(Default)]
struct Waiting {
    now: AtomicU64,
    peak: AtomicU64,
}

struct Object(Arc<Waiting>, [u64; 8]);

impl Object {
    fn retiring(waiting: &Arc<Waiting>) -> Self {
        waiting.peak.fetch_max(waiting.now.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
        Self(waiting.clone(), [7; 8])
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        assert_eq!(black_box(self.1[3]), 7);
        self.0.now.fetch_sub(1, Ordering::Relaxed);
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Library {
    Seize,
    /// `seize`, with each object released promptly, like the last put of an object with a destructor.
    Refs,
    Epoch,
    /// With a flush after each retired object, so that the object does not wait for others.
    EpochFlush,
}

impl Library {
    const ALL: [(&'static str, Self); 4] = [
        ("seize", Self::Seize),
        ("netmem-refs, prompt", Self::Refs),
        ("crossbeam-epoch", Self::Epoch),
        ("crossbeam-epoch, flushed", Self::EpochFlush),
    ];

    fn hold<R>(self, hold: impl FnOnce() -> R) -> R {
        match self {
            Self::Seize => {
                let _guard = black_box(SEIZE.enter());
                hold()
            }
            Self::Refs => rcu::read(|guard| {
                black_box(guard);
                hold()
            }),
            Self::Epoch | Self::EpochFlush => {
                let _guard = black_box(epoch::pin());
                hold()
            }
        }
    }

    fn enter_and_leave(self) {
        self.hold(|| ());
    }

    fn retire(self, waiting: &Arc<Waiting>) {
        let object = Object::retiring(waiting);
        match self {
            Self::Refs => drop(Owner::<_, RcuRef>::new(object)),
            Self::Seize => {
                // SAFETY: the object was never shared, and was made by a box.
                unsafe { SEIZE.enter().defer_retire(Box::into_raw(Box::new(object)), seize::reclaim::boxed) };
            }
            Self::Epoch | Self::EpochFlush => {
                let (guard, object) = (epoch::pin(), Box::new(object));
                // SAFETY: the object was never shared, and may be dropped on any thread.
                unsafe { guard.defer_unchecked(move || drop(object)) };
                if self == Self::EpochFlush {
                    guard.flush();
                }
            }
        }
    }
}

const PAIRS: u32 = 5_000_000;

/// The median of five runs, per call.
fn nanoseconds(calls: u32, mut run: impl FnMut()) -> f64 {
    let mut runs: Vec<f64> = (0..5)
        .map(|_| {
            let start = Instant::now();
            (0..calls).for_each(|_| run());
            start.elapsed().as_secs_f64() * 1e9 / f64::from(calls)
        })
        .collect();
    runs.sort_by(f64::total_cmp);
    runs[2]
}

/// The slower one of two threads that do the same.
fn two_threads(run: impl Fn() -> f64 + Sync) -> f64 {
    let barrier = Barrier::new(2);
    let run = || {
        barrier.wait();
        run()
    };
    thread::scope(|scope| {
        let (one, two) = (scope.spawn(run), scope.spawn(run));
        one.join().unwrap_or(f64::NAN).max(two.join().unwrap_or(f64::NAN))
    })
}

struct Load {
    retired: f64,
    peak: u64,
    left: u64,
}

/// Retires for half a second while another thread enters and leaves, or stays in one section throughout.
fn under_load(library: Library, stalled: bool) -> Load {
    let waiting = Arc::new(Waiting::default());
    let (stop, ready) = (AtomicBool::new(false), Barrier::new(2));
    let retired = thread::scope(|scope| {
        scope.spawn(|| {
            let reads = || if stalled { thread::sleep(Duration::from_millis(1)) } else { library.enter_and_leave() };
            let until_stopped = || {
                ready.wait();
                while !stop.load(Ordering::Relaxed) {
                    reads();
                }
            };
            if stalled { library.hold(until_stopped) } else { until_stopped() }
        });
        ready.wait();
        let (start, mut retired) = (Instant::now(), 0_u32);
        while start.elapsed() < Duration::from_millis(500) {
            (0..64).for_each(|_| library.retire(&waiting));
            retired += 64;
        }
        let seconds = start.elapsed().as_secs_f64();
        stop.store(true, Ordering::Relaxed);
        f64::from(retired) / seconds
    });
    // This thread goes on reading. No thread retires objects any more.
    (0..10_000).for_each(|_| library.enter_and_leave());
    Load { retired, peak: waiting.peak.load(Ordering::Relaxed), left: waiting.now.load(Ordering::Relaxed) }
}

fn counts() {
    type Row<'a> = (&'a str, u32, &'a (dyn Fn() + Sync));
    let (plain, rcu) = (OwnLine::new(RefCount::new(1)), OwnLine::new(RcuRef::new(1)));
    let tries = AtomicU64::new(0);
    let refcount = || {
        black_box(black_box(&plain).try_get());
        black_box(plain.put());
    };
    let rcuref = || {
        black_box(rcu::read(|guard| black_box(&rcu).try_get(guard)));
        black_box(rcu.put());
    };
    let batched = || {
        rcu::read(|guard| {
            for _ in 0..64 {
                black_box(black_box(&rcu).try_get(guard));
                black_box(rcu.put_guarded(guard));
            }
        });
    };
    let counted = || {
        let (_, retries) = black_box(&plain).try_get_counting();
        if retries != 0 {
            tries.fetch_add(u64::from(retries), Ordering::Relaxed);
        }
        black_box(plain.put());
    };
    let rows: [Row; 3] =
        [("RefCount", 1, &refcount), ("RcuRef", 1, &rcuref), ("RcuRef, one section for 64", 64, &batched)];
    println!("\nget and put of one count, ns        one thread   two threads");
    for (name, pairs, run) in rows {
        let per_pair = || nanoseconds(PAIRS / pairs, run) / f64::from(pairs);
        println!("{name:<34} {:>11.1} {:>13.1}", per_pair(), two_threads(per_pair));
    }
    two_threads(|| nanoseconds(PAIRS / 5, counted));
    let retries = tries.load(Ordering::Relaxed);
    #[allow(clippy::cast_precision_loss, reason = "a ratio")]
    let each = retries as f64 / (2.0 * 5.0 * f64::from(PAIRS / 5));
    println!("retries of RefCount's exchange, per get, two threads: {each:.2}");
}

fn main() {
    println!("section, ns per enter and leave     one thread        nested   two threads");
    for (name, library) in [Library::ALL[0], Library::ALL[1], Library::ALL[2]] {
        let pairs = || nanoseconds(PAIRS, || library.enter_and_leave());
        println!("{name:<34} {:>11.1} {:>13.1} {:>13.1}", pairs(), library.hold(pairs), two_threads(pairs));
    }
    println!("\none thread retires, the other       retires/s     most waiting   left after 10,000 more sections");
    for (what, stalled) in [("enters and leaves", false), ("stays in one section", true)] {
        println!("{what}:");
        for (name, library) in Library::ALL {
            let load = under_load(library, stalled);
            println!("  {name:<29} {:>12.0} {:>16} {:>33}", load.retired, load.peak, load.left);
        }
    }
    counts();
}
