//! The host: its connections and listeners, and the packets that they send.

use super::device::{Device, MIN_PATH_MTU_V4, MIN_PATH_MTU_V6, headers};
use super::stream::{self, SEND_BUFFER, Stream, ip_fields};
use netmem_inet::Time;
use netmem_inet::tcp::sender::SendOptions;
use netmem_inet::tcp::{Config, Ecn, Event, Listener, Secret};
use netmem_packetdrill::{Options, Settings};
use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// The stack under test.
pub(super) struct Netmem {
    /// The time of the call that is running.
    pub(super) now: Time,
    pub(super) settings: Settings,
    pub(super) streams: BTreeMap<usize, Stream>,
    pub(super) listeners: BTreeMap<usize, Listening>,
    pub(super) next: usize,
    pub(super) secret: Secret,
    pub(super) sent: VecDeque<Vec<u8>>,
    /// The path MTUs that ICMP errors have reported, by the peer's address.
    pub(super) paths: BTreeMap<IpAddr, u16>,
}

pub(super) struct Listening {
    pub(super) local: SocketAddr,
    pub(super) listener: Listener,
    pub(super) config: Config,
    pub(super) options: Options,
    /// Connections that `accept` returns.
    pub(super) ready: VecDeque<usize>,
    pub(super) half_open: Vec<usize>,
}

impl Netmem {
    /// A host without connections.
    pub(super) fn new(settings: Settings) -> Self {
        Self {
            now: Time::ZERO,
            settings,
            streams: BTreeMap::new(),
            listeners: BTreeMap::new(),
            next: 0,
            secret: Secret::new([7; 16]),
            sent: VecDeque::new(),
            paths: BTreeMap::new(),
        }
    }

    /// A number for a connection or a listener.
    pub(super) fn id(&mut self) -> usize {
        self.next += 1;
        self.next - 1
    }

    /// Sends the segments of a connection, and processes its events.
    pub(super) fn pump(&mut self, id: usize) {
        self.apply_route(id);
        let full = self.settings.queue_is_full();
        // Without other settings, Linux's pacing rate lets two segments leave together at the rates
        // of the scripts.
        let segments = self.settings.number("tcp_min_tso_segs", 2) as usize;
        let cuts = self.settings.has("device", "off");
        let Some(stream) = self.streams.get_mut(&id) else { return };
        loop {
            let mut device = Device {
                flow: stream.flow,
                ip: stream.connection.ip(),
                sent: &mut self.sent,
                full,
                most: if cuts { 65_536 } else { segments * stream.segment() },
                cuts,
            };
            let result = stream.connection.poll_transmit(self.now, &mut device);
            // The next record is passed on after the record before it was sent, so that no segment
            // has bytes of both.
            if result.is_err() || stream.records.is_empty() || stream.not_sent() > 0 {
                break;
            }
            stream.flush_records();
            // A record is not held back if other records follow.
            if !stream.records.is_empty() {
                stream.connection.set_nodelay(true);
            }
        }
        while let Some(event) = stream.connection.poll_event() {
            let listener = stream.listener.and_then(|id| self.listeners.get_mut(&id));
            match event {
                Event::Connected => {
                    if let Some(listening) = listener {
                        listening.half_open.retain(|half| *half != id);
                        listening.listener.connected();
                        listening.ready.push_back(id);
                        stream.listener = None;
                    }
                }
                Event::Closed(error) => {
                    if let Some(listening) = listener {
                        listening.half_open.retain(|half| *half != id);
                        listening.listener.failed();
                        stream.used = false;
                    }
                    stream.ended = true;
                    stream.failure = error.map(stream::errno);
                }
                Event::End => stream.end = true,
                _ => (),
            }
        }
        if stream.records.is_empty() && !stream.options.no_delay {
            stream.connection.set_nodelay(false);
        }
        stream.note(self.now);
        if !stream.used && stream.connection.is_gone() {
            self.streams.remove(&id);
        }
    }

    pub(super) fn config(&self, options: &Options, v4: bool) -> Config {
        let s = &self.settings;
        let headers = u64::from(headers(v4));
        let link = s.after("link", "mtu").unwrap_or(1500) - headers;
        let route = s.after("route", "mtu").map_or(link, |mtu| mtu - headers);
        let least = if v4 { MIN_PATH_MTU_V4 } else { MIN_PATH_MTU_V6 } - headers as u16;
        let announced = s.after("route", "advmss").unwrap_or(link);
        let mut config = Config {
            mss: announced as u16,
            max_payload: route as u16,
            default_mss: if v4 { 536 } else { least },
            receive_buffer: s.nth("tcp_rmem", 2, 6 << 20) as u32,
            budget: 1 << 20,
            window_scaling: s.is_on("tcp_window_scaling"),
            sack: s.is_on("tcp_sack"),
            timestamps: s.is_on("tcp_timestamps"),
            ecn: match s.number("tcp_ecn", 2) {
                0 => Ecn::Off,
                1 => Ecn::Request,
                _ => Ecn::Accept,
            },
            send: SendOptions {
                send_buffer: SEND_BUFFER,
                syn_retries: match options.syn_retries {
                    0 => s.number("tcp_syn_retries", 6) as u32,
                    set => set,
                },
                retries: s.number("tcp_retries2", 15) as u32,
                // A search begins there, too.
                path_floor: s.number("tcp_base_mss", least.into()).min(least.into()) as u32,
                restart_idle: s.is_on("tcp_slow_start_after_idle"),
                // Linux paces where the queueing discipline is fq, and its units are those of the
                // pacing rate always. The device's limit is that of its units (`pump`), unless
                // the stack cuts: then only pacing limits them.
                pacing: s.has("qdisc", "fq") || s.has("device", "off"),
                tail_probes: s.is_on("tcp_early_retrans"),
                mtu_probing: s.number("tcp_mtu_probing", 0) != 0,
                initial_window: s.after("route", "initcwnd").map_or(10, |segments| segments as u32),
                ..SendOptions::default()
            },
            syn_ack_retries: s.number("tcp_synack_retries", 5) as u32,
            fin_wait_2: Duration::from_secs(s.number("tcp_fin_timeout", 60)),
            ip: ip_fields(options),
            ..Config::default()
        };
        if options.max_segment != 0 {
            config.mss = config.mss.min(options.max_segment);
            config.max_payload = config.max_payload.min(options.max_segment);
        }
        config
    }
}
