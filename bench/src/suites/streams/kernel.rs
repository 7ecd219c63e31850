//! An end on the kernel's sockets.

use super::end::{End, Idle, LOOK};
use super::memory::{Buffer, Memory, PIECE};
use super::net::{CONGESTION, Namespace, Outcome};
use anyhow::{Context, ensure};
use rustix::net::sockopt::tcp_congestion;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::MutexGuard;
use std::time::Duration;

/// The longest time for a connection to be made.
const PATIENCE: Duration = Duration::from_secs(60);
/// If the kernel can poll the device, it polls that many microseconds in a call of a socket.
const BUSY_POLL: libc::c_int = 50;

/// One end. Its thread either sleeps in the calls of the socket, or calls again and again.
pub(super) struct Kernel<'m> {
    stream: TcpStream,
    idle: Idle,
    memory: &'m Memory,
    source: Option<MutexGuard<'m, Buffer>>,
    sink: Option<MutexGuard<'m, Buffer>>,
    /// Bytes of the last produced piece that were not sent yet.
    left: usize,
}

/// A socket that listens in a namespace.
pub(super) fn listen(namespace: &Namespace, at: Ipv4Addr, port: u16) -> Outcome<TcpListener> {
    namespace.run(|| TcpListener::bind((at, port)).map_err(|e| format!("a socket of the kernel: {e}")))
}

/// A connection from a namespace.
pub(super) fn connect(namespace: &Namespace, to: SocketAddr) -> Outcome<TcpStream> {
    namespace.run(|| TcpStream::connect_timeout(&to, PATIENCE).map_err(|e| format!("connecting to {to}: {e}")))
}

/// Waits for a connection, for a limited time.
pub(super) fn accept(listener: &TcpListener) -> anyhow::Result<TcpStream> {
    let mut fds = [rustix::event::PollFd::new(listener, rustix::event::PollFlags::IN)];
    let patience = rustix::event::Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
    rustix::event::poll(&mut fds, Some(&patience))?;
    listener.set_nonblocking(true)?;
    Ok(listener.accept().context("no connection came to a socket of the kernel")?.0)
}

impl<'m> Kernel<'m> {
    pub(super) fn new(stream: TcpStream, idle: Idle, memory: &'m Memory) -> anyhow::Result<Self> {
        stream.set_nodelay(true)?;
        let congestion = tcp_congestion(&stream).context("the congestion control of a socket of the kernel")?;
        ensure!(congestion == CONGESTION, "a socket of the kernel uses {congestion}");
        match idle {
            Idle::Sleeps => {
                stream.set_nonblocking(false)?;
                stream.set_read_timeout(Some(LOOK))?;
                stream.set_write_timeout(Some(LOOK))?;
            }
            Idle::Polls => {
                stream.set_nonblocking(true)?;
                busy_poll(&stream)?;
            }
        }
        Ok(Self { stream, idle, memory, source: None, sink: None, left: 0 })
    }
}

/// Lets the kernel poll the device in calls of the socket, if the device can be polled.
fn busy_poll(stream: &TcpStream) -> io::Result<()> {
    let value = BUSY_POLL;
    // SAFETY: the option is an `int`, and the kernel reads as many bytes as it is progress.
    let result = unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_BUSY_POLL,
            std::ptr::from_ref(&value).cast(),
            size_of_val(&value) as libc::socklen_t,
        )
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The number of bytes; 0 if the call would block or was interrupted; `None` at the end.
fn moved(result: io::Result<usize>) -> anyhow::Result<Option<usize>> {
    match result {
        Ok(0) => Ok(None),
        Ok(n) => Ok(Some(n)),
        Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted) => {
            Ok(Some(0))
        }
        // The other end was dropped at the end of the run.
        Err(e) if matches!(e.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) => Ok(None),
        Err(e) => Err(e).context("a socket of the kernel"),
    }
}

impl End for Kernel<'_> {
    fn produce(&mut self) -> anyhow::Result<usize> {
        let source = self.source.get_or_insert_with(|| self.memory.source());
        if self.left == 0 {
            self.left = source.produce().len();
        }
        let sent = moved(self.stream.write(&source.produced()[PIECE - self.left..]))?.unwrap_or(0);
        self.left -= sent;
        Ok(sent)
    }

    fn consume(&mut self) -> anyhow::Result<Option<usize>> {
        let sink = self.sink.get_or_insert_with(|| self.memory.sink());
        let mut received = Ok(None);
        sink.consume(|room| {
            received = moved(self.stream.read(room));
            received.as_ref().map_or(0, |n| n.unwrap_or(0))
        });
        received
    }

    fn write(&mut self, bytes: &[u8]) -> anyhow::Result<usize> {
        Ok(moved(self.stream.write(bytes))?.unwrap_or(0))
    }

    fn read(&mut self, into: &mut [u8]) -> anyhow::Result<Option<usize>> {
        moved(self.stream.read(into))
    }

    fn turn(&mut self, worked: bool) -> anyhow::Result<()> {
        if !worked && self.idle == Idle::Polls {
            std::hint::spin_loop();
        }
        Ok(())
    }
}
