//! What happens when time passes: timeouts, keep-alive, retries for buffers.
//!
//! Why one deadline: a stack has many connections and one timer wheel. `poll_timeout` is the
//! earliest of a connection's timers, and `handle_timeout` acts on all that have expired.

use std::time::Duration;

use super::connection::{Connection, Stall};
use super::state::State;
use super::{Carrier, Error, Flags};
use crate::time::Time;

/// The first and the longest interval at which a connection checks for free buffers.
const FIRST_RETRY: Duration = Duration::from_millis(10);
const LONGEST_RETRY: Duration = Duration::from_millis(500);

/// When a timer expires. [`Time::NEVER`] if it does not run.
#[inline]
fn at(timer: Option<Time>) -> Time {
    timer.unwrap_or(Time::NEVER)
}

impl<C: Carrier> Connection<C> {
    /// The time at which [`handle_timeout`](Self::handle_timeout) is to be called, `None` if no
    /// timer runs. Any other call can change it. Cost: constant.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Time> {
        let stall = self.stall.map(|stall| stall.at);
        if self.state == State::Closed {
            return stall;
        }
        let retry = self.retry_at.map(|(at, _)| at);
        let first = at(self.sender.poll_timeout()).min(at(self.acks.poll_timeout()));
        let rare = at(self.expires_at).min(at(retry)).min(at(self.keep_alive_at())).min(at(stall));
        let first = first.min(rare);
        (first < Time::NEVER).then_some(first)
    }

    /// Acts on the timers that have expired at `now`. Call it at the time of
    /// [`poll_timeout`](Self::poll_timeout). An earlier call does nothing.
    /// [`poll_transmit`](Self::poll_transmit) follows.
    pub fn handle_timeout(&mut self, now: Time) {
        record!(self, Step::Timeout(now));
        if let Some(stall) = self.stall.filter(|stall| stall.at <= now) {
            self.handle_stall(stall, now);
        }
        if self.state == State::Closed {
            return;
        }
        if self.expires_at.is_some_and(|until| until <= now) {
            return match self.state {
                State::FinWait2 | State::TimeWait => self.end(),
                _ => self.reset(self.soft_error.map_or(Error::TimedOut, Error::Unreachable), now),
            };
        }
        if self.sender.poll_timeout().is_some_and(|deadline| deadline <= now)
            && self.sender.handle_timeout(now).is_err()
        {
            return self.fail(self.soft_error.map_or(Error::TimedOut, Error::Unreachable));
        }
        self.acks.handle_timeout(now);
        // The next transmission announces the window, if the window has opened.
        if let Some((at, wait)) = &mut self.retry_at
            && *at <= now
        {
            *wait = (*wait * 2).min(LONGEST_RETRY);
            *at = now + *wait;
            self.receiver.retry_buffers();
        }
        if self.keep_alive_at().is_some_and(|at| at <= now) {
            self.send_keep_alive(now);
        }
    }

    /// Handles that the output has refused segments for as long as a retransmission timer runs.
    /// This counts as a retransmission if payload, SYN or FIN waits, so that the connection ends
    /// where nothing leaves any more (RFC 9293, section 3.8.3).
    fn handle_stall(&mut self, stall: Stall, now: Time) {
        if self.state == State::Closed {
            // The last segment is a reset, which is not repeated.
            (self.reply, self.stall) = (None, None);
            return;
        }
        let expired = stall.expired + u32::from(!self.sender.is_idle());
        if expired > self.sender.most_retries() {
            self.fail(self.soft_error.map_or(Error::TimedOut, Error::Unreachable));
            self.stall = None;
            return;
        }
        self.stall = Some(Stall { at: now + self.sender.backoff(expired), expired });
    }

    /// The time at which the next probe of an idle peer is due.
    fn keep_alive_at(&self) -> Option<Time> {
        let keep_alive = self.config.keep_alive?;
        let open = !matches!(self.state, State::SynSent | State::SynReceived | State::TimeWait);
        let at = if self.keep_alive_probes == 0 {
            self.last_received + keep_alive.idle
        } else {
            self.keep_alive_probed_at + keep_alive.interval
        };
        (open && self.sender.is_idle()).then_some(at)
    }

    /// Sends a probe: a segment without payload, whose number the peer has already acknowledged.
    /// The peer must answer it (RFC 9293, section 3.8.4).
    fn send_keep_alive(&mut self, now: Time) {
        if self.config.keep_alive.is_some_and(|keep_alive| self.keep_alive_probes >= keep_alive.probes) {
            return self.reset(self.soft_error.map_or(Error::TimedOut, Error::Unreachable), now);
        }
        self.keep_alive_probes += 1;
        self.keep_alive_probed_at = now;
        self.reply = Some(self.header(self.sender.next_seq() - 1, Flags::ACK, now).0);
    }

    /// Starts or stops the timer that checks for free buffers. It runs while a closed window waits
    /// for buffers: the user returns a buffer by dropping payload, which is no call of this
    /// connection.
    pub(super) fn schedule_buffer_retry(&mut self, now: Time) {
        // If the whole queue is out of buffers, that lasts for long, and each check costs a segment
        // of the peer.
        let first = if self.receiver.is_cut_short() { LONGEST_RETRY } else { FIRST_RETRY };
        self.retry_at = self.receiver.waits_for_buffers().then(|| self.retry_at.unwrap_or((now + first, first)));
    }
}
