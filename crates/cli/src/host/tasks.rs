//! Tasks of a stack's thread, one for each connection: they run when their socket has woken them.

use super::Mem;
use futures_util::stream::{FuturesUnordered, Stream};
use netmem::Frag;
use netmem_inet::{Fragment, SocketError, TcpStream};
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

/// Tasks that end in one run.
const TASKS: usize = 256;

pub(crate) type Conn = TcpStream<Mem>;
pub(crate) type Task<'a> = Pin<Box<dyn Future<Output = Result<(), SocketError>> + 'a>>;

/// See the module.
pub(crate) struct Tasks<'a> {
    tasks: FuturesUnordered<Task<'a>>,
    woken: Arc<Woken>,
    waker: Waker,
}

/// Whether a task was woken since the tasks were run.
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl<'a> Tasks<'a> {
    pub(crate) fn new() -> Self {
        let woken = Arc::new(Woken(AtomicBool::new(true)));
        Self { tasks: FuturesUnordered::new(), waker: Waker::from(Arc::clone(&woken)), woken }
    }

    /// Adds a task.
    pub(crate) fn push(&mut self, task: Task<'a>) {
        self.tasks.push(task);
        self.woken.0.store(true, Ordering::Relaxed);
    }

    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    /// Runs tasks that were woken, a bounded number of them, and tells how each ended. Returns how many ended, and one more if others are
    /// to be run.
    pub(crate) fn run(&mut self, mut ended: impl FnMut(Result<(), SocketError>)) -> usize {
        let mut cx = Context::from_waker(&self.waker);
        self.woken.0.store(false, Ordering::Relaxed);
        for n in 0..TASKS {
            match pin!(&mut self.tasks).poll_next(&mut cx) {
                Poll::Ready(Some(result)) => ended(result),
                Poll::Ready(None) => return n,
                Poll::Pending => return n + usize::from(self.woken.0.load(Ordering::Relaxed)),
            }
        }
        TASKS + 1
    }
}

/// The next received fragments: at least one, or none at the end of the stream.
pub(crate) async fn receive(stream: &mut Conn, into: &mut [Fragment<Mem>]) -> Result<usize, SocketError> {
    poll_fn(|cx| stream.poll_recv(cx, into)).await
}

/// Sends a fragment as it is, when there is room.
pub(crate) async fn send(stream: &mut Conn, mut fragment: Frag<Mem>, more: bool) -> Result<(), SocketError> {
    loop {
        match stream.send(fragment, more) {
            Ok(()) => return Ok(()),
            Err((SocketError::WouldBlock, back)) => fragment = back,
            Err((error, _)) => return Err(error),
        }
        poll_fn(|cx| stream.poll_writable(cx)).await?;
    }
}

/// Copies bytes and sends them, as there is room.
pub(crate) async fn write(stream: &mut Conn, mut bytes: &[u8]) -> Result<(), SocketError> {
    while !bytes.is_empty() {
        let n = poll_fn(|cx| stream.poll_write(cx, bytes)).await?;
        bytes = &bytes[n..];
    }
    Ok(())
}
