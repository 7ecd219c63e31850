//! A client's connection, as a service sees it.
//!
//! Each wait has a time limit. A peer that sends nothing, or reads nothing, so loses its
//! connection.
//!
//! The server may end and save its connections for another process. Then no call waits any more:
//! bytes that the service sends are kept ([`Client::send`], [`Client::write`]), and the next call
//! that receives returns [`End::Leaves`], which ends the task.

use super::admission::Admitted;
use super::pressure::{Kept, Pressure, Progress};
use crate::host::tasks::Conn;
use crate::host::timers::{Alarm, Timers};
use netmem::pool::Frag;
use netmem_inet::{Fragment, SocketError, Time};
use netmem_measure::endpoint::Mem;
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

/// The most bytes that are received and dropped after the last answer.
const MAX_REST: usize = 1 << 20;

/// The counters of a stack's connections.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    pub(super) connections: u64,
    /// Connections that ended with an error.
    pub(super) broken: u64,
    /// Connections that were reset at once, because of a limit.
    pub(super) refused: u64,
    /// Connections that ended by [`End::Idle`].
    pub(super) idle: u64,
    /// Connections that ended by [`End::Late`].
    pub(super) late: u64,
    /// Connections that ended by [`End::Stopped`].
    pub(super) stopped: u64,
    pub(super) received: u64,
    pub(super) sent: u64,
}

impl Counts {
    pub(super) fn add(&mut self, other: &Self) {
        let Self { connections, broken, refused, idle, late, stopped, received, sent } = other;
        self.connections += connections;
        self.broken += broken;
        self.refused += refused;
        self.idle += idle;
        self.late += late;
        self.stopped += stopped;
        self.received += received;
        self.sent += sent;
    }
}

/// How long a connection may make the server wait.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// For a new request, or for the peer to read.
    pub(super) idle: Duration,
    /// For the rest of a request, in total.
    pub(super) request: Duration,
}

/// The data that the connections of a stack share.
#[derive(Clone)]
pub(super) struct Shared {
    pub(super) counts: Rc<RefCell<Counts>>,
    /// The server is about to end, and its connections are saved for another process.
    pub(super) leaving: Rc<Cell<bool>>,
    pub(super) timers: Timers,
    pub(super) patience: Patience,
    pub(super) pressure: Arc<Pressure>,
}

/// Why a service ended before its connection did.
#[derive(Clone, Copy, Debug, thiserror::Error)]
pub(super) enum End {
    /// The connection is saved for another process, with the state that the service has stored.
    #[error("the connection goes on elsewhere")]
    Leaves,
    /// The peer has sent no request, or read nothing, for too long.
    #[error("the connection was idle for too long")]
    Idle,
    /// The rest of a request did not come.
    #[error("the rest of a request did not come")]
    Late,
    /// The peer has stopped, and the connection kept pages that another one needed. See
    /// [`super::pressure`].
    #[error("the peer stopped, and kept pages")]
    Stopped,
    #[error(transparent)]
    Broken(#[from] SocketError),
}

/// What a service waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Awaited {
    /// A new request, or any bytes of a service without requests.
    Request,
    /// The rest of a request.
    Rest,
    /// The rest of a value, of which a part is in pages of the store.
    Value,
}

/// See the module.
pub(super) struct Client {
    stream: Conn,
    shared: Shared,
    alarm: Alarm,
    /// How long the server has waited for the present request.
    waited: Duration,
    /// The last round that this connection has answered.
    round: u64,
    progress: Progress,
    /// Pages of the store were sent, and not all that was sent was acknowledged when last seen.
    by_reference: bool,
    /// Bytes that the service has sent and the stream has not accepted, because the server ends.
    kept: Vec<u8>,
    shut: bool,
    /// Counts the connection.
    _admitted: Admitted,
}

impl Client {
    /// A new connection, or one that another process has saved. `kept` are the bytes that the other
    /// process kept; `shut` is set if it has shut down its direction. A new connection has
    /// neither.
    pub(super) fn new(stream: Conn, shared: Shared, admitted: Admitted, kept: Vec<u8>, shut: bool) -> Self {
        let (alarm, round) = (shared.timers.alarm(), shared.pressure.round());
        let progress = Progress::default();
        Self {
            stream,
            shared,
            alarm,
            waited: Duration::ZERO,
            round,
            progress,
            by_reference: false,
            kept,
            shut,
            _admitted: admitted,
        }
    }

    /// The stream, the kept bytes, and whether the stream is shut down after these bytes.
    pub(super) fn into_parts(self) -> (Conn, Vec<u8>, bool) {
        (self.stream, self.kept, self.shut)
    }

    /// Ends a connection because of its peer, and counts why. A peer that has not read what was
    /// sent to it gets a reset: it is not waited for any longer.
    pub(super) fn end(self, end: End) {
        let mut counts = self.shared.counts.borrow_mut();
        match end {
            End::Idle => counts.idle += 1,
            End::Late => counts.late += 1,
            End::Stopped => counts.stopped += 1,
            End::Leaves | End::Broken(_) => {}
        }
        drop(counts);
        if out(&self.stream).1 > 0 {
            self.stream.abort();
        }
    }

    /// Whether there are kept bytes, which the stream has not accepted.
    pub(super) fn has_kept(&self) -> bool {
        !self.kept.is_empty()
    }

    /// Whether the service must end, with [`End::Leaves`]. For a service that sends and never
    /// receives.
    pub(super) fn leaves(&self) -> bool {
        self.shared.leaving.get()
    }

    /// The pages that the connections of the server keep.
    pub(super) fn pressure(&self) -> &Pressure {
        &self.shared.pressure
    }

    /// Counts a request whose rest did not come, for a service that answers it.
    pub(super) fn count_late(&self) {
        self.shared.counts.borrow_mut().late += 1;
    }

    /// The present time of the stack's thread.
    pub(super) fn now(&self) -> Time {
        self.shared.timers.now()
    }

    /// Sends the bytes that another process kept.
    pub(super) async fn resume(&mut self) -> Result<(), End> {
        let kept = std::mem::take(&mut self.kept);
        self.write(&kept).await?;
        if self.shut {
            self.shutdown();
        }
        Ok(())
    }

    /// Waits for received fragments and stores them in `into`. Returns how many: at least one, or 0
    /// at the end of the stream.
    pub(super) async fn receive(&mut self, into: &mut [Fragment<Mem>], awaited: Awaited) -> Result<usize, End> {
        let Patience { idle, request } = self.shared.patience;
        let begin = self.now();
        let limit = match awaited {
            Awaited::Request => {
                self.request_ends();
                idle
            }
            Awaited::Rest | Awaited::Value => request.saturating_sub(self.waited),
        };
        let n = self.wait(awaited, limit, |stream, cx| stream.poll_recv(cx, into)).await;
        // The time before a request is not the request's.
        if awaited != Awaited::Request {
            self.waited += self.now().since(begin);
        }
        let n = n?.ok_or(End::Leaves)?;
        let bytes: usize = into[..n].iter().map(Fragment::len).sum();
        self.shared.counts.borrow_mut().received += bytes as u64;
        Ok(n)
    }

    /// A request is complete: the time limit of the next one begins.
    pub(super) fn request_ends(&mut self) {
        self.waited = Duration::ZERO;
        self.progress.value_ends();
    }

    /// Waits for room, and sends a fragment without a copy.
    pub(super) async fn send(&mut self, mut fragment: Frag<Mem>, more: bool) -> Result<(), End> {
        let len = fragment.len() as u64;
        loop {
            if self.leaves() {
                self.kept.extend_from_slice(&fragment);
                return Ok(());
            }
            match self.stream.send(fragment, more) {
                Ok(()) => break,
                Err((SocketError::WouldBlock, back)) => fragment = back,
                Err((error, _)) => return Err(error.into()),
            }
            self.wait_for_room(|stream, cx| stream.poll_writable(cx)).await?;
        }
        self.by_reference = true;
        self.shared.counts.borrow_mut().sent += len;
        Ok(())
    }

    /// Waits for room, copies the bytes and sends them.
    pub(super) async fn write(&mut self, mut bytes: &[u8]) -> Result<(), End> {
        while !bytes.is_empty() {
            if self.leaves() {
                self.kept.extend_from_slice(bytes);
                return Ok(());
            }
            let Some(n) = self.wait_for_room(|stream, cx| stream.poll_write(cx, bytes)).await? else { continue };
            bytes = &bytes[n..];
            self.shared.counts.borrow_mut().sent += n as u64;
        }
        Ok(())
    }

    /// Waits until the peer has acknowledged all that was sent, or the server ends.
    pub(super) async fn deliver(&mut self) -> Result<(), End> {
        if self.shut {
            return Ok(());
        }
        // A send buffer of one byte has room when nothing is in it.
        self.stream.set_send_buffer(1);
        self.wait_for_room(|stream, cx| stream.poll_writable(cx)).await.map(|_| ())
    }

    /// Lets a time pass, for a service that waits for pages.
    pub(super) async fn pause(&mut self, time: Duration) -> Result<(), End> {
        // The time does not count as the peer's.
        self.progress.value_ends();
        let end = self.now() + time;
        poll_fn(|cx| {
            if self.leaves() {
                return Poll::Ready(Err(End::Leaves));
            }
            self.answer_round(false)?;
            if self.alarm.is_due(end, cx) { Poll::Ready(Ok(())) } else { Poll::Pending }
        })
        .await
    }

    /// Shuts down the sending direction, after the kept bytes.
    pub(super) fn shutdown(&mut self) {
        self.shut = true;
        if self.kept.is_empty() {
            self.stream.shutdown();
        }
    }

    /// Ends a connection after its last answer. Bytes that the client still sends are received and
    /// dropped, up to a bound: if unread data were left, TCP would reset the connection, and the
    /// client might lose the answer.
    pub(super) async fn finish(&mut self) -> Result<(), End> {
        self.shutdown();
        self.request_ends();
        let (mut place, mut taken) = ([Fragment::default()], 0);
        while taken < MAX_REST {
            match self.receive(&mut place, Awaited::Rest).await {
                Ok(0) | Err(End::Late) => break,
                Ok(_) => taken += std::mem::take(&mut place[0]).len(),
                Err(end) => return Err(end),
            }
        }
        Ok(())
    }

    async fn wait_for_room<T>(
        &mut self,
        ready: impl FnMut(&mut Conn, &mut Context<'_>) -> Poll<Result<T, SocketError>>,
    ) -> Result<Option<T>, End> {
        self.wait(Awaited::Request, self.shared.patience.idle, ready).await
    }

    /// Waits until `ready` has a result, but not longer than `limit`. Returns `None` if the server
    /// ends meanwhile.
    async fn wait<T>(
        &mut self,
        awaited: Awaited,
        limit: Duration,
        mut ready: impl FnMut(&mut Conn, &mut Context<'_>) -> Poll<Result<T, SocketError>>,
    ) -> Result<Option<T>, End> {
        let mut deadline = self.now() + limit;
        let mut before = None;
        poll_fn(|cx| {
            if self.leaves() {
                return Poll::Ready(Ok(None));
            }
            if let Poll::Ready(outcome) = ready(&mut self.stream, cx) {
                return Poll::Ready(outcome.map(Some).map_err(End::Broken));
            }
            self.answer_round(awaited == Awaited::Value)?;
            while self.alarm.is_due(deadline, cx) {
                if awaited != Awaited::Request {
                    return Poll::Ready(Err(End::Late));
                }
                // A peer that still reads is not idle.
                let (delivered, out) = out(&self.stream);
                if out == 0 || before == Some(delivered) {
                    return Poll::Ready(Err(End::Idle));
                }
                before = Some(delivered);
                deadline = self.now() + limit;
            }
            Poll::Pending
        })
        .await
    }

    /// Answers a round of [`Pressure`], if one was begun since the last call.
    fn answer_round(&mut self, has_value: bool) -> Result<(), End> {
        let round = self.shared.pressure.round();
        if round == self.round {
            return Ok(());
        }
        self.round = round;
        let (now, (delivered, out)) = (self.now(), out(&self.stream));
        self.by_reference &= out > 0;
        // Copied answers are in the stack's pages.
        let sent = self.progress.sent(now, delivered, if self.by_reference { out } else { 0 });
        let value = if has_value { self.progress.value(now) } else { Kept::Nothing };
        if (sent, value) != (Kept::Nothing, Kept::Nothing) {
            // Also if the connection ends now: its pages are free only after that.
            self.shared.pressure.keep(round);
        }
        if sent == Kept::Stopped || value == Kept::Stopped { Err(End::Stopped) } else { Ok(()) }
    }
}

/// Segments that the peer has acknowledged since the connection began, and segments that it has
/// not.
fn out(stream: &Conn) -> (u32, u32) {
    let Some(info) = stream.info() else { return (0, 0) };
    let unsent = info.send.unsent.div_ceil(info.send.segment_size.max(1) as usize);
    (info.send.delivered, info.send.unacked.saturating_add(u32::try_from(unsent).unwrap_or(u32::MAX)))
}
