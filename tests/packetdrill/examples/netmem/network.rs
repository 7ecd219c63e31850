//! Packets from packetdrill: which connection or listener they reach, and what follows.

use super::device::{MIN_PATH_MTU_V4, MIN_PATH_MTU_V6, headers, packet};
use super::host::Netmem;
use super::memory::{Memory, SharedBytes};
use super::stream::Stream;
use netmem_inet::tcp::{Answer, ArrivingSegment, ConnectionTemplate, Header, IpFields, SegmentMeta, reset_for};
use netmem_inet::wire::{Flow, Icmp, IcmpError, IcmpKind, Ip, QuotedTransport, Transport};
use netmem_packetdrill::fail;

impl Netmem {
    /// Processes a packet from packetdrill.
    pub(super) fn arrive(&mut self, bytes: &[u8]) {
        let Ok(ip) = Ip::parse(bytes, bytes.len()) else { return };
        let Ok(transport) = ip.transport(bytes) else { return };
        let sum = |at: usize, len: usize| {
            let mut sum = netmem_packet::Sum::default();
            sum.add(&bytes[at..at + len]);
            sum
        };
        if ip.covered(&transport).is_some_and(|covered| !covered.holds(sum(covered.range.at, covered.range.len))) {
            return;
        }
        match transport {
            Transport::Tcp(segment) => {
                let flow = ip.flow(segment.source_port, segment.destination_port);
                let payload = &bytes[segment.payload.at..segment.payload.end()];
                self.segment(flow, &segment.header, payload, ip.is_ce());
            }
            Transport::Icmp(Icmp::Error(error)) => self.icmp(&error),
            // Without a message, a script would wait for an effect that cannot come.
            _ => fail("packets other than TCP and ICMP errors are not supported"),
        }
    }

    /// Processes an ICMP error about a segment. A smaller path MTU counts for all connections with
    /// that peer, and for later ones.
    fn icmp(&mut self, error: &IcmpError) {
        let IcmpError { kind, quoted } = error;
        let QuotedTransport::Tcp { seq } = quoted.transport else { return };
        let open = |stream: &Stream| stream.flow == quoted.flow && !stream.connection.is_gone();
        let Some((&id, stream)) = self.streams.iter_mut().find(|(_, stream)| open(stream)) else { return };
        if stream.options.ignores_path && matches!(kind, IcmpKind::TooBig { .. }) {
            return;
        }
        let v4 = quoted.flow.remote.is_ipv4();
        let believed =
            stream.connection.handle_delivery_error(kind.for_connection(headers(v4).into()), Some(seq), self.now);
        if let IcmpKind::TooBig { mtu } = *kind
            && believed
        {
            let least = if v4 { MIN_PATH_MTU_V4 } else { MIN_PATH_MTU_V6 };
            let mtu = u16::try_from(mtu).unwrap_or(u16::MAX).max(least);
            let known = self.paths.entry(quoted.flow.remote.ip()).or_insert(u16::MAX);
            *known = mtu.min(*known);
            for id in self.streams.keys().copied().collect::<Vec<_>>() {
                self.apply_path(id);
            }
        }
        self.pump(id);
    }

    /// Applies the route's MTU to a connection, if the script has changed it since.
    pub(super) fn apply_route(&mut self, id: usize) {
        let Some(stream) = self.streams.get(&id) else { return };
        let most = self.config(&stream.options, stream.flow.remote.is_ipv4()).max_payload;
        if let Some(stream) = self.streams.get_mut(&id).filter(|stream| stream.max_payload != most) {
            stream.max_payload = most;
            stream.connection.set_max_payload(most);
            self.apply_path(id);
        }
    }

    /// Applies the path MTU that is known for the peer of a connection.
    fn apply_path(&mut self, id: usize) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        let remote = stream.flow.remote.ip();
        if let Some(mtu) = self.paths.get(&remote).filter(|_| !stream.options.ignores_path) {
            let most = stream.max_payload.min(mtu - headers(remote.is_ipv4()));
            stream.connection.set_max_payload(most);
        }
    }

    /// Adds a connection. Returns its number.
    pub(super) fn insert(&mut self, stream: Stream) -> usize {
        let id = self.id();
        self.streams.insert(id, stream);
        self.apply_path(id);
        id
    }

    fn segment(&mut self, flow: Flow, header: &Header, payload: &[u8], ce: bool) {
        let size = self.settings.number("segment", 1460).max(1) as usize;
        let meta = SegmentMeta { len: payload.len() as u32, segments: payload.len().div_ceil(size).max(1) as u16, ce };
        let known = self
            .streams
            .iter()
            .find(|(_, stream)| stream.flow == flow && !stream.connection.is_gone())
            .map(|(id, _)| *id);
        let mut after = None;
        if let Some(id) = known {
            let stream = self.streams.get_mut(&id).expect("it was found");
            after = stream.connection.reused_by(header);
            if after.is_none() {
                self.give(id, header, payload, meta);
                return;
            }
        }
        let listening = self.listeners.iter_mut().find(|(_, l)| l.local == flow.local);
        let Some((&listener, listening)) = listening else {
            self.reply(&flow, reset_for(header, meta.len));
            return;
        };
        let arriving = ArrivingSegment { header, len: meta.len, flow: &flow, after, cookie_at: None };
        let template = ConnectionTemplate { config: &listening.config, secret: &self.secret, queue: None };
        let path = || Some(template.config.max_payload);
        let answer = listening.listener.handle_segment::<Memory>(arriving, template, self.now, path);
        // A new connection ends TIME-WAIT.
        if let Some(old) = known.filter(|_| !matches!(answer, Answer::Drop)) {
            self.streams.remove(&old);
        }
        match answer {
            Answer::HalfOpen(connection) => {
                let (options, most) = (listening.options, listening.config.max_payload);
                let stream = Stream::new(flow, connection, options, most, Some(listener), header);
                let id = self.insert(stream);
                self.listeners.entry(listener).and_modify(|listening| listening.half_open.push(id));
                self.pump(id);
            }
            Answer::Connected(connection) => {
                let (options, most) = (listening.options, listening.config.max_payload);
                let stream = Stream::new(flow, connection, options, most, None, header);
                let id = self.insert(stream);
                self.listeners.entry(listener).and_modify(|listening| listening.ready.push_back(id));
                self.give(id, header, payload, meta);
            }
            Answer::Reply(header) => self.reply(&flow, Some(header)),
            Answer::Drop => (),
        }
    }

    /// Passes a segment to a connection.
    fn give(&mut self, id: usize, header: &Header, payload: &[u8], meta: SegmentMeta) {
        let stream = self.streams.get_mut(&id).expect("it is there");
        if let Some(listening) = stream.listener.and_then(|id| self.listeners.get_mut(&id))
            && !listening.listener.admits(&stream.connection, header)
        {
            return;
        }
        stream.observe(header);
        let chunk = (!payload.is_empty()).then(|| SharedBytes::new(payload));
        stream.connection.handle_segment(header, chunk, meta, self.now);
        self.pump(id);
    }

    fn reply(&mut self, flow: &Flow, header: Option<Header>) {
        let packet = header.map(|header| packet(flow, &header, &[], IpFields::default(), false));
        self.sent.extend(packet);
    }
}
