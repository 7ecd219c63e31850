//! A connection of the table on which nothing happens, and what can be seen of it without waking
//! it.

use crate::stack::page_counts::RemotePages;
use crate::stack::pages::WrittenPages;
use crate::stack::path::Path;
use crate::stack::payload::Payload;
use crate::stack::transport::entry::{ConnectionEntry, Role, Shrink};
use crate::tcp::{Config, Connection, IdleConnection, Seq, State};
use crate::wire::Flow;
use std::ops::Deref;
use std::sync::Arc;
use std::task::Waker;

/// The most settings that are kept to be shared. Listeners and users have few different ones.
const MOST_SHARED: usize = 32;

/// The settings of idle connections. Those that are equal are kept once.
pub(crate) struct SharedConfigs {
    known: Vec<Arc<Config>>,
}

impl SharedConfigs {
    pub(crate) const fn new() -> Self {
        Self { known: Vec::new() }
    }

    /// Settings that are equal to `config`. Cost: linear in the number of different ones, of which
    /// there are at most 32; others are not shared.
    fn share(&mut self, config: Config) -> Arc<Config> {
        if let Some(known) = self.known.iter().find(|known| ***known == config) {
            return known.clone();
        }
        if self.known.len() == MOST_SHARED {
            self.known.retain(|known| Arc::strong_count(known) > 1);
        }
        let config = Arc::new(config);
        if self.known.len() < MOST_SHARED {
            self.known.push(config.clone());
        }
        config
    }
}

/// An idle connection in its table: what is left of its [`ConnectionEntry`].
pub(crate) struct IdleEntry<P: Payload> {
    connection: IdleConnection,
    flow: Flow,
    path: Path<P>,
    role: Role,
    read: Option<Waker>,
    write: Option<Waker>,
    remote: Option<Arc<RemotePages<P::Mem>>>,
    unverified: u64,
    una: Seq,
    max_payload: u16,
    connected: bool,
    urgent: bool,
    /// It is in the list of connections whose window is limited by the page budget, or in the queue
    /// of those that wait for a page to write.
    buffer_limited: bool,
    awaits_page: bool,
}

impl<P: Payload> IdleEntry<P> {
    /// The connection in little memory. `None` if something is under way, or if it is to be
    /// processed.
    pub(crate) fn of(entry: &ConnectionEntry<P>, configs: &mut SharedConfigs) -> Option<IdleConnection> {
        let waits = entry.due || entry.in_ring_queue || entry.awaits_hop || entry.in_time_wait;
        if waits || entry.closed.is_some() || entry.out_of_order > 0 || entry.written.has_own() {
            return None;
        }
        entry.connection.idle(|config| configs.share(config))
    }

    /// The entry, without what is empty when `connection` is idle ([`of`](Self::of)).
    pub(crate) fn new(entry: ConnectionEntry<P>, connection: IdleConnection) -> Self {
        Self {
            connection,
            flow: entry.flow,
            path: entry.path,
            role: entry.role,
            read: entry.read,
            write: entry.write,
            remote: entry.written.remote,
            unverified: entry.unverified,
            una: entry.una,
            max_payload: entry.max_payload,
            connected: entry.connected,
            urgent: entry.urgent,
            buffer_limited: entry.buffer_limited,
            awaits_page: entry.awaits_page,
        }
    }

    /// The entry as it was.
    pub(crate) fn wake(self) -> ConnectionEntry<P> {
        ConnectionEntry {
            connection: self.connection.wake(),
            flow: self.flow,
            path: self.path,
            role: self.role,
            due: false,
            only_arrived: false,
            in_ring_queue: false,
            awaits_hop: false,
            buffer_limited: self.buffer_limited,
            in_time_wait: false,
            awaits_page: self.awaits_page,
            connected: self.connected,
            closed: None,
            read: self.read,
            write: self.write,
            urgent: self.urgent,
            max_payload: self.max_payload,
            unverified: self.unverified,
            una: self.una,
            written: WrittenPages::by(self.remote),
            shrink_at: Shrink::Busy,
            out_of_order: 0,
        }
    }
}

impl<P: Payload> IdleEntry<P> {
    /// Whether the user has received everything, and the peer sends no more. Otherwise there is
    /// nothing to receive yet.
    pub(crate) fn is_at_end(&self) -> bool {
        self.connection.is_at_end()
    }

    /// The wakers of the reader and of the writer.
    pub(crate) fn wakers_mut(&mut self) -> [&mut Option<Waker>; 2] {
        [&mut self.read, &mut self.write]
    }
}

/// What can be seen of a connection, whether it is idle or not.
pub(crate) enum Seen<'a, P: Payload> {
    Working(&'a ConnectionEntry<P>),
    Idle(&'a IdleEntry<P>),
}

impl<'a, P: Payload> Seen<'a, P> {
    pub(crate) fn flow(&self) -> &'a Flow {
        match self {
            Self::Working(entry) => &entry.flow,
            Self::Idle(entry) => &entry.flow,
        }
    }

    pub(crate) fn path(&self) -> &'a Path<P> {
        match self {
            Self::Working(entry) => &entry.path,
            Self::Idle(entry) => &entry.path,
        }
    }

    pub(crate) fn role(&self) -> Role {
        match self {
            Self::Working(entry) => entry.role,
            Self::Idle(entry) => entry.role,
        }
    }

    pub(crate) fn is_connected(&self) -> bool {
        match self {
            Self::Working(entry) => entry.connected,
            Self::Idle(entry) => entry.connected,
        }
    }

    pub(crate) fn unverified(&self) -> u64 {
        match self {
            Self::Working(entry) => entry.unverified,
            Self::Idle(entry) => entry.unverified,
        }
    }

    /// Pages with payload that was written and is not acknowledged.
    pub(crate) fn written_pages(&self) -> usize {
        match self {
            Self::Working(entry) => entry.written.held(),
            Self::Idle(entry) => entry.remote.as_ref().map_or(0, |remote| remote.held() as usize),
        }
    }

    pub(crate) fn state(&self) -> State {
        match self {
            Self::Working(entry) => entry.connection.state(),
            Self::Idle(entry) => entry.connection.state(),
        }
    }

    /// The connection. If it is idle, it is a copy, in memory that is allocated for it.
    pub(crate) fn connection(&self) -> SeenConnection<'a, P> {
        match self {
            Self::Working(entry) => SeenConnection::Working(&entry.connection),
            Self::Idle(entry) => SeenConnection::Copy(Box::new(entry.connection.clone().wake())),
        }
    }
}

/// A connection that is only looked at.
pub(crate) enum SeenConnection<'a, P: Payload> {
    Working(&'a Connection<P>),
    Copy(Box<Connection<P>>),
}

impl<P: Payload> Deref for SeenConnection<'_, P> {
    type Target = Connection<P>;

    fn deref(&self) -> &Connection<P> {
        match self {
            Self::Working(connection) => connection,
            Self::Copy(connection) => connection,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_are_equal_are_kept_once_and_unused_ones_make_room() {
        let mut configs = SharedConfigs::new();
        let config = |mss| Config { mss, ..Config::default() };
        let first = configs.share(config(1));
        assert!(Arc::ptr_eq(&first, &configs.share(config(1))));
        for mss in 2..1000 {
            assert_eq!(configs.share(config(mss)).mss, mss);
            assert!(configs.known.len() <= MOST_SHARED);
        }
        assert!(Arc::ptr_eq(&first, &configs.share(config(1))), "it is in use");
    }
}
