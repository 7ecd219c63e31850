//! Without privileges: a process that has dropped them, and a worker on what a helper has opened.
//!
//! A process of its own: a test lowers `RLIMIT_MEMLOCK`, which is a limit of the whole process.
#![allow(clippy::unwrap_used)]

use netmem_packet::{Armed, Packet, Poll, PollThenSleep, RxQueue, TxQueue, Wait};
use netmem_pool::{KernelShared, PoolOptions, RegionOptions};
use netmem_testing::namespace::{drop_privileges, in_namespace, ip};
use netmem_testing::xsk::{Raw, frame, index, memory, until, veth};
use netmem_xsk::helper::{HelperError, HelperOptions};
use netmem_xsk::{AttachError, Filter, Grant, Interface, QueueOptions, UmemOptions, Xsk, XskError, XskOptions};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketType};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

/// Passes a grant to a worker. The thread ends when the worker has bound its sockets.
fn send(grant: Grant, to: UnixStream) -> JoinHandle<Result<(), HelperError>> {
    std::thread::spawn(move || grant.send(to, LIMIT))
}

/// Proves XSK-4: a process opens an interface as root, becomes another user without capabilities,
/// and receives, sends, sleeps and closes as before. What would need a privilege is refused by
/// name.
#[test]
fn privileges_are_dropped_once_the_interface_is_open() {
    in_namespace(|| {
        veth("v0", "v1", 1, 1500);
        let peer = Raw::new("v1");
        let options = || XskOptions::new("v0").pages(2048);
        let mut xsk = Xsk::<KernelShared>::open(options(), |_| QueueOptions::new().cache(64)).unwrap();
        let pool = xsk.pool(PoolOptions::new("sent").limit(64)).unwrap();
        drop_privileges();

        let refused = Xsk::<KernelShared>::open(options(), |_| QueueOptions::new()).unwrap_err();
        assert!(matches!(refused, XskError::Missing(_)) && refused.to_string().contains("CAP_NET_RAW"), "{refused}");
        let program = xsk.program.as_ref().unwrap();
        let refused = program.set_filter(&Filter::default()).unwrap_err();
        assert!(matches!(refused, AttachError::Privilege(_)), "{refused}");

        let mut pause = PollThenSleep::new(Duration::ZERO);
        let (rx, tx) = &mut xsk.pairs[0];
        for number in 0..200 {
            let sent = frame(60 + number, number as u64);
            peer.send(&sent);
            let mut got = 0;
            while got == 0 {
                got = rx.poll(|poll| poll.receive(64, &mut |packet: Packet<_>| assert_eq!(packet.to_vec(), sent)));
                pause.turn(got, &mut [rx], None).unwrap();
            }
            let mut page = pool.alloc().unwrap();
            page.copy_from(0, &sent).unwrap();
            tx.send(Packet::new(page.freeze_range(0..sent.len()))).unwrap();
            tx.flush();
            assert_eq!(peer.receive(), sent);
            until("completion", || (tx.complete() > 0).then_some(()));
        }
        assert_eq!((tx.outstanding(), rx.stats().stopped, tx.stats().stopped), (0, None, None));
        assert_eq!(rx.socket().kernel_stats().unwrap().rx_dropped, 0);
        assert_eq!(Interface::by_name("v0").unwrap().programs.len(), 1);
        drop(xsk);
        assert_eq!(Interface::by_name("v0").unwrap().programs, []);
    });
}

/// The worker's error names the interface: the index is that of another interface in the worker's
/// network namespace.
#[test]
fn an_interface_that_has_gone_is_named() {
    in_namespace(|| {
        veth("gone0", "gone1", 1, 1500);
        let grant = Grant::open("gone0", &HelperOptions { program: None, ..HelperOptions::default() }).unwrap();
        ip("link del gone0");
        let options = XskOptions::granted(grant).memory(RegionOptions::new(1536).huge_pages(false));
        let queue = |_| QueueOptions::new().rx_ring(256).tx_ring(256).fill(256).cache(64);
        let error = Xsk::<KernelShared>::open(options, queue).unwrap_err();
        assert_eq!(error.to_string(), "there is no interface gone0 in this network namespace");
    });
}

/// Proves XSK-4: the worker is another user without any capability. It registers its memory, binds
/// and moves frames, and its end detaches the program from the interface. The helper has nothing
/// any more. In the worker's network namespace the interface's number is that of another interface,
/// with fewer queues, which changes nothing.
#[test]
fn a_worker_without_privileges_moves_frames() {
    const LAST: usize = 200;
    in_namespace(|| {
        veth("v0", "v1", 2, 1500);
        let peer = Raw::new("v1");
        let (ours, theirs) = UnixStream::pair().unwrap();
        let options = HelperOptions { queues: vec![0, 1], ..HelperOptions::default() };
        let helper = send(Grant::open("v0", &options).unwrap(), ours);
        let number = index("v0");
        let worker = move || {
            // SAFETY: this thread uses nothing of its old namespace but what it is passed.
            assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNET) }, 0);
            ip(&format!("link add other index {number} type veth peer name end"));
            drop_privileges();
            assert!(Interface::by_name("v0").is_err());
            let mut grant = Grant::receive(&theirs, LIMIT).unwrap();
            // As if the device had a ring.
            assert_eq!(std::mem::replace(&mut grant.rx_ring, 400), 0);
            // Within the limit of locked memory that an ordinary user has.
            let options = XskOptions::granted(grant).memory(RegionOptions::new(1536).huge_pages(false));
            let queue = |_| QueueOptions::new().rx_ring(256).tx_ring(256).fill(256).cache(64);
            let mut xsk = Xsk::<KernelShared>::open(options, queue).unwrap();
            assert_eq!(xsk.pairs.iter().map(|(rx, _)| rx.posted()).collect::<Vec<_>>(), [500, 500]);
            // Sends back what comes by either queue, until the last frame. The peer sends each
            // frame until it is back, and sends many if this thread gets no CPU: those that the
            // ring has no room for are dropped.
            let mut over = false;
            until("the last frame", || {
                for (rx, tx) in &mut xsk.pairs {
                    rx.poll(|poll| {
                        tx.complete();
                        poll.receive(64, &mut |packet: Packet<KernelShared>| {
                            let last = packet.len() == LAST;
                            over |= tx.send(packet).is_ok() && last;
                        });
                        tx.flush();
                    });
                }
                over.then_some(())
            });
            until("completions", || {
                for (_, tx) in &mut xsk.pairs {
                    tx.complete();
                }
                xsk.pairs.iter().all(|(_, tx)| tx.outstanding() == 0).then_some(())
            });
        };
        let worker = std::thread::spawn(worker);
        // Until the worker has bound both sockets, the kernel has the frames.
        until("the first frame comes back", || {
            peer.offer(&frame(60, 1));
            peer.try_receive()
        });
        for len in (61..LAST).chain([LAST]) {
            let sent = frame(len, len as u64);
            until("a frame comes back", || {
                peer.offer(&sent);
                (0..100)
                    .find_map(|_| peer.try_receive().filter(|back| back.len() == len))
                    .map(|back| assert!(back == sent))
            });
        }
        worker.join().unwrap();
        helper.join().unwrap().unwrap();
        assert_eq!(Interface::by_name("v0").unwrap().programs, []);
    });
}

/// Proves XSK-4: a socket gets frames only when it is bound. Until then the kernel has them, and
/// none is lost.
#[test]
fn the_kernel_has_the_frames_until_the_worker_has_bound() {
    in_namespace(|| {
        veth("v0", "v1", 1, 1500);
        let (peer, kernel) = (Raw::new("v1"), Raw::new("v0"));
        let (ours, theirs) = UnixStream::pair().unwrap();
        let helper = send(Grant::open("v0", &HelperOptions::default()).unwrap(), ours);
        let grant = Grant::receive(&theirs, LIMIT).unwrap();
        for number in 0..50 {
            peer.send(&frame(60, number));
            assert_eq!(kernel.receive(), frame(60, number));
        }
        let open = |_| QueueOptions::new().cache(64);
        let mut xsk = Xsk::<KernelShared>::open(XskOptions::granted(grant).pages(2048), open).unwrap();
        helper.join().unwrap().unwrap();
        for number in 50..100 {
            peer.send(&frame(60, number));
            let (rx, _) = &mut xsk.pairs[0];
            let mut receive = |packet: Packet<_>| assert_eq!(packet.to_vec(), frame(60, number));
            until("the frame", || (rx.poll(|poll| poll.receive(64, &mut receive)) > 0).then_some(()));
        }
        assert_eq!(kernel.try_receive(), None);
        // A receive queue that ends alone leaves the map, into which the helper has put it.
        let (rx, _tx) = xsk.pairs.remove(0);
        drop(rx);
        peer.send(&frame(60, 100));
        assert_eq!(kernel.receive(), frame(60, 100));
    });
}

/// The errors about locked memory have the bytes of all queues and of each: the one before anything
/// is registered, and that of the kernel, which also counts what the user has locked before.
#[test]
fn a_worker_is_told_how_much_memory_a_queue_locks() {
    in_namespace(|| {
        veth("v0", "v1", 2, 1500);
        veth("w0", "w1", 2, 1500);
        // The usual limit. Nothing in the other tests needs more.
        let limit = Rlimit { current: Some(8 << 20), ..getrlimit(Resource::Memlock) };
        setrlimit(Resource::Memlock, limit).unwrap();
        let options = HelperOptions { queues: vec![0, 1], ..HelperOptions::default() };
        let [first, second, third] = ["v0", "w0", "v1"].map(|name| Grant::open(name, &options).unwrap());
        let worker = || {
            drop_privileges();
            let open = |grant, pages| {
                let options = XskOptions::granted(grant).memory(RegionOptions::new(pages).huge_pages(false));
                let queue = |_| QueueOptions::new().rx_ring(256).tx_ring(256).fill(256).cache(64);
                Xsk::<KernelShared>::open(options, queue)
            };
            let _holds = open(first, 1536).unwrap();
            let error = open(second, 1536).unwrap_err();
            assert!(matches!(error, XskError::Memlock { bytes: 6291456, queues: 2, limit: 8388608, .. }), "{error}");
            let says = "may not pin 6291456 bytes (3145728 for each of 2 queues) for the UMEM";
            assert!(error.to_string().contains(says), "{error}");
            let error = open(third, 4096).unwrap_err().to_string();
            assert!(
                error.starts_with("a UMEM of 16777216 bytes (8388608 for each of 2 queues) is more than"),
                "{error}"
            );
        };
        std::thread::scope(|scope| scope.spawn(worker).join().unwrap());
    });
}

/// A worker in another network namespace, which cannot see the interface, is woken when that is
/// deleted.
#[test]
fn a_worker_is_told_that_its_interface_is_gone() {
    in_namespace(|| {
        veth("v0", "v1", 1, 1500);
        let (ours, theirs) = UnixStream::pair().unwrap();
        let helper = send(Grant::open("v0", &HelperOptions::default()).unwrap(), ours);
        let (armed, is_armed) = std::sync::mpsc::channel();
        let worker = std::thread::spawn(move || {
            // SAFETY: this thread uses nothing of its old namespace but what it is passed.
            assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNET) }, 0);
            let options = XskOptions::granted(Grant::receive(&theirs, LIMIT).unwrap()).pages(2048);
            let mut xsk = Xsk::<KernelShared>::open(options, |_| QueueOptions::new().cache(64)).unwrap();
            let (rx, _) = &mut xsk.pairs[0];
            assert_eq!(rx.arm().unwrap(), Armed::Waits);
            armed.send(()).unwrap();
            // The time is only there so that a failure ends.
            let patience = Timespec { tv_sec: 60, tv_nsec: 0 };
            let woken = poll(&mut [PollFd::from_borrowed_fd(rx.as_fd(), PollFlags::IN)], Some(&patience));
            assert_eq!(woken.unwrap(), 1, "it sleeps on");
            rx.arm().unwrap_err().to_string()
        });
        is_armed.recv().unwrap();
        helper.join().unwrap().unwrap();
        ip("link delete v0");
        let error = worker.join().unwrap();
        assert!(error.starts_with("queue 0 of v0 has stopped: the interface is gone"), "{error}");
    });
}

/// What a helper sends is not trusted: a ring that no queue can be filled for is an error.
#[test]
fn a_helper_that_lies_about_the_ring() {
    in_namespace(|| {
        veth("v0", "v1", 1, 1500);
        let mut grant = Grant::open("v0", &HelperOptions::default()).unwrap();
        grant.rx_ring = u32::MAX;
        let error = Xsk::<KernelShared>::open(XskOptions::granted(grant), |_| QueueOptions::new()).unwrap_err();
        assert!(matches!(error, XskError::RingSize { ring: "fill", .. }), "{error}");
    });
}

/// A socket stays in the network namespace in which it was made. The interface's number is that of
/// another interface here, with fewer queues, which is not asked.
#[test]
fn a_socket_of_another_namespace() {
    in_namespace(|| {
        veth("v0", "v1", 2, 1500);
        let (number, peer) = (index("v0"), Raw::new("v1"));
        let (memory, umem) = memory::<KernelShared>(2048, &UmemOptions::new());
        let socket = rustix::net::socket(AddressFamily::XDP, SocketType::RAW, None).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // SAFETY: as above.
                assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNET) }, 0);
                ip(&format!("link add other index {number} type veth peer name end"));
                let mut pool = PoolOptions::new("sent").limit(8).build(memory.clone(), Some(umem.domain())).unwrap();
                let (_rx, mut tx) = umem.open(number, 1, memory, QueueOptions::new().socket(socket)).unwrap();
                let mut page = pool.alloc().unwrap();
                page.copy_from(0, &frame(60, 1)).unwrap();
                tx.send(Packet::new(page.freeze_range(0..60))).unwrap();
                tx.flush();
                assert_eq!(peer.receive(), frame(60, 1));
                until("completion", || (tx.complete() > 0).then_some(()));
            });
        });
    });
}
