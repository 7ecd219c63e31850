//! The replay of a recording, with payload that is only counted.
//!
//! Why the segments are compared: a change of the code that changes what a peer sees is found by
//! old recordings.

use std::cell::Cell;
use std::rc::Rc;

use super::recording::{Recording, SentSegment, Step};
use super::{Accepted, Carrier, Chunk, Config, Connection, Full, Outgoing, Output, Ticket};

/// A replay differs from its recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("step {step}: a segment differs from the recorded one")]
pub struct Diverged {
    /// The number of the call, from 0.
    pub step: usize,
}

impl Recording {
    /// Repeats the calls. Returns the connection in its state after the last one.
    ///
    /// # Errors
    /// A segment of the replay differs from that of the recording: either the code has changed, or
    /// the connection met a limit that is not recorded.
    pub fn replay(&self) -> Result<Connection<Counted>, Diverged> {
        let config = Config { record: 0, ..self.config };
        let mut tcp = match &self.syn {
            Some(syn) => Connection::answer(syn, &config, self.start, None, self.now),
            None => Connection::connect(&config, self.start, None, self.now),
        };
        let (done, mut transmissions) = (Rc::new(Cell::new(0)), 0);
        for (n, step) in self.steps.iter().enumerate() {
            match step {
                Step::Segment { header, meta, chunks, now } => {
                    tcp.handle_segment(header, chunks.iter().map(|len| Length::new(*len)), *meta, *now);
                }
                Step::DeliveryError { error, seq, now } => {
                    tcp.handle_delivery_error(*error, *seq, *now);
                }
                Step::Transmit { now, offload, sent, done: at_end, full } => {
                    done.set(sent.first().map_or(*at_end, |segment| segment.done));
                    let mut comparison = Comparison {
                        sent,
                        offload: *offload,
                        at_end: *at_end,
                        done: &done,
                        transmissions: &mut transmissions,
                        same: true,
                    };
                    let was_full = tcp.poll_transmit(*now, &mut comparison).is_err();
                    if !comparison.same || !comparison.sent.is_empty() || was_full != *full {
                        return Err(Diverged { step: n });
                    }
                }
                Step::Timeout(now) => tcp.handle_timeout(*now),
                // A refused call is refused in the replay, too.
                Step::Send { len, more, joins } => drop(tcp.send(Length { len: *len, joins: *joins }, *more)),
                Step::Recv(now) => drop(tcp.recv(*now)),
                Step::MarkUrgent => tcp.mark_urgent(),
                Step::Shutdown => tcp.shutdown(),
                Step::ShutdownRead => tcp.shutdown_read(),
                Step::Close(now) => tcp.close(*now),
                Step::Abort(now) => tcp.abort(*now),
                Step::DeviceGone => tcp.handle_device_gone(),
                Step::Supersede => tcp.supersede(),
                Step::Evict => drop(tcp.evict()),
                Step::Nodelay(nodelay) => tcp.set_nodelay(*nodelay),
                Step::Cork(cork) => tcp.set_cork(*cork),
                Step::UserTimeout(timeout) => tcp.set_user_timeout(*timeout),
                Step::SendBuffer(bytes) => tcp.set_send_buffer(*bytes),
                Step::LowWater(bytes) => tcp.set_low_water(*bytes),
                Step::KeepAlive(keep_alive) => tcp.set_keep_alive(*keep_alive),
                Step::AckEvery(segments) => tcp.set_ack_every(*segments),
                Step::QuickAck(quick) => tcp.set_quick_ack(*quick),
                Step::MaxPayload(max_payload) => tcp.set_max_payload(*max_payload),
            }
        }
        Ok(tcp)
    }
}

/// The carrier of a replay, whose payload is only counted.
#[derive(Debug)]
pub struct Counted;

/// A number of bytes that occupy no memory.
#[derive(Clone, Copy, Debug)]
pub struct Length {
    len: u32,
    /// Whether this chunk continued the chunk before it.
    joins: bool,
}

impl Length {
    fn new(len: u32) -> Self {
        Self { len, joins: false }
    }
}

impl Chunk for Length {
    type Tail = ();

    fn continues(&self, next: &Self) -> bool {
        next.joins
    }

    fn join(&mut self, next: Self) {
        self.len += next.len;
    }

    fn len(&self) -> usize {
        self.len as usize
    }

    fn advance(&mut self, n: usize) {
        self.len -= n as u32;
    }

    fn truncate(&mut self, len: usize) {
        self.len = len as u32;
    }
}

/// A transmission of a replay. It is complete when it was complete in the recording.
#[derive(Debug)]
pub struct Numbered {
    number: u64,
    done: Rc<Cell<u64>>,
}

impl Ticket for Numbered {
    fn is_done(&self) -> bool {
        self.number < self.done.get()
    }
}

impl Carrier for Counted {
    type Received = Length;
    type Sent = Length;
    type Ticket = Numbered;
}

/// An output that compares the sent segments with the recording.
struct Comparison<'a> {
    sent: &'a [SentSegment],
    offload: usize,
    at_end: u64,
    done: &'a Rc<Cell<u64>>,
    transmissions: &'a mut u64,
    same: bool,
}

impl Output<Counted> for Comparison<'_> {
    fn max_payload(&self) -> usize {
        self.offload
    }

    fn transmit(&mut self, segment: Outgoing<'_, Counted>) -> Result<Accepted<Numbered>, Full> {
        // After the last recorded segment, either the ring was full, or the replay sends one
        // segment too many. The caller distinguishes these cases.
        let (sent, rest) = self.sent.split_first().ok_or(Full)?;
        // The ring may have had room for the first segments only.
        let cut = sent.len < segment.payload_len && sent.len > 0 && sent.len.is_multiple_of(segment.segment_size);
        self.same &= sent.header == *segment.header && (sent.len == segment.payload_len || cut);
        self.sent = rest;
        self.done.set(rest.first().map_or(self.at_end, |next| next.done));
        *self.transmissions += u64::from(sent.tracked);
        let len = sent.len.min(segment.payload_len);
        Ok(Accepted { ticket: Numbered { number: *self.transmissions, done: Rc::clone(self.done) }, len })
    }
}

#[cfg(test)]
mod tests;
