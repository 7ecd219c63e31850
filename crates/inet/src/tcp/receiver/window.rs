//! The window that the receiver announces, and when an update of it is due.
//!
//! Why it is not simply the free bytes: buffers are counted, not bytes, and one byte can occupy a
//! buffer. An edge that was announced is kept (RFC 9293, section 3.8.6), and small steps are not
//! announced (section 3.8.6.2.2).

use super::Receiver;
use crate::tcp::{Chunk, Seq};

impl<T: Chunk> Receiver<T> {
    /// The number of bytes from `nxt` on that could be promised now.
    pub(super) fn room(&self) -> u32 {
        if self.cut_short {
            return 0;
        }
        let free = self.budget.free();
        let buffers = free.saturating_mul(self.per_buffer);
        // If a segment would be admitted, the window has room for it.
        let buffers = if free > 0 || self.budget.used() == 0 { buffers.max(self.mss) } else { buffers };
        self.capacity.saturating_sub(self.queued).min(buffers)
    }

    /// The least number of bytes by which the edge moves: a segment, or half of what can be
    /// promised at most (avoidance of silly windows, RFC 9293, section 3.8.6.2.2). `room` bytes
    /// could be promised.
    fn least(&self, room: u32) -> u32 {
        let most = self.capacity.min(room + self.queued);
        self.mss.min(most / 2).max(1)
    }

    /// The number of bytes that the peer may send from `nxt` on, if the edge does not move.
    fn remaining(&self) -> u32 {
        match self.reduced_edge {
            None => self.edge - self.nxt,
            Some(announced) => u32::try_from(announced.distance(self.nxt)).unwrap_or(0).min(self.room()),
        }
    }

    /// The number of bytes by which the edge would move if an acknowledgement were sent now.
    #[inline]
    fn advance(&self, remaining: u32) -> u32 {
        let is_none = self.cannot_advance(remaining);
        debug_assert!(!is_none || self.advance_of_room(remaining) == 0, "{remaining} bytes remain");
        if is_none { 0 } else { self.advance_of_room(remaining) }
    }

    /// Whether what the user has read is less than the [least](Self::least) step, whatever is free.
    /// That is so in nearly all calls, and no buffers are counted then.
    #[inline]
    pub(super) fn cannot_advance(&self, remaining: u32) -> bool {
        let most = self.capacity.saturating_sub(self.queued).saturating_sub(remaining);
        // Less than half of the capacity is also less than half of what is promised and stored.
        most == 0 || most < self.mss.min(self.capacity / 2)
    }

    pub(super) fn advance_of_room(&self, remaining: u32) -> u32 {
        let room = self.room();
        room.checked_sub(remaining).filter(|advance| *advance >= self.least(room)).unwrap_or(0)
    }

    /// Whether a window update must be sent now: the window would become at least twice as large as
    /// the peer knows.
    pub(in crate::tcp) fn update_is_due(&self) -> bool {
        let remaining = self.remaining();
        // What the user has read admits less in nearly all calls, and counts no buffers.
        if self.capacity.saturating_sub(self.queued) < remaining.saturating_mul(2) {
            return false;
        }
        let advance = self.advance(remaining);
        advance > 0 && advance >= remaining && !self.finished
    }

    /// Whether the window is closed because no buffer is free. A returned buffer causes no call of
    /// this connection.
    pub(in crate::tcp) fn waits_for_buffers(&self) -> bool {
        let remaining = self.remaining();
        // The least step is a segment at most.
        if remaining >= self.mss.max(1) {
            return false;
        }
        let room = self.room();
        let least = self.least(room);
        remaining < least && room < least.min(self.capacity.saturating_sub(self.queued)) && !self.finished
    }

    /// Whether free buffers would make a window update necessary. If so, check again when buffers
    /// are returned.
    pub(in crate::tcp) fn is_buffer_limited(&self) -> bool {
        let promised = self.edge - self.nxt;
        let possible = self.capacity.saturating_sub(self.queued);
        !self.finished && possible >= promised.saturating_mul(2).max(1) && !self.update_is_due()
    }

    /// The window for a header that is sent now, and the edge that it promises: see
    /// [`note_promised`](Self::note_promised).
    pub(in crate::tcp) fn window(&self, syn: bool) -> (u16, Seq) {
        let shift = if syn { 0 } else { self.scale };
        let unit = 1 << shift;
        let remaining = self.remaining();
        let advance = self.advance(remaining);
        let open = remaining + advance;
        // Rounding down would withdraw promised bytes. If every window were rounded up, more than
        // the capacity would be promised.
        let most = self.capacity.saturating_sub(self.queued) + unit;
        let up = advance == 0 && self.reduced_edge.is_none() && open.next_multiple_of(unit) <= most;
        let units = (if up { open.div_ceil(unit) } else { open >> shift }).min(u32::from(u16::MAX));
        (units as u16, self.nxt + (units << shift))
    }

    /// Notes that a header was sent whose window promises `edge`.
    pub(in crate::tcp) fn note_promised(&mut self, edge: Seq) {
        self.reduced_edge = self.reduced_edge.and((edge < self.edge).then_some(edge));
        self.edge = self.edge.max(edge);
    }
}
