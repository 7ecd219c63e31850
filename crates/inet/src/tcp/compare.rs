//! Clones of connections, on which the simulation runs both ways where there is a short one.
//!
//! Why: a short way leaves out what it has found to be without effect. On clones of a connection,
//! the short way and the general one are taken for the same call, and their values and their output
//! must be equal.
//!
//! | call | short way | when |
//! | --- | --- | --- |
//! | [`Connection::handle_segment`] | window and payload | the next bytes, and nothing is missing |
//! | the same | and the round trip of one range | all that was sent is acknowledged, too |
//! | [`Connection::poll_transmit`] | nothing is chosen | nothing can be sent to any output |

use std::fmt::{self, Write};

use super::budget::Charges;
use super::connection::Connection;
use super::{Carrier, Full, Header, Output, SegmentMeta};
use crate::time::Time;

impl<C> Connection<C>
where
    C: Carrier<Received: fmt::Debug, Sent: fmt::Debug, Ticket: Clone + fmt::Debug> + Clone + fmt::Debug,
{
    /// A connection with the same values, whose buffers are counted by itself. `None` if payload is
    /// out of order, when no short way is taken; and if fewer than `buffers` are free: whether
    /// payload can be copied together then depends on who else holds it, as a clone does.
    #[doc(hidden)]
    #[must_use]
    pub fn cloned(&self, buffers: u32) -> Option<Cloned<C>> {
        let mut copied = Vec::new();
        let receiver = self.receiver.copy(&mut copied)?;
        if receiver.budget().free() < buffers {
            return None;
        }
        let connection = Self {
            sender: self.sender.clone(),
            receiver,
            #[cfg(feature = "record")]
            recording: None,
            ..*self
        };
        Some(Cloned { connection, _copied: copied })
    }

    /// All values but the recording, as text.
    #[doc(hidden)]
    #[must_use]
    pub fn values(&self) -> String {
        let mut text = String::new();
        self.write_values(&mut text).unwrap_or_else(|_| unreachable!("a string has room"));
        text
    }

    fn write_values(&self, to: &mut impl Write) -> fmt::Result {
        let Self {
            state,
            config,
            sender,
            receiver,
            acks,
            irs,
            peer_mss,
            peer_scale,
            window_scaling,
            sack,
            ecn,
            sent_plain_syn,
            peer_clock,
            last_acknowledged,
            ecn_echo,
            events,
            error,
            soft_error,
            reply,
            challenge_limit,
            expires_at,
            orphan_progress,
            send_shutdown,
            recv_shutdown,
            closed,
            urgent,
            urgent_sent,
            retry_at,
            last_received,
            keep_alive_probes,
            keep_alive_probed_at,
            last_data_received,
            largest_segment,
            stall,
            #[cfg(feature = "record")]
                recording: _,
        } = self;
        let peer = (irs, peer_mss, peer_scale, window_scaling, sack, ecn, sent_plain_syn, peer_clock);
        let ends = (error, soft_error, expires_at, orphan_progress, send_shutdown, recv_shutdown, closed);
        let times = (last_received, keep_alive_probes, keep_alive_probed_at, last_data_received, retry_at);
        let rest = (last_acknowledged, ecn_echo, events, urgent, urgent_sent, largest_segment);
        write!(to, "{state:?} {peer:?} {ends:?} {times:?} {rest:?} {acks:?} {stall:?} ")?;
        write!(to, "{reply:?} {challenge_limit:?} {:?} {sender:?} ", config.max_payload)?;
        receiver.values(to)
    }

    /// Whether [`handle_segment`](Self::handle_segment) uses its short way.
    #[doc(hidden)]
    #[must_use]
    pub fn expects(&self, header: &Header, meta: SegmentMeta, now: Time) -> bool {
        self.is_expected(header, meta, now)
    }

    /// Whether [`poll_transmit`](Self::poll_transmit) uses its short way.
    #[doc(hidden)]
    #[must_use]
    pub fn sends_nothing(&self) -> bool {
        self.is_quiet()
    }
}

/// A clone of a connection. It has no user: the charges of the chunks that it has from the other
/// one are no charges of its budget.
#[doc(hidden)]
pub struct Cloned<C: Carrier> {
    connection: Connection<C>,
    /// What the budget of the other one counted.
    _copied: Vec<Charges>,
}

impl<C> Cloned<C>
where
    C: Carrier<Received: fmt::Debug, Sent: fmt::Debug, Ticket: Clone + fmt::Debug> + Clone + fmt::Debug,
{
    /// [`Connection::values`].
    #[must_use]
    pub fn values(&self) -> String {
        self.connection.values()
    }

    /// [`Connection::handle_segment`] of a segment that is [expected](Connection::expects), without
    /// the short way.
    pub fn handle_segment_generally(
        &mut self,
        header: &Header,
        payload: impl IntoIterator<Item = C::Received>,
        meta: SegmentMeta,
        now: Time,
    ) {
        self.connection.handle_synchronized(header, payload.into_iter(), meta, now);
    }

    /// [`Connection::poll_transmit`] without its short way.
    #[doc(hidden)]
    pub fn poll_transmit_generally(&mut self, now: Time, out: &mut impl Output<C>) -> Result<(), Full> {
        self.connection.transmit(false, now, out)
    }
}
