//! A queue that is opened again with a limit of locked memory that is just sufficient: the kernel
//! counts the memory of the closed socket for a while. In a process of its own, because a limit
//! applies to a process.
#![allow(clippy::unwrap_used)]

use netmem_pool::KernelShared;
use netmem_testing::namespace::{in_namespace, with_capabilities};
use netmem_testing::xsk::{index, memory, wire};
use netmem_xsk::{ClosedQueue, QueueOptions, UmemOptions, XskError};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::CapabilitySet;

const PAGES: usize = 512;

#[test]
fn a_queue_is_opened_again_within_the_limit() {
    in_namespace(|| {
        let (ours, _theirs) = wire(1500);
        let (memory, umem) = memory::<KernelShared>(PAGES, &UmemOptions::new());
        let options = || QueueOptions::new().fill(64);
        let bytes = (PAGES * memory.region().page_size()) as u64;
        let before = getrlimit(Resource::Memlock);
        let limit = |current| setrlimit(Resource::Memlock, Rlimit { current: Some(current), ..before }).unwrap();
        with_capabilities(CapabilitySet::NET_RAW | CapabilitySet::NET_ADMIN, || {
            limit(bytes - 1);
            let refused = umem.open(index(&ours), 0, memory.clone(), options()).unwrap_err();
            assert!(matches!(refused, XskError::Memlock { .. }), "{refused:?}");
            // The queue has a page besides, in which the kernel is asked whether a queue is free.
            limit(bytes + 4096);
            let (mut rx, mut tx) = umem.open(index(&ours), 0, memory.clone(), options()).unwrap();
            for round in 0..20 {
                let reopened = ClosedQueue::new(rx, tx).unwrap().reopen(options());
                (rx, tx) = reopened.unwrap_or_else(|error| panic!("round {round}: {:?}", error.source));
            }
        });
    });
}
