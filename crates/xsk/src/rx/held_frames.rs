//! Received frames that have not come back.

use super::XskRx;
use crate::held;
use crate::held_frame::{FrameHolder, HeldFrame};
use crate::umem_memory::UmemMemory;
use std::time::{Duration, Instant};

impl<M: UmemMemory> XskRx<M> {
    /// The frames that were received, and whose pages have not come back to the queue's pool for
    /// `longer_than` or more: the oldest first. Pages that the program has allocated from the pool
    /// are among them. So are those that the kernel may still have because a socket was closed
    /// while they were being sent, or posted: [`FrameHolder::Kernel`],
    /// [`Umem::held`](crate::Umem::held).
    ///
    /// Each call is a sample: call it once a second, for instance, when statistics are read. A
    /// frame is reported if it was out at a sample that is at least so long ago, and ever since. A
    /// page that the program drops and allocates again between two samples counts as one. Frames
    /// that were not polled, and chunks for the kernel to receive into, are not among them.
    ///
    /// The queue does nothing for this in between. Cost of a call: it reads a byte for each chunk
    /// and a cache line for each page of the region, allocates 9 bytes for each page, and costs
    /// what [`PagePool::each_in_flight`] costs: a list of the pool's idle pages, and a membarrier.
    /// The first call allocates 16 bytes for each chunk.
    ///
    /// Note: pages that are idle on other CPUs are reported, too, as long as they could not be
    /// reclaimed, because the kernel refused the barrier for instance.
    ///
    /// [`PagePool::each_in_flight`]: netmem_pool::PagePool::each_in_flight
    pub fn held_frames(&mut self, longer_than: Duration) -> Vec<HeldFrame> {
        let Some(pool) = &mut self.pool else { return Vec::new() };
        let (now, layout) = (Instant::now(), *self.umem.layout());
        let since = self.times.of(layout.chunks());
        let pages = self.umem.region().pages();
        // For each page, its values that are the queue's own: posted chunks, and parts of a page
        // that is being cut.
        let mut own = vec![0_u32; pages as usize];
        self.queue.posted.sample(|chunk, posted, received| {
            let time = &mut since[chunk as usize];
            if posted {
                *time = None;
                own[layout.page_of(chunk).0 as usize] += 1;
            } else if received {
                *time = Some(now);
            }
        });
        self.queue.split_pages().for_each(|page| own[page as usize] += 1);
        // What the kernel had of closed sockets of the UMEM, and may still have.
        let mut kept = vec![0_u32; pages as usize];
        held::each_count(self.umem.number(), |page, n| kept[page as usize] += n);
        let mut out = vec![None; pages as usize];
        pool.each_in_flight(self.umem.region(), |page, refs| {
            let i = page as usize;
            out[i] = match refs.saturating_sub(own[i]) {
                0 => None,
                others if others <= kept[i] => Some(FrameHolder::Kernel),
                _ => Some(FrameHolder::Program),
            };
        });
        let interface = self.socket.interface().into();
        let mut held = Vec::new();
        for (page, out) in (0..pages).zip(out) {
            let first = page * layout.per_page;
            let chunks = first..first + layout.per_page;
            let Some(holder) = out else {
                chunks.for_each(|chunk| since[chunk as usize] = None);
                continue;
            };
            // The chunk that was received last: of the others it is unknown whether they are back.
            let newest = chunks.clone().filter_map(|chunk| Some((since[chunk as usize]?, chunk))).max();
            let (time, chunk) = newest.unwrap_or((now, first));
            since[chunk as usize] = Some(time);
            if now.duration_since(time) >= longer_than {
                let address = u64::from(chunk) << layout.shift;
                let queue = self.socket.queue();
                let interface = std::sync::Arc::clone(&interface);
                held.push(HeldFrame { interface, queue, page, address, since: time, holder });
            }
        }
        held.sort_by_key(|frame| frame.since);
        held
    }
}
