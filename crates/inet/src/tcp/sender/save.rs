//! The state of a sender as plain numbers, with which it continues on another queue, or after a
//! restart.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::core::Sender;
use super::queue::Queue;
use super::scoreboard::Range;
use super::{Negotiated, SendOptions};
use crate::tcp::{Carrier, Seq};
use crate::time::Time;

/// The state of an established connection that is needed to continue sending, besides its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedSender {
    /// The number of SYN.
    pub iss: Seq,
    /// The first number that is not acknowledged.
    pub una: Seq,
    /// The number after the last number that was sent.
    pub nxt: Seq,
    /// Whether FIN is queued behind the payload.
    pub fin: bool,
    /// Whether FIN is acknowledged.
    pub fin_acked: bool,
    /// The largest segment that the peer accepts, in bytes of payload and options.
    pub mss: u16,
    /// Whether selective acknowledgements are used.
    pub sack: bool,
    /// Whether timestamps are used.
    pub timestamps: bool,
    /// Whether explicit congestion notification is used.
    pub ecn: bool,
    /// The peer's window in bytes.
    pub window: u32,
    /// The sequence number of the segment with that window.
    pub window_seq: Seq,
    /// The largest window that the peer announced, in bytes.
    pub max_window: u32,
    /// Bytes of payload and options that fit into the path MTU.
    pub max_payload: u32,
    /// The smoothed round-trip time; zero if it is not known.
    pub rtt: Duration,
}

impl<C: Carrier> Sender<C> {
    /// The state, or `None` before the handshake is complete.
    #[must_use]
    pub fn save(&self) -> Option<SavedSender> {
        let agreed = self.agreed.filter(|_| self.syn_acked)?;
        Some(SavedSender {
            iss: self.iss,
            una: self.una,
            nxt: self.nxt,
            fin: self.fin,
            fin_acked: self.is_fin_acked(),
            mss: self.path.peer(),
            sack: agreed.sack,
            timestamps: self.path.has_timestamps(),
            ecn: agreed.ecn,
            window: self.peer_window,
            window_seq: self.window_seq,
            max_window: self.max_window,
            max_payload: self.path.path(),
            rtt: Duration::from_micros(self.rtt.smoothed()),
        })
    }

    /// The payload in the queue, in order: from the first unacknowledged byte to the last that the
    /// user has queued.
    pub fn chunks(&self) -> impl Iterator<Item = &C::Sent> {
        self.queue.chunks()
    }

    /// A sender that continues from the state of another one that was [saved](Self::save). Numbers
    /// that were sent and not acknowledged count as in flight. The congestion window begins anew,
    /// because the path may be another one.
    #[must_use]
    pub fn restore(
        saved: &SavedSender,
        chunks: impl IntoIterator<Item = C::Sent>,
        options: SendOptions,
        now: Time,
    ) -> Self {
        let mut sender = Self::established_at(saved.iss, saved.max_payload, options, now);
        let SavedSender { una, nxt, mss, sack, timestamps, ecn, window, window_seq: seq, .. } = *saved;
        sender.max_window = saved.max_window;
        sender.establish(&Negotiated { mss, sack, timestamps, ecn, window, seq }, now);
        sender.start_at(una);
        // The payload ended before FIN.
        sender.queue = Queue::new(una - u32::from(saved.fin_acked));
        for chunk in chunks {
            sender.queue.push(chunk, true);
        }
        sender.fin = saved.fin;
        if !saved.rtt.is_zero() {
            sender.rtt.sample(u64::try_from(saved.rtt.as_micros()).unwrap_or(u64::MAX));
        }
        // The numbers in flight end at most where the queue ends.
        let most = sender.queue.end() + u32::from(saved.fin);
        let nxt = nxt.min(most);
        if nxt > una {
            let at = now.micros();
            sender.nxt = nxt;
            sender
                .scoreboard
                .push(Range { ever_retransmitted: true, ..Range::new(una, nxt, sender.segment_size(), at, 0) });
            sender.rack.sent(una, nxt, at);
            sender.waiting_since = Some(at);
            sender.arm_retransmission(at);
        }
        sender
    }
}
