//! A socket for tests, whose kernel is simulated by the test. Both sides of the four rings are in
//! memory of this process. The simulated kernel can write invalid values, which the real kernel
//! does not do.

#![allow(clippy::unwrap_used)]

use crate::if_xdp::Desc;
use crate::options::{Mode, UmemOptions};
use crate::receive::Receive;
use crate::ring::{Consumer, Producer, RingEntry, RingPointers};
use crate::rx::XskRx;
use crate::socket::{RxRings, TxRings, XskSocket};
use crate::sys::Mapping;
use crate::tx::XskTx;
use crate::umem::Umem;
use crate::wait_set::WaitSet;
use netmem_pool::{KernelShared, PagePool, PoolOptions, RegionOptions, RegionProvider};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The offsets of the parts of a fake ring.
const CONSUMER: usize = 64;
const FLAGS: usize = 128;
const ENTRIES: usize = 192;

/// The kernel's side of a ring.
#[derive(Clone, Copy)]
pub(crate) struct Indices<'a> {
    pub(crate) producer: &'a AtomicU32,
    pub(crate) consumer: &'a AtomicU32,
    pub(crate) flags: &'a AtomicU32,
}

pub(crate) struct Fake {
    pub(crate) rx: Option<XskRx>,
    pub(crate) tx: Option<XskTx>,
    pub(crate) umem: Umem<KernelShared>,
    pub(crate) memory: Arc<RegionProvider<KernelShared>>,
    /// Fill, completion, RX, TX.
    rings: [Mapping; 4],
    pub(crate) fill: Consumer<u64>,
    pub(crate) done: Producer<u64>,
    pub(crate) received: Producer<Desc>,
    pub(crate) sent: Consumer<Desc>,
}

fn file(len: usize) -> OwnedFd {
    let file = memfd_create("ring", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, len as u64).unwrap();
    file
}

fn pointers<E: RingEntry>(memory: &Mapping) -> RingPointers<E::Atomic> {
    // SAFETY: the mapping is that long.
    unsafe {
        RingPointers {
            producer: memory.at.cast(),
            consumer: memory.at.add(CONSUMER).cast(),
            flags: memory.at.add(FLAGS).cast(),
            entries: memory.at.add(ENTRIES).cast(),
        }
    }
}

/// A socket without queues.
pub(crate) fn socket(mode: Mode) -> Arc<XskSocket> {
    let rings = [(); 4].map(|()| Mapping::new(file(4096).as_fd(), 0, 4096).unwrap());
    Arc::new(XskSocket::fake(rings, file(0), mode))
}

impl Fake {
    /// A socket with rings of `size` entries, on memory of `pages` pages. The fill level is
    /// `level`.
    pub(crate) fn new(pages: usize, options: &UmemOptions, size: u32, level: u32) -> Self {
        let memory = RegionProvider::new(RegionOptions::new(pages).huge_pages(false).build::<KernelShared>().unwrap());
        let umem = Umem::new(memory.region().clone(), options).unwrap();
        let len = (ENTRIES + size as usize * size_of::<Desc>()).next_multiple_of(4096);
        let files = [(); 4].map(|()| file(len));
        let map = || [0, 1, 2, 3].map(|i: usize| Mapping::new(files[i].as_fd(), 0, len).unwrap());
        let (ours, theirs) = (map(), map());
        // SAFETY: both mappings are of the same files, which are long enough; the socket keeps
        // ours, and the fake its own.
        let (fill, done, rx, tx) = unsafe {
            (
                Producer::new(pointers::<u64>(&ours[0]), size),
                Consumer::new(pointers::<u64>(&ours[1]), size),
                Consumer::new(pointers::<Desc>(&ours[2]), size),
                Producer::new(pointers::<Desc>(&ours[3]), size),
            )
        };
        // SAFETY: as above.
        let (kernel_fill, kernel_done, received, sent) = unsafe {
            (
                Consumer::new(pointers::<u64>(&theirs[0]), size),
                Producer::new(pointers::<u64>(&theirs[1]), size),
                Producer::new(pointers::<Desc>(&theirs[2]), size),
                Consumer::new(pointers::<Desc>(&theirs[3]), size),
            )
        };
        // The descriptor is no socket and answers no call of one: the fake kernel is not called.
        let socket = Arc::new(XskSocket::fake(ours, file(0), Mode::Copy));
        let mut pool = PoolOptions::new("fake").build(memory.clone(), Some(umem.domain())).unwrap();
        let mut queue = Receive::new(&umem, RxRings { fill, rx }, level);
        pool.poll(|napi| queue.refill(napi));
        let waiting = || WaitSet::fake(file(0));
        let rx = Some(XskRx::new(pool, queue, waiting(), socket.clone(), memory.clone(), umem.clone()));
        let tx =
            Some(XskTx::new(umem.clone(), socket, TxRings { tx, completion: done }, waiting(), memory.clone(), None));
        Self { rx, tx, umem, memory, rings: theirs, fill: kernel_fill, done: kernel_done, received, sent }
    }

    pub(crate) fn rx(&mut self) -> &mut XskRx {
        self.rx.as_mut().unwrap()
    }

    pub(crate) fn tx(&mut self) -> &mut XskTx {
        self.tx.as_mut().unwrap()
    }

    /// The indices of a ring: 0 is fill, 1 completion, 2 RX, 3 TX.
    pub(crate) fn indices(&self, ring: usize) -> Indices<'_> {
        let pointers = pointers::<u64>(&self.rings[ring]);
        // SAFETY: mapped as long as this value.
        unsafe {
            Indices {
                producer: pointers.producer.as_ref(),
                consumer: pointers.consumer.as_ref(),
                flags: pointers.flags.as_ref(),
            }
        }
    }

    /// Pops a chunk from the fill ring.
    pub(crate) fn take_chunk(&mut self) -> u64 {
        assert!(self.fill.available(1).unwrap() > 0, "the fill ring is empty");
        let addr = self.fill.consume();
        self.fill.release();
        addr
    }

    /// Puts a descriptor into the RX ring.
    pub(crate) fn deliver(&mut self, addr: u64, len: u32, options: u32) {
        assert!(self.received.free(1).unwrap() > 0);
        self.received.push(Desc { addr, len, options });
        self.received.publish();
    }

    /// Pops a descriptor from the TX ring.
    pub(crate) fn take_sent(&mut self) -> Option<Desc> {
        (self.sent.available(1).unwrap() > 0).then(|| {
            let desc = self.sent.consume();
            self.sent.release();
            desc
        })
    }

    /// Puts an address into the completion ring.
    pub(crate) fn complete(&mut self, addr: u64) {
        assert!(self.done.free(1).unwrap() > 0);
        self.done.push(addr);
        self.done.publish();
    }

    pub(crate) fn pool(&self) -> PagePool<KernelShared> {
        PoolOptions::new("tx").build(self.memory.clone(), Some(self.umem.domain())).unwrap()
    }

    /// Sets or clears the flag of the TX ring by which the kernel asks for a system call.
    pub(crate) fn request_kicks(&self, ask: bool) {
        self.indices(3).flags.store(u32::from(ask), Ordering::Relaxed);
    }
}
