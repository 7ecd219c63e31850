//! `netmem serve`: a server on netmem's own stack, behind a tap or on an interface by AF_XDP.
//!
//! ```text
//!                  ┌─────────────────────────────── one thread ──────────────────────────────────┐
//!   tap queue ──── Worker::poll ── rings ── Stack::poll ──► a task for each connection ──► Stack::poll sends
//! ```
//!
//! Each queue of the tap has a queue pair, a stack and a thread. The thread also drives the part of
//! the device that serves the queue pair, so that a request needs no notification between driver
//! and device and wakes no second thread. Each connection is a task on the thread of its stack. Its
//! socket wakes the task. The thread sleeps if no task and no queue has work. If a frame arrives by
//! another queue than its connection's, its stack hands it to the connection's stack.
//!
//! The services are a demonstration. A peer that is idle, slow or hostile nevertheless costs only
//! its own connection: each wait has a time limit ([`client`]), connections are counted
//! ([`admission`]), and connections that keep the pages of a store are found ([`pressure`]).
//!
//! With `--state`, the next process continues the connections: see [`state`].

mod admission;
mod client;
mod http;
mod memcached;
mod metrics;
mod plain;
mod pressure;
mod report;
mod service;
mod state;

use crate::args::{PortArg, ServeArg, ServeArgs};
use crate::host::tasks::Tasks;
use crate::host::timers::Timers;
use crate::host::{DeviceThreads, Drives, Ended, HostOptions, Running, Stacks, with_stacks};
use crate::limits;
use crate::link::{AskedLink, one_each};
use crate::metrics::Server as MetricsServer;
use admission::Admission;
use anyhow::Context as _;
use client::{Client, End, Patience, Shared};
use metrics::{Board, Figures, Pools, Reporter};
use netmem::device::port::{Port, PortError, Tap};
use netmem::net::{Armed, Wait};
use netmem::pool::SharedPool;
use netmem::virtio::Spin;
use netmem::xdp::{Filter, Interface, ProgramOptions, Rule};
use netmem_inet::{Address, ListenOptions, ListenerStats, SocketError, TcpListener};
use netmem_measure::arguments::BadArgument;
use netmem_measure::endpoint::{Clock, Mem, OwnStack};
use netmem_measure::{cpus, output, signals};
use pressure::{Member, Pressure};
use report::Done;
use service::Service;
use state::{Left, StateFile};
use std::cell::RefCell;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How long each thread polls after the last frame before it sleeps.
const SPIN: Spin = Spin::For(Duration::from_micros(50));
/// The most polls at the end, before connections are saved. A connection in its handshake cannot be
/// saved; these polls process frames that have arrived, and so complete handshakes.
const LAST_POLLS: usize = 16;

/// Serves until a signal comes.
pub(crate) fn run(args: &ServeArgs) -> anyhow::Result<()> {
    args.check()?;
    limits::descriptors(64 + 32 * usize::from(args.queues), "serve")?;
    match &args.port {
        PortArg::Tap(name) => {
            let taps = Tap::open(name, args.queues.into(), true)?;
            serve_over(args, mtu(name)?, one_each(taps))
        }
        PortArg::Xsk(xsk) => {
            // Only frames to the server's addresses are redirected. The kernel keeps all other
            // traffic of the interface.
            let host = |own: &Address| Rule { address: Some(own.addr), ..Rule::default() };
            let program =
                ProgramOptions { filter: Filter::new(args.addr.iter().map(host))?, ..ProgramOptions::default() };
            let ports = args.af_xdp.ports(xsk, args.queues, program)?;
            serve_over(args, mtu(&xsk.interface)?, one_each(ports))
        }
        port => Ok(BadArgument::new(format!(
            "--port {port}: a server is behind a tap or an interface; use tap:NAME or xsk:IFACE"
        ))?),
    }
}

/// Serves with these ports, or with a bad link before each.
fn serve_over<P: Port + 'static>(
    args: &ServeArgs,
    mtu: u16,
    mut port: impl FnMut(usize) -> Result<P, PortError>,
) -> anyhow::Result<()> {
    let (signal, raise) = signals::stop_descriptors()?;
    let stop = Stop { flag: signals::stop_flag()?, signal, raise };
    let service = args.service.to_string();
    let state = args.state.as_deref().map(|path| StateFile::new(path, &service)).transpose()?;
    let figures = MetricsServer::open(args.metrics)?;
    let server = Server { args, stop, state, mtu, figures };
    match AskedLink::open(args.link, args.pcap.as_deref())? {
        None => server.run(port),
        Some(link) => {
            let result = server.run(|pair| Ok(link.over(port(pair)?, pair)));
            link.report().iter().for_each(|report| output::offer(&report.to_string()));
            result.and(link.finish().map_err(Into::into))
        }
    }
}

/// The MTU of an interface of this thread's network namespace.
fn mtu(name: &str) -> anyhow::Result<u16> {
    let link = Interface::by_name(name).with_context(|| format!("the MTU of {name}"))?;
    Ok(u16::try_from(link.mtu).unwrap_or(u16::MAX))
}

/// What ends the server: a signal, or a thread that cannot go on.
struct Stop {
    flag: Arc<AtomicBool>,
    /// Becomes readable at the first signal.
    signal: UnixStream,
    /// The other end of `signal`.
    raise: UnixStream,
}

impl Stop {
    fn is_set(&self) -> bool {
        self.flag.load(Ordering::Relaxed)
    }

    fn set(&self) {
        self.flag.store(true, Ordering::Relaxed);
        // The write fails if the socket is full. Then `signal` is readable already.
        let _ = std::io::Write::write(&mut &self.raise, &[0]);
    }
}

/// Stops the server when it is dropped, also in a panic.
struct Ends<'a>(&'a Stop);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.set();
    }
}

/// Runs a host on the server's ports.
type Host<'a> =
    &'a mut dyn FnMut(&HostOptions, &mut dyn FnMut(&mut Stacks) -> anyhow::Result<()>) -> anyhow::Result<Ended>;

struct Server<'a> {
    args: &'a ServeArgs,
    stop: Stop,
    state: Option<StateFile<'a>>,
    mtu: u16,
    /// Answers with figures while the stacks run.
    figures: Option<MetricsServer>,
}

impl Server<'_> {
    fn run<P: Port + 'static>(&self, mut port: impl FnMut(usize) -> Result<P, PortError>) -> anyhow::Result<()> {
        // Once for each kind of port, and a service once for each service.
        let host: Host<'_> = &mut |options, run| Ok(with_stacks(&mut port, self.args.queues, options, run)?.1);
        match self.args.service {
            ServeArg::Echo => self.with(host, plain::PAGES, |_| Ok(plain::Echo)),
            ServeArg::Discard => self.with(host, plain::PAGES, |_| Ok(plain::Discard)),
            ServeArg::Source => self.with(host, plain::PAGES, |pool| plain::Source::new(pool)),
            ServeArg::Http => self.with(host, plain::PAGES, |pool| http::Http::new(pool)),
            ServeArg::Memcached => {
                let sizes = memcached::Sizes::new(self.args.store.unwrap_or(memcached::LIMIT));
                self.with(host, sizes.pages, |pool| Ok(memcached::Memcached::new(pool, sizes)))
            }
        }
    }

    fn with<S: Service>(
        &self,
        host: Host<'_>,
        pages: usize,
        service: impl FnOnce(&Arc<SharedPool<Mem>>) -> anyhow::Result<S>,
    ) -> anyhow::Result<()> {
        let queues = self.args.queues;
        let resumed: Vec<Left<S::State>> = self.state.map(|file| file.read()).transpose()?.unwrap_or_default();
        let mut shares: Vec<Vec<Left<S::State>>> = (0..queues).map(|_| Vec::new()).collect();
        for (n, connection) in resumed.into_iter().enumerate() {
            shares[n % usize::from(queues)].push(connection);
        }
        let pages_of = |share: &Vec<Left<_>>| share.iter().map(|left| left.stream.payload() / 4096 + 2).sum::<usize>();
        let options = HostOptions {
            addresses: self.args.addr.clone(),
            mtu: self.mtu,
            pages,
            restored: shares.iter().map(pages_of).max().unwrap_or(0),
            device: DeviceThreads::Stacks,
        };
        let (mut report, mut service, mut shares) = (String::new(), Some(service), shares);
        let Ended { stats, accounting } = host(&options, &mut |stacks| {
            let Some(service) = service.take() else { return Ok(()) };
            let service = service(stacks.pool())?;
            report = self.stacks(stacks, &service, std::mem::take(&mut shares))? + &service.report();
            Ok(())
        })?;
        let frames = stats.rx_frames.load(Ordering::Relaxed);
        let in_place = stats.rx_in_place.load(Ordering::Relaxed);
        output::print(&format!(
            "{report}device: {frames} frames to the stack, {in_place} read into its pages by the kernel, {} from it\npages: {} lent, all came back",
            stats.tx_frames.load(Ordering::Relaxed),
            accounting.allocated,
        ))?;
        Ok(())
    }

    /// Serves on all stacks, then saves the connections for the next process. Returns the report.
    fn stacks<S: Service>(
        &self,
        stacks: &mut Stacks,
        service: &S,
        shares: Vec<Vec<Left<S::State>>>,
    ) -> anyhow::Result<String> {
        // A stack may be polled before another stack has restored its connections. `expect` keeps
        // it from answering segments of those connections with a reset.
        shares.iter().flatten().for_each(|connection| stacks.host().expect(&connection.stream));
        let asked: usize = shares.iter().map(Vec::len).sum();
        if let Some(file) = self.state {
            file.remove()?;
        }
        let shares: Vec<_> = shares.into_iter().map(Mutex::new).collect();
        let admission = Admission::new(self.args.max_connections, self.args.most_of_peer());
        let pressure = Arc::new(Pressure::new(self.args.queues));
        let board = Board::new(self.args.queues);
        let own = std::iter::once(("own", None, Arc::clone(stacks.pool())));
        let sent = stacks.sent_pools().into_iter().enumerate().map(|(queue, pool)| ("sent", Some(queue), pool));
        let pools: Pools = own.chain(sent).collect();
        let done = std::thread::scope(|scope| {
            // The thread of the figures ends with the stacks.
            let _ends = Ends(&self.stop);
            if let Some(server) = &self.figures {
                server.start(scope, &self.stop.flag, Figures { board: &board, pools: &pools })?;
            }
            stacks.run(|n, running| {
                let share = std::mem::take(&mut *shares[n].lock().unwrap_or_else(PoisonError::into_inner));
                // If one stack ends, the others end, too.
                let _ends = Ends(&self.stop);
                self.serve(service, n, running, share, (&admission, &pressure, &board))
            })
        })?;
        let mut report = report::summary(&done);
        let lost: u64 = done.iter().map(|done| done.lost).sum();
        if let Some(file) = self.state {
            let left: Vec<_> = done.into_iter().flat_map(|done| done.left).collect();
            let kept = left.len();
            file.write(left)?;
            let continued = asked as u64 - lost;
            report +=
                &format!("state: {continued} connections went on, {lost} could not; {kept} wait for the next server\n");
        }
        Ok(report)
    }

    /// Accepts connections and runs their tasks, on the thread of a stack.
    fn serve<S: Service>(
        &self,
        service: &S,
        n: usize,
        running: &mut Running,
        resumed: Vec<Left<S::State>>,
        (admission, pressure, board): (&Arc<Admission>, &Arc<Pressure>, &Board),
    ) -> anyhow::Result<Done<S::State>> {
        if let Some(cpu) = self.args.cpu(n) {
            cpus::pin(cpu);
        }
        let Running { stack, clock, host, device, .. } = running;
        let device = device.as_deref_mut().context("a stack without its part of the device")?;
        let shared = Shared {
            counts: Rc::default(),
            leaving: Rc::default(),
            timers: Timers::default(),
            patience: Patience { idle: self.args.idle_timeout, request: self.args.request_timeout },
            pressure: Arc::clone(pressure),
        };
        let (left, mut lost) = (Leaving::<S>::default(), 0);
        let member = pressure.join(n, stack.waker());
        let mut tasks = Tasks::new();
        for connection in resumed {
            match stack.sockets().restore(&connection.stream, &S::config()) {
                Ok(stream) => {
                    let Left { kept, shut, over, state, .. } = connection;
                    let admitted = admission.readmit(stream.peer_addr().ip());
                    let client = Client::new(stream, shared.clone(), admitted, kept, shut);
                    tasks.push(Box::pin(task(service, client, over, state, &left)));
                }
                Err(error) => {
                    host.give_up(&connection.stream);
                    eprintln!("the connection of {} cannot go on: {error}", connection.stream.peer_addr());
                    lost += 1;
                }
            }
        }
        let port = self.args.tcp_port.unwrap_or(S::PORT);
        let at = SocketAddr::from((Ipv4Addr::UNSPECIFIED, port));
        let options = ListenOptions { connection: S::config(), ..ListenOptions::default() };
        let listener = stack.sockets().listen(at, options)?;
        if n == 0 {
            let addresses: Vec<_> =
                self.args.addr.iter().map(|own| SocketAddr::from((own.addr, port)).to_string()).collect();
            eprintln!("ready: {} on {}, port {}", self.args.service, addresses.join(" and "), self.args.port);
        }
        let reporter = board.join(n, stack.waker());
        let acceptor = Acceptor { listener, service, shared: &shared, admission, left: &left, reporter };
        let listener = self.drive(stack, *clock, device, acceptor, tasks, &member)?;
        let counts = *shared.counts.borrow();
        Ok(Done { counts, stats: stack.stats(), listener, lost, left: left.into_inner() })
    }

    /// Runs a stack, its part of the device and the tasks of its connections until the server is
    /// stopped. Then saves the connections, or ends them. Returns the counters of the listener.
    fn drive<'a, S: Service>(
        &self,
        stack: &mut OwnStack,
        clock: Clock,
        device: &mut dyn Drives,
        mut acceptor: Acceptor<'a, S>,
        mut tasks: Tasks<'a>,
        member: &Member<'_>,
    ) -> anyhow::Result<ListenerStats> {
        let (shared, left) = (acceptor.shared, acceptor.left);
        let ended = |result: Result<(), SocketError>| shared.counts.borrow_mut().broken += u64::from(result.is_err());
        let mut signal = Signal(&self.stop.signal);
        let mut asked = 0;
        while !self.stop.is_set() {
            let mut work = device.poll();
            work += stack.poll(clock.now());
            work += acceptor.accept(&mut tasks);
            work += shared.timers.advance(clock.now());
            if member.asked() > asked {
                asked = member.asked();
                shared.timers.wake_all();
            }
            work += tasks.run(ended);
            if !tasks.are_woken() {
                member.answer(asked);
            }
            acceptor.reporter.answer(stack, &acceptor.listener, &shared.counts.borrow());
            if work > 0 {
                // Sends what the tasks have written. The device's next poll passes it on.
                stack.poll(clock.now());
            }
            let due = [stack.poll_timeout(), shared.timers.next()].into_iter().flatten().min();
            let sleep = due.map(|at| at.since(clock.now()));
            device.turn(work, SPIN, &mut [stack, &mut signal], sleep)?;
        }
        if self.state.is_some() {
            for _ in 0..LAST_POLLS {
                let work = device.poll() + stack.poll(clock.now()) + acceptor.accept(&mut tasks);
                if work == 0 {
                    break;
                }
            }
            shared.leaving.set(true);
            tasks.poll_all(ended);
        }
        let stats = acceptor.listener.stats().unwrap_or_default();
        drop((tasks, acceptor));
        if self.state.is_some() {
            left.borrow_mut().extend(stack.sockets().save_closing().into_iter().map(Left::closing));
        } else {
            // Sends the resets of the dropped connections, and other packets that are due.
            stack.poll(clock.now());
        }
        for _ in 0..LAST_POLLS {
            if device.poll() == 0 {
                break;
            }
        }
        Ok(stats)
    }
}

/// Connections that tasks have saved for another process.
type Leaving<S> = RefCell<Vec<Left<<S as Service>::State>>>;

/// Where connections come in.
struct Acceptor<'a, S: Service> {
    listener: TcpListener<Mem>,
    service: &'a S,
    shared: &'a Shared,
    admission: &'a Arc<Admission>,
    left: &'a Leaving<S>,
    reporter: Reporter<'a>,
}

impl<'a, S: Service> Acceptor<'a, S> {
    /// Makes a task for each new connection, or resets it if there are too many. Returns how many
    /// there were.
    fn accept(&mut self, tasks: &mut Tasks<'a>) -> usize {
        let mut accepted = 0;
        while let Ok(stream) = self.listener.accept() {
            accepted += 1;
            let Some(admitted) = self.admission.admit(stream.peer_addr().ip()) else {
                stream.abort();
                self.shared.counts.borrow_mut().refused += 1;
                continue;
            };
            let client = Client::new(stream, self.shared.clone(), admitted, Vec::new(), false);
            tasks.push(Box::pin(task(self.service, client, false, S::State::default(), self.left)));
            self.shared.counts.borrow_mut().connections += 1;
        }
        accepted
    }
}

/// The task of a connection: runs until the connection ends or is saved for another process.
async fn task<S: Service>(
    service: &S,
    mut client: Client,
    over: bool,
    mut state: S::State,
    left: &Leaving<S>,
) -> Result<(), SocketError> {
    let mut ended = client.resume().await;
    if ended.is_ok() && !over {
        ended = service.serve(&mut client, &mut state).await;
    }
    match ended {
        Err(End::Broken(error)) => return Err(error),
        Err(end @ (End::Idle | End::Late | End::Stopped)) => {
            client.end(end);
            return Ok(());
        }
        // The stack completes the close of a stream that is dropped.
        Ok(()) if !client.has_kept() => return Ok(()),
        Ok(()) | Err(End::Leaves) => {}
    }
    left.borrow_mut().extend(Left::new(client, over || ended.is_ok(), state));
    Ok(())
}

/// A descriptor that a signal makes readable.
struct Signal<'a>(&'a UnixStream);

impl AsFd for Signal<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Wait for Signal<'_> {
    fn arm(&mut self) -> std::io::Result<Armed> {
        Ok(Armed::Waits)
    }

    fn disarm(&mut self) {}

    fn check(&self) -> std::io::Result<()> {
        Ok(())
    }
}
