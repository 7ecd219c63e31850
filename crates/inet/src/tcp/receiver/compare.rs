//! Clones of receivers, and their values, for the simulation's comparisons.

use std::fmt;

use super::Receiver;
use crate::tcp::Chunk;
use crate::tcp::budget::{Charges, Held};

impl<T: Chunk + fmt::Debug> Receiver<T> {
    /// A receiver with the same values, and a budget of its own, whose charges are `copied`. `None`
    /// if payload is out of order: no short way is taken then.
    pub(in crate::tcp) fn copy(&self, copied: &mut Vec<Charges>) -> Option<Self> {
        let assembler = self.assembler.copy_of_empty()?;
        let queue = self.queue.iter().map(Held::of_clone).collect();
        Some(Self { queue, assembler, budget: self.budget.copy(copied), ..*self })
    }

    /// All values.
    pub(in crate::tcp) fn values(&self, to: &mut impl fmt::Write) -> fmt::Result {
        let Self {
            nxt,
            edge,
            reduced_edge,
            out_of_buffers,
            cut_short,
            is_compact,
            scale,
            mss,
            capacity,
            most,
            queue,
            queued,
            assembler,
            budget,
            per_buffer,
            fin,
            finished,
            duplicate,
            round,
        } = self;
        let window = (nxt, edge, reduced_edge, scale, mss, capacity, most, round);
        let buffers = (out_of_buffers, cut_short, is_compact, per_buffer, budget.counts());
        write!(to, "{window:?} {buffers:?} {:?} {:?} ", (fin, finished, duplicate, queued), assembler.values())?;
        queue.iter().try_for_each(|held| write!(to, "{:?} ", **held))
    }
}
