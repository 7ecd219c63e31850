//! A TCP echo server on io_uring, whose buffers are pages of a [`SharedPool`].
//!
//! ```text
//!   worker 1 ──► ring, provided buffers ┐                    recv:  the kernel fills a buffer
//!   worker 2 ──► ring, provided buffers ┼── one SharedPool   send:  the same page, fixed buffer;
//!   ...                                 ┘    one region             then it is dropped
//! ```
//!
//! * The region is registered with each ring as one *fixed buffer*: the kernel keeps its pages
//!   pinned, and a send by `WRITE_FIXED` does not look them up.
//! * Pages are posted to the kernel by a *provided-buffer ring*. The buffer's number is the page's
//!   number in its region. The page itself stays in a table at that number. When the kernel reports
//!   which buffer it has filled, the page is removed from the table: it is the received data.
//! * A page that was echoed is dropped and goes to this CPU's magazine. The worker allocates the
//!   next page from there and posts it.
//!
//! ```text
//! cargo run --release -p netmem --all-features --example io_uring_echo -- 127.0.0.1:7000
//! cargo run --release -p netmem --all-features --example io_uring_echo -- --self-test
//! ```

use io_uring::types::{BufRingEntry, Fd};
use io_uring::{IoUring, cqueue, opcode, squeue};
use netmem::pool::{KernelShared, Page, PoolOptions, RegionOptions, RegionProvider, SharedPool};
use rustix::event::{EventfdFlags, eventfd};
use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread;

/// The kernel writes a page until it has completed the request, and not afterwards.
type M = KernelShared;
type Memory = Arc<RegionProvider<M>>;

const PAGES: usize = 256;
/// Pages posted to the kernel by each worker. A power of two.
const POSTED: u16 = 64;
const GROUP: u16 = 0;
const WORKERS: usize = 2;

/// What an operation was, in the upper half of its number; the connection's descriptor is in the
/// lower half.
const ACCEPT: u64 = 1 << 32;
const RECV: u64 = 2 << 32;
const SEND: u64 = 3 << 32;
const STOP: u64 = 4 << 32;
const CANCEL: u64 = 5 << 32;

/// Pages that the kernel may fill, in a ring that it shares with this process.
struct Provided {
    /// `POSTED` entries in memory of their own.
    ring: *mut BufRingEntry,
    tail: u16,
    /// Each page that is posted, at its number in the region.
    posted: Vec<Option<Page<M>>>,
}

impl Provided {
    const BYTES: usize = POSTED as usize * size_of::<BufRingEntry>();

    fn new(ring: &IoUring, pages: u32) -> io::Result<Self> {
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: new memory, of zeros, wherever there is room.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), Self::BYTES, access, kind, -1, 0) };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let posted = (0..pages).map(|_| None).collect();
        let provided = Self { ring: at.cast(), tail: 0, posted };
        // SAFETY: the memory stays mapped until the worker has closed its ring.
        unsafe { ring.submitter().register_buf_ring_with_flags(at.addr() as u64, POSTED, GROUP, 0)? };
        Ok(provided)
    }

    /// Lends a page to the kernel.
    fn post(&mut self, page: Page<M>) {
        let number = page.index();
        let at = usize::from(self.tail % POSTED);
        // SAFETY: one of the ring's entries, which the kernel reads only once the tail has passed
        // it.
        let entry = unsafe { &mut *self.ring.add(at) };
        entry.set_addr(page.as_ptr().addr() as u64);
        entry.set_len(page.len() as u32);
        // The region has fewer pages than there are buffer numbers.
        entry.set_bid(number as u16);
        self.posted[number as usize] = Some(page);
        self.tail = self.tail.wrapping_add(1);
        // SAFETY: the tail lies in the ring's memory, where the kernel reads it.
        let tail = unsafe { &*BufRingEntry::tail(self.ring).cast::<AtomicU16>() };
        // Release: the kernel sees the entry before it sees the tail.
        tail.store(self.tail, Ordering::Release);
    }

    /// The page that the kernel has filled, which is this process's again.
    fn filled(&mut self, number: u16) -> Option<Page<M>> {
        self.posted.get_mut(usize::from(number))?.take()
    }
}

impl Drop for Provided {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, with this length.
        unsafe { libc::munmap(self.ring.cast(), Self::BYTES) };
    }
}

/// A connection: it receives, or it sends back what it has received.
struct Connection {
    stream: TcpStream,
    /// What is being sent, and how much of it has been sent.
    sending: Option<(Page<M>, usize, usize)>,
}

/// One thread's ring and what it serves.
struct Worker<'p> {
    // The ring goes first: then the kernel uses neither buffers nor connections any more.
    ring: IoUring,
    provided: Provided,
    pool: &'p SharedPool<M>,
    listener: &'p TcpListener,
    connections: HashMap<RawFd, Connection>,
    /// Connections that wait for a page.
    out_of_buffers: Vec<RawFd>,
    /// Operations that the kernel has not completed.
    pending: usize,
    stop: Arc<OwnedFd>,
    stopped: u64,
    echoed: u64,
}

impl<'p> Worker<'p> {
    fn new(
        pool: &'p SharedPool<M>,
        memory: &Memory,
        listener: &'p TcpListener,
        stop: Arc<OwnedFd>,
    ) -> io::Result<Self> {
        let ring = IoUring::new(256)?;
        let region = memory.region();
        let whole = libc::iovec { iov_base: region.as_ptr().cast(), iov_len: region.len() };
        // SAFETY: the region outlives the ring: the pool keeps it.
        unsafe { ring.submitter().register_buffers(&[whole])? };
        let provided = Provided::new(&ring, region.pages())?;
        let mut worker = Self {
            ring,
            provided,
            pool,
            listener,
            connections: HashMap::new(),
            out_of_buffers: Vec::new(),
            pending: 0,
            stop,
            stopped: 0,
            echoed: 0,
        };
        (0..POSTED).for_each(|_| worker.post());
        Ok(worker)
    }

    /// Lends one more page, if there is one.
    fn post(&mut self) {
        if let Some(page) = self.pool.alloc() {
            self.provided.post(page);
        }
    }

    fn start(&mut self, operation: squeue::Entry) -> io::Result<()> {
        // SAFETY: what the operation uses stays until it is complete: the listener, the stop
        // descriptor, a connection and its page.
        while unsafe { self.ring.submission().push(&operation) }.is_err() {
            self.ring.submit()?;
        }
        self.pending += 1;
        Ok(())
    }

    fn accept(&mut self) -> io::Result<()> {
        let (listener, null) = (Fd(self.listener.as_raw_fd()), std::ptr::null_mut());
        self.start(opcode::Accept::new(listener, null, null.cast()).build().user_data(ACCEPT))
    }

    fn receive(&mut self, fd: RawFd) -> io::Result<()> {
        let operation = opcode::Recv::new(Fd(fd), std::ptr::null_mut(), 0).buf_group(GROUP).build();
        self.start(operation.flags(squeue::Flags::BUFFER_SELECT).user_data(RECV | fd as u64))
    }

    fn send(&mut self, fd: RawFd) -> io::Result<()> {
        let Some(Connection { sending: Some((page, done, len)), .. }) = self.connections.get(&fd) else {
            return Ok(());
        };
        let rest = page.as_ptr().wrapping_add(*done);
        // The region is fixed buffer 0.
        let operation = opcode::WriteFixed::new(Fd(fd), rest, (len - done) as u32, 0).build();
        self.start(operation.user_data(SEND | fd as u64))
    }

    /// Serves until it is stopped. Returns how many bytes were echoed.
    fn serve(mut self) -> io::Result<u64> {
        let stop = opcode::Read::new(Fd(self.stop.as_raw_fd()), (&raw mut self.stopped).cast(), 8).build();
        self.start(stop.user_data(STOP))?;
        self.accept()?;
        let served = self.turns();
        // The kernel writes into pages as long as an operation is pending. Closing the ring would
        // not wait for it.
        self.connections.values().for_each(|connection| drop(connection.stream.shutdown(std::net::Shutdown::Both)));
        let cancelled = self.start(opcode::AsyncCancel::new(ACCEPT).build().user_data(CANCEL));
        let mut quiet = cancelled.is_ok();
        while quiet && self.pending > 0 {
            quiet = self.ring.submit_and_wait(1).is_ok();
            self.pending -= self.ring.completion().count();
        }
        if !quiet {
            // The kernel may still write: these pages are never used again.
            std::mem::take(&mut self.provided.posted).into_iter().for_each(std::mem::forget);
        }
        served.map(|()| self.echoed)
    }

    fn turns(&mut self) -> io::Result<()> {
        loop {
            self.ring.submit_and_wait(1)?;
            let done: Vec<cqueue::Entry> = self.ring.completion().collect();
            self.pending -= done.len();
            for completion in done {
                let fd = completion.user_data() as u32 as RawFd;
                match completion.user_data() >> 32 << 32 {
                    ACCEPT => self.accepted(completion.result())?,
                    RECV => self.received(fd, &completion)?,
                    SEND => self.sent(fd, completion.result())?,
                    STOP => return Ok(()),
                    _ => {}
                }
            }
        }
    }

    fn accepted(&mut self, fd: i32) -> io::Result<()> {
        if fd >= 0 {
            // SAFETY: a descriptor that the kernel made for this operation.
            let stream = TcpStream::from(unsafe { OwnedFd::from_raw_fd(fd) });
            stream.set_nodelay(true)?;
            self.connections.insert(fd, Connection { stream, sending: None });
            self.receive(fd)?;
        }
        self.accept()
    }

    fn received(&mut self, fd: RawFd, completion: &cqueue::Entry) -> io::Result<()> {
        let page = cqueue::buffer_select(completion.flags()).and_then(|number| self.provided.filled(number));
        match (usize::try_from(completion.result()), page, self.connections.get_mut(&fd)) {
            (Ok(len @ 1..), Some(page), Some(connection)) => {
                connection.sending = Some((page, 0, len));
                self.send(fd)
            }
            // No buffer was left. This connection goes on when one is.
            (Err(_), None, Some(_)) if completion.result() == -libc::ENOBUFS => {
                self.out_of_buffers.push(fd);
                Ok(())
            }
            (_, page, _) => {
                let came_back = page.is_some();
                drop(page);
                self.connections.remove(&fd);
                if came_back { self.replenish() } else { Ok(()) }
            }
        }
    }

    fn sent(&mut self, fd: RawFd, result: i32) -> io::Result<()> {
        let Some(connection) = self.connections.get_mut(&fd) else { return Ok(()) };
        let Some((page, done, len)) = connection.sending.take() else { return Ok(()) };
        match usize::try_from(result) {
            Ok(n @ 1..) if done + n < len => {
                connection.sending = Some((page, done + n, len));
                return self.send(fd);
            }
            Ok(1..) => {
                self.echoed += len as u64;
                drop(page);
                self.receive(fd)?;
            }
            _ => {
                drop(page);
                self.connections.remove(&fd);
            }
        }
        self.replenish()
    }

    /// Lends a page in place of one that was dropped, and lets a connection go on that waited for
    /// one.
    fn replenish(&mut self) -> io::Result<()> {
        self.post();
        match self.out_of_buffers.pop() {
            Some(fd) => self.receive(fd),
            None => Ok(()),
        }
    }
}

/// Runs workers on `listener` until `until` returns. Returns the number of echoed bytes, and of
/// pages that were not returned.
fn serve<T>(listener: &TcpListener, until: impl FnOnce() -> T) -> anyhow::Result<(T, u64, u64)> {
    let memory = RegionProvider::new(RegionOptions::new(PAGES).build::<M>()?);
    let pool = PoolOptions::new("io_uring").build_shared(memory.clone(), None)?;
    let stops =
        (0..WORKERS).map(|_| Ok(Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?))).collect::<io::Result<Vec<_>>>()?;
    let (answer, echoed) = thread::scope(|scope| {
        let workers: Vec<_> = stops
            .iter()
            .map(|stop| {
                let (pool, memory, stop) = (&pool, &memory, stop.clone());
                scope.spawn(move || Worker::new(pool, memory, listener, stop)?.serve())
            })
            .collect();
        let answer = until();
        for stop in &stops {
            rustix::io::write(stop, &1_u64.to_ne_bytes())?;
        }
        let echoed = workers
            .into_iter()
            .map(|worker| worker.join().unwrap_or_else(|_| Err(io::Error::other("a worker panicked"))));
        Ok::<_, io::Error>((answer, echoed.sum::<io::Result<u64>>()?))
    })?;
    Ok((answer, echoed, pool.close().outstanding))
}

/// Sends messages and checks that each comes back. Returns the number of bytes.
fn client(to: std::net::SocketAddr, seed: usize) -> io::Result<u64> {
    let mut stream = TcpStream::connect(to)?;
    stream.set_nodelay(true)?;
    let mut bytes = 0;
    for round in 0..100 {
        let message: Vec<u8> = (0..1 + (seed * 997 + round * 61) % 9000).map(|n| (n + seed + round) as u8).collect();
        stream.write_all(&message)?;
        let mut answer = vec![0; message.len()];
        stream.read_exact(&mut answer)?;
        if answer != message {
            return Err(io::Error::other("what came back is not what was sent"));
        }
        bytes += message.len() as u64;
    }
    Ok(bytes)
}

/// The result of the self-test.
pub(crate) enum Tested {
    /// So many bytes came back, and no page was lost.
    Passed(u64),
    /// io_uring is not available here.
    Skipped(io::Error),
}

/// Serves a few clients of its own on the loopback device.
///
/// # Errors
///
/// Something did not come back: bytes, or a page.
pub(crate) fn self_test() -> anyhow::Result<Tested> {
    if let Err(error) = IoUring::new(8) {
        let missing = matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM | libc::EACCES));
        return if missing { Ok(Tested::Skipped(error)) } else { Err(error.into()) };
    }
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let clients = || -> io::Result<u64> {
        let clients: Vec<_> = (0..8).map(|seed| thread::spawn(move || client(address, seed))).collect();
        let sent = clients
            .into_iter()
            .map(|client| client.join().unwrap_or_else(|_| Err(io::Error::other("a client panicked"))));
        sent.sum()
    };
    let (sent, echoed, lost) = serve(&listener, clients)?;
    let sent = sent?;
    if sent != echoed || lost > 0 {
        anyhow::bail!("{sent} bytes were sent, {echoed} echoed, {lost} pages lost");
    }
    Ok(Tested::Passed(echoed))
}

#[allow(dead_code, reason = "the test that includes this file has no use for it")]
fn main() -> anyhow::Result<()> {
    match std::env::args().nth(1).as_deref() {
        Some("--self-test") => match self_test()? {
            Tested::Passed(bytes) => println!("{bytes} bytes were echoed"),
            Tested::Skipped(why) => println!("skipped: io_uring is not available: {why}"),
        },
        Some(address) => {
            let listener = TcpListener::bind(address)?;
            println!("listening on {}", listener.local_addr()?);
            let forever = || loop {
                thread::park();
            };
            let ((), _, _) = serve(&listener, forever)?;
        }
        None => anyhow::bail!("usage: io_uring_echo ADDRESS:PORT | --self-test"),
    }
    Ok(())
}
