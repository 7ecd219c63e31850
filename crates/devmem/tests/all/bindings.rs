//! Bindings: how they are made, attached to queues and unbound, which values keep them, and when
//! they are released.

use crate::memory_common::{Feed, Memory, bind, until, worker};
use netmem_devmem::{AttachError, BindError, Binding, CountMode, Netdev, Pages, Queues};
use netmem_pool::{Device, Provider, RegionError};
use netmem_refs::{RefCount, Worker};
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::Arc;

/// Proves MEM-1: if memory cannot be bound, the error names the reason, and no descriptor is left
/// open.
#[test]
fn what_cannot_be_bound() {
    let worker = worker();
    let memory = Memory::bytes(3 * 4096 + 100);
    let error = Binding::new(memory.fd(), 0, &worker).unwrap_err();
    assert!(matches!(error, BindError::Size { bytes: 12388, page_size: 4096, rest: 100 }), "{error:?}");
    assert!(error.to_string().contains("100 bytes are left"), "{error}");
    let error = Binding::new(Memory::pages(3).fd(), 1, &worker).unwrap_err();
    assert!(matches!(error, BindError::Size { page_size: 8192, rest: 4096, .. }), "{error:?}");
    let error = Binding::new(Memory::bytes(100).fd(), 0, &worker).unwrap_err();
    assert!(matches!(error, BindError::Region(RegionError::Small { .. })), "{error:?}");
    let error = Binding::new(memory.fd(), 10, &worker).unwrap_err();
    assert!(matches!(error, BindError::Region(RegionError::Order { order: 10 })), "{error:?}");
    let error = Binding::new(Memory::bytes(0).fd(), 0, &worker).unwrap_err();
    assert!(matches!(error, BindError::Region(RegionError::Small { bytes: 0, .. })), "{error:?}");
    memory.assert_gone();
}

/// Proves MEM-1: a descriptor that is not of memory, or whose object is gone, is refused and
/// closed. Its size is not trusted.
#[test]
fn descriptors_that_are_no_memory() {
    let worker = worker();
    let ((pipe, mut writer), (socket, mut other)) = (io::pipe().unwrap(), UnixStream::pair().unwrap());
    let (directory, zeros) = (File::open(std::env::temp_dir()).unwrap(), File::open("/dev/zero").unwrap());
    // A folder in `/proc` of a process that has ended: from Linux 6.2 on, the kernel reports
    // nothing about it.
    let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
    let dead = File::open(format!("/proc/{}/fd", child.id())).unwrap();
    drop(child.stdin.take());
    child.wait().unwrap();
    let all: [(OwnedFd, &str); 5] = [
        (pipe.into(), "it is a pipe"),
        (socket.into(), "it is a socket"),
        (directory.into(), "it is a directory"),
        (zeros.into(), "it is a device file"),
        (dead.into(), ""),
    ];
    for (file, what) in all {
        let error = Binding::new(file, 0, &worker).unwrap_err();
        let BindError::Descriptor { source } = &error else { panic!("{error:?}") };
        let text = error.to_string();
        assert!(source.to_string().contains(what) && text.contains(what), "{text}");
        assert!(text.contains("no size to tell") && text.contains("bind a dma-buf or a memfd"), "{text}");
    }
    // The descriptors are closed: the other ends of the pipe and of the socket see it.
    assert_eq!(writer.write(&[0]).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    assert_eq!(other.read(&mut [0]).unwrap(), 0);
}

/// Proves MEM-1: an id is never used twice, not even for the same memory.
#[test]
fn ids_are_unique() {
    let (worker, memory, mut ids) = (worker(), Memory::pages(4), BTreeSet::new());
    for _ in 0..100 {
        let binding = Binding::new(memory.fd(), 0, &worker).unwrap();
        assert!(ids.insert(binding.id()));
        binding.unbind().unwrap();
    }
    memory.assert_gone();
}

/// Queues of which some cannot be restarted. They note what each queue receives into, and every
/// call.
struct Fake {
    into: Vec<Option<Arc<dyn Provider<Device>>>>,
    fail_attach: Option<usize>,
    fail_detach: Option<usize>,
    log: Vec<(char, usize)>,
}

impl Fake {
    fn new(queues: usize) -> Netdev<Self> {
        let into = (0..queues).map(|_| None).collect();
        Netdev::new(Self { into, fail_attach: None, fail_detach: None, log: Vec::new() })
    }
}

impl Queues for Fake {
    type Error = io::Error;

    fn queues(&self) -> usize {
        self.into.len()
    }

    fn attach(&mut self, queue: usize, memory: Arc<dyn Provider<Device>>) -> io::Result<()> {
        self.log.push(('a', queue));
        if self.fail_attach == Some(queue) {
            return Err(io::Error::other("attach"));
        }
        assert!(self.into[queue].replace(memory).is_none(), "it was attached");
        Ok(())
    }

    fn detach(&mut self, queue: usize) -> io::Result<()> {
        self.log.push(('d', queue));
        if self.fail_detach == Some(queue) {
            return Err(io::Error::other("detach"));
        }
        assert!(self.into[queue].take().is_some(), "it was not attached");
        Ok(())
    }
}

/// Proves MEM-1: if an attach fails half way, it undoes its steps, the last first, and leaves
/// everything as it was.
#[test]
fn a_bind_that_fails_half_way() {
    let worker = worker();
    let (memory, binding) = bind(8, &worker);
    let mut net = Fake::new(6);
    net.queues_mut().fail_attach = Some(4);
    let error = net.attach(&binding, &[1, 5, 0, 4, 2]).unwrap_err();
    assert!(matches!(&error, AttachError::Restart { queue: 4, stuck, .. } if stuck.is_empty()), "{error:?}");
    let done = [('a', 1), ('a', 5), ('a', 0), ('a', 4), ('d', 0), ('d', 5), ('d', 1)];
    assert_eq!(net.queues_mut().log, done);
    assert!((0..6).all(|q| net.attached(q).is_none()));
    assert_eq!(binding.stats().queues, 0);
    // The attach can be tried again.
    net.queues_mut().fail_attach = None;
    net.attach(&binding, &[1, 5, 0, 4, 2]).unwrap();
    assert_eq!(binding.stats().queues, 5);
    net.unbind(binding).unwrap();
    assert!((0..6).all(|q| net.attached(q).is_none()));
    memory.assert_gone();
}

/// Proves MEM-1: if a queue cannot be detached again, the error names it, and it stays attached to
/// the binding until it can be detached.
#[test]
fn a_bind_that_cannot_be_undone() {
    let worker = worker();
    let (memory, binding) = bind(8, &worker);
    let mut net = Fake::new(3);
    (net.queues_mut().fail_attach, net.queues_mut().fail_detach) = (Some(2), Some(0));
    let error = net.attach(&binding, &[0, 1, 2]).unwrap_err();
    assert!(matches!(&error, AttachError::Restart { queue: 2, stuck, .. } if stuck[0].0 == 0), "{error:?}");
    assert_eq!((net.attached(0), net.attached(1)), (Some(binding.id()), None));
    // So the binding is not unbound, neither through the `Netdev` nor by itself.
    let error = net.unbind(binding).unwrap_err();
    assert_eq!(error.source.as_ref().unwrap().queue, 0);
    let error = error.binding.unbind().unwrap_err();
    assert_eq!(error.queues, 1);
    assert!(error.to_string().contains("attached to 1 queues"), "{error}");
    net.queues_mut().fail_detach = None;
    net.unbind(*error.binding).unwrap();
    memory.assert_gone();
}

/// Proves MEM-1 and POOL-11: when queues are dropped with their device, they do not count as
/// attached any more. This also holds for queues that could not be detached.
#[test]
fn a_device_that_goes() {
    let worker = worker();
    for alone in [false, true] {
        let (memory, binding) = bind(8, &worker);
        let mut net = Fake::new(3);
        net.attach(&binding, &[0, 2]).unwrap();
        net.queues_mut().fail_detach = Some(2);
        let error = net.unbind(binding).unwrap_err();
        assert_eq!((error.source.as_ref().unwrap().queue, error.binding.stats().queues), (2, 2));
        if alone {
            drop(net.into_queues());
        } else {
            drop(net);
        }
        assert_eq!(error.binding.stats().queues, 0);
        error.binding.unbind().unwrap();
        memory.assert_gone();
    }
}

/// Proves MEM-1: a queue that does not exist, is taken, or is named twice in a call is refused
/// before anything is done.
#[test]
fn queues_that_cannot_be_had() {
    let worker = worker();
    let ((memory, binding), (others, other)) = (bind(8, &worker), bind(8, &worker));
    let mut net = Fake::new(3);
    let error = net.attach(&binding, &[0, 3]).unwrap_err();
    assert!(matches!(error, AttachError::NoSuchQueue { queue: 3, queues: 3 }), "{error:?}");
    let error = net.attach(&binding, &[0, 1, 0]).unwrap_err();
    assert!(matches!(error, AttachError::Taken { queue: 0, .. }), "{error:?}");
    assert!(net.queues_mut().log.is_empty());
    net.attach(&other, &[1]).unwrap();
    let error = net.attach(&binding, &[0, 1]).unwrap_err();
    assert!(matches!(error, AttachError::Taken { queue: 1, binding } if binding == other.id()), "{error:?}");
    assert_eq!(net.queues_mut().log, [('a', 1)]);
    // The binding is dropped with its queue attached: the queue gets no more pages, and can be
    // detached.
    drop(other);
    let provider = net.queues_mut().into[1].clone().unwrap();
    assert_eq!(provider.alloc(&mut [None, None]), 0);
    drop(provider);
    assert!(others.descriptors() > 0, "the queue still has the binding");
    assert!(net.detach(1).unwrap() && !net.detach(1).unwrap());
    others.assert_gone();
    net.attach(&binding, &[0, 1]).unwrap();
    net.unbind(binding).unwrap();
    memory.assert_gone();
}

/// Proves MEM-2: received fragments do not touch the binding's count. Each keeps its page, the page
/// keeps its pool, and the pool keeps the binding, also after the pool's handle and the owner are
/// dropped. The last fragment releases all of it, on the worker.
#[test]
fn fragments_keep_the_binding() {
    let worker = worker();
    let (memory, binding) = bind(64, &worker);
    let mut feed = Feed::new(&binding);
    let mut frags: Vec<_> = (0..40).map(|_| feed.datagram(9, 100).into_parts().1.into_iter().next().unwrap()).collect();
    assert_eq!(binding.stats().count, CountMode::PerCpu);
    drop(feed);
    assert_eq!(binding.stats().in_use, 40);
    let memory_of = binding.reference();
    binding.unbind().unwrap();
    assert_eq!((memory_of.stats().in_use, memory_of.stats().count), (40, CountMode::Atomic));
    assert!(!memory_of.drained());
    drop(memory_of);
    let last = frags.pop().unwrap();
    drop(frags);
    assert!(memory.descriptors() > 0);
    drop(last);
    memory.assert_gone();
}

/// Proves MEM-2: a binding whose pages were all returned is drained only after it is unbound,
/// because before that more pages may go out.
#[test]
fn drained_is_for_good() {
    let worker = worker();
    let (memory, binding) = bind(8, &worker);
    let memory_of = binding.reference();
    let mut feed = Feed::new(&binding);
    drop(feed.datagram(9, 100));
    drop(feed);
    assert!(memory_of.stats().in_use == 0 && !memory_of.drained());
    let feed = Feed::new(&binding);
    binding.unbind().unwrap();
    assert!(memory_of.drained());
    drop((feed, memory_of));
    memory.assert_gone();
}

/// Proves MEM-2 also for a binding with an ordinary count, which exists for comparisons.
#[test]
fn with_another_count() {
    let worker = worker();
    let memory = Memory::pages(8);
    let binding = Binding::<RefCount>::counted(memory.fd(), 0, &worker).unwrap();
    assert_eq!(binding.stats().count, CountMode::Atomic);
    let mut feed = Feed::new(&binding);
    let frag = feed.datagram(9, 100);
    drop((binding, feed));
    assert!(memory.descriptors() > 0);
    drop(frag);
    memory.assert_gone();
}

/// Proves MEM-2: a binding is unbound while its queue allocates and returns pages. No page goes out
/// after that, and all pages are returned.
#[test]
fn unbind_during_traffic() {
    for _ in 0..50 {
        let worker = worker();
        let (memory, binding) = bind(256, &worker);
        let mut feed = Feed::new(&binding);
        let held = binding.reference();
        std::thread::scope(|s| {
            s.spawn(|| {
                let mut kept = Vec::new();
                while let Some(page) = feed.pool.alloc() {
                    kept.push(page);
                    if kept.len() == 200 {
                        kept.clear();
                        feed.pool.shrink(0);
                    }
                }
                drop(kept);
            });
            until(|| held.stats().in_use > 0);
            binding.unbind().unwrap();
        });
        feed.pool.shrink(0);
        assert_eq!((feed.pool.held(), held.stats().in_use), (0, 0));
        assert!(feed.pool.alloc().is_none());
        drop((feed, held));
        memory.assert_gone();
    }
}

/// Proves MEM-2: the last put may be on any thread, and the cleanup runs on the worker. When a
/// worker is dropped, it has done its cleanups.
#[test]
fn the_worker_cleans_up() {
    let (worker, memory) = (Worker::new("cleanup").unwrap(), Memory::pages(4));
    let worker = Arc::new(worker);
    let binding = Binding::new(memory.fd(), 0, &worker).unwrap();
    let (go, wait) = std::sync::mpsc::channel::<()>();
    worker.defer(move || wait.recv().unwrap());
    drop(binding);
    assert_eq!(memory.descriptors(), 1, "the worker is busy");
    go.send(()).unwrap();
    drop(worker);
    assert_eq!(memory.descriptors(), 0);
}

/// Proves POOL-10 and MEM-1: no part of bound memory is ever mapped in this process.
#[test]
fn bound_memory_is_not_mapped() {
    let worker = worker();
    let (memory, binding) = bind(64, &worker);
    let mut feed = Feed::new(&binding);
    let frame = feed.datagram(9, 1000);
    assert_eq!(memory.mappings(), 0);
    drop((frame, feed, binding));
    memory.assert_gone();
}
