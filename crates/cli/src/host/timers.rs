//! Deadlines of the tasks of a stack's thread.
//!
//! Most waits end long before their deadline, and a new wait begins with a later one. So a deadline
//! that moves to a later time changes nothing in the queue: the task is woken at the earlier time,
//! and sets its alarm again. A task with one deadline costs one entry of the queue, and one wake-up
//! in each period.

use netmem_inet::Time;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::task::{Context, Waker};

/// The deadlines of a thread's tasks, and the thread's present time.
#[derive(Clone, Debug, Default)]
pub(crate) struct Timers(Rc<Queue>);

#[derive(Debug, Default)]
struct Queue {
    now: Cell<Time>,
    next: Cell<u64>,
    /// By time, and by a number that makes entries of the same time different.
    wakers: RefCell<BTreeMap<(Time, u64), Waker>>,
}

impl Timers {
    /// The time of the last [`advance`](Self::advance).
    pub(crate) fn now(&self) -> Time {
        self.0.now.get()
    }

    /// Sets the time, and wakes the tasks whose alarms are due. Returns how many.
    pub(crate) fn advance(&self, now: Time) -> usize {
        self.0.now.set(now);
        let mut woken = 0;
        loop {
            let mut wakers = self.0.wakers.borrow_mut();
            let Some(entry) = wakers.first_entry().filter(|entry| entry.key().0 <= now) else { return woken };
            let waker = entry.remove();
            drop(wakers);
            waker.wake();
            woken += 1;
        }
    }

    /// When the next alarm is due.
    pub(crate) fn next(&self) -> Option<Time> {
        self.0.wakers.borrow().first_key_value().map(|(&(at, _), _)| at)
    }

    /// Wakes all tasks that have set an alarm. Their alarms stay set.
    pub(crate) fn wake_all(&self) {
        let wakers: Vec<Waker> = self.0.wakers.borrow().values().cloned().collect();
        wakers.into_iter().for_each(Waker::wake);
    }

    /// An alarm for a task of this thread.
    pub(crate) fn alarm(&self) -> Alarm {
        Alarm { timers: self.clone(), set: None }
    }
}

/// A task's alarm. It is cancelled on drop.
#[derive(Debug)]
pub(crate) struct Alarm {
    timers: Timers,
    set: Option<(Time, u64)>,
}

impl Alarm {
    /// Whether the time `at` has come. If not, the task is woken at that time or earlier.
    pub(crate) fn is_due(&mut self, at: Time, cx: &Context<'_>) -> bool {
        let queue = &self.timers.0;
        let now = queue.now.get();
        if at <= now {
            return true;
        }
        if self.set.is_some_and(|(set, _)| set > now && set <= at) {
            return false;
        }
        self.clear();
        let key = (at, self.timers.0.next.replace(self.timers.0.next.get() + 1));
        self.timers.0.wakers.borrow_mut().insert(key, cx.waker().clone());
        self.set = Some(key);
        false
    }

    fn clear(&mut self) {
        let waker = self.set.take().and_then(|key| self.timers.0.wakers.borrow_mut().remove(&key));
        // After the borrow, because the drop of a waker may drop a task.
        drop(waker);
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn at(micros: u64) -> Time {
        Time::from_micros(micros)
    }

    #[test]
    fn a_later_deadline_costs_no_entry_and_an_earlier_one_replaces_it() {
        let (timers, count) = (Timers::default(), Arc::new(Count::default()));
        let waker = Waker::from(Arc::clone(&count));
        let cx = Context::from_waker(&waker);
        let mut alarm = timers.alarm();
        assert!(!alarm.is_due(at(10), &cx) && !alarm.is_due(at(20), &cx));
        assert_eq!(timers.next(), Some(at(10)));
        assert!(!alarm.is_due(at(5), &cx));
        assert_eq!((timers.next(), timers.0.wakers.borrow().len()), (Some(at(5)), 1));
        assert_eq!((timers.advance(at(4)), timers.advance(at(5)), timers.advance(at(6))), (0, 1, 0));
        assert_eq!((count.0.load(Ordering::Relaxed), timers.next()), (1, None));
        assert!(alarm.is_due(at(6), &cx) && !alarm.is_due(at(20), &cx));
        timers.wake_all();
        assert_eq!((count.0.load(Ordering::Relaxed), timers.next()), (2, Some(at(20))));
        drop(alarm);
        assert_eq!((timers.advance(at(30)), timers.next()), (0, None));
    }
}
