//! Tasks of a stack's thread, one for each connection. A task runs when its socket has woken it.

use futures_util::stream::{FuturesUnordered, Stream};
use netmem::pool::Frag;
use netmem_inet::{Fragment, SocketError, TcpStream};
use netmem_measure::endpoint::Mem;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

/// The most tasks that may end in one run.
const TASKS: usize = 256;

pub(crate) type Conn = TcpStream<Mem>;
pub(crate) type Task<'a> = Pin<Box<dyn Future<Output = Result<(), SocketError>> + 'a>>;

/// See the module.
pub(crate) struct Tasks<'a> {
    tasks: FuturesUnordered<Task<'a>>,
    woken: Arc<Woken>,
    waker: Waker,
}

/// Whether a task was woken since the last run.
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

    /// Polls each task, woken or not. Calls `ended` with the result of each task that has ended,
    /// and keeps the others.
    pub(crate) fn poll_all(&mut self, mut ended: impl FnMut(Result<(), SocketError>)) {
        let mut cx = Context::from_waker(&self.waker);
        for mut task in std::mem::take(&mut self.tasks) {
            match task.as_mut().poll(&mut cx) {
                Poll::Ready(result) => ended(result),
                Poll::Pending => self.tasks.push(task),
            }
        }
    }

    /// Whether a task was woken since the last run began, or the last run left woken tasks.
    pub(crate) fn are_woken(&self) -> bool {
        self.woken.0.load(Ordering::Relaxed)
    }

    /// Whether there are no tasks.
    pub(crate) fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    /// Runs tasks that were woken, until none is left or [`TASKS`] have ended. Calls `ended` with
    /// the result of each task that has ended. Returns how many ended, plus one if other tasks are
    /// still woken.
    pub(crate) fn run(&mut self, mut ended: impl FnMut(Result<(), SocketError>)) -> usize {
        let mut cx = Context::from_waker(&self.waker);
        self.woken.0.store(false, Ordering::Relaxed);
        for n in 0..TASKS {
            match pin!(&mut self.tasks).poll_next(&mut cx) {
                Poll::Ready(Some(result)) => ended(result),
                Poll::Ready(None) => return n,
                Poll::Pending => return n + usize::from(self.are_woken()),
            }
        }
        self.woken.0.store(true, Ordering::Relaxed);
        TASKS + 1
    }
}

/// Waits for received fragments and stores them in `into`. Returns how many: at least one, or 0 at
/// the end of the stream.
pub(crate) async fn receive(stream: &mut Conn, into: &mut [Fragment<Mem>]) -> Result<usize, SocketError> {
    poll_fn(|cx| stream.poll_recv(cx, into)).await
}

/// Waits for room, and sends a fragment without a copy.
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
