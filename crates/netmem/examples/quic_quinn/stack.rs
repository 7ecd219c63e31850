//! The stack, on threads of its own or as a task of quinn's runtime, and the socket that quinn has
//! of it.

use anyhow::bail;
use netmem::host::{Behind, Opened, Queue};
use netmem::net::{RxQueue, TxQueue, Wait};
use netmem::pool::Mapped;
use netmem::tcp::remote::Sockets;
use netmem::tcp::tokio::drive;
use netmem::tcp::{StackOptions, StackWaker, Time};
use quinn::AsyncUdpSocket;
use std::future::poll_fn;
use std::io::Read;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// How long a stack has at the end, to send what is in its rings.
const END: Duration = Duration::from_secs(1);

/// What other threads use of a stack.
type Handles<M> = (Sockets<M>, StackWaker<M>);

/// Drives a queue's stack on this thread, until `stop` is set.
fn run<R, T, D>(queue: Queue<R, T, D>, opened: &mpsc::Sender<Handles<R::Mem>>, stop: &AtomicBool) -> anyhow::Result<()>
where
    R: RxQueue<Mem: Mapped> + Wait,
    T: TxQueue<Mem = R::Mem> + Wait,
    D: Behind,
{
    let mut stack = queue.start(options())?;
    opened.send((stack.stack().remote(), stack.stack().waker()))?;
    while !stop.load(Ordering::Relaxed) {
        let work = stack.poll();
        stack.pause(work, None)?;
    }
    // What is in the rings leaves.
    stack.finish(END)?;
    Ok(())
}

/// Runs `user` with a socket that is bound to `local`, while each queue has a thread.
pub(crate) fn with_socket<R, T, D>(
    opened: Opened<R::Mem, Queue<R, T, D>>,
    local: SocketAddr,
    user: impl FnOnce(Arc<dyn AsyncUdpSocket>) -> anyhow::Result<()>,
) -> anyhow::Result<()>
where
    R: RxQueue<Mem: Mapped> + Wait + Send,
    T: TxQueue<Mem = R::Mem> + Wait + Send,
    D: Behind,
{
    let (stop, (opens, handles)) = (AtomicBool::new(false), mpsc::channel());
    thread::scope(|scope| {
        let start = |queue| {
            let (opens, stop) = (opens.clone(), &stop);
            scope.spawn(move || run(queue, &opens, stop))
        };
        let stacks: Vec<_> = opened.queues.into_iter().map(start).collect();
        drop(opens);
        // A thread that could not start has no handles, and says why at the end.
        let handles: Vec<_> = handles.iter().take(stacks.len()).collect();
        let used = handles.first().map_or(Ok(()), |(sockets, _)| {
            // Datagrams that arrive by another queue are handed over.
            let socket = sockets.bind(local);
            let bound = super::ends::runtime()?.block_on(poll_fn(|cx| socket.poll_bound(cx)));
            bound?;
            user(Arc::new(socket))
        });
        stop.store(true, Ordering::Relaxed);
        handles.iter().for_each(|(_, waker)| waker.wake());
        for stack in stacks {
            stack.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
        used
    })
}

/// Runs `user` on a runtime of this thread, with a socket that is bound to `local`. A task of the
/// same runtime drives the stack: nothing is woken by system calls while there is work.
pub(crate) fn with_task<R, T, D, F>(
    opened: Opened<R::Mem, Queue<R, T, D>>,
    local: SocketAddr,
    user: impl FnOnce(Arc<dyn AsyncUdpSocket>) -> F,
) -> anyhow::Result<()>
where
    R: RxQueue<Mem: Mapped> + Wait,
    T: TxQueue<Mem = R::Mem> + Wait,
    D: Behind,
    F: Future<Output = anyhow::Result<()>>,
{
    let mut queues = opened.queues.into_iter();
    let (Some(queue), None) = (queues.next(), queues.next()) else { bail!("a task drives one queue") };
    let beginning = Instant::now();
    let now = || Time::ZERO + beginning.elapsed();
    let (mut stack, device) = queue.apart(options(), now())?;
    let socket = stack.remote().bind(local);
    super::ends::runtime()?.block_on(async {
        tokio::select! {
            driven = drive(&mut stack, now) => Ok(driven?),
            used = async {
                poll_fn(|cx| socket.poll_bound(cx)).await?;
                user(Arc::new(socket)).await
            } => used,
        }
    })?;
    stack.finish(now() + END, now)?;
    drop((stack, device));
    Ok(())
}

/// A socket for datagrams holds a quarter of the pages: here 512, as many datagrams or more.
fn options() -> StackOptions {
    StackOptions { pages: 2048, ..StackOptions::default() }
}

/// Is ready when standard input ends.
pub(crate) fn standard_input_ends() -> oneshot::Receiver<()> {
    let (ends, ended) = oneshot::channel();
    thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        let _ = ends.send(());
    });
    ended
}
