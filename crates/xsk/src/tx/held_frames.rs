//! Sent frames that have not completed.

use super::XskTx;
use crate::held_frame::{FrameHolder, HeldFrame};
use crate::umem_memory::UmemMemory;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

impl<M: UmemMemory> XskTx<M> {
    /// The chunks of frames that were queued and have not completed for `longer_than` or more: the
    /// oldest first. It is known for each whether the kernel has taken it from the TX ring.
    ///
    /// Each call is a sample, as in [`XskRx::held_frames`](crate::XskRx::held_frames). Call
    /// [`complete`](netmem_packet::TxQueue::complete) before, so that only frames are reported that
    /// the kernel has. If frames share a chunk, the time is that of the last completion of one of
    /// them.
    ///
    /// The queue does nothing for this in between but to mark each completion, in the store that
    /// counts it. Cost of a call: it reads two bytes for each chunk, and the TX ring. The first
    /// call allocates 16 bytes for each chunk.
    pub fn held_frames(&mut self, longer_than: Duration) -> Vec<HeldFrame> {
        let (now, layout) = (Instant::now(), self.layout);
        // A queue whose ring has an impossible index is stopped at the next flush.
        let pending: BTreeSet<u32> = match self.tx.pending_entries() {
            Ok(entries) => entries.filter_map(|desc| layout.chunk_of(desc.addr)).collect(),
            Err(_) => BTreeSet::new(),
        };
        let since = self.times.of(layout.chunks());
        let (interface, queue): (Arc<str>, _) = (self.socket.interface().into(), self.socket.queue());
        let mut held = Vec::new();
        self.out.sample(|chunk, out, completed| {
            let time = &mut since[chunk as usize];
            if !out {
                *time = None;
                return;
            }
            let since = time.filter(|_| !completed).unwrap_or(now);
            *time = Some(since);
            if now.duration_since(since) >= longer_than {
                let holder = if pending.contains(&chunk) { FrameHolder::TxRing } else { FrameHolder::Kernel };
                let (page, address) = (layout.page_of(chunk).0, u64::from(chunk) << layout.shift);
                held.push(HeldFrame { interface: interface.clone(), queue, page, address, since, holder });
            }
        });
        held.sort_by_key(|frame| frame.since);
        held
    }
}
