//! The orderly end of a stack: its peers learn that their connections end.
//!
//! Why dropping is not enough: a stack that is dropped sends nothing, and its peers wait until they
//! give up.

use crate::stack::payload::Transmit;
use crate::stack::source::Source;
use crate::stack::stack::Stack;
use crate::stack::transport::idle::Seen;
use crate::tcp::State;
use crate::time::Time;
use netmem_packet::{PollThenSleep, TxQueue, Wait};
use std::io;
use std::time::Duration;

/// How long the stack polls for work before it sleeps.
const POLL: Duration = Duration::from_micros(50);

impl<P, R, T> Stack<R, T>
where
    P: Transmit<T>,
    R: Source<Payload = P>,
    T: TxQueue<Mem = P::Mem> + Wait,
{
    /// Closes all sockets as if their users had dropped them: what was written is still sent, then
    /// FIN. Connections that were not accepted, or whose received payload was not read, are reset.
    /// Calls of streams that still exist return
    /// [`SocketError::StackGone`](crate::stack::SocketError::StackGone) as soon as their
    /// connections have ended.
    ///
    /// This only begins the end: poll the stack until [`is_closed`](Self::is_closed).
    /// [`finish`](Self::finish) does both.
    pub fn close(&mut self) {
        // What other threads have sent is not in their connections yet.
        self.close_remote();
        self.core.borrow_mut().close();
    }

    /// Whether nothing is left to be sent: each peer has acknowledged all payload and the end, and
    /// each datagram has left. Connections in TIME-WAIT, and those whose peers have not closed yet,
    /// do not count. Cost: linear in the connections.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        let core = self.core.borrow();
        let ended = |state| matches!(state, State::FinWait2 | State::TimeWait);
        let gone = |seen: &Seen<'_, P>| matches!(seen, Seen::Working(entry) if entry.connection.is_gone());
        core.tcp.connections.iter().all(|(_, seen)| ended(seen.state()) || gone(&seen))
            && !core.datagrams.has_work()
            && !core.datagrams.is_blocked()
            && core.resources.egress.loopback.is_empty()
            // A ring of another thread's socket has datagrams only while its port is signalled, or
            // the outbox has datagrams.
            && !self.has_remote_work()
    }

    /// Ends the stack in order: [closes](Self::close) all sockets, and drives the stack until all
    /// was sent and acknowledged, at most until `deadline`. Connections that are left then are
    /// reset. Returns how many.
    ///
    /// A program that only drops its stack sends nothing: its peers wait for what does not come.
    /// `now` is the clock of [`poll`](Self::poll). The thread sleeps while there is nothing to do.
    /// If the thread also drives the device, call `close`, and continue the program's own loop
    /// until `is_closed`.
    ///
    /// # Errors
    ///
    /// A queue has stopped before the end ([`Wait::arm`]), so that no more can be sent. Or the
    /// thread cannot wait for the queues, because the system is short of memory.
    pub fn finish(&mut self, deadline: Time, now: impl Fn() -> Time) -> io::Result<usize> {
        self.close();
        let mut pause = PollThenSleep::new(POLL);
        loop {
            let work = self.poll(now());
            if work == 0 && self.is_closed() {
                return Ok(0);
            }
            let present = now();
            if present >= deadline {
                return Ok(self.reset_all(present));
            }
            let next = self.poll_timeout().map_or(deadline, |next| next.min(deadline));
            pause.turn(work, &mut [self], Some(next.since(present)))?;
        }
    }

    /// Resets all connections that have not ended. Returns how many.
    fn reset_all(&mut self, now: Time) -> usize {
        let mut core = self.core.borrow_mut();
        let ended = |state| matches!(state, State::FinWait2 | State::TimeWait | State::Closed);
        let open = core.tcp.connections.ids(|seen| !ended(seen.state()));
        for &id in &open {
            core.orphan(id, true);
        }
        drop(core);
        self.poll(now);
        open.len()
    }
}
