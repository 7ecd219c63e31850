//! A receiver that holds no payload, in little memory.

use std::collections::VecDeque;

use super::Receiver;
use crate::tcp::assembler::Assembler;
use crate::tcp::budget::LocalBudget;
use crate::tcp::{Chunk, Seq};
use crate::time::Time;

/// A [`Receiver`] that holds no payload: all that was received is read, and nothing is out of
/// order.
#[derive(Clone, Debug)]
pub(in crate::tcp) struct IdleReceiver {
    nxt: Seq,
    edge: Seq,
    reduced_edge: Option<Seq>,
    out_of_buffers: u64,
    cut_short: bool,
    is_compact: bool,
    scale: u8,
    finished: bool,
    capacity: u32,
    most: u32,
    per_buffer: u32,
    fin: Option<Seq>,
    duplicate: Option<(Seq, Seq)>,
    budget: LocalBudget,
    round: (Time, u32),
}

impl<T: Chunk> Receiver<T> {
    /// The receiver in little memory. `None` if it holds payload.
    pub(in crate::tcp) fn idle(&self) -> Option<IdleReceiver> {
        self.is_empty().then(|| IdleReceiver {
            nxt: self.nxt,
            edge: self.edge,
            reduced_edge: self.reduced_edge,
            out_of_buffers: self.out_of_buffers,
            cut_short: self.cut_short,
            is_compact: self.is_compact,
            scale: self.scale,
            finished: self.finished,
            capacity: self.capacity,
            most: self.most,
            per_buffer: self.per_buffer,
            fin: self.fin,
            duplicate: self.duplicate,
            budget: self.budget.clone(),
            round: self.round,
        })
    }
}

impl IdleReceiver {
    /// Whether the peer's FIN was received, and everything before it.
    pub(in crate::tcp) fn is_finished(&self) -> bool {
        self.finished
    }

    /// The receiver, with its announced MSS.
    pub(in crate::tcp) fn wake<T: Chunk>(self, mss: u32) -> Receiver<T> {
        Receiver {
            nxt: self.nxt,
            edge: self.edge,
            reduced_edge: self.reduced_edge,
            out_of_buffers: self.out_of_buffers,
            cut_short: self.cut_short,
            is_compact: self.is_compact,
            scale: self.scale,
            mss,
            capacity: self.capacity,
            most: self.most,
            queue: VecDeque::new(),
            queued: 0,
            assembler: Assembler::new(),
            budget: self.budget,
            per_buffer: self.per_buffer,
            fin: self.fin,
            finished: self.finished,
            duplicate: self.duplicate,
            round: self.round,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tcp::testing::SharedBytes;

    fn values(receiver: &Receiver<SharedBytes>) -> String {
        let Receiver { nxt, edge, reduced_edge, out_of_buffers, cut_short, is_compact, scale, mss, .. } = receiver;
        let Receiver { capacity, most, queued, budget, per_buffer, fin, finished, duplicate, round, .. } = receiver;
        let window = (nxt, edge, reduced_edge, out_of_buffers, cut_short, is_compact, scale, mss, capacity, most);
        format!("{:?}", (window, queued, budget, per_buffer, fin, finished, duplicate, round))
    }

    #[test]
    fn a_receiver_that_was_idle_has_all_values() {
        let mut receiver = Receiver::new(1 << 20, false, 1460, LocalBudget::within(10, None));
        receiver.open(Seq(5), true, None);
        (receiver.reduced_edge, receiver.out_of_buffers) = (Some(Seq(7)), 8);
        (receiver.cut_short, receiver.is_compact, receiver.finished) = (true, true, true);
        (receiver.capacity, receiver.per_buffer, receiver.fin) = (70_000, 77, Some(Seq(9)));
        (receiver.duplicate, receiver.round) = (Some((Seq(1), Seq(2))), (Time::from_micros(3), 4));
        let woken = receiver.idle().unwrap().wake(1460);
        assert_eq!(values(&woken), values(&receiver));
        receiver.edge = Seq(100);
        receiver.fin = None;
        receiver.accept(receiver.nxt, 3, [SharedBytes::numbered(6, 3)].into_iter(), false);
        assert!(receiver.idle().is_none(), "something is to be read");
    }
}
