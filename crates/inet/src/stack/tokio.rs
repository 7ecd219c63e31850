//! Tokio's traits for streams, and a task that drives a stack.
//!
//! The task and the sockets are on one thread: a current-thread runtime, and a
//! [`LocalSet`](tokio::task::LocalSet) where tasks are spawned. Programs written for tokio's
//! traits, such as hyper, then run on the stack as they are. These traits read into the caller's
//! bytes, so payload is copied. Programs that want fragments use [`TcpStream::poll_recv`]. `Bytes`
//! that were made of fragments are written without a copy ([`TcpStream::write`]).

use crate::stack::{Stack, TcpStream};
use crate::time::Time;
use netmem_packet::{Armed, RxQueue, TxQueue, Wait};
use netmem_pool::Mapped;
use std::future::poll_fn;
use std::io;
use std::os::fd::AsFd;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};

impl<M: Mapped> AsyncRead for TcpStream<M> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let n = ready!(self.get_mut().poll_read(cx, buf.initialize_unfilled()))?;
        buf.advance(n);
        Poll::Ready(Ok(()))
    }
}

impl<M: Mapped> AsyncWrite for TcpStream<M> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.get_mut().poll_write(cx, bytes).map_err(io::Error::from)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.get_mut().poll_write_vectored(cx, slices).map_err(io::Error::from)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// The next poll of the stack sends what was written, so there is nothing to flush.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().shutdown();
        Poll::Ready(Ok(()))
    }
}

/// Drives a stack until the future is dropped: polls it, lets other tasks run, and sleeps in
/// tokio's reactor when there is nothing to do. The stack is the caller's, so that a program can
/// call [`Stack::finish`] after that.
///
/// `now` is the clock. Timers are as exact as tokio's: they fire up to a millisecond late.
///
/// # Errors
///
/// A queue has stopped ([`Wait::arm`]), or the stack's descriptor cannot be registered with the
/// runtime.
pub async fn drive<R, T>(stack: &mut Stack<R, T>, now: impl Fn() -> Time) -> io::Result<()>
where
    R: RxQueue<Mem: Mapped> + Wait,
    T: TxQueue<Mem = R::Mem> + Wait,
{
    let descriptor = stack.as_fd().try_clone_to_owned()?;
    // SAFETY: the value owns its descriptor, which is open and the same until the value is dropped.
    let readable = unsafe { AsyncFd::register_with_interest(descriptor, Interest::READABLE) }?;
    loop {
        if stack.poll(now()) > 0 {
            tokio::task::yield_now().await;
            continue;
        }
        if stack.arm()? == Armed::Work {
            tokio::task::yield_now().await;
            continue;
        }
        let mut sleep = std::pin::pin!(stack.poll_timeout().map(|at| tokio::time::sleep(at.since(now()))));
        poll_fn(|cx| {
            let called = stack.poll_calls(cx.waker());
            let timeout = sleep.as_mut().as_pin_mut().is_some_and(|sleep| sleep.poll(cx).is_ready());
            let woken = match readable.poll_read_ready(cx) {
                // The readiness is cleared before the stack is armed again, so that a later wake-up
                // is not missed.
                Poll::Ready(guard) => guard.map(|mut guard| guard.clear_ready()).is_ok(),
                Poll::Pending => false,
            };
            if called || timeout || woken { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        stack.disarm();
    }
}
