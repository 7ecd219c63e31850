//! The host: its sockets, its stack, and the packets that it has sent.

use crate::options::Options;
use crate::settings::Settings;
use crate::stack::{ConnectionId, ListenerId, Stack};
use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    Main,
    Caller,
    Ending,
}

pub(crate) struct World {
    pub(crate) stack: Box<dyn Stack>,
    pub(crate) now: Duration,
    pub(super) settings: Settings,
    pub(crate) sockets: BTreeMap<i32, Socket>,
    pub(super) port: u16,
    /// Packets, with the times at which they were sent.
    pub(super) sent: VecDeque<(Vec<u8>, Duration)>,
    pub(super) turn: Turn,
    /// Whether a call is blocked on packetdrill's second thread, and until when at most.
    pub(super) blocked: Option<Option<Duration>>,
}

pub(crate) struct Socket {
    pub(crate) kind: SocketKind,
    pub(crate) nonblocking: bool,
    pub(crate) options: Options,
    /// Whether a `connect` has not returned its result yet.
    pub(super) connecting: bool,
    /// Whether its addresses are those of IPv4. A socket of IPv6 has IPv4 addresses mapped into
    /// IPv6.
    pub(crate) v4: bool,
    pub(super) local: Option<SocketAddr>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum SocketKind {
    New,
    Listener(ListenerId),
    Connection(ConnectionId),
}

impl World {
    /// A host without sockets.
    pub(crate) fn new(stack: Box<dyn Stack>, settings: Settings) -> Self {
        Self {
            stack,
            now: Duration::from_secs(1000),
            settings,
            sockets: BTreeMap::new(),
            port: 40_000,
            sent: VecDeque::new(),
            turn: Turn::Main,
            blocked: None,
        }
    }

    /// The time of the next timer.
    pub(super) fn deadline(&mut self) -> Option<Duration> {
        self.stack.deadline().into_iter().chain(self.blocked.flatten()).min()
    }

    /// Runs the due timers of the stack.
    pub(super) fn timeout(&mut self) {
        self.stack.handle_timeout(self.now);
        self.collect();
    }

    /// Takes the packets that the stack sends now.
    pub(super) fn collect(&mut self) {
        while let Some(packet) = self.stack.next_packet(self.now) {
            self.sent.push_back((packet, self.now));
        }
    }
}
