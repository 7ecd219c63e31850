//! Events that a program's log subscriber gets from the pool, and subscribers that panic.
//!
//! The tests set subscribers for their own thread, and run one at a time. If a thread without a
//! subscriber is the first at an event while another thread has one, `tracing` treats the event as
//! disabled in all threads.

use crate::common::{counting, pool, provider};
use netmem_pool::{LingerReminder, PoolOptions, Private, lingering};
use netmem_testing::{fields, on_event};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Proves POOL-11: one event reports that a pool lingers. A caller that asks for reminders gets one
/// every 60 s. The library starts no thread.
#[test]
fn reminders_are_the_callers() {
    let _alone = crate::alone();
    let names = Arc::new(Mutex::new(Vec::new()));
    let log = names.clone();
    let subscriber = on_event(tracing::Level::WARN, move |event| {
        let pools = fields(event).into_iter().filter(|(name, _)| *name == "pool");
        log.lock().unwrap().extend(pools.map(|(_, value)| value));
    });
    let mine = || names.lock().unwrap().drain(..).filter(|n| n.contains("reminded")).count();
    tracing::subscriber::with_default(subscriber, || {
        let (mut pool, _) = pool(PoolOptions::new("reminded").cache(16), 4);
        let page = pool.alloc();
        assert_eq!(pool.close().outstanding, 1);
        assert_eq!(mine(), 1);
        assert!(lingering().iter().any(|l| l.name == "reminded"));
        let now = Instant::now();
        let mut reminder = LingerReminder::new(now);
        let minute = Duration::from_secs(60);
        assert_eq!((reminder.remind(now), mine()), (now + minute, 0));
        assert_eq!((reminder.remind(now + minute), mine()), (now + 2 * minute, 1));
        assert_eq!((reminder.remind(now + minute), mine()), (now + 2 * minute, 0));
        drop(page);
        assert_eq!((reminder.remind(now + 5 * minute), mine()), (now + 6 * minute, 0));
    });
    let threads = std::fs::read_dir("/proc/self/task").unwrap();
    for thread in threads {
        let name = std::fs::read_to_string(thread.unwrap().path().join("comm")).unwrap_or_default();
        assert!(!name.starts_with("netmem"), "a thread of the library: {name}");
    }
}

/// Proves POOL-11 and NET-6: a log subscriber that panics does not prevent the end of a pool, does
/// not hide a pool that lingers, and does not make a page return that a device may write.
#[test]
fn in_a_log_subscriber() {
    let _alone = crate::alone();
    let grumbling = |f: &mut dyn FnMut()| {
        let panicking = on_event(tracing::Level::TRACE, |_| resume_unwind(Box::new("a bad log line")));
        tracing::subscriber::with_default(panicking, || {
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
