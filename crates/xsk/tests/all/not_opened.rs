//! Queues that cannot be opened, although their socket could be: another socket of the UMEM has the
//! queue or another mode, or the kernel fails after it has bound the socket.
#![allow(clippy::unwrap_used)]

use netmem_pool::{KernelShared, RegionProvider};
use netmem_testing::namespace::{in_namespace, ip};
use netmem_testing::xsk::{index, memory, name, until, veth};
use netmem_xsk::{ClosedQueue, MixedHalves, Mode, QueueOptions, UmemOptions, XskError, XskRx, XskTx, reclaim};
use std::sync::Arc;
use std::thread;

fn options() -> QueueOptions {
    QueueOptions::new().fill(64)
}

fn free(memory: &Arc<RegionProvider<KernelShared>>) -> usize {
    std::iter::from_fn(|| memory.page()).collect::<Vec<_>>().len()
}

/// An interface with two queues.
fn interface() -> String {
    let (ours, theirs) = (name("o"), name("t"));
    veth(&ours, &theirs, 2, 1500);
    ours
}

/// The error names what is missing, at once and before the socket is bound.
#[test]
fn another_mode_than_that_of_the_umem() {
    in_namespace(|| {
        let ours = interface();
        let (memory, umem) = memory::<KernelShared>(256, &UmemOptions::new());
        let _first = umem.open(index(&ours), 0, memory.clone(), options()).unwrap();
        let refused = umem.open(index(&ours), 1, memory.clone(), options().mode(Mode::ZeroCopy)).unwrap_err();
        assert!(matches!(refused, XskError::Mode { queue: 1, mode: Mode::ZeroCopy, .. }), "{refused:?}");
        assert_eq!(free(&memory), 256 - 64);
        // The socket was not bound: its queue is free.
        let _second = umem.open(index(&ours), 1, memory, options().mode(Mode::Copy)).unwrap();
    });
}

/// A queue that has a socket of the same UMEM.
#[test]
fn a_queue_that_is_open() {
    in_namespace(|| {
        let ours = interface();
        let (memory, umem) = memory::<KernelShared>(256, &UmemOptions::new());
        let open = |queue| umem.open(index(&ours), queue, memory.clone(), options());
        let _both = (open(0).unwrap(), open(1).unwrap());
        for queue in [0, 1] {
            let refused = open(queue).unwrap_err();
            assert!(matches!(&refused, XskError::Busy { queue: of, .. } if *of == queue), "{refused:?}");
        }
    });
}

/// Two halves of different sockets are not closed.
#[test]
fn halves_of_different_sockets() {
    in_namespace(|| {
        let ours = interface();
        let (memory, umem) = memory::<KernelShared>(256, &UmemOptions::new());
        let open = |queue| umem.open(index(&ours), queue, memory.clone(), options()).unwrap();
        let ((rx, tx_of_first), (rx_of_second, tx)) = (open(0), open(1));
        let refused: MixedHalves = ClosedQueue::new(rx, tx).unwrap_err();
        let text = refused.to_string();
        assert!(text.contains("queue 0") && text.contains("queue 1"), "{text}");
        let (rx, tx): (XskRx, XskTx) = *refused.halves;
        assert_eq!((rx.posted(), rx.socket().queue(), tx.socket().queue()), (64, 0, 1));
        for (rx, tx) in [(rx, tx_of_first), (rx_of_second, tx)] {
            assert_eq!(ClosedQueue::new(rx, tx).unwrap().left(), 64);
        }
    });
}

/// Makes `getsockopt(XDP_OPTIONS)` of this thread fail with EIO, for good.
fn refuse_to_report_the_mode() {
    let word = |offset| libc::sock_filter { code: 0x20, jt: 0, jf: 0, k: offset };
    let equal = |value: u32, otherwise| libc::sock_filter { code: 0x15, jt: 0, jf: otherwise, k: value };
    let answer = |k| libc::sock_filter { code: 0x06, jt: 0, jf: 0, k };
    let getsockopt = u32::try_from(libc::SYS_getsockopt).unwrap();
    // The offsets in `struct seccomp_data`: the number of the call, and the low words of its second
    // and third argument.
    let mut filter = [
        word(0),
        equal(getsockopt, 5),
        word(24),
        equal(libc::SOL_XDP as u32, 3),
        word(32),
        equal(libc::XDP_OPTIONS as u32, 1),
        answer(libc::SECCOMP_RET_ERRNO | libc::EIO as u32),
        answer(libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program is there during the call. It applies to this thread only.
    let done = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program)
    };
    assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
}

/// The kernel has bound the socket and does not report its mode. It may have written to the chunks:
/// they are kept until the queue can be bound again.
#[test]
fn an_error_after_the_socket_is_bound() {
    in_namespace(|| {
        let ours = interface();
        let (memory, umem) = memory::<KernelShared>(256, &UmemOptions::new());
        let refused = thread::scope(|s| {
            let open = || {
                refuse_to_report_the_mode();
                umem.open(index(&ours), 0, memory.clone(), options()).unwrap_err()
            };
            s.spawn(open).join().unwrap()
        });
        assert!(matches!(refused, XskError::System { step: "ask for the mode of the socket", .. }), "{refused:?}");
        assert_eq!(free(&memory), 256 - 64);
        let queues = until("a free queue", || umem.open(index(&ours), 0, memory.clone(), options()).ok());
        assert_eq!(free(&memory), 256 - 64);
        drop(queues);
        ip(&format!("link delete {ours}"));
        reclaim();
        assert_eq!(free(&memory), 256);
    });
}
