//! Budgets, their parts, and what is counted in them.

use super::*;

#[test]
fn a_buffer_counts_in_both_budgets_until_it_is_dropped() {
    let queue = Budget::new(30);
    let one = Budget::within(2, Some(&queue));
    let two = Budget::within(20, Some(&queue));
    let held: Vec<_> = [one.try_charge(), one.try_charge(), two.try_charge()].into_iter().map(Option::unwrap).collect();
    assert!(one.try_charge().is_none(), "the connection's limit");
    let forced = Held::new(7, one.charge());
    assert_eq!((one.used(), two.used(), queue.used(), queue.free()), (3, 1, 4, 26));
    drop(held);
    assert_eq!((one.used(), two.used(), queue.used()), (1, 0, 1));
    let (chunk, charge) = forced.into_parts();
    assert_eq!((chunk, one.used()), (7, 1));
    drop(charge);
    assert_eq!((one.used(), queue.used()), (0, 0));
    one.try_charge().unwrap().detach();
    assert_eq!((one.used(), queue.used()), (1, 1));
    one.uncharge(1);
    assert_eq!((one.used(), queue.used()), (0, 0));
    assert!(one.try_charge_many(3).is_none());
    let (some, more) = (one.try_charge_many(2), two.charge_many(3));
    assert_eq!((one.used(), queue.used()), (2, 5));
    drop((some, more));
    assert_eq!((one.used(), two.used(), queue.used()), (0, 0, 0));
}

/// Connections that come one after the other and keep all that they may have. The next one has
/// some, and half of that can be promised.
#[test]
fn a_connection_has_a_share_of_what_is_free() {
    let queue = Budget::new(4096);
    let mut greedy = Vec::new();
    for n in 0..100 {
        let budget = Budget::within(4096, Some(&queue));
        let promised = budget.free();
        let held: Vec<_> = std::iter::from_fn(|| budget.try_charge()).collect();
        assert!((promised..=promised.max(1) * 2 + 1).contains(&(held.len() as u32)) && promised > 0, "{n}");
        greedy.push((budget, held));
    }
    assert!(greedy[0].1.len() > 1000 && queue.free() > 60, "{}", queue.free());
    assert!(Budget::within(4096, Some(&queue)).try_charge().is_some());
}

/// A buffer can be counted if, and only if, some room is left.
#[test]
fn whether_there_is_room_is_found_without_its_size() {
    let mut random = fastrand::Rng::with_seed(7);
    let mut found = [0; 2];
    for _ in 0..10_000 {
        let queue = Budget::new(random.u32(1..200));
        let one = Budget::within(random.u32(1..200), Some(&queue));
        let others = queue.charge_many(random.u32(0..200));
        let own = one.charge_many(random.u32(0..100));
        let detached = random.u32(0..20);
        (0..detached).for_each(|_| one.charge().detach());
        for budget in [&queue, &one] {
            assert_eq!(budget.has_room(), budget.room(1) > 0, "{queue:?} {one:?}, {own:?} {others:?}, {detached}");
        }
        found[usize::from(one.has_room())] += 1;
        one.uncharge(detached);
    }
    assert!(found.iter().all(|times| *times > 500), "{found:?}");
    for (free, used, limit) in
        [(0, 0, 0), (0, 1, 0), (u32::MAX, 0, u32::MAX), (0, u32::MAX, u32::MAX), (1 << 31, 1 << 30, 1)]
    {
        assert_eq!(is_below_share(free, used, limit), share(free, used, limit) > used, "{free} {used} {limit}");
    }
}

/// Detached charges do not reduce the share of what the peer sends.
#[test]
fn buffers_that_were_left_counted_are_not_in_the_share() {
    let queue = Budget::new(1600);
    let (holder, other) = (Budget::within(1500, Some(&queue)), Budget::within(1500, Some(&queue)));
    for held in 0..1500 {
        let charge = holder.try_charge().unwrap_or_else(|| panic!("{held}"));
        charge.detach();
    }
    assert!(holder.try_charge().is_none(), "the connection's limit");
    assert_eq!((holder.free(), queue.used(), other.try_charge_first().is_some()), (0, 1500, true));
    holder.uncharge(1000);
    assert_eq!((holder.used(), holder.free()), (500, other.free()));
}

#[test]
fn a_buffer_with_several_chunks_counts_once() {
    let budget = Budget::new(10);
    let mut first = budget.try_charge().unwrap();
    let mut second = first.share();
    let third = second.share();
    assert_eq!(budget.used(), 1);
    drop((first, third));
    assert_eq!(budget.used(), 1);
    let left = second.share();
    left.detach();
    drop(second);
    assert_eq!(budget.used(), 1, "it is counted by number");
    budget.uncharge(1);
    assert_eq!(budget.used(), 0);
}

#[test]
fn a_buffer_that_is_awaited_calls_the_waker_once() {
    struct Calls(AtomicU32);
    impl std::task::Wake for Calls {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
    let calls = Arc::new(Calls(AtomicU32::new(0)));
    let queue = Budget::waking(30, calls.clone().into());
    let (one, two) = (Budget::within(3, Some(&queue)), Budget::within(3, Some(&queue)));
    let held: Vec<_> = [&one, &one, &two].map(|budget| budget.try_charge().unwrap()).into();
    drop(two.try_charge());
    let [first, second, third] = held.try_into().unwrap();
    drop(first);
    assert_eq!(calls.0.load(Ordering::Relaxed), 0, "none was awaited");
    two.wait();
    drop(second);
    assert_eq!(calls.0.load(Ordering::Relaxed), 1, "another connection's makes room in the queue's");
    drop(third);
    assert_eq!(calls.0.load(Ordering::Relaxed), 2, "the connection's own");
    drop(two.try_charge());
    assert_eq!(calls.0.load(Ordering::Relaxed), 2);
}

fn counts(budget: &Budget) -> &Arc<Counts> {
    &budget.0
}

/// Counts its calls.
#[derive(Default)]
struct Woken(AtomicU32);

impl std::task::Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// The thread of a stack counts, and another one returns what it has counted, while the connection
/// and the stack exist and after they are gone.
#[test]
fn what_the_thread_of_a_stack_counts_is_returned_anywhere() {
    for (ends, at_home) in [(0, false), (1, false), (2, false), (1, true), (2, true)] {
        let calls = Arc::new(Woken::default());
        let queue = LocalBudget::waking(30, calls.clone().into());
        let one = LocalBudget::within(20, Some(&queue));
        let (weak, kept) = (Arc::downgrade(counts(&one)), Arc::downgrade(counts(&queue)));
        let (here, away) = (one.charge_many(3), one.charge());
        let (first, second) = (one.try_charge().unwrap(), one.charge());
        second.detach();
        drop(first);
        assert_eq!((one.used(), queue.used(), counts(&one).charged.sum()), (5, 5, 4));
        one.wait();
        let handle = Budget::clone(&one);
        let mut owners = vec![Some(queue), Some(one)];
        for owner in owners.iter_mut().rev().take(ends) {
            *owner = None;
        }
        std::thread::scope(|scope| _ = scope.spawn(|| drop(away)));
        assert_eq!(
            (handle.used(), handle.0.parent.as_ref().unwrap().used(), calls.0.load(Ordering::Relaxed)),
            (4, 4, 1)
        );
        handle.uncharge(1);
        drop((handle, owners));
        assert!(weak.strong_count() > 0, "three are counted");
        if at_home {
            drop(here);
        } else {
            std::thread::scope(|scope| _ = scope.spawn(|| drop(here)));
        }
        assert_eq!((weak.strong_count(), kept.strong_count()), (0, 0), "{ends}");
    }
}

/// A connection that is idle in between is counted at its home still, and ends once.
#[test]
fn a_clone_of_a_local_budget_keeps_its_home() {
    let calls = Arc::new(Woken::default());
    let queue = LocalBudget::waking(30, calls.clone().into());
    let one = LocalBudget::within(20, Some(&queue));
    let weak = Arc::downgrade(counts(&one));
    let other = one.clone();
    drop(one);
    assert!(counts(&other).charged.is_home());
    let held = [other.try_charge(), other.try_charge()];
    other.wait();
    drop(held);
    assert_eq!((calls.0.load(Ordering::Relaxed), other.used(), queue.used()), (1, 0, 0), "it is woken once");
    drop(other);
    assert_eq!(weak.strong_count(), 0);
    let apart = LocalBudget::within(20, Some(&Budget::new(30)));
    assert!(!counts(&apart).charged.is_home() && apart.try_charge().is_some());
}

/// A clone for a comparison counts what its original counts, and more. It ends before the latter
/// does, or what it has counted meanwhile.
#[cfg(feature = "compare")]
#[test]
fn a_copy_counts_by_itself_until_what_it_counts_is_returned() {
    for late in [false, true] {
        let queue = LocalBudget::waking(30, Waker::noop().clone());
        let one = LocalBudget::within(20, Some(&queue));
        let held = [one.charge(), one.charge(), queue.charge()];
        one.charge().detach();
        let mut copied = Vec::new();
        let copy = one.copy(&mut copied);
        let parent = copy.0.parent.clone().unwrap();
        let ends = [&*copy, &parent].map(|budget| Arc::downgrade(counts(budget)));
        assert_eq!((copy.used(), parent.used(), copy.free()), (one.used(), queue.used(), one.free()));
        let more = copy.charge();
        assert_eq!((copy.used(), parent.used(), one.used(), queue.used()), (4, 5, 3, 4));
        drop(parent);
        if late {
            drop((copy, copied));
            assert!(ends.iter().all(|counts| counts.strong_count() > 0), "one is counted");
            drop(more);
        } else {
            drop((copy, more));
            assert!(ends.iter().all(|counts| counts.strong_count() > 0), "two are counted, and three");
            drop(copied);
        }
        assert_eq!(ends.map(|counts| counts.strong_count()), [0, 0]);
        drop(held);
        assert_eq!((one.used(), queue.used()), (1, 1));
    }
}

/// Threads count and return in a budget that has no home, or another one.
#[test]
fn threads_that_count_at_the_same_time() {
    let local = LocalBudget::waking(u32::MAX, Waker::noop().clone());
    for queue in [&Budget::new(u32::MAX), &*local] {
        let budgets = [0; 2].map(|_| Budget::within(u32::MAX, Some(queue)));
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..if cfg!(miri) { 20 } else { 2000 } {
                        let held = budgets.each_ref().map(|budget| (budget.charge(), budget.charge_many(2)));
                        drop(held);
                    }
                });
            }
        });
        assert_eq!((budgets[0].used(), budgets[1].used(), queue.used()), (0, 0, 0));
        assert_eq!(Arc::strong_count(&budgets[0].0), 1);
    }
}
