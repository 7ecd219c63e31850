//! The races of `ring.rs`, `port.rs` and `waiting.rs`, in all interleavings (loom).

#![allow(clippy::unwrap_used)]

use crate::stack::error::SocketError;
use crate::stack::remote::port::{Asked, Hub, Port};
use crate::stack::remote::ring::{Receiver, Sender, ring};
use crate::stack::remote::waiting::{PageRequests, SendSide, Shortage, Wanted};
use crate::stack::shared::notifier::Notifier;
use loom::thread;
use netmem_packet::Armed;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Wake, Waker};

/// What a new port has for the stack. Loom reports one that is never dropped.
type Token = loom::sync::Arc<()>;

fn port() -> (Arc<Notifier>, Arc<Hub<Token>>, Arc<Port<Token>>) {
    let notifier = Arc::new(Notifier::new().unwrap());
    let hub = Arc::new(Hub::new(notifier.clone()));
    (notifier, hub.clone(), Arc::new(Port::new(hub)))
}

/// Counts wake-ups.
#[derive(Default)]
struct Calls(AtomicU32);

impl Wake for Calls {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// A value against its index: three values through two places, each received once, in order.
#[test]
fn a_value_against_its_index() {
    loom::model(|| {
        let (mut sender, mut receiver) = ring::<Box<u32>, 2>();
        let thread = thread::spawn(move || {
            for n in 0..3 {
                let mut value = Box::new(n);
                while let Err(back) = sender.push(value) {
                    value = back;
                    thread::yield_now();
                }
                let _ = sender.publish();
            }
        });
        for n in 0..3 {
            let value = loop {
                match receiver.pop() {
                    Some(value) => break value,
                    None => thread::yield_now(),
                }
            };
            assert_eq!(*value, n);
            let _ = receiver.release();
        }
        thread.join().unwrap();
        assert!(receiver.is_empty());
    });
}

/// A push against a receiver that goes to sleep: the receiver finds the value, or is woken.
#[test]
fn a_push_against_a_receiver_that_goes_to_sleep() {
    loom::model(|| {
        let (mut sender, mut receiver) = ring::<u32, 2>();
        let thread = thread::spawn(move || {
            sender.push(7).unwrap();
            (sender.publish(), sender)
        });
        let sleeps = receiver.pop().is_none() && receiver.wait_for_items();
        let (wakes, _sender) = thread.join().unwrap();
        assert!(wakes || !sleeps);
    });
}

/// A receiver that releases one place at a time against a sender that waits for two: each sleep of
/// the sender ends. (Loom reports one that does not.)
#[test]
fn releases_of_a_place_against_a_sender_that_waits_for_two() {
    loom::model(|| {
        let (mut sender, mut receiver) = ring::<u32, 2>();
        sender.push(1).unwrap();
        sender.push(2).unwrap();
        assert!(!sender.publish());
        let wakes = loom::sync::Arc::new(loom::sync::Notify::new());
        let thread = {
            let wakes = wakes.clone();
            thread::spawn(move || {
                for n in 1..=2 {
                    assert_eq!(receiver.pop(), Some(n));
                    if receiver.release() {
                        wakes.notify();
                    }
                }
                receiver
            })
        };
        while sender.wait_for_room_for(2) {
            wakes.wait();
        }
        assert!(sender.has_room_for(2));
        thread.join().unwrap();
    });
}

/// A pop against a sender that goes to sleep: the sender finds room, or is woken.
#[test]
fn a_pop_against_a_sender_that_goes_to_sleep() {
    loom::model(|| {
        let (mut sender, mut receiver) = ring::<u32, 1>();
        sender.push(7).unwrap();
        assert!(!sender.publish());
        let thread = thread::spawn(move || {
            assert_eq!(receiver.pop(), Some(7));
            (receiver.release(), receiver)
        });
        let sleeps = sender.push(8).is_err() && sender.wait_for_room();
        let (wakes, _receiver) = thread.join().unwrap();
        assert!(wakes || !sleeps);
    });
}

/// The end of both sides: the side that goes last drops what is in the ring, also what was not
/// published.
#[test]
fn the_end_of_both_sides() {
    loom::model(|| {
        let (mut sender, mut receiver) = ring::<Token, 2>();
        let token = Token::new(());
        let thread = {
            let token = token.clone();
            thread::spawn(move || {
                sender.push(token.clone()).unwrap();
                let _ = sender.publish();
                sender.push(token).unwrap();
            })
        };
        drop(receiver.pop());
        drop(receiver);
        thread.join().unwrap();
        assert_eq!(Token::strong_count(&token), 1);
    });
}

/// A handle that sends values, and the stack's end of its ring.
fn pushes(port: &Arc<Port<Token>>, sender: &mut Sender<u32, 2>, value: u32) {
    sender.push(value).unwrap();
    if sender.publish() {
        port.signal();
    }
}

/// What the stack does in a poll of a port: it pops all, and waits. Returns how many values there were.
fn polls(hub: &Hub<Token>, receiver: &mut Receiver<u32, 2>) -> Option<u32> {
    hub.next()?;
    let mut values = 0;
    loop {
        while receiver.pop().is_some() {
            values += 1;
        }
        if receiver.wait_for_items() {
            return Some(values);
        }
    }
}

/// A signal against a poll of the port: no value stays in a ring whose port is not in the queue.
#[test]
fn a_signal_against_a_poll_of_the_port() {
    loom::model(|| {
        let (_, hub, port) = port();
        let (mut sender, mut receiver) = ring::<u32, 2>();
        assert!(receiver.wait_for_items());
        let thread = thread::spawn(move || {
            pushes(&port, &mut sender, 1);
            pushes(&port, &mut sender, 2);
            (port, sender)
        });
        let mut values = polls(&hub, &mut receiver).unwrap_or(0);
        let _handle = thread.join().unwrap();
        while let Some(more) = polls(&hub, &mut receiver) {
            values += more;
        }
        assert_eq!(values, 2);
    });
}

/// A signal against the stack that goes to sleep: the stack finds the port, or its descriptor is
/// readable.
#[test]
fn a_signal_against_the_stack_that_goes_to_sleep() {
    loom::model(|| {
        let (notifier, hub, port) = port();
        let thread = thread::spawn(move || port.signal());
        let sleeps = hub.next().is_none() && notifier.arm(|| hub.has_work()) == Armed::Waits;
        thread.join().unwrap();
        let is_readable = poll(&mut [PollFd::new(&*notifier, PollFlags::IN)], Some(&Timespec::default())).unwrap() > 0;
        assert!(is_readable || !sleeps);
        hub.close();
    });
}

/// A close against payload: when the stack sees the close, it has what was pushed before.
#[test]
fn a_close_against_payload() {
    loom::model(|| {
        let (_, hub, port) = port();
        let (mut sender, mut receiver) = ring::<u32, 2>();
        assert!(receiver.wait_for_items());
        let thread = {
            let port = port.clone();
            thread::spawn(move || {
                pushes(&port, &mut sender, 1);
                port.ask(Asked::SHUTDOWN);
                sender
            })
        };
        let mut values = 0;
        let mut look = || {
            let next = hub.next()?;
            let is_shut = next.port.asked().has(Asked::SHUTDOWN);
            while receiver.pop().is_some() {
                values += 1;
            }
            assert!(values == 1 || !is_shut, "the end is before the payload");
            Some(is_shut)
        };
        let mut is_shut = look() == Some(true);
        let _sender = thread.join().unwrap();
        while let Some(shut) = look() {
            is_shut |= shut;
        }
        assert!(is_shut, "a close cannot get lost");
    });
}

/// A push against the end of the stack: a port that the stack does not know, and one that it knows,
/// are ended; and nothing stays in the queue.
#[test]
fn a_push_against_the_end_of_the_stack() {
    loom::model(|| {
        let (_, hub, port) = port();
        let other = Arc::new(Port::new(hub.clone()));
        let thread = {
            let port = port.clone();
            thread::spawn(move || {
                port.open(Token::new(()));
                port.signal();
            })
        };
        other.signal();
        hub.close();
        thread.join().unwrap();
        assert!(!hub.has_work());
        for port in [port, other] {
            assert_eq!(port.failure(), Some(SocketError::StackGone));
            assert_eq!(port.read_end(), Some(Err(SocketError::StackGone)));
        }
    });
}

/// A reader and a writer that go to sleep against the end: each sees the end, or is woken.
#[test]
fn a_reader_that_goes_to_sleep_against_the_end() {
    loom::model(|| {
        let (_, hub, port) = port();
        let thread = {
            let port = port.clone();
            thread::spawn(move || port.end())
        };
        let [read, write] = [(); 2].map(|()| Arc::new(Calls::default()));
        let [reader, writer] = [&read, &write].map(|calls| Waker::from(calls.clone()));
        port.register_reader(&mut Context::from_waker(&reader));
        let reader_sleeps = port.read_end().is_none();
        port.register_writer(&mut Context::from_waker(&writer));
        let writer_sleeps = port.failure().is_none();
        thread.join().unwrap();
        assert!(!reader_sleeps || read.0.load(Ordering::Relaxed) > 0);
        assert!(!writer_sleeps || write.0.load(Ordering::Relaxed) > 0);
        drop(hub);
    });
}

/// What tasks of two threads send by: a ring of one place, which is full.
type Side = loom::sync::Arc<SendSide<Token, u32, 1>>;

fn full_side() -> (Side, Receiver<u32, 1>, Arc<Hub<Token>>, Arc<Wanted>) {
    let (_, hub, port) = port();
    let (mut sender, receiver) = ring::<u32, 1>();
    sender.push(7).unwrap();
    assert!(!sender.publish());
    let wanted = Arc::<Wanted>::default();
    (Side::new(SendSide::new(port, sender, wanted.clone())), receiver, hub, wanted)
}

/// A task that sleeps until it is woken. Loom reports one that sleeps for ever.
struct Sleeper {
    woken: loom::sync::atomic::AtomicBool,
    // Loom's can also end a sleep without a call.
    notify: loom::sync::Notify,
}

impl Wake for Sleeper {
    fn wake(self: Arc<Self>) {
        // An exchange, because a model does not order a store after another thread's exchange.
        self.woken.swap(true, Ordering::AcqRel);
        self.notify.notify();
    }
}

/// Waits until a call can send.
fn waits_to_write(side: &Side) {
    let (woken, notify) = (loom::sync::atomic::AtomicBool::new(false), loom::sync::Notify::new());
    let task = Arc::new(Sleeper { woken, notify });
    let waker = Waker::from(task.clone());
    while side.poll_writable(&mut Context::from_waker(&waker), 1).is_pending() {
        while !task.woken.swap(false, Ordering::AcqRel) {
            task.notify.wait();
        }
    }
}

/// Two tasks that wait for room: each sleep ends when the stack releases the place.
#[test]
fn two_tasks_that_wait_for_room() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = model.preemption_bound.or(Some(3));
    model.check(|| {
        let (side, mut receiver, _hub, _wanted) = full_side();
        let other = {
            let side = side.clone();
            thread::spawn(move || waits_to_write(&side))
        };
        let stack = {
            let side = side.clone();
            thread::spawn(move || {
                assert_eq!(receiver.pop(), Some(7));
                if receiver.release() {
                    side.port.wake_writer();
                }
                receiver
            })
        };
        waits_to_write(&side);
        other.join().unwrap();
        let _receiver = stack.join().unwrap();
    });
}

/// What the stack does with requests for pages until all tasks have been woken: it has the pages.
/// Returns the numbers that it has read.
fn answers(side: &Side, hub: &Hub<Token>, wanted: &Wanted, is_over: impl Fn() -> bool) -> Vec<u32> {
    let (mut requests, mut read) = (PageRequests::default(), Vec::new());
    while !is_over() {
        if hub.next().is_none() {
            thread::yield_now();
        } else if let Some((pages, of_pool)) = requests.poll(&side.port, wanted) {
            assert!(!of_pool);
            read.push(pages);
            requests.answer(&side.port);
        }
    }
    read
}

/// A call of a task has found too few pages, and the task waits for as many.
fn waits_for_pages(side: &Side, pages: u32) {
    side.lock().note_shortage(Shortage { pages, of_pool: false });
    waits_to_write(side);
}

/// A request for pages against the stack that reads it: the number is not lost.
#[test]
fn a_request_for_pages_against_the_stack_that_reads_it() {
    loom::model(|| {
        let (side, mut receiver, hub, wanted) = full_side();
        assert_eq!(receiver.pop(), Some(7));
        assert!(!receiver.release());
        let over = loom::sync::Arc::new(loom::sync::atomic::AtomicBool::new(false));
        let task = {
            let (side, over) = (side.clone(), over.clone());
            thread::spawn(move || {
                waits_for_pages(&side, 3);
                over.swap(true, Ordering::AcqRel);
            })
        };
        assert_eq!(answers(&side, &hub, &wanted, || over.load(Ordering::Acquire)), [3]);
        task.join().unwrap();
    });
}

/// Two tasks that request pages: each sleep ends, and the stack reads no number that is larger than
/// a task's that it has not answered.
#[test]
fn two_tasks_that_request_pages() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = model.preemption_bound.or(Some(2));
    model.check(|| {
        let (side, mut receiver, hub, wanted) = full_side();
        assert_eq!(receiver.pop(), Some(7));
        assert!(!receiver.release());
        let over = loom::sync::Arc::new(loom::sync::atomic::AtomicU32::new(0));
        let tasks = [3, 2].map(|pages| {
            let (side, over) = (side.clone(), over.clone());
            thread::spawn(move || {
                waits_for_pages(&side, pages);
                over.fetch_add(1, Ordering::AcqRel);
            })
        });
        let read = answers(&side, &hub, &wanted, || over.load(Ordering::Acquire) == 2);
        assert!(read.iter().all(|pages| (1..=3).contains(pages)), "{read:?}");
        tasks.into_iter().for_each(|task| task.join().unwrap());
    });
}
