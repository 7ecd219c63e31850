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
//! | the same | nothing is chosen behind a segment | nothing can be sent behind it |

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

    /// Whether [`poll_transmit`](Self::poll_transmit) can send nothing, so that nothing is chosen.
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

    /// [`Connection::poll_transmit`] without its short ways.
    #[doc(hidden)]
    pub fn poll_transmit_generally(&mut self, now: Time, out: &mut impl Output<C>) -> Result<(), Full> {
        self.connection.transmit::<false>(now, out)
    }
}

#[cfg(test)]
mod tests {
    use super::super::sender::SendOptions;
    use super::super::testing::{End, Pair, Sent, stream};
    use super::super::{Config, DeliveryError, SegmentMeta, Unreachable};
    use crate::time::Time;
    use std::time::Duration;

    /// Has an end process a segment, and a clone of it in the general way, if there is a short one.
    /// Counts the segments that acknowledge nothing, those that acknowledge all, and those of them
    /// after which there is room to write again.
    fn deliver(to: &mut End, sent: &Sent, stripped: bool, now: Time, compared: &mut [u32; 3]) {
        let (header, meta) = (&sent.header, SegmentMeta::of(sent.len()));
        let payload = if stripped { Vec::new() } else { sent.payload.clone() };
        let expects = to.tcp.expects(header, meta, now);
        let clone = expects.then(|| to.tcp.cloned(payload.len() as u32)).flatten();
        let (answers, was_writable) = (header.ack != to.tcp.una(), to.tcp.is_writable());
        to.tcp.handle_segment(header, payload.clone(), meta, now);
        if let Some(mut clone) = clone {
            clone.handle_segment_generally(header, payload, meta, now);
            assert_eq!(to.tcp.values(), clone.values(), "{header:?}");
            compared[usize::from(answers)] += 1;
            compared[2] += u32::from(answers && !was_writable && to.tcp.is_writable());
        }
    }

    /// Messages in both directions. Some are lost, late, or dropped by the receiving queue.
    #[test]
    fn messages_have_the_same_effects_in_both_ways() {
        let mut compared = [0; 3];
        for seed in 0..400 {
            let mut random = fastrand::Rng::with_seed(seed);
            let send = SendOptions { send_buffer: [1 << 20, 300][random.usize(0..2)], ..SendOptions::default() };
            let config = Config { send, timestamps: random.bool(), sack: random.bool(), ..Config::default() };
            let mut pair = Pair::connected(&config, &config);
            let (mut link, mut sent) = (Vec::new(), 0);
            pair.a.tcp.set_nodelay(true);
            for _ in 0..200 {
                let from_a = random.bool();
                let end = if from_a { &mut pair.a } else { &mut pair.b };
                match random.u8(0..10) {
                    0..4 => {
                        let len = random.usize(1..300);
                        sent += end.tcp.send(stream(sent, len), false).map_or(0, |()| len);
                    }
                    4 | 5 => end.read(pair.now),
                    6 | 7 => {
                        let longest = 1 << random.u32(0..20);
                        pair.now += Duration::from_micros(random.u64(0..longest));
                    }
                    8 => {
                        let (what, una) = (DeliveryError::Unreachable(Unreachable::Network), end.tcp.una());
                        end.tcp.handle_delivery_error(what, Some(una), pair.now);
                    }
                    _ => end.tcp.handle_timeout(pair.now),
                }
                let out = end.output(pair.now).into_iter().filter(|_| random.u8(0..20) > 0);
                link.extend(out.map(|sent| (from_a, sent)));
                while !link.is_empty() && random.u8(0..4) > 0 {
                    let (from_a, sent) = link.remove(0);
                    let to = if from_a { &mut pair.b } else { &mut pair.a };
                    deliver(to, &sent, random.u8(0..30) == 0, pair.now, &mut compared);
                }
            }
        }
        assert!(compared.iter().all(|times| *times > 500), "{compared:?}");
    }
}
