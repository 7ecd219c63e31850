//! Events that a program's log subscriber gets from the pool, and subscribers that panic.
//!
//! The tests set subscribers for their own thread, and run one at a time. If a thread without a
//! subscriber is the first at an event while another thread has one, `tracing` takes the event for
//! disabled in all threads.

use crate::common::{counting, pool, provider};
use netmem_pool::{LingerReminder, PoolOptions, Private, lingering};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Collects the names of the pools in events.
#[derive(Clone, Default)]
struct Names(Arc<Mutex<Vec<String>>>);

impl tracing::field::Visit for Names {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
        if field.name() == "pool" {
            self.0.lock().unwrap().push(format!("{value:?}"));
        }
    }
}

impl tracing::Subscriber for Names {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        event.record(&mut self.clone());
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

/// Proves POOL-11: one event reports that a pool lingers. A caller that asks for reminders gets one
/// every 60 s. The library starts no thread.
#[test]
fn reminders_are_the_callers() {
    let _alone = crate::alone();
    let names = Names::default();
    let mine = |names: &Names| names.0.lock().unwrap().drain(..).filter(|n| n.contains("reminded")).count();
    tracing::subscriber::with_default(names.clone(), || {
        let (mut pool, _) = pool(PoolOptions::new("reminded").cache(16), 4);
        let page = pool.alloc();
        assert_eq!(pool.close().outstanding, 1);
        assert_eq!(mine(&names), 1);
        assert!(lingering().iter().any(|l| l.name == "reminded"));
        let now = Instant::now();
        let mut reminder = LingerReminder::new(now);
        let minute = Duration::from_secs(60);
        assert_eq!((reminder.remind(now), mine(&names)), (now + minute, 0));
        assert_eq!((reminder.remind(now + minute), mine(&names)), (now + 2 * minute, 1));
        assert_eq!((reminder.remind(now + minute), mine(&names)), (now + 2 * minute, 0));
        drop(page);
        assert_eq!((reminder.remind(now + 5 * minute), mine(&names)), (now + 6 * minute, 0));
    });
    let threads = std::fs::read_dir("/proc/self/task").unwrap();
    for thread in threads {
        let name = std::fs::read_to_string(thread.unwrap().path().join("comm")).unwrap_or_default();
        assert!(!name.starts_with("netmem"), "a thread of the library: {name}");
    }
}

/// A log subscriber that panics at every event.
struct Grumbler;

impl tracing::Subscriber for Grumbler {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, _: &tracing::Event<'_>) {
        resume_unwind(Box::new("a bad log line"));
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

/// Proves POOL-11 and NET-6: a log subscriber that panics does not prevent the end of a pool, does
/// not hide a pool that lingers, and does not make a page return that a device may write.
#[test]
fn in_a_log_subscriber() {
    let _alone = crate::alone();
    let grumbling = |f: &mut dyn FnMut()| {
        tracing::subscriber::with_default(Grumbler, || {
            assert!(catch_unwind(AssertUnwindSafe(f)).is_err(), "nothing was logged");
        });
    };
    let (memory, domain) = (provider::<Private>(4), counting());
    let mut pool = PoolOptions::new("logged").cache(16).build(memory.clone(), Some(domain.clone())).unwrap();
    let (mut other, _) = crate::common::pool(PoolOptions::new("logged too"), 1);
    let mut foreign = other.alloc();
    grumbling(&mut || pool.quarantine(foreign.take().unwrap()));
    assert!(other.alloc().is_none(), "a page was handed out that the device may write");
    let page = pool.alloc().unwrap();
    grumbling(&mut || pool.device_gone());
    assert_eq!(domain.maps(), domain.unmaps());
    let mut pool = Some(pool);
    grumbling(&mut || drop(pool.take()));
    let lingers = || netmem_pool::lingering().iter().any(|l| l.name == "logged");
    assert!(lingers());
    drop(page);
    assert!(!lingers());
    assert_eq!(domain.maps(), domain.unmaps());
    assert_eq!(std::iter::from_fn(|| memory.page()).collect::<Vec<_>>().len(), 4, "pages were lost");
    let weak = Arc::downgrade(&memory);
    drop(memory);
    assert!(weak.upgrade().is_none(), "the pool is still there");
}
