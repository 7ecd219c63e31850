//! What a TCP does for packetdrill: the trait [`Stack`], and the types of its methods.

use crate::errno::Errno;
use crate::options::{Options, SocketOption};
use crate::tcp_info::TcpInfo;
use std::net::{Shutdown, SocketAddr};
use std::time::Duration;

/// A listener. The stack chooses the number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ListenerId(pub usize);

/// A connection. The stack chooses the number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(pub usize);

/// A connection that [`Stack::accept`] returns.
#[derive(Clone, Copy, Debug)]
pub struct Accepted {
    /// The connection.
    pub connection: ConnectionId,
    /// The address of the peer.
    pub remote: SocketAddr,
    /// The options of the listener at the time of the connection request.
    pub options: Options,
}

/// The flag that follows the bytes of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Push {
    /// No flag.
    Plain,
    /// `MSG_MORE`: the last segment may wait for more bytes.
    More,
    /// `MSG_EOR`: no segment has bytes of this call and of a later one.
    Record,
    /// `MSG_OOB`: the last byte is urgent.
    Urgent,
}

/// The state of a connection that decides whether a call waits, and what `poll` returns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Readiness {
    /// The handshake is not complete, and has not failed: `connect` and `write` wait.
    pub opening: bool,
    /// There are bytes to receive (`POLLIN`).
    pub readable: bool,
    /// A call that waits for room continues (`POLLOUT`).
    pub writable: bool,
    /// Urgent data is announced (`POLLPRI`).
    pub urgent: bool,
    /// No bytes follow those that are readable, because the peer has sent FIN or the connection has
    /// ended (`POLLIN`, `POLLRDHUP`).
    pub end: bool,
    /// The connection has ended in both directions (`POLLHUP`).
    pub closed: bool,
    /// [`Stack::take_error`] returns an error (`POLLERR`).
    pub failed: bool,
}

/// The sizes of a connection that `ioctl` and `getsockopt` return. The call is an error where the
/// stack does not know the size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    /// Bytes that can be received (`SIOCINQ`).
    pub readable: Option<usize>,
    /// Bytes of the user that the peer has not acknowledged (`SIOCOUTQ`).
    pub unacknowledged: Option<usize>,
    /// Bytes of the user that were not sent (`SIOCOUTQNSD`).
    pub unsent: Option<usize>,
    /// Bytes of payload of a full segment (`TCP_MAXSEG`).
    pub segment: Option<usize>,
}

/// A host with a TCP, which packetdrill tests.
///
/// No method waits. What waits in a script is called again after each event: a packet, a timer,
/// another call. `now` is the time since the start of a virtual clock. It never goes back, and
/// stands still while packets arrive, calls are made and packets leave.
///
/// An [`Errno`] is an error number of `errno.h`. A script that needs what the stack does not have
/// must fail, so a method returns `EOPNOTSUPP` there, and no success without an effect. The
/// provided methods do the same.
///
/// A connection is known from [`connect`](Self::connect) or [`accept`](Self::accept) to
/// [`close`](Self::close), also after it has ended.
pub trait Stack: Send {
    /// Begins a connection. Its result is known when [`Readiness::opening`] is no longer set.
    ///
    /// # Errors
    ///
    /// The one that `connect` returns at once.
    fn connect(
        &mut self,
        now: Duration,
        local: SocketAddr,
        remote: SocketAddr,
        options: &Options,
    ) -> Result<ConnectionId, Errno>;

    /// Begins to listen at an address. `backlog` is what the script passes to `listen`.
    ///
    /// # Errors
    ///
    /// The one that `listen` returns.
    fn listen(&mut self, local: SocketAddr, backlog: usize, options: &Options) -> Result<ListenerId, Errno>;

    /// Returns the next connection of a listener whose handshake is complete.
    fn accept(&mut self, listener: ListenerId) -> Option<Accepted>;

    /// Whether [`accept`](Self::accept) returns a connection.
    fn can_accept(&self, listener: ListenerId) -> bool;

    /// Accepts bytes to send, as many as there is room for, and returns their number. `push` is of
    /// their end, and has no effect if not all are accepted.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if there is no room; `EPIPE` if nothing can be sent any more.
    fn send(&mut self, now: Duration, connection: ConnectionId, bytes: &[u8], push: Push) -> Result<usize, Errno>;

    /// Receives bytes, as many as there are and `bytes` has room for, and returns their number. It
    /// is 0 if no bytes follow, because the peer has sent FIN or the connection has ended.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if there are no bytes yet.
    fn receive(&mut self, now: Duration, connection: ConnectionId, bytes: &mut [u8]) -> Result<usize, Errno>;

    /// Copies bytes as [`receive`](Self::receive) does, and leaves them. Returns 0 if there are
    /// none, at the end or yet.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` if the stack does not have it.
    fn peek(&mut self, connection: ConnectionId, bytes: &mut [u8]) -> Result<usize, Errno> {
        let _ = (connection, bytes);
        Err(libc::EOPNOTSUPP)
    }

    /// Ends one direction of a connection, or both.
    ///
    /// # Errors
    ///
    /// The one that `shutdown` returns.
    fn shutdown(&mut self, now: Duration, connection: ConnectionId, how: Shutdown) -> Result<(), Errno>;

    /// Closes a connection: the user makes no more calls. With `reset` ([`SocketOption::Linger`])
    /// it ends at once, and otherwise when the peer has what was sent.
    fn close(&mut self, now: Duration, connection: ConnectionId, reset: bool);

    /// Closes a listener. Connections that it has not returned end with it.
    fn close_listener(&mut self, now: Duration, listener: ListenerId);

    /// The state of a connection, which does not change it.
    fn readiness(&self, connection: ConnectionId) -> Readiness;

    /// Returns the error with which a connection has ended, once: `ECONNRESET`, `ETIMEDOUT`. Calls
    /// report it, and so does `SO_ERROR`.
    fn take_error(&mut self, connection: ConnectionId) -> Option<Errno>;

    /// The sizes of a connection.
    fn sizes(&self, connection: ConnectionId) -> Sizes {
        let _ = connection;
        Sizes::default()
    }

    /// The state of a connection that `TCP_INFO` returns. Fields that the stack does not know stay
    /// as in [`TcpInfo::UNKNOWN`].
    fn info(&self, now: Duration, connection: ConnectionId) -> TcpInfo {
        let _ = (now, connection);
        TcpInfo::UNKNOWN
    }

    /// Whether the stack has an option. The calls for other options return `ENOPROTOOPT`.
    fn has_option(&self, option: SocketOption) -> bool {
        let _ = option;
        false
    }

    /// Applies options that the script has changed to a connection.
    fn set_options(&mut self, now: Duration, connection: ConnectionId, options: &Options) {
        let _ = (now, connection, options);
    }

    /// Applies options that the script has changed to a listener, for later connection requests.
    fn set_listener_options(&mut self, listener: ListenerId, options: &Options) {
        let _ = (listener, options);
    }

    /// Sets whether the next segments are acknowledged at once ([`SocketOption::QuickAck`]).
    fn set_quick_ack(&mut self, connection: ConnectionId, quick: bool) {
        let _ = (connection, quick);
    }

    /// Processes a packet that arrives. It begins with its IP header.
    fn receive_packet(&mut self, now: Duration, packet: &[u8]);

    /// Returns the next packet to send, which begins with its IP header. It is called after each
    /// other method that can have something to send, until it returns `None`.
    fn next_packet(&mut self, now: Duration) -> Option<Vec<u8>>;

    /// The time of the next timer.
    fn deadline(&mut self) -> Option<Duration>;

    /// Runs the timers that are due. Afterwards the deadline is later than `now`.
    fn handle_timeout(&mut self, now: Duration);
}
