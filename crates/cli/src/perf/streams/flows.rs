//! The tasks of flows on our stack.
//!
//! ```text
//!   streams    stream_source ── messages, when they are due ──► stream_target counts bytes
//!   requests   requests ── a request ──► answers ── its answer ──► requests counts it and its time
//! ```
//!
//! Datagrams have the same two forms. Each flow begins with the cookie of the run. A flow of
//! datagrams repeats it until the target knows all flows: so whatever is lost later was lost on the
//! way.

use super::cookie::Cookie;
use super::pace::{Latencies, Pace};
use super::plan::{NUMBER, Work};
use super::watch::{Source, Watch};
use crate::host::tasks::{Conn, receive, send};
use crate::host::timers::{Alarm, Timers};
use netmem::pool::Frag;
use netmem_inet::{Fragment, SocketError, UdpSocket};
use netmem_measure::endpoint::Mem;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::ops::Range;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

/// Datagrams that a flow sends before the next one has its turn.
const TURN: usize = 8;
/// How often a flow of datagrams sends the cookie until its target knows it.
const BEGIN_EVERY: Duration = Duration::from_millis(1);
/// The longest time that is waited for the answer to a datagram.
pub(super) const LOST_AFTER: Duration = Duration::from_secs(1);

/// The pages that a task of a source sends from. They outlive the task, because the run joins the
/// thread.
pub(super) type Payload = Rc<[Frag<Mem>]>;

/// What the tasks of an end share.
pub(super) struct Shared<'w> {
    pub(super) watch: &'w Watch,
    pub(super) timers: Timers,
    pub(super) latencies: RefCell<Latencies>,
    /// Connections to a target here that have not sent the cookie yet, and those that have.
    pub(super) unknown: Cell<usize>,
    pub(super) known: Cell<usize>,
    payload: Payload,
}

impl<'w> Shared<'w> {
    pub(super) fn new(watch: &'w Watch, payload: Payload) -> Self {
        let (timers, latencies, unknown, known) = Default::default();
        Self { watch, payload, timers, latencies, unknown, known }
    }
}

/// The flows of a target that have not come yet, by their numbers.
pub(super) type Numbers = Rc<RefCell<Range<usize>>>;

/// The turns of a flow: its messages, one after the other.
struct Turns<'w> {
    shared: Rc<Shared<'w>>,
    pace: Pace,
    alarm: Alarm,
    messages: u64,
    _open: Source<'w>,
}

impl<'w> Turns<'w> {
    fn new(shared: Rc<Shared<'w>>, flow: u16, open: Source<'w>) -> Self {
        Self { pace: shared.watch.pace(flow), alarm: shared.timers.alarm(), shared, messages: 0, _open: open }
    }

    /// Waits until the next message is due, and returns when it was. `None`: the flow ends.
    async fn next(&mut self) -> Option<Instant> {
        let Self { shared, pace, alarm, messages, .. } = self;
        let watch = shared.watch;
        if let Pace::Closed = pace {
            let goes_on = !watch.is_over();
            *messages += u64::from(goes_on);
            return goes_on.then(Instant::now);
        }
        let (goes_on, due) = (|pace: &Pace| pace.goes_on(&watch.window, watch.work.drain), pace.due());
        poll_fn(|cx| if goes_on(pace) { until(alarm, &shared.timers, due, cx) } else { Poll::Ready(()) }).await;
        if !goes_on(pace) {
            return None;
        }
        pace.sent();
        *messages += 1;
        Some(due)
    }

    fn answered(&self, due: Instant) {
        self.shared.latencies.borrow_mut().answered(&self.shared.watch.window, due);
    }
}

impl Drop for Turns<'_> {
    fn drop(&mut self) {
        let watch = self.shared.watch;
        self.shared.latencies.borrow_mut().ended(&watch.window, self.pace.clone());
        watch.add_messages(self.messages);
    }
}

/// Waits until a time. The alarm is as exact as the stack's clock, so the last microsecond passes
/// in polls.
fn until(alarm: &mut Alarm, timers: &Timers, time: Instant, cx: &Context<'_>) -> Poll<()> {
    let left = time.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Poll::Ready(());
    }
    if alarm.is_due(timers.now() + left, cx) {
        cx.waker().wake_by_ref();
    }
    Poll::Pending
}

/// Sends a message of `left` bytes.
async fn message(stream: &mut Conn, payload: &Payload, mut left: usize) -> Result<(), SocketError> {
    for page in payload.iter().cycle() {
        let n = left.min(page.len());
        left -= n;
        send(stream, page.slice(0..n), left > 0).await?;
        if left == 0 {
            break;
        }
    }
    Ok(())
}

/// Receives what there is, or waits for it. Returns how many bytes: 0 at the end.
async fn bytes(stream: &mut Conn) -> Result<usize, SocketError> {
    let mut places: [Fragment<Mem>; 32] = Default::default();
    let n = receive(stream, &mut places).await?;
    Ok(places[..n].iter().map(|place| place.len()).sum())
}

/// Begins a stream: waits for the connection, and sends the cookie.
async fn begin(stream: &mut Conn, cookie: Cookie) -> Result<(), SocketError> {
    poll_fn(|cx| stream.poll_connected(cx)).await?;
    let mut left = cookie.bytes();
    while !left.is_empty() {
        match stream.write(left) {
            Ok(n) => left = &left[n..],
            Err(SocketError::WouldBlock) => poll_fn(|cx| stream.poll_writable(cx)).await?,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Waits for the cookie. Returns the number of the flow, and how many bytes have come behind the
/// cookie. `None`: the connection is none of the flows.
pub(super) async fn begun(stream: &mut Conn, shared: &Shared<'_>, numbers: &Numbers) -> Option<(usize, usize)> {
    shared.unknown.update(|n| n + 1);
    let behind = behind_cookie(stream, shared.watch.flows.cookie).await;
    shared.unknown.update(|n| n - 1);
    let behind = behind?;
    let flow = numbers.borrow_mut().next()?;
    shared.known.update(|n| n + 1);
    Some((flow, behind))
}

async fn behind_cookie(stream: &mut Conn, cookie: Cookie) -> Option<usize> {
    let (mut read, mut n, mut behind) = ([0; Cookie::LEN], 0, 0);
    while n < read.len() {
        let mut places: [Fragment<Mem>; 32] = Default::default();
        let fragments = receive(stream, &mut places).await.ok().filter(|n| *n > 0)?;
        for place in &places[..fragments] {
            let more = place.len().min(read.len() - n);
            place.copy_to(0, &mut read[n..n + more]).ok()?;
            n += more;
            behind += place.len() - more;
        }
    }
    cookie.is(&read).then_some(behind)
}

/// Sends messages until the run is over, then waits for the peer's end.
pub(super) async fn stream_source<'w>(
    mut stream: Conn,
    shared: Rc<Shared<'w>>,
    flow: u16,
    open: Source<'w>,
) -> Result<(), SocketError> {
    begin(&mut stream, shared.watch.flows.cookie).await?;
    let (payload, size) = (Rc::clone(&shared.payload), shared.watch.work.size);
    let mut turns = Turns::new(shared, flow, open);
    while turns.next().await.is_some() {
        message(&mut stream, &payload, size).await?;
    }
    stream.shutdown();
    while bytes(&mut stream).await? > 0 {}
    Ok(())
}

/// Receives bytes, and counts them.
pub(super) async fn stream_target(
    mut stream: Conn,
    shared: Rc<Shared<'_>>,
    numbers: Numbers,
) -> Result<(), SocketError> {
    let Some((flow, behind)) = begun(&mut stream, &shared, &numbers).await else { return Ok(()) };
    if behind > 0 {
        shared.watch.count(flow, behind);
    }
    loop {
        match bytes(&mut stream).await? {
            0 => break,
            n => shared.watch.count(flow, n),
        }
    }
    stream.shutdown();
    Ok(())
}

/// Sends requests, each when the one before is answered, until the run is over.
pub(super) async fn requests<'w>(
    mut stream: Conn,
    shared: Rc<Shared<'w>>,
    flow: u16,
    answer: usize,
    open: Source<'w>,
) -> Result<(), SocketError> {
    begin(&mut stream, shared.watch.flows.cookie).await?;
    let (payload, watch) = (Rc::clone(&shared.payload), shared.watch);
    let mut turns = Turns::new(shared, flow, open);
    while let Some(due) = turns.next().await {
        message(&mut stream, &payload, watch.work.size).await?;
        let mut left = answer;
        while left > 0 {
            match bytes(&mut stream).await? {
                0 => return Err(SocketError::Closed(netmem_inet::tcp::Error::Reset)),
                n => left = left.saturating_sub(n),
            }
        }
        turns.answered(due);
        watch.count(flow.into(), 1);
    }
    stream.shutdown();
    while bytes(&mut stream).await? > 0 {}
    Ok(())
}

/// Answers requests until the stream ends.
pub(super) async fn answers(
    mut stream: Conn,
    shared: Rc<Shared<'_>>,
    answer: usize,
    numbers: Numbers,
) -> Result<(), SocketError> {
    let Some((_, mut received)) = begun(&mut stream, &shared, &numbers).await else { return Ok(()) };
    loop {
        while received >= shared.watch.work.size {
            received -= shared.watch.work.size;
            message(&mut stream, &shared.payload, answer).await?;
        }
        match bytes(&mut stream).await? {
            0 => break,
            n => received += n,
        }
    }
    stream.shutdown();
    Ok(())
}

/// Sends a datagram, which may wait for room.
async fn datagram(
    socket: &mut UdpSocket<Mem>,
    mut send: impl FnMut(&mut UdpSocket<Mem>) -> Result<(), SocketError>,
) -> Result<(), SocketError> {
    loop {
        match send(socket) {
            Err(SocketError::WouldBlock) => poll_fn(|cx| socket.poll_writable(cx)).await,
            // The target does not listen yet, or no longer.
            Ok(()) | Err(SocketError::Refused) => return Ok(()),
            Err(error) => return Err(error),
        }
    }
}

/// Sends datagrams as fast as the queue accepts them, or when they are due, until the run is over.
pub(super) async fn datagram_source<'w>(
    mut socket: UdpSocket<Mem>,
    to: SocketAddr,
    shared: Rc<Shared<'w>>,
    flow: u16,
    open: Source<'w>,
) -> Result<(), SocketError> {
    let (payload, watch) = (Rc::clone(&shared.payload), shared.watch);
    let mut alarm = shared.timers.alarm();
    while !watch.has_started() && !watch.is_over() {
        datagram(&mut socket, |socket| socket.send_to(watch.flows.cookie.bytes(), to)).await?;
        let next = Instant::now() + BEGIN_EVERY;
        poll_fn(|cx| until(&mut alarm, &shared.timers, next, cx)).await;
    }
    let mut turns = Turns::new(shared, flow, open);
    for (n, page) in payload.iter().cycle().enumerate() {
        if turns.next().await.is_none() {
            break;
        }
        if n % TURN == 0 {
            let_others().await;
        }
        let len = watch.work.size.min(page.len());
        datagram(&mut socket, |socket| socket.send_fragment_to(page.slice(0..len), to)).await?;
        watch.sent();
    }
    Ok(())
}

/// Sends requests as datagrams, until the run is over.
pub(super) async fn datagram_requests<'w>(
    mut socket: UdpSocket<Mem>,
    to: SocketAddr,
    shared: Rc<Shared<'w>>,
    flow: u16,
    open: Source<'w>,
) -> Result<(), SocketError> {
    let watch = shared.watch;
    let mut request = vec![0x5a; watch.work.size];
    let (mut alarm, mut is_known) = (shared.timers.alarm(), false);
    while !is_known && !watch.is_over() {
        datagram(&mut socket, |socket| socket.send_to(watch.flows.cookie.bytes(), to)).await?;
        let next = Instant::now() + BEGIN_EVERY;
        is_known = poll_fn(|cx| {
            let is_cookie = |places: &[_], len| is_cookie(&watch.flows.cookie, places, len);
            let back = received(&mut socket, cx, is_cookie);
            if back { Poll::Ready(true) } else { until(&mut alarm, &shared.timers, next, cx).map(|()| false) }
        })
        .await;
    }
    let mut turns = Turns::new(shared, flow, open);
    for number in 0u64.. {
        let Some(due) = turns.next().await else { break };
        request[..NUMBER].copy_from_slice(&number.to_le_bytes());
        datagram(&mut socket, |socket| socket.send_to(&request, to)).await?;
        let Turns { shared, alarm, .. } = &mut turns;
        let lost_at = Instant::now() + LOST_AFTER;
        let answered = poll_fn(|cx| {
            let back = received(&mut socket, cx, |places, _| number_of(places) == Some(number));
            if back { Poll::Ready(true) } else { until(alarm, &shared.timers, lost_at, cx).map(|()| false) }
        });
        if answered.await {
            turns.answered(due);
            watch.count(flow.into(), 1);
        } else {
            turns.shared.latencies.borrow_mut().lost(&watch.window, due);
        }
    }
    Ok(())
}

/// Receives datagrams until one is the awaited. Returns whether it has come.
fn received(
    socket: &mut UdpSocket<Mem>,
    cx: &mut Context<'_>,
    is_awaited: impl Fn(&[Fragment<Mem>], usize) -> bool,
) -> bool {
    let mut places: [Fragment<Mem>; 4] = Default::default();
    while let Poll::Ready(received) = socket.poll_recv_from(cx, &mut places) {
        if received.is_ok_and(|datagram| is_awaited(&places, datagram.len)) {
            return true;
        }
        places = Default::default();
    }
    false
}

/// Whether a datagram of this length is the cookie.
fn is_cookie(cookie: &Cookie, places: &[Fragment<Mem>], len: usize) -> bool {
    let mut bytes = [0; Cookie::LEN];
    let head = places.first().filter(|_| len == bytes.len());
    head.is_some_and(|head| head.copy_to(0, &mut bytes).is_ok()) && cookie.is(&bytes)
}

/// The number of a request or of an answer.
fn number_of(places: &[Fragment<Mem>]) -> Option<u64> {
    let mut number = [0; NUMBER];
    places.first()?.copy_to(0, &mut number).ok()?;
    Some(u64::from_le_bytes(number))
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

/// The target of datagrams: one socket. Flows differ by their senders, who have sent the cookie.
pub(super) struct Datagrams {
    socket: UdpSocket<Mem>,
    flows: HashMap<SocketAddr, usize>,
    /// The answer to a request, behind its number.
    answer: Vec<u8>,
    /// The numbers of its flows.
    numbers: Range<usize>,
    /// When a datagram was last received.
    last: Instant,
}

impl Datagrams {
    pub(super) fn new(socket: UdpSocket<Mem>, work: Work, numbers: Range<usize>) -> Self {
        let answer = vec![0x5a; work.answer.unwrap_or(0)];
        Self { socket, flows: HashMap::new(), answer, numbers, last: Instant::now() }
    }

    /// Whether no more datagrams will come.
    pub(super) fn have_drained(&self, watch: &Watch) -> bool {
        watch.has_drained(self.last.elapsed())
    }

    /// Receives the datagrams that are there, and answers requests. An answer for which there is no
    /// room is lost. Returns how many there were.
    pub(super) fn receive(&mut self, watch: &Watch) -> usize {
        let (mut places, mut received): ([Fragment<Mem>; 4], _) = (Default::default(), 0);
        while let Ok(datagram) = self.socket.recv_from(&mut places) {
            received += 1;
            self.handle(watch, datagram.from, datagram.len, &places);
            places = Default::default();
        }
        received
    }

    fn handle(&mut self, watch: &Watch, from: SocketAddr, len: usize, places: &[Fragment<Mem>]) {
        let (cookie, next) = (&watch.flows.cookie, self.numbers.start + self.flows.len());
        let is_cookie = is_cookie(cookie, places, len);
        if is_cookie && next < self.numbers.end {
            self.flows.entry(from).or_insert(next);
        }
        let Some(&flow) = self.flows.get(&from) else { return };
        self.last = Instant::now();
        match (self.answer.is_empty(), is_cookie) {
            (true, true) => watch.count(flow, 0),
            (true, false) => {
                watch.count(flow, len);
                watch.arrived();
            }
            (false, true) => _ = self.socket.send_to(cookie.bytes(), from),
            (false, false) => {
                let Some(number) = number_of(places) else { return };
                self.answer[..NUMBER].copy_from_slice(&number.to_le_bytes());
                _ = self.socket.send_to(&self.answer, from);
            }
        }
    }
}
