//! How a connection ends: FIN, a reset, a failure, TIME-WAIT.
//!
//! Why one file: each way out passes `end`, which drops the payload and reports the event. Nothing
//! else sets the state `Closed`. `timers` decides when a connection has waited long enough.

use super::connection::Connection;
use super::event::Events;
use super::state::State;
use super::{Carrier, Error, Flags, Header, Seq};
use crate::time::Time;

/// A connection that reuses the ports of one in TIME-WAIT begins this far after the last number of
/// the old one.
const REUSE_GAP: u32 = 1 << 16;

impl<C: Carrier> Connection<C> {
    /// Shuts the sending side down: FIN follows the queued payload. Payload is still received (half
    /// close).
    pub fn shutdown(&mut self) {
        record!(self, Step::Shutdown);
        self.finish();
    }

    fn finish(&mut self) {
        if self.send_shutdown || self.state == State::Closed {
            return;
        }
        self.send_shutdown = true;
        match self.state {
            State::SynSent => return self.end(),
            // The state FIN-WAIT-1 begins when the handshake is complete.
            State::SynReceived => {}
            State::CloseWait => self.state = State::LastAck,
            _ => self.state = State::FinWait1,
        }
        self.sender.finish();
    }

    /// Shuts the reading side down: after the queued payload, [`recv`](Self::recv) returns the end
    /// of the stream. TCP has no message for this, so that the peer does not learn of it. Payload
    /// that still arrives is acknowledged.
    pub fn shutdown_read(&mut self) {
        record!(self, Step::ShutdownRead);
        self.recv_shutdown = true;
    }

    /// Closes the connection for the user.
    ///
    /// Queued payload is sent, then FIN. If there is payload that the user has not read, the
    /// connection is reset instead: the peer must know that it was lost (RFC 9293, section 3.6.1).
    /// The connection is also reset if payload arrives later, or if the peer acknowledges nothing
    /// for [`Config::orphan`](super::Config::orphan).
    pub fn close(&mut self, now: Time) {
        record!(self, Step::Close(now));
        let unread = self.receiver.readable() > 0;
        self.closed = true;
        if unread && matches!(self.state, State::Established | State::FinWait1 | State::FinWait2 | State::CloseWait) {
            return self.reset(Error::Aborted, now);
        }
        self.receiver.clear();
        self.finish();
        let limit = match self.state {
            State::Closed | State::TimeWait => return,
            State::FinWait2 => self.config.fin_wait_2,
            _ => self.config.orphan,
        };
        self.expires_at.get_or_insert(now + limit);
        self.restart_orphan_progress();
    }

    /// Sets the progress that extends an orphan's time. If each acknowledged byte extended it, a
    /// peer could keep the orphan for months.
    pub(super) fn restart_orphan_progress(&mut self) {
        let step = (self.sender.end() - self.sender.una()) / 8;
        self.orphan_progress = (self.sender.una() + step.max(1), step.max(1));
    }

    /// Resets the connection.
    pub fn abort(&mut self, now: Time) {
        record!(self, Step::Abort(now));
        match self.state {
            State::Closed => {}
            State::SynSent | State::Closing | State::LastAck | State::TimeWait => self.fail(Error::Aborted),
            _ => self.reset(Error::Aborted, now),
        }
    }

    /// Ends the connection because its device is gone: nothing can be sent or received any more.
    /// [`poll_event`](Self::poll_event) follows.
    pub fn handle_device_gone(&mut self) {
        record!(self, Step::DeviceGone);
        if self.state != State::Closed {
            self.fail(Error::DeviceGone);
        }
    }

    /// Whether `syn` may begin a new connection with the same addresses and ports while this one is
    /// in TIME-WAIT. `syn` must be later by its timestamp (RFC 6191) or by its number. Returns the
    /// least initial number for this side.
    #[must_use]
    pub fn reused_by(&self, syn: &Header) -> Option<Seq> {
        let begins = syn.flags.has(Flags::SYN) && !syn.flags.has(Flags::ACK) && !syn.flags.has(Flags::RST);
        let by_number = self.receiver.nxt() < syn.seq;
        let later = match (&self.peer_clock, syn.options.timestamps) {
            (Some(clock), Some(stamps)) if stamps.value != clock.recent() => {
                0 < stamps.value.wrapping_sub(clock.recent()) as i32
            }
            _ => by_number,
        };
        (self.state == State::TimeWait && begins && later).then(|| self.sender.next_seq() + REUSE_GAP)
    }

    /// Ends TIME-WAIT, because a new connection with the same addresses and ports has begun
    /// ([`reused_by`] has allowed it). The user can still read what was received, and then the end
    /// of the stream.
    ///
    /// [`reused_by`]: Self::reused_by
    pub fn supersede(&mut self) {
        record!(self, Step::Supersede);
        if self.state == State::TimeWait {
            self.end();
        }
    }

    /// Enters TIME-WAIT: both sides sent FIN, and both were acknowledged. The last acknowledgement
    /// may have to be repeated.
    pub(super) fn time_wait(&mut self, now: Time) {
        self.state = State::TimeWait;
        self.expires_at = Some(now + self.config.time_wait);
    }

    /// Ends the connection because of `error`, and sends a reset to the peer.
    pub(super) fn reset(&mut self, error: Error, now: Time) {
        let (header, _) = self.header(self.sender.next_seq(), Flags::RST.with(Flags::ACK), now);
        self.fail(error);
        self.reply = Some(header);
    }

    /// Ends the connection because of `error`. Received payload can still be read, unless the user
    /// has closed the connection.
    pub(super) fn fail(&mut self, error: Error) {
        self.error = Some(error);
        self.end();
    }

    /// Ends the connection.
    pub(super) fn end(&mut self) {
        self.state = State::Closed;
        self.expires_at = None;
        self.reply = None;
        self.sender.clear();
        self.events.add(Events::CLOSED);
        if self.closed {
            self.receiver.clear();
        }
    }
}

#[cfg(test)]
mod tests;
