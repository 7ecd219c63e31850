//! The state LISTEN: decides which segments begin a connection.
//!
//! Why it only counts: half-open connections are ordinary connections, which the caller stores with
//! its other ones. So there is one table, one set of timers, and one place where a flood is
//! limited.

use std::hash::Hash;

use super::connection::Connection;
use super::cookie::CookieOptions;
use super::state::State;
use super::{Budget, Carrier, Config, Ecn, Flags, Header, Options, Secret, Seq, Timestamps, cookie, reset_for, window};
use crate::time::Time;

/// A listening port: the sizes of its two bounded queues, and the behaviour when they are full.
///
/// ```text
///   SYN ─┬─► half open: at most `half_open` ──┬─► waits: at most `backlog` ─► accept
///        │     full                           │     full: SYN and acknowledgements are dropped
///        └─► SYN-ACK with a cookie ─► its ACK ┘
/// ```
///
/// The queues themselves belong to the caller, which stores half-open connections with its other
/// connections. This value counts them and makes the decisions. If a peer's final acknowledgement
/// is dropped, the peer believes that it is connected. The connection completes later, when SYN-ACK
/// is sent again and there is room.
#[derive(Clone, Copy, Debug)]
pub struct Listener {
    backlog: usize,
    most_half_open: usize,
    waiting: usize,
    half_open: usize,
    cookie_at: Option<Time>,
    dropped: u64,
    cookies: u64,
}

/// The reaction to a segment for a listening port.
pub enum Answer<C: Carrier> {
    /// A connection in SYN-RECEIVED. Its next [`poll_transmit`](Connection::poll_transmit) sends
    /// SYN-ACK. Report later whether it [`connected`](Listener::connected) or
    /// [`failed`](Listener::failed).
    HalfOpen(Connection<C>),
    /// The acknowledgement had a cookie. This connection is established and counted as waiting.
    /// Pass the same segment to it.
    Connected(Connection<C>),
    /// A segment to be sent: SYN-ACK with a cookie, or a reset.
    Reply(Header),
    /// The segment is dropped without an answer.
    Drop,
}

/// A segment for a listening port.
#[derive(Clone, Copy, Debug)]
pub struct ArrivingSegment<'a, F> {
    /// The header of the segment.
    pub header: &'a Header,
    /// Bytes of payload.
    pub len: u32,
    /// Addresses and ports of the segment.
    pub flow: &'a F,
    /// The result of [`Connection::reused_by`], if this segment replaces a connection of this flow
    /// in TIME-WAIT.
    pub after: Option<Seq>,
    /// When another listener of the host that shares the secret last sent a cookie. The segment
    /// that returns a cookie can arrive at any of them.
    pub cookie_at: Option<Time>,
}

/// What the connections of a listening port have in common.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionTemplate<'a> {
    /// The options of a new connection. [`max_payload`](Config::max_payload) is set by the path.
    pub config: &'a Config,
    /// The key of initial numbers and cookies.
    pub secret: &'a Secret,
    /// The budget in which received payload is counted.
    pub queue: Option<&'a Budget>,
}

impl Listener {
    /// A listener for `backlog` connections that wait for accept, and for `half_open` handshakes
    /// without cookies.
    #[must_use]
    pub fn new(backlog: usize, half_open: usize) -> Self {
        Self { backlog, most_half_open: half_open, waiting: 0, half_open: 0, cookie_at: None, dropped: 0, cookies: 0 }
    }

    /// Processes a segment for which there is no connection. RFC 9293, section 3.10.7.2.
    ///
    /// `path` is called only if a connection is to be made. It returns the bytes of payload of a
    /// segment that the path to the peer admits, or `None` if no connection can be made: the
    /// segment is dropped then. So a segment that makes no connection costs no lookup of a path.
    ///
    /// Cost: the memory of a connection for a SYN while there is room for half-open connections,
    /// otherwise two keyed hashes.
    pub fn handle_segment<C: Carrier>(
        &mut self,
        segment: ArrivingSegment<'_, impl Hash>,
        template: ConnectionTemplate<'_>,
        now: Time,
        path: impl FnOnce() -> Option<u16>,
    ) -> Answer<C> {
        let ArrivingSegment { header, len, flow, after, cookie_at } = segment;
        let flags = header.flags;
        if flags.has(Flags::RST) {
            return Answer::Drop;
        }
        if flags.has(Flags::ACK) {
            let cookie_at = self.cookie_at.max(cookie_at);
            if flags.has(Flags::SYN) || cookie_at.is_none_or(|at| now.since(at) > cookie::VALID) {
                return reset(header, len);
            }
            return self.cookie(&segment, template, now, path);
        }
        if !flags.has(Flags::SYN) {
            return Answer::Drop;
        }
        if self.is_full() {
            self.dropped += 1;
            return Answer::Drop;
        }
        if self.half_open < self.most_half_open {
            let Some(config) = on_path(template.config, path) else { return Answer::Drop };
            self.half_open += 1;
            let mut start = template.secret.start(flow, now);
            start.iss = after.map_or(start.iss, |after| start.iss.max(after));
            return Answer::HalfOpen(Connection::answer(header, &config, start, template.queue, now));
        }
        self.cookies += 1;
        self.cookie_at = Some(now);
        Answer::Reply(syn_cookie(header, flow, template.config, template.secret, now))
    }

    fn cookie<C: Carrier>(
        &mut self,
        segment: &ArrivingSegment<'_, impl Hash>,
        template: ConnectionTemplate<'_>,
        now: Time,
        path: impl FnOnce() -> Option<u16>,
    ) -> Answer<C> {
        let ArrivingSegment { header, len, flow, .. } = *segment;
        let iss = header.ack - 1;
        let Some(mss) = cookie::check(template.secret, flow, header.seq - 1, iss, now) else {
            // The payload or FIN overtook the acknowledgement with the cookie. The segment is
            // dropped: the peer sends it again.
            let repeated = len > 0 || header.flags.has(Flags::FIN);
            return if repeated { Answer::Drop } else { reset(header, len) };
        };
        if self.is_full() {
            self.dropped += 1;
            return Answer::Drop;
        }
        let Some(config) = on_path(template.config, path) else { return Answer::Drop };
        self.waiting += 1;
        let stamps = header.options.timestamps.filter(|_| config.timestamps);
        let kept = stamps.map_or(CookieOptions::default(), |stamps| cookie::options(stamps.echo));
        let options = Options { mss: Some(mss), timestamps: stamps, ..kept.options };
        let syn = CookieOptions { options, ..kept };
        let start = super::Start { iss, ..template.secret.start(flow, now) };
        Answer::Connected(Connection::from_cookie(header, syn, &config, start, template.queue, now))
    }

    /// Whether a segment may be passed to a half-open connection. While the accept queue is full,
    /// acknowledgements that would complete the handshake are dropped.
    pub fn admits<C: Carrier>(&mut self, connection: &Connection<C>, header: &Header) -> bool {
        let completes = connection.state() == State::SynReceived && header.flags.has(Flags::ACK);
        let admitted = !completes || header.flags.has(Flags::RST) || !self.is_full();
        self.dropped += u64::from(!admitted);
        admitted
    }

    /// When this listener last sent a cookie.
    #[must_use]
    pub fn cookie_at(&self) -> Option<Time> {
        self.cookie_at
    }

    /// Notes that a half-open connection is connected, and waits for accept.
    pub fn connected(&mut self) {
        self.half_open = self.half_open.saturating_sub(1);
        self.waiting += 1;
    }

    /// Notes that a half-open connection is over.
    pub fn failed(&mut self) {
        self.half_open = self.half_open.saturating_sub(1);
    }

    /// Notes that a waiting connection was accepted, or is over.
    pub fn accepted(&mut self) {
        self.waiting = self.waiting.saturating_sub(1);
    }

    /// The number of connections that wait for accept.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// The number of handshakes that are not complete.
    #[must_use]
    pub fn half_open(&self) -> usize {
        self.half_open
    }

    /// The number of segments that were dropped because the accept queue was full, since the
    /// listener was made.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// The number of cookies that were sent, since the listener was made.
    #[must_use]
    pub fn cookies(&self) -> u64 {
        self.cookies
    }

    fn is_full(&self) -> bool {
        self.waiting >= self.backlog
    }
}

/// The options of a new connection on its path.
fn on_path(config: &Config, path: impl FnOnce() -> Option<u16>) -> Option<Config> {
    path().map(|max_payload| Config { max_payload, ..*config })
}

/// A SYN-ACK with a cookie, for which no state is kept.
fn syn_cookie(syn: &Header, flow: &impl Hash, config: &Config, secret: &Secret, now: Time) -> Header {
    let mss = syn.options.mss.unwrap_or(config.default_mss);
    let stamps = syn.options.timestamps.filter(|_| config.timestamps);
    let scale = syn.options.window_scale.filter(|_| config.window_scaling && stamps.is_some());
    let sack = syn.options.sack_permitted && config.sack && stamps.is_some();
    let ecn = syn.flags.is_ecn_setup() && config.ecn != Ecn::Off && stamps.is_some();
    let clock = (now.micros() / 1000) as u32;
    let clock = clock.wrapping_add(secret.start(flow, now).timestamp_offset);
    let flags = Flags::SYN.with(Flags::ACK);
    let (most, own_scale) = window::scale(config.receive_buffer);
    Header {
        seq: cookie::make(secret, flow, syn.seq, mss, now),
        ack: syn.seq + 1,
        flags: if ecn { flags.with(Flags::ECE) } else { flags },
        window: window::cookie_window(most),
        urgent: 0,
        options: Options {
            mss: Some(config.mss),
            window_scale: scale.map(|_| own_scale),
            sack_permitted: sack,
            timestamps: stamps
                .map(|stamps| Timestamps { value: cookie::stamp(clock, scale, sack, ecn), echo: stamps.value }),
            ..Options::default()
        },
    }
}

fn reset<C: Carrier>(header: &Header, len: u32) -> Answer<C> {
    reset_for(header, len).map_or(Answer::Drop, Answer::Reply)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::testing::{End, Sent, TestCarrier, start, stream};
    use super::super::{Error, Event};
    use super::*;

    const NOW: Time = Time::from_micros(100_000_000);

    fn secret() -> Secret {
        Secret::new([7; 16])
    }

    fn give(listener: &mut Listener, header: &Header, flow: u32, now: Time) -> Answer<TestCarrier> {
        give_segment(listener, ArrivingSegment { header, len: 0, flow: &flow, after: None, cookie_at: None }, now)
    }

    fn give_segment(listener: &mut Listener, segment: ArrivingSegment<'_, u32>, now: Time) -> Answer<TestCarrier> {
        let template = ConnectionTemplate { config: &Config::default(), secret: &secret(), queue: None };
        listener.handle_segment(segment, template, now, || Some(1460))
    }

    fn client(config: &Config) -> (End, Header) {
        let mut end = End::new(Connection::connect(config, start(1000), None, NOW));
        let syn = end.output(NOW).remove(0).header;
        (end, syn)
    }

    fn bare(header: Header) -> Sent {
        Sent { header, payload: Vec::new(), ect: false }
    }

    #[test]
    fn a_handshake_moves_from_queue_to_queue() {
        let mut listener = Listener::new(1, 1);
        let (mut client, syn) = client(&Config::default());
        let Answer::HalfOpen(server) = give(&mut listener, &syn, 1, NOW) else { panic!() };
        let mut server = End::new(server);
        let syn_ack = server.output(NOW).remove(0);
        client.input(&syn_ack, NOW);
        let ack = client.output(NOW).remove(0);
        assert!(listener.admits(&server.tcp, &ack.header));
        server.input(&ack, NOW);
        assert_eq!(server.tcp.poll_event(), Some(Event::Connected));
        assert_eq!((listener.half_open(), listener.waiting()), (1, 0));
        listener.connected();
        assert_eq!((listener.half_open(), listener.waiting()), (0, 1));
        // The accept queue is full.
        assert!(matches!(give(&mut listener, &syn, 2, NOW), Answer::Drop));
        assert_eq!(listener.dropped(), 1);
        listener.accepted();
        assert!(matches!(give(&mut listener, &syn, 2, NOW), Answer::HalfOpen(_)));
        listener.failed();
        assert_eq!((listener.half_open(), listener.waiting()), (0, 0));
    }

    #[test]
    fn a_full_accept_queue_lets_the_peer_wait() {
        let mut listener = Listener::new(1, 2);
        let mut ends: Vec<_> = (1..3)
            .map(|flow| {
                let (mut client, syn) = client(&Config::default());
                let Answer::HalfOpen(server) = give(&mut listener, &syn, flow, NOW) else { panic!() };
                let mut server = End::new(server);
                server.output(NOW).iter().for_each(|sent| client.input(sent, NOW));
                (client, server)
            })
            .collect();
        listener.connected();
        let (mut client, mut server) = ends.remove(1);
        client.tcp.send(stream(0, 10), false).unwrap();
        let sent = client.output(NOW);
        assert!(sent.iter().all(|sent| !listener.admits(&server.tcp, &sent.header)));
        listener.accepted();
        // SYN-ACK is repeated, and the following acknowledgement is admitted.
        let later = server.tcp.poll_timeout().unwrap();
        server.tcp.handle_timeout(later);
        server.output(later).iter().for_each(|sent| client.input(sent, later));
        client.tcp.handle_timeout(later);
        for sent in client.output(later) {
            assert!(listener.admits(&server.tcp, &sent.header));
            server.input(&sent, later);
        }
        assert_eq!(server.tcp.poll_event(), Some(Event::Connected));
        // A reset is always admitted.
        assert!(listener.admits(&server.tcp, &Header { flags: Flags::RST, ..sent[0].header }));
    }

    /// Proves INET-6.
    #[test]
    fn a_syn_ack_is_repeated_five_times() {
        let (_, syn) = client(&Config::default());
        let Answer::HalfOpen(server) = give(&mut Listener::new(1, 1), &syn, 1, NOW) else { panic!() };
        let mut server = End::new(server);
        let (mut now, mut sent) = (NOW, server.output(NOW));
        while let Some(next) = server.tcp.poll_timeout() {
            now = next;
            server.tcp.handle_timeout(now);
            sent.extend(server.output(now));
        }
        assert!(sent.iter().all(|sent| sent.has(Flags::SYN.with(Flags::ACK))));
        assert_eq!((sent.len(), now.since(NOW)), (6, Duration::from_secs(63)));
        assert_eq!(server.tcp.failure(), Some(Error::TimedOut));
    }

    #[test]
    fn cookies_keep_scale_and_sack_within_timestamps() {
        for timestamps in [true, false] {
            let mut listener = Listener::new(1, 0);
            let config = Config { timestamps, ..Config::default() };
            let (mut client, syn) = client(&config);
            let Answer::Reply(syn_ack) = give(&mut listener, &syn, 1, NOW) else { panic!() };
            assert_eq!(
                (syn_ack.options.window_scale.is_some(), syn_ack.options.sack_permitted),
                (timestamps, timestamps)
            );
            client.input(&bare(syn_ack), NOW);
            client.tcp.send(stream(0, 5000), false).unwrap();
            let later = NOW + Duration::from_secs(60);
            let sent = client.output(later);
            let Answer::Connected(server) = give(&mut listener, &sent[0].header, 1, later) else { panic!() };
            assert_eq!(listener.waiting(), 1);
            let mut server = End::new(server);
            assert_eq!(
                (server.tcp.window_scaling, server.tcp.sack, server.tcp.peer_clock.is_some()),
                (timestamps, timestamps, timestamps)
            );
            assert_eq!((server.tcp.peer_scale, server.tcp.peer_mss), (client.tcp.peer_scale, 1460));
            sent.iter().for_each(|sent| server.input(sent, later));
            server.read(later);
            assert_eq!((server.read.len(), server.tcp.state()), (5000, State::Established));
            server.output(later).iter().for_each(|sent| client.input(sent, later));
            assert_eq!(client.tcp.una(), sent[0].header.seq + 5000, "the echoed timestamps pass PAWS");
        }
    }

    #[test]
    fn an_acknowledgement_without_a_valid_cookie_is_reset() {
        let mut listener = Listener::new(1, 0);
        let (mut client, syn) = client(&Config::default());
        let header = Header { seq: syn.seq + 1, ack: Seq(99), flags: Flags::ACK, ..syn };
        let is_reset =
            |answer| matches!(answer, Answer::Reply(reset) if reset.flags == Flags::RST && reset.seq == header.ack);
        assert!(is_reset(give(&mut listener, &header, 1, NOW)), "no cookie was sent");
        let Answer::Reply(syn_ack) = give(&mut listener, &syn, 1, NOW) else { panic!() };
        assert!(is_reset(give(&mut listener, &header, 1, NOW)), "forged");
        client.input(&bare(syn_ack), NOW);
        let ack = client.output(NOW).remove(0).header;
        assert!(!matches!(give(&mut listener, &ack, 2, NOW), Answer::Connected(_)), "of another flow");
        let late = NOW + Duration::from_secs(129);
        assert!(!matches!(give(&mut listener, &ack, 1, late), Answer::Connected(_)), "too late");
        for (flags, len) in [(ack.flags, 1000), (ack.flags.with(Flags::FIN), 0)] {
            let header = Header { seq: ack.seq + 1000, flags, ..ack };
            let arriving = ArrivingSegment { header: &header, len, flow: &1, after: None, cookie_at: None };
            let overtook = give_segment(&mut listener, arriving, NOW);
            assert!(matches!(overtook, Answer::Drop), "the acknowledgement is on its way");
        }
        assert!(matches!(give(&mut listener, &ack, 1, NOW), Answer::Connected(_)));
        assert!(matches!(give(&mut listener, &ack, 1, NOW), Answer::Drop), "the accept queue is full");
    }

    #[test]
    fn a_flood_of_syn_occupies_the_queue_and_no_more() {
        let mut listener = Listener::new(1, 16);
        let (_, syn) = client(&Config::default());
        let kept = (0..10_000).filter(|flow| matches!(give(&mut listener, &syn, *flow, NOW), Answer::HalfOpen(_)));
        assert_eq!((kept.count(), listener.half_open(), listener.cookies()), (16, 16, 9984));
    }

    /// The stack of another queue has sent the cookie.
    #[test]
    fn a_cookie_returns_to_any_listener_that_shares_the_secret() {
        let (mut one, mut other) = (Listener::new(1, 0), Listener::new(1, 0));
        let (mut client, syn) = client(&Config::default());
        let Answer::Reply(syn_ack) = give(&mut one, &syn, 1, NOW) else { panic!() };
        client.input(&bare(syn_ack), NOW);
        let ack = client.output(NOW).remove(0).header;
        assert!(matches!(give(&mut other, &ack, 1, NOW), Answer::Reply(_)), "it knows of no cookie");
        let arriving = ArrivingSegment { header: &ack, len: 0, flow: &1, after: None, cookie_at: one.cookie_at() };
        assert!(matches!(give_segment(&mut other, arriving, NOW), Answer::Connected(_)));
    }

    /// A flood must not cost a lookup of a path for each segment.
    #[test]
    fn only_a_connection_needs_a_path() {
        let mut listener = Listener::new(1, 0);
        let (mut client, syn) = client(&Config::default());
        let (secret, config) = (secret(), Config::default());
        let mut paths = 0;
        let mut segment = |header: &Header, admits: bool| {
            let arriving = ArrivingSegment { header, len: 0, flow: &1, after: None, cookie_at: None };
            let template = ConnectionTemplate { config: &config, secret: &secret, queue: None };
            let answer: Answer<TestCarrier> = listener.handle_segment(arriving, template, NOW, || {
                paths += 1;
                admits.then_some(1000)
            });
            (answer, paths)
        };
        let (Answer::Reply(syn_ack), 0) = segment(&syn, true) else { panic!() };
        client.input(&bare(syn_ack), NOW);
        let ack = client.output(NOW).remove(0).header;
        let forged = Header { ack: ack.ack + 1, ..ack };
        assert!(matches!(segment(&forged, true), (Answer::Reply(_), 0)));
        assert!(matches!(segment(&ack, false), (Answer::Drop, 1)), "no connection can be made");
        assert!(matches!(segment(&ack, true), (Answer::Connected(_), 2)));
    }

    #[test]
    fn what_does_not_begin_a_connection_is_reset_or_dropped() {
        let mut listener = Listener::new(1, 1);
        let flags = |flags: Flags| Header { seq: Seq(5), ack: Seq(9), flags, ..Header::default() };
        assert!(matches!(give(&mut listener, &flags(Flags::RST), 1, NOW), Answer::Drop));
        assert!(matches!(give(&mut listener, &flags(Flags::FIN), 1, NOW), Answer::Drop));
        for flags in [flags(Flags::ACK), flags(Flags::SYN.with(Flags::ACK))] {
            assert!(matches!(give(&mut listener, &flags, 1, NOW), Answer::Reply(reset) if reset.seq == Seq(9)));
        }
        assert_eq!(reset_for(&flags(Flags::RST), 0), None);
        let reset = reset_for(&flags(Flags::SYN), 10).unwrap();
        assert_eq!((reset.seq, reset.ack, reset.flags), (Seq(0), Seq(16), Flags::RST.with(Flags::ACK)));
    }

    #[test]
    fn a_new_connection_begins_after_the_one_in_time_wait() {
        let mut listener = Listener::new(1, 1);
        let (_, syn) = client(&Config::default());
        let after = secret().start(&1_u32, NOW).iss + 70_000;
        let arriving = ArrivingSegment { header: &syn, len: 0, flow: &1, after: Some(after), cookie_at: None };
        let answer = give_segment(&mut listener, arriving, NOW);
        assert!(matches!(answer, Answer::HalfOpen(server) if server.una() == after));
    }

    #[test]
    fn a_reset_of_a_half_open_connection_ends_it() {
        let mut listener = Listener::new(1, 1);
        let (_, syn) = client(&Config::default());
        let Answer::HalfOpen(server) = give(&mut listener, &syn, 1, NOW) else { panic!() };
        let mut server = End::new(server);
        server.output(NOW);
        server.answer(Header { seq: syn.seq + 1, flags: Flags::RST, ..Header::default() }, NOW);
        assert_eq!(server.events, [Event::Closed(Some(Error::Refused))]);
    }
}
