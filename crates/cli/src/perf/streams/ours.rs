//! The ends on our stack, which has a task for each flow.

use super::plan::{PAGES, Proto};
use super::{CHECK_EVERY, PATIENCE, PORT, Watch};
use crate::host::Running;
use crate::host::tasks::{Conn, Task, Tasks, receive, send};
use netmem::net::PollThenSleep;
use netmem::pool::Frag;
use netmem_inet::tcp::Config;
use netmem_inet::{Fragment, ListenOptions, SocketError, Sockets, TcpListener, UdpSocket};
use netmem_measure::endpoint::Mem;
use std::collections::HashMap;
use std::future::poll_fn;
use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::{Duration, Instant};

/// Datagrams that a flow sends before the next one has its turn.
const TURN: usize = 8;

/// The end: source or target.
#[derive(Clone, Copy, Debug)]
pub(super) enum End {
    Source { to: SocketAddr, flows: u16 },
    Target,
}

/// The pages that a task of a source sends from. They outlive the task, because the run joins the
/// thread.
type Payload = Rc<[Frag<Mem>]>;

/// Runs until the run is over and the flows have ended.
pub(super) fn run(running: &mut Running, watch: &Watch, end: End, spin: Duration) -> anyhow::Result<()> {
    let payload = payload(running)?;
    let Running { stack, clock, .. } = running;
    let sockets = stack.sockets();
    let any = SocketAddr::from((Ipv4Addr::UNSPECIFIED, PORT));
    let (mut flows, mut listener, mut udp) = (Flows::new(watch), None, None);
    match (end, watch.proto) {
        (End::Source { to, flows: count }, proto) => {
            for _ in 0..count {
                flows.source(&sockets, proto, to, &payload)?;
            }
        }
        (End::Target, Proto::Tcp) => listener = Some(sockets.listen(any, ListenOptions::default())?),
        (End::Target, Proto::Udp) => udp = Some(Datagrams::new(sockets.bind(any)?)),
    }
    let empty = &watch.empty_ns[if matches!(end, End::Target) { 1 } else { 0 }];
    let mut pause = PollThenSleep::new(spin);
    let mut ends = None;
    loop {
        let begin = Instant::now();
        if watch.is_over() {
            let by = *ends.get_or_insert(begin + PATIENCE);
            // A target has closed when the source has acknowledged its FIN.
            let closed = match end {
                End::Source { .. } => !watch.target_open.load(Ordering::Acquire),
                End::Target => stack.connections() == 0,
            };
            if flows.are_over(end) && closed || begin > by {
                break;
            }
        }
        let mut work = stack.poll(clock.now());
        work += listener.as_mut().map_or(0, |listener| flows.accept(listener));
        work += udp.as_mut().map_or(0, |udp| udp.receive(watch));
        work += flows.run();
        let sleep = stack.poll_timeout().map_or(CHECK_EVERY, |at| at.since(clock.now()).min(CHECK_EVERY));
        if work == 0 {
            let idle = begin.elapsed();
            empty.fetch_add(u64::try_from(idle.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
        }
        pause.turn(work, &mut [stack], sleep.into())?;
    }
    if matches!(end, End::Target) {
        watch.target_open.store(false, Ordering::Release);
    }
    let failed = flows.failed;
    drop((flows, listener, udp));
    stack.poll(clock.now());
    failed.map_or(Ok(()), |error| Err(anyhow::Error::new(error).context("a flow of the source")))
}

/// Pages to send from, used again and again.
fn payload(running: &mut Running) -> anyhow::Result<Payload> {
    let pool = &running.pool;
    let pages: Option<Vec<_>> = (0..PAGES).map(|_| Some(pool.alloc()?.freeze())).collect();
    Ok(pages.ok_or_else(|| anyhow::anyhow!("no pages for the payload"))?.into())
}

/// The tasks of an end.
struct Flows<'w> {
    tasks: Tasks<'w>,
    watch: &'w Watch,
    accepted: usize,
    /// The error of the first flow that did not end in order.
    failed: Option<SocketError>,
}

impl<'w> Flows<'w> {
    fn new(watch: &'w Watch) -> Self {
        Self { tasks: Tasks::new(), watch, accepted: 0, failed: None }
    }

    /// Whether all flows have ended. A target of datagrams gets no message of an end.
    fn are_over(&self, end: End) -> bool {
        match (end, self.watch.proto) {
            (End::Target, Proto::Tcp) => self.tasks.is_empty() && self.accepted > 0,
            (End::Target, Proto::Udp) => true,
            _ => self.tasks.is_empty(),
        }
    }

    fn source(
        &mut self,
        sockets: &Sockets<Mem>,
        proto: Proto,
        to: SocketAddr,
        payload: &Payload,
    ) -> Result<(), SocketError> {
        let (watch, payload) = (self.watch, Rc::clone(payload));
        let task: Task<'w> = match proto {
            Proto::Tcp => {
                let stream = sockets.connect(to, &Config::default())?;
                Box::pin(stream_source(stream, watch, payload))
            }
            Proto::Udp => {
                let any = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
                Box::pin(datagram_source(sockets.bind(any)?, to, watch, payload))
            }
        };
        self.tasks.push(task);
        Ok(())
    }

    fn accept(&mut self, listener: &mut TcpListener<Mem>) -> usize {
        let before = self.accepted;
        while let Ok(stream) = listener.accept() {
            self.tasks.push(Box::pin(stream_target(stream, self.watch, self.accepted)));
            self.accepted += 1;
        }
        self.accepted - before
    }

    fn run(&mut self) -> usize {
        let failed = &mut self.failed;
        self.tasks.run(|ended| *failed = failed.or(ended.err()))
    }
}

/// Sends messages until the run is over, then waits for the peer's end.
async fn stream_source(mut stream: Conn, watch: &Watch, payload: Payload) -> Result<(), SocketError> {
    poll_fn(|cx| stream.poll_connected(cx)).await?;
    while !watch.is_over() {
        let mut left = watch.size;
        for page in payload.iter().cycle() {
            let n = left.min(page.len());
            left -= n;
            send(&mut stream, page.slice(0..n), left > 0).await?;
            if left == 0 {
                break;
            }
        }
    }
    stream.shutdown();
    let mut places: [Fragment<Mem>; 4] = Default::default();
    while receive(&mut stream, &mut places).await? > 0 {}
    Ok(())
}

/// Receives bytes, and counts them.
async fn stream_target(mut stream: Conn, watch: &Watch, flow: usize) -> Result<(), SocketError> {
    let mut places: [Fragment<Mem>; 32] = Default::default();
    loop {
        let n = receive(&mut stream, &mut places).await?;
        if n == 0 {
            stream.shutdown();
            return Ok(());
        }
        let bytes = places[..n].iter_mut().map(|place| std::mem::take(place).len()).sum();
        watch.count(flow, bytes);
    }
}

/// Sends datagrams as fast as the queue accepts them, until the run is over.
async fn datagram_source(
    mut socket: UdpSocket<Mem>,
    to: SocketAddr,
    watch: &Watch,
    payload: Payload,
) -> Result<(), SocketError> {
    for (n, page) in payload.iter().cycle().enumerate() {
        if watch.is_over() {
            break;
        }
        if n % TURN == 0 {
            let_others().await;
        }
        match socket.send_fragment_to(page.slice(0..watch.size.min(page.len())), to) {
            Ok(()) => {}
            Err(SocketError::WouldBlock) => poll_fn(|cx| socket.poll_writable(cx)).await,
            // The target does not listen yet, or no longer.
            Err(SocketError::Refused) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Lets the other flows run: otherwise the flow that runs first would always find the room.
async fn let_others() {
    let mut waited = false;
    poll_fn(|cx| {
        cx.waker().wake_by_ref();
        if std::mem::replace(&mut waited, true) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

/// The target of datagrams: one socket. Flows differ by their senders.
struct Datagrams {
    socket: UdpSocket<Mem>,
    flows: HashMap<SocketAddr, usize>,
}

impl Datagrams {
    fn new(socket: UdpSocket<Mem>) -> Self {
        Self { socket, flows: HashMap::new() }
    }

    /// Receives the datagrams that are there. Returns how many.
    fn receive(&mut self, watch: &Watch) -> usize {
        let mut places: [Fragment<Mem>; 4] = Default::default();
        let mut taken = 0;
        while let Ok(received) = self.socket.recv_from(&mut places) {
            let next = self.flows.len();
            if next < watch.bytes.len() || self.flows.contains_key(&received.from) {
                watch.count(*self.flows.entry(received.from).or_insert(next), received.len);
            }
            places = Default::default();
            taken += 1;
        }
        taken
    }
}
