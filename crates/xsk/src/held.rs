//! Pages that the kernel may still read or write although their socket is closed.
//!
//! ```text
//!   a half of a socket ends ──► pages that the kernel has are kept
//!                                            │ the kernel lets the queue be bound again
//!                                            └──► they return
//! ```
//!
//! The kernel releases a socket's memory some time after the socket was closed, on a thread of its
//! own: the driver then lets go of the chunks that it has posted, and the frames that were being
//! sent are gone. It reports this in one way: another socket can be bound to the same queue, which
//! is refused (`EBUSY`) until then. So the pages are kept by queue, and the next socket that is
//! bound to the queue, of whichever UMEM, returns them.
//!
//! If no UMEM is left that would bind one, a socket without frames is bound for a moment to ask:
//! when the last handle of the UMEM ends, and in [`reclaim`]. No socket is ever bound again to a
//! queue whose interface was deleted. The kernel has unbound the sockets of such an interface: a
//! receive queue that ends later checks this at its own socket (`XskSocket::is_unbound`). For
//! queues that ended before, [`release_gone`] checks it.

use crate::binding::{Binding, Limits};
use crate::error::XskError;
use crate::ethtool;
use crate::layout::Layout;
use crate::options::{Mode, QueueOptions};
use crate::queue_key::{QueueAddress, QueueKey};
use crate::socket::{NotOpened, Retry, Unbound};
use crate::sys;
use crate::umem_memory::UmemMemory;
use netmem_pool::{Provider, RawPage, Region};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Pages that return when the kernel is done with them.
trait HeldPages: Send {
    fn release(self: Box<Self>);
    /// Pages of frames that were being sent.
    fn sent(&self) -> usize;
    /// Calls `f` for each page in a pool that goes on: the page's number, and its counts.
    fn each_count(&self, f: &mut dyn FnMut(u32, u32));
    /// Whether the memory is gone, and nothing is to be returned.
    fn is_gone(&self) -> bool;
}

/// Counts of pages, each with the page's number, that a transmit queue did not get back.
struct HeldSent<M: UmemMemory> {
    region: Arc<Region<M>>,
    counts: Vec<(u32, u32)>,
}

impl<M: UmemMemory> HeldPages for HeldSent<M> {
    fn release(self: Box<Self>) {
        for (page, n) in self.counts {
            // SAFETY: `XskTx` had so many counts of the page, and moved them to this list.
            unsafe { self.region.put(page, n) };
        }
    }

    fn sent(&self) -> usize {
        self.counts.len()
    }

    fn each_count(&self, f: &mut dyn FnMut(u32, u32)) {
        self.counts.iter().for_each(|&(page, n)| f(page, n));
    }

    fn is_gone(&self) -> bool {
        false
    }
}

/// Pages that a receive queue has put in quarantine. They do not keep the region.
struct HeldPosted<M: UmemMemory> {
    provider: Weak<dyn Provider<M>>,
    region: Weak<Region<M>>,
    pages: Vec<u32>,
}

impl<M: UmemMemory> HeldPosted<M> {
    fn new((provider, region): (&Arc<dyn Provider<M>>, &Arc<Region<M>>), pages: Vec<u32>) -> Box<Self> {
        Box::new(Self { provider: Arc::downgrade(provider), region: Arc::downgrade(region), pages })
    }
}

impl<M: UmemMemory> HeldPages for HeldPosted<M> {
    fn release(self: Box<Self>) {
        let (Some(provider), Some(region)) = (self.provider.upgrade(), self.region.upgrade()) else { return };
        for page in self.pages {
            // SAFETY: the page was in no use but the receive queue's, which put it in quarantine,
            // and the kernel writes to it no more. It is one of this provider: `Umem::open` has
            // checked that all of them are of this region.
            unsafe {
                let page: RawPage<M> = region.claim(page);
                provider.release(page);
            }
        }
    }

    fn sent(&self) -> usize {
        0
    }

    fn each_count(&self, _: &mut dyn FnMut(u32, u32)) {}

    fn is_gone(&self) -> bool {
        self.provider.strong_count() == 0
    }
}

struct HeldEntry {
    /// Later entries have larger numbers.
    number: u64,
    key: QueueKey,
    /// The UMEM, while it has handles.
    umem: Option<u64>,
    pages: Box<dyn HeldPages>,
}

static HELD: Mutex<Vec<HeldEntry>> = Mutex::new(Vec::new());
/// The number of the next entry. It is changed while `HELD` is locked.
static NEXT_ENTRY: AtomicU64 = AtomicU64::new(0);

fn held() -> MutexGuard<'static, Vec<HeldEntry>> {
    HELD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A number for a UMEM.
pub(crate) fn number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

fn keep(key: QueueKey, umem: u64, pages: Box<dyn HeldPages>) {
    let mut held = held();
    held.retain(|held| !held.pages.is_gone());
    // Relaxed: the lock orders the changes.
    let number = NEXT_ENTRY.fetch_add(1, Ordering::Relaxed);
    held.push(HeldEntry { number, key, umem: Some(umem), pages });
}

/// Keeps counts of pages, each with the page's number, that are being sent, or that a queue had
/// posted whose pool goes on.
pub(crate) fn keep_sent<M: UmemMemory>(key: QueueKey, umem: u64, region: &Arc<Region<M>>, counts: Vec<(u32, u32)>) {
    keep(key, umem, Box::new(HeldSent { region: region.clone(), counts }));
}

/// Remembers pages in quarantine, by their numbers.
pub(crate) fn keep_posted<M: UmemMemory>(
    key: QueueKey,
    umem: u64,
    memory: (&Arc<dyn Provider<M>>, &Arc<Region<M>>),
    pages: Vec<u32>,
) {
    if !pages.is_empty() {
        keep(key, umem, HeldPosted::new(memory, pages));
    }
}

/// Returns pages in quarantine, by their numbers, to their provider at once. The kernel is done
/// with them.
pub(crate) fn release_posted<M: UmemMemory>(memory: (&Arc<dyn Provider<M>>, &Arc<Region<M>>), pages: Vec<u32>) {
    HeldPosted::new(memory, pages).release();
}

/// Whether pages are kept for this queue.
pub(crate) fn any(key: QueueKey) -> bool {
    held().iter().any(|held| held.key == key)
}

/// The number of sent pages that are kept for a UMEM.
pub(crate) fn sent_of(umem: u64) -> usize {
    held().iter().filter(|held| held.umem == Some(umem)).map(|held| held.pages.sent()).sum()
}

/// Calls `f` for each page that is kept for a UMEM in a pool that goes on: the page's number, and
/// the counts that are kept. In `f`, the list is locked.
pub(crate) fn each_count(umem: u64, mut f: impl FnMut(u32, u32)) {
    held().iter().filter(|held| held.umem == Some(umem)).for_each(|held| held.pages.each_count(&mut f));
}

/// A socket was bound to this queue, and has it still: the kernel is done with all pages that were
/// kept for it.
pub(crate) fn released(key: QueueKey) {
    release_before(key, u64::MAX);
}

/// The kernel is done with the pages that were kept for this queue in entries below `end`.
fn release_before(key: QueueKey, end: u64) {
    let back: Vec<_> = held().extract_if(.., |held| held.key == key && held.number < end).collect();
    // Outside of the lock: the drop of a page can be user code.
    back.into_iter().for_each(|held| held.pages.release());
}

/// The queues of these entries, each once.
fn keys(of: impl Fn(&HeldEntry) -> bool) -> Vec<QueueKey> {
    let mut keys = Vec::new();
    for held in held().iter().filter(|held| of(held)) {
        if !keys.contains(&held.key) {
            keys.push(held.key);
        }
    }
    keys
}

/// Returns the pages of those of these queues that the kernel lets be bound, or whose interface is
/// gone.
fn release_free(keys: Vec<QueueKey>, retry: Retry) {
    release_if(keys, |key| is_free(key, retry));
}

/// Returns the pages of those of these queues that are free.
///
/// Invariant (*probed*): the entries that return were there before `is_free` was called. When it
/// answers, another thread may have opened the queue and ended it already, and the kernel then has
/// the pages of that entry:
///
/// ```text
///   this thread                     another thread
///   is_free(K): K can be bound
///                                   binds K, ends it, adds an entry of K
///   releases the entries of K
/// ```
fn release_if(keys: Vec<QueueKey>, is_free: impl Fn(QueueKey) -> bool) {
    for key in keys {
        let end = {
            let _held = held();
            NEXT_ENTRY.load(Ordering::Relaxed)
        };
        if is_free(key) {
            release_before(key, end);
        }
    }
}

/// The last handle of a UMEM has ended, and with it the last of its queues. Waits for the kernel to
/// let go of its sent pages, for half a second at most for each queue.
pub(crate) fn end(umem: u64) {
    let ended = keys(|held| held.umem == Some(umem) && held.pages.sent() > 0);
    held().iter_mut().filter(|held| held.umem == Some(umem)).for_each(|held| held.umem = None);
    release_free(ended, Retry::Patient);
}

/// Returns the pages of queues whose interface was deleted, or moved to another network namespace.
/// An ioctl for each queue for which pages are kept, and a few more system calls for each one whose
/// interface is gone.
pub(crate) fn release_gone() {
    let mut keys = keys(|held| !held.pages.is_gone());
    keys.retain(|key| ethtool::name(key.ifindex).is_none());
    release_free(keys, Retry::Once);
}

/// Whether a queue's interface was deleted, or moved to another network namespace, and the kernel
/// has unbound its sockets.
pub(crate) fn is_gone(key: QueueKey) -> bool {
    ethtool::name(key.ifindex).is_none() && is_free(key, Retry::Once)
}

/// Returns sent pages of queues whose UMEM is gone, if the kernel has released the queue meanwhile.
/// Returns the number of those that are still kept.
///
/// A frame that was sent can outlive its socket for as long as its receiver holds it. Its pages are
/// kept until another socket is bound to the queue, which [`Umem::open`](crate::Umem::open) does,
/// or until this function finds that one can be bound. For that it binds a socket for a moment,
/// which needs CAP_NET_RAW, and the network namespace of the interface. About ten system calls for
/// each queue. Pages of deleted interfaces return, too: those that were posted, and those that were
/// sent.
pub fn reclaim() -> usize {
    release_gone();
    let is_orphan = |held: &HeldEntry| held.umem.is_none() && held.pages.sent() > 0;
    release_free(keys(is_orphan), Retry::Once);
    held().iter().filter(|held| is_orphan(held)).map(|held| held.pages.sent()).sum()
}

/// Whether the kernel lets a queue be bound, or its interface is gone. False if this thread cannot
/// ask.
fn is_free(key: QueueKey, retry: Retry) -> bool {
    /// A UMEM that no frame is in.
    #[repr(align(4096))]
    struct Chunk([u8; 4096]);

    let Ok(fd) = sys::socket() else { return false };
    if sys::netns(fd.as_fd()).ok() != key.netns {
        return false;
    }
    // An interface that is being deleted has no name any more while the kernel still unbinds its
    // sockets. The attempt to bind waits for that.
    let name = ethtool::name(key.ifindex).unwrap_or_else(|| key.ifindex.to_string());
    let mut memory = Box::new(Chunk([0; 4096]));
    let options = QueueOptions::new().rx_ring(2).tx_ring(2).multi_buffer(false).mode(Mode::Copy);
    let binding = Binding::new(&options, &[], Limits::default(), 0);
    let bind = || {
        let step = "register the memory as a UMEM";
        sys::register(fd.as_fd(), memory.0.as_mut_ptr(), &Layout::ONE_CHUNK)
            .map_err(|source| XskError::System { step, source })?;
        let (unbound, _) = Unbound::new(fd, 2, &options)?;
        let address = QueueAddress { interface: name, ifindex: key.ifindex, queue: key.queue };
        unbound.bind(address, &options, &binding, None, retry)
    };
    match bind() {
        Ok(_) => true,
        Err(NotOpened { error, was_bound }) => {
            was_bound || matches!(error, XskError::NoInterface { .. } | XskError::NoQueue { .. })
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use netmem_pool::{KernelShared, PoolOptions, RegionOptions, RegionProvider};

    /// A queue is opened and ends again while another thread has just found that it can be bound:
    /// the pages of the new entry stay.
    #[test]
    fn an_entry_that_is_added_during_the_probe_stays() {
        let region = RegionOptions::new(4).huge_pages(false).build::<KernelShared>().unwrap();
        let memory = RegionProvider::new(region);
        let mut pool = PoolOptions::new("held").cache(0).build(memory.clone(), None).unwrap();
        let umem = number();
        // No interface of a test has this key.
        let key = QueueKey { netns: Some(u64::MAX), ifindex: 0, queue: 0 };
        let mut keep = || {
            let frag = pool.alloc().unwrap().freeze();
            let page = memory.region().index_of(&frag).unwrap();
            let _ = frag.into_count();
            keep_sent(key, umem, memory.region(), vec![(page, 1)]);
            page
        };
        keep();
        let keep = std::cell::RefCell::new(keep);
        let mut later = None;
        let added = std::cell::Cell::new(None);
        release_if(vec![key], |_| {
            added.set(Some((keep.borrow_mut())()));
            true
        });
        each_count(umem, |page, n| assert_eq!(later.replace((page, n)), None));
        assert_eq!(later, added.get().map(|page| (page, 1)));
        release_if(vec![key], |_| false);
        assert_eq!(sent_of(umem), 1);
        release_if(vec![key], |_| true);
        assert_eq!(sent_of(umem), 0);
    }
}
