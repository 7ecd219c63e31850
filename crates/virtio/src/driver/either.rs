//! Receive queues whose frames have payload in device memory, as one trait: a queue of its own, and
//! one that is restarted in place.

use super::queues::EitherRx;
use super::split_rx::VirtioSplitRx;
use super::wait::QueueWait;
use netmem_packet::{EitherFrame, Packet, Poll, RxQueue, SplitFrame, SplitRxQueue};
use netmem_pool::PeerMemory;

impl<M: PeerMemory> SplitRxQueue for VirtioSplitRx<M> {
    type Mem = M;

    fn poll<R>(&mut self, f: impl FnOnce(&mut dyn FnMut(usize, &mut Vec<EitherFrame<M>>) -> usize) -> R) -> R {
        VirtioSplitRx::poll(self, |poll| {
            f(&mut |budget, frames| {
                poll.receive(budget, &mut |frame: SplitFrame<M>| frames.push(EitherFrame::Split(frame)))
            })
        })
    }
}

/// The queue as its last restart has left it. It is locked during a poll, so that a restart waits
/// for the end of the poll. A queue that has stopped has no frames.
impl<M: PeerMemory> SplitRxQueue for QueueWait<M> {
    type Mem = M;

    fn poll<R>(&mut self, f: impl FnOnce(&mut dyn FnMut(usize, &mut Vec<EitherFrame<M>>) -> usize) -> R) -> R {
        let mut queue = self.lock();
        match queue.as_deref_mut() {
            Some(EitherRx::Host(rx)) => rx.poll(|poll| {
                f(&mut |budget, frames| {
                    poll.receive(budget, &mut |packet: Packet<M>| frames.push(EitherFrame::Host(packet)))
                })
            }),
            Some(EitherRx::Split(rx)) => SplitRxQueue::poll(rx, f),
            Some(EitherRx::Stopped) | None => f(&mut |_, _| 0),
        }
    }
}
