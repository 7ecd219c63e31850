//! `netmem serve`: a server on netmem's own stack, behind a tap.
//!
//! ```text
//!   tap ── device's thread ── rings ── this thread: Stack::poll ──► a task for each connection ──► the next poll sends
//! ```
//!
//! Each connection is a task, woken by its socket. Tasks, stack and driver are on one thread, which sleeps when none of them has work.

mod http;
mod memcached;
mod plain;

use crate::args::{BadArgument, PortArg, ServeArg, ServeArgs};
use crate::host::tasks::{Conn, Task, Tasks};
use crate::host::{Ended, HostOptions, Mem, OwnStack, Running, with_stack};
use crate::link::AskedLink;
use crate::{limits, output, signals};
use anyhow::Context as _;
use netmem::device::port::{Port, PortError, Tap, TapError};
use netmem::packet::{Armed, PollThenSleep, Wait};
use netmem::virtio::Spin;
use netmem_inet::{ListenOptions, StackStats, TcpListener};
use std::cell::RefCell;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How long each thread polls after the last frame before it sleeps.
const SPIN: Duration = Duration::from_micros(50);
/// Payload from this length on is sent from the page that it was received in. Shorter payload is copied: it would pin a page that is
/// many times as long.
const BY_REFERENCE: usize = 512;

/// What the server counts.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    connections: u64,
    /// Connections that did not end in order.
    broken: u64,
    received: u64,
    sent: u64,
}

type Shared = Rc<RefCell<Counts>>;

/// A service: what is done with each connection.
trait Service {
    /// The port on which it listens.
    const PORT: u16;

    /// The task of a connection.
    fn serve(&self, stream: Conn, counts: Shared) -> Task<'static>;

    /// What it says of itself at the end, in lines.
    fn report(&self) -> String {
        String::new()
    }
}

/// Serves until a signal comes.
pub(crate) fn run(args: &ServeArgs) -> anyhow::Result<()> {
    let PortArg::Tap(name) = &args.port else {
        return Ok(BadArgument::new(format!("--port {}: a server is behind a tap; use tap:NAME", args.port))?);
    };
    limits::descriptors(64, "serve")?;
    let signal = signals::stop_descriptor()?;
    let stop = signals::stop_flag()?;
    let mut taps = Tap::open(name, 1, true)?.into_iter();
    let missing = || PortError::Tap { name: name.clone(), source: TapError::Queues { asked: 0 } };
    let mut port = |_| taps.next().ok_or_else(missing);
    let server = Server { args, stop: &stop, signal, mtu: mtu(name)? };
    match args.link.map(AskedLink::new) {
        None => server.run(port),
        Some(link) => {
            let result = server.run(|pair| Ok(link.over(port(pair)?, pair)));
            output::offer(&link.report().to_string());
            result
        }
    }
}

/// The MTU of an interface.
fn mtu(name: &str) -> anyhow::Result<u16> {
    let path = format!("/sys/class/net/{name}/mtu");
    let text = std::fs::read_to_string(&path).with_context(|| path.clone())?;
    let mtu: u32 = text.trim().parse().with_context(|| path)?;
    Ok(u16::try_from(mtu).unwrap_or(u16::MAX))
}

struct Server<'a> {
    args: &'a ServeArgs,
    stop: &'a AtomicBool,
    signal: UnixStream,
    mtu: u16,
}

impl Server<'_> {
    fn run<P: Port>(self, port: impl FnMut(usize) -> Result<P, PortError>) -> anyhow::Result<()> {
        let addresses = self.args.addr.clone();
        let pages = if self.args.service == ServeArg::Memcached { memcached::PAGES } else { plain::PAGES };
        let options = HostOptions { addresses, mtu: self.mtu, pages, spin: Spin::For(SPIN), device_cpu: None };
        let (report, Ended { stats, books }) = with_stack(port, &options, |running| match self.args.service {
            ServeArg::Echo => self.serve(running, &plain::Echo),
            ServeArg::Discard => self.serve(running, &plain::Discard),
            ServeArg::Source => {
                let service = plain::Source::new(running)?;
                self.serve(running, &service)
            }
            ServeArg::Http => {
                let service = http::Http::new(running)?;
                self.serve(running, &service)
            }
            ServeArg::Memcached => {
                let service = memcached::Memcached::new(running)?;
                self.serve(running, &service)
            }
        })?;
        let frames = stats.rx_frames.load(Ordering::Relaxed);
        let in_place = stats.rx_in_place.load(Ordering::Relaxed);
        output::print(&format!(
            "{report}device: {frames} frames to the stack, {in_place} read into its pages by the kernel, {} from it\npages: {} lent, all came back",
            stats.tx_frames.load(Ordering::Relaxed),
            books.allocated,
        ))
    }

    /// Accepts connections and runs their tasks; returns the report.
    fn serve<S: Service>(&self, running: &mut Running, service: &S) -> anyhow::Result<String> {
        let Running { stack, clock, .. } = running;
        let at = SocketAddr::from((Ipv4Addr::UNSPECIFIED, S::PORT));
        let mut listener = stack.sockets().listen(at, ListenOptions::default())?;
        let addresses: Vec<_> =
            self.args.addr.iter().map(|own| SocketAddr::from((own.addr, S::PORT)).to_string()).collect();
        eprintln!("ready: {} on {}, port {}", self.args.service, addresses.join(" and "), self.args.port);
        let counts = Shared::default();
        let mut tasks = Tasks::new();
        let mut pause = PollThenSleep::new(SPIN);
        let mut signal = Signal(&self.signal);
        while !self.stop.load(Ordering::Relaxed) {
            let mut work = stack.poll(clock.now());
            work += accept(&mut listener, service, &counts, &mut tasks);
            work += tasks.run(|result| counts.borrow_mut().broken += u64::from(result.is_err()));
            let sleep = stack.next_deadline().map(|at| at.since(clock.now()));
            pause.turn(work, &mut [stack, &mut signal], sleep)?;
        }
        drop((tasks, listener));
        // Resets and what was due leave.
        stack.poll(clock.now());
        Ok(summary(&counts.borrow(), stack) + &service.report())
    }
}

fn accept<S: Service>(listener: &mut TcpListener<Mem>, service: &S, counts: &Shared, tasks: &mut Tasks<'_>) -> usize {
    let mut accepted = 0;
    while let Ok(stream) = listener.accept() {
        tasks.push(service.serve(stream, Rc::clone(counts)));
        counts.borrow_mut().connections += 1;
        accepted += 1;
    }
    accepted
}

fn summary(counts: &Counts, stack: &OwnStack) -> String {
    let Counts { connections, broken, received, sent } = *counts;
    let StackStats { copied_received, copied_sent, wrong_checksum, .. } = stack.stats();
    format!(
        "served {connections} connections, {broken} of them broken: {received} bytes received ({copied_received} copied), {sent} bytes sent \
         ({copied_sent} copied)\nstack: {wrong_checksum} packets with a wrong checksum\n"
    )
}

/// A descriptor that a signal makes readable.
struct Signal<'a>(&'a UnixStream);

impl AsFd for Signal<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Wait for Signal<'_> {
    fn arm(&mut self) -> Armed {
        Armed::Waits
    }

    fn disarm(&mut self) {}
}
