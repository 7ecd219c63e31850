//! A client's connection, as a service sees it.
//!
//! The server may end and save its connections for another process. Then no call waits any more: bytes that the service
//! sends are kept ([`Client::send`], [`Client::write`]), and the next call that receives returns [`End::Leaves`], which
//! ends the task.

use crate::host::Mem;
use crate::host::tasks::Conn;
use netmem::Frag;
use netmem_inet::{Fragment, SocketError};
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Context, Poll};

/// The most bytes that are received and dropped after the last answer.
const MAX_REST: usize = 1 << 20;

/// The counters of a stack's connections.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    pub(super) connections: u64,
    /// Connections that ended with an error.
    pub(super) broken: u64,
    pub(super) received: u64,
    pub(super) sent: u64,
}

/// The data that the connections of a stack share.
#[derive(Clone, Default)]
pub(super) struct Shared {
    pub(super) counts: Rc<RefCell<Counts>>,
    /// The server is about to end, and its connections are saved for another process.
    pub(super) leaving: Rc<Cell<bool>>,
}

/// Why a service ended before its connection did.
#[derive(Clone, Copy, Debug, thiserror::Error)]
pub(super) enum End {
    /// The connection is saved for another process, with the state that the service has stored.
    #[error("the connection goes on elsewhere")]
    Leaves,
    #[error(transparent)]
    Broken(#[from] SocketError),
}

/// See the module.
pub(super) struct Client {
    stream: Conn,
    shared: Shared,
    /// Bytes that the service has sent and the stream has not accepted, because the server ends.
    kept: Vec<u8>,
    shut: bool,
}

impl Client {
    /// A new connection, or one that another process has saved. `kept` are the bytes that the other process kept;
    /// `shut` says whether it has shut down its direction. A new connection has neither.
    pub(super) fn new(stream: Conn, shared: Shared, kept: Vec<u8>, shut: bool) -> Self {
        Self { stream, shared, kept, shut }
    }

    /// The stream, the kept bytes, and whether the stream is shut down after these bytes.
    pub(super) fn into_parts(self) -> (Conn, Vec<u8>, bool) {
        (self.stream, self.kept, self.shut)
    }

    /// Whether there are kept bytes, which the stream has not accepted.
    pub(super) fn has_kept(&self) -> bool {
        !self.kept.is_empty()
    }

    /// Whether the service must end, with [`End::Leaves`]. For a service that sends and never receives.
    pub(super) fn leaves(&self) -> bool {
        self.shared.leaving.get()
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

    /// Waits for received fragments and stores them in `into`. Returns how many: at least one, or 0 at the end of the
    /// stream.
    pub(super) async fn receive(&mut self, into: &mut [Fragment<Mem>]) -> Result<usize, End> {
        let Self { stream, shared, .. } = self;
        let n = poll_fn(|cx| match shared.leaving.get() {
            true => Poll::Ready(Err(End::Leaves)),
            false => stream.poll_recv(cx, into).map_err(End::Broken),
        });
        let n = n.await?;
        let bytes: usize = into[..n].iter().map(Fragment::len).sum();
        shared.counts.borrow_mut().received += bytes as u64;
        Ok(n)
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
            self.wait(|stream, cx| stream.poll_writable(cx)).await?;
        }
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
            let Some(n) = self.wait(|stream, cx| stream.poll_write(cx, bytes)).await? else { continue };
            bytes = &bytes[n..];
            self.shared.counts.borrow_mut().sent += n as u64;
        }
        Ok(())
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
        let (mut place, mut taken) = ([Fragment::default()], 0);
        while taken < MAX_REST && self.receive(&mut place).await? > 0 {
            taken += std::mem::take(&mut place[0]).len();
        }
        Ok(())
    }

    /// Waits until `ready` has a result. Returns `None` if the server ends meanwhile.
    async fn wait<T>(
        &mut self,
        mut ready: impl FnMut(&mut Conn, &mut Context<'_>) -> Poll<Result<T, SocketError>>,
    ) -> Result<Option<T>, End> {
        let Self { stream, shared, .. } = self;
        poll_fn(|cx| match shared.leaving.get() {
            true => Poll::Ready(Ok(None)),
            false => ready(stream, cx).map(|outcome| Ok(Some(outcome?))),
        })
        .await
    }
}
