//! The ends on our stack, which has a task for each flow.

use super::cookie::MAX_UNKNOWN;
use super::flows::{self, Datagrams, Numbers, Payload, Shared};
use super::plan::{PAGES, Proto};
use super::watch::{Route, Routes, Source, Watch};
use super::{CHECK_EVERY, PATIENCE, PORT};
use crate::host::Running;
use crate::host::tasks::{Task, Tasks};
use netmem::net::PollThenSleep;
use netmem_inet::tcp::Config;
use netmem_inet::{ListenOptions, SocketError, Sockets, TcpListener};
use netmem_measure::endpoint::Mem;
use std::cell::RefCell;
use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// What the end does.
#[derive(Debug)]
pub(super) struct End {
    /// How many flows come to [`PORT`], to the port after it, and so on.
    pub(super) targets: Vec<u16>,
    pub(super) routes: Routes,
}

/// Runs until the run is over and the flows have ended.
pub(super) fn run(running: &mut Running, watch: &Watch, end: &End, spin: Duration) -> anyhow::Result<()> {
    let shared = Rc::new(Shared::new(watch, payload(running)?));
    let Running { stack, clock, .. } = running;
    let sockets = stack.sockets();
    let mut flows = Flows::new(&shared);
    let mut targets = Targets::new(&sockets, watch, &end.targets)?;
    let mut routes = Some(&end.routes);
    let is_target = !end.targets.is_empty();
    let empty = &watch.empty_ns[usize::from(is_target)];
    let timers = &shared.timers;
    let mut pause = PollThenSleep::new(spin);
    let mut ends = None;
    loop {
        let begin = Instant::now();
        if watch.is_over() {
            let by = *ends.get_or_insert_with(|| {
                // Tasks that wait until their next message is due.
                timers.wake_all();
                begin + PATIENCE
            });
            let closed = match &targets {
                _ if !watch.flows.are_local => watch.is_closed(),
                _ if !is_target => flows.tasks.is_empty() && !watch.target_open.load(Ordering::Acquire),
                Targets::Udp(sockets) => sockets.iter().all(|socket| socket.have_drained(watch)),
                // A target has closed when the source has acknowledged its FIN.
                Targets::Tcp(_) => flows.tasks.is_empty() && shared.known.get() > 0 && stack.connections() == 0,
            };
            if closed || !watch.has_started() || begin > by {
                break;
            }
        }
        if let Some(known) = routes.and_then(|routes| routes.get()) {
            flows.sources(&sockets, known)?;
            routes = None;
        }
        let mut work = stack.poll(clock.now()) + timers.advance(clock.now());
        work += match &mut targets {
            Targets::Tcp(listeners) => {
                listeners.iter_mut().map(|(listener, numbers)| flows.accept(listener, numbers)).sum()
            }
            Targets::Udp(sockets) => sockets.iter_mut().map(|socket| socket.receive(watch)).sum::<usize>(),
        };
        work += flows.run();
        let due = [stack.poll_timeout(), timers.next()].into_iter().flatten().min();
        let sleep = due.map_or(CHECK_EVERY, |at| at.since(clock.now()).min(CHECK_EVERY));
        if work == 0 {
            let idle = begin.elapsed();
            empty.fetch_add(u64::try_from(idle.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
        }
        pause.turn(work, &mut [stack], sleep.into())?;
    }
    if is_target {
        watch.target_open.store(false, Ordering::Release);
    }
    let failed = flows.failed;
    drop((flows, targets));
    watch.add_latencies(&shared.latencies.borrow());
    stack.poll(clock.now());
    failed.map_or(Ok(()), |error| Err(anyhow::Error::new(error).context("a flow")))
}

/// Pages to send from, used again and again.
fn payload(running: &mut Running) -> anyhow::Result<Payload> {
    let pool = &running.pool;
    let pages: Option<Vec<_>> = (0..PAGES).map(|_| Some(pool.alloc()?.freeze())).collect();
    Ok(pages.ok_or_else(|| anyhow::anyhow!("no pages for the payload"))?.into())
}

/// The sockets of a target, and the numbers of the flows of each that are to come.
enum Targets {
    Tcp(Vec<(TcpListener<Mem>, Numbers)>),
    Udp(Vec<Datagrams>),
}

impl Targets {
    fn new(sockets: &Sockets<Mem>, watch: &Watch, flows: &[u16]) -> Result<Self, SocketError> {
        let mut next = 0;
        let places = (PORT..).zip(flows).map(|(port, &flows)| {
            let first = next;
            next += usize::from(flows);
            (SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)), first..next)
        });
        Ok(match watch.work.proto {
            Proto::Tcp => {
                let listen =
                    |(at, numbers)| Ok((sockets.listen(at, ListenOptions::default())?, Rc::new(RefCell::new(numbers))));
                Self::Tcp(places.map(listen).collect::<Result<_, SocketError>>()?)
            }
            Proto::Udp => {
                let bind = |(at, numbers)| Ok(Datagrams::new(sockets.bind(at)?, watch.work, numbers));
                Self::Udp(places.map(bind).collect::<Result<_, SocketError>>()?)
            }
        })
    }
}

/// The tasks of an end.
struct Flows<'w> {
    tasks: Tasks<'w>,
    shared: Rc<Shared<'w>>,
    /// The error of the first flow that did not end in order.
    failed: Option<SocketError>,
}

impl<'w> Flows<'w> {
    fn new(shared: &Rc<Shared<'w>>) -> Self {
        Self { tasks: Tasks::new(), shared: Rc::clone(shared), failed: None }
    }

    /// Begins the flows of all routes.
    fn sources(&mut self, sockets: &Sockets<Mem>, routes: &[Route]) -> Result<(), SocketError> {
        let to = routes.iter().flat_map(|route| std::iter::repeat_n(route.to, route.flows.into()));
        (0..).zip(to).try_for_each(|(flow, to)| self.source(sockets, to, flow))
    }

    fn source(&mut self, sockets: &Sockets<Mem>, to: SocketAddr, flow: u16) -> Result<(), SocketError> {
        let (shared, any) = (Rc::clone(&self.shared), SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)));
        let open = Source(shared.watch);
        let task: Task<'w> = match (shared.watch.work.proto, shared.watch.work.answer) {
            (Proto::Tcp, None) => {
                Box::pin(flows::stream_source(sockets.connect(to, &Config::default())?, shared, flow, open))
            }
            (Proto::Tcp, Some(answer)) => {
                Box::pin(flows::requests(sockets.connect(to, &Config::default())?, shared, flow, answer, open))
            }
            (Proto::Udp, None) => Box::pin(flows::datagram_source(sockets.bind(any)?, to, shared, flow, open)),
            (Proto::Udp, Some(_)) => Box::pin(flows::datagram_requests(sockets.bind(any)?, to, shared, flow, open)),
        };
        self.tasks.push(task);
        Ok(())
    }

    /// Accepts the connections of a listener while flows are to come. Returns how many there were.
    fn accept(&mut self, listener: &mut TcpListener<Mem>, numbers: &Numbers) -> usize {
        let mut accepted = 0;
        while let Ok(stream) = listener.accept() {
            accepted += 1;
            if numbers.borrow().is_empty() || self.shared.unknown.get() >= MAX_UNKNOWN {
                continue;
            }
            let (shared, numbers) = (Rc::clone(&self.shared), Rc::clone(numbers));
            let task: Task<'w> = match shared.watch.work.answer {
                None => Box::pin(flows::stream_target(stream, shared, numbers)),
                Some(answer) => Box::pin(flows::answers(stream, shared, answer, numbers)),
            };
            self.tasks.push(task);
        }
        accepted
    }

    fn run(&mut self) -> usize {
        let failed = &mut self.failed;
        self.tasks.run(|ended| *failed = failed.or(ended.err()))
    }
}
