//! A connection on which nothing happens, in little memory.
//!
//! Why: a server has many connections, and few of them do something at a time. A [`Connection`]
//! has lists of what is under way, timers, and its own copy of its settings. [`IdleConnection`] has
//! what is left when nothing is under way, and refers to settings that it shares with others.
//!
//! ```text
//!                 idle: nothing in flight, to be read, or to be acknowledged
//!   Connection ──────────────────────────────────────────────────────────────► IdleConnection
//!              ◄──────────────────────────────────────────────────────────────
//!                 wake: a segment, a timer, a call of the user
//! ```
//!
//! A connection that was idle in between continues as if it had not been. The simulation runs each
//! connection in both ways, and compares the packets.
//!
//! Both directions name each field, so that a new one cannot be left out.

use std::fmt;
use std::sync::Arc;

use super::acks::IdleAcks;
use super::clock::PeerClock;
use super::connection::Connection;
use super::event::Events;
use super::limit::Limit;
use super::receiver::IdleReceiver;
use super::sender::IdleSender;
use super::{Carrier, Config, Seq, State, Unreachable};
use crate::time::Time;

/// A connection on which nothing happens, in less than a third of the memory of a [`Connection`]:
/// see [`Connection::idle`].
#[derive(Clone)]
pub struct IdleConnection {
    /// The settings, but for `max_payload`.
    config: Arc<Config>,
    max_payload: u16,
    sender: IdleSender,
    receiver: IdleReceiver,
    acks: IdleAcks,
    peer_clock: Option<PeerClock>,
    challenge_limit: Limit,
    last_received: Time,
    last_data_received: Time,
    keep_alive_probed_at: Time,
    keep_alive_probes: u8,
    state: State,
    peer_scale: u8,
    window_scaling: bool,
    sack: bool,
    ecn: bool,
    sent_plain_syn: bool,
    ecn_echo: bool,
    recv_shutdown: bool,
    soft_error: Option<Unreachable>,
    peer_mss: u16,
    irs: Seq,
    last_acknowledged: Seq,
    urgent: Option<Seq>,
    urgent_sent: Option<Seq>,
    largest_segment: u32,
}

impl<C: Carrier> Connection<C> {
    /// Whether the connection is open, and its user has not shut its sending side down; and its
    /// steps are not recorded. Otherwise it is never [idle](Self::idle) again.
    pub(crate) fn can_be_idle(&self) -> bool {
        #[cfg(feature = "record")]
        if self.recording.is_some() {
            return false;
        }
        matches!(self.state, State::Established | State::CloseWait) && !self.send_shutdown && !self.closed
    }

    /// The connection in little memory, if it is open, its user has not shut its sending side down,
    /// and nothing is under way: nothing is to be sent, acknowledged or read, no event waits, and
    /// no timer runs but that of keep-alive. For an owner of many connections: drop this one, and
    /// continue with [`IdleConnection::wake`] when there is something to do.
    ///
    /// `share` returns settings that are equal to its argument: those of another idle connection,
    /// if there is one.
    ///
    /// **Warning:** drop the connection without sending or receiving on it. Otherwise two
    /// connections would use the same sequence numbers.
    #[must_use]
    pub fn idle(&self, share: impl FnOnce(Config) -> Arc<Config>) -> Option<IdleConnection> {
        let waits = self.reply.is_some() || self.expires_at.is_some() || self.retry_at.is_some();
        if !self.can_be_idle() || waits || self.stall.is_some() || !self.events.is_empty() {
            return None;
        }
        let acks = self.acks.idle()?;
        let receiver = self.receiver.idle()?;
        let (sender, send) = self.sender.idle()?;
        Some(IdleConnection {
            // A peer can have the path's MTU changed. The settings of one connection must not
            // differ from those of others for that.
            config: share(Config { send, max_payload: Config::default().max_payload, ..self.config }),
            max_payload: self.config.max_payload,
            sender,
            receiver,
            acks,
            peer_clock: self.peer_clock,
            challenge_limit: self.challenge_limit,
            last_received: self.last_received,
            last_data_received: self.last_data_received,
            keep_alive_probed_at: self.keep_alive_probed_at,
            keep_alive_probes: self.keep_alive_probes,
            state: self.state,
            peer_scale: self.peer_scale,
            window_scaling: self.window_scaling,
            sack: self.sack,
            ecn: self.ecn,
            sent_plain_syn: self.sent_plain_syn,
            ecn_echo: self.ecn_echo,
            recv_shutdown: self.recv_shutdown,
            soft_error: self.soft_error,
            peer_mss: self.peer_mss,
            irs: self.irs,
            last_acknowledged: self.last_acknowledged,
            urgent: self.urgent,
            urgent_sent: self.urgent_sent,
            largest_segment: self.largest_segment,
        })
    }
}

impl IdleConnection {
    /// The connection, as it was. Cost: about two kilobytes are written, and nothing is allocated.
    #[must_use]
    pub fn wake<C: Carrier>(self) -> Connection<C> {
        let config = Config { max_payload: self.max_payload, ..*self.config };
        Connection {
            state: self.state,
            config,
            sender: self.sender.wake(&config.send),
            receiver: self.receiver.wake(u32::from(config.mss)),
            acks: self.acks.wake(config.ack_delay, config.quick_acks),
            irs: self.irs,
            peer_mss: self.peer_mss,
            peer_scale: self.peer_scale,
            window_scaling: self.window_scaling,
            sack: self.sack,
            ecn: self.ecn,
            sent_plain_syn: self.sent_plain_syn,
            peer_clock: self.peer_clock,
            last_acknowledged: self.last_acknowledged,
            ecn_echo: self.ecn_echo,
            events: Events::default(),
            error: None,
            soft_error: self.soft_error,
            reply: None,
            challenge_limit: self.challenge_limit,
            expires_at: None,
            // It is set when the user closes.
            orphan_progress: (Seq(0), 1),
            send_shutdown: false,
            recv_shutdown: self.recv_shutdown,
            closed: false,
            urgent: self.urgent,
            urgent_sent: self.urgent_sent,
            retry_at: None,
            last_received: self.last_received,
            keep_alive_probes: self.keep_alive_probes,
            keep_alive_probed_at: self.keep_alive_probed_at,
            last_data_received: self.last_data_received,
            largest_segment: self.largest_segment,
            stall: None,
            #[cfg(feature = "record")]
            recording: None,
        }
    }

    /// The state of the connection.
    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// Whether the user has received everything, and the peer sends no more. Otherwise there is
    /// nothing to receive yet.
    #[must_use]
    pub fn is_at_end(&self) -> bool {
        self.receiver.is_finished() || self.recv_shutdown
    }
}

impl fmt::Debug for IdleConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IdleConnection({:?})", self.state)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Pair, TestCarrier, stream};
    use super::super::{Ecn, IpFields, KeepAlive};
    use super::*;

    fn values(tcp: &Connection<TestCarrier>) -> String {
        let peer = (tcp.irs, tcp.peer_mss, tcp.peer_scale, tcp.peer_clock, tcp.last_acknowledged, tcp.largest_segment);
        let agreed = (tcp.window_scaling, tcp.sack, tcp.ecn, tcp.sent_plain_syn, tcp.ecn_echo, tcp.recv_shutdown);
        let times = (tcp.last_received, tcp.keep_alive_probes, tcp.keep_alive_probed_at, tcp.last_data_received);
        let rest = (tcp.state, tcp.acks, tcp.soft_error, tcp.challenge_limit, tcp.urgent, tcp.urgent_sent);
        let Connection { config, .. } = tcp;
        let settings = (config.ip, config.keep_alive, config.max_payload, config.ack_every, config.ecn);
        format!("{:?}", (peer, agreed, times, rest, settings, tcp.poll_timeout()))
    }

    #[test]
    fn a_connection_that_was_idle_has_all_values() {
        let config = Config { ecn: Ecn::Request, ..Config::default() };
        let mut pair = Pair::connected(&config, &config);
        pair.a.tcp.send(stream(0, 5000), false).unwrap();
        pair.b.tcp.send(stream(0, 700), false).unwrap();
        assert!(pair.a.tcp.idle(Arc::new).is_none(), "something is to be sent");
        pair.settle();
        assert!(pair.b.tcp.idle(Arc::new).is_none(), "something is to be read");
        pair.a.read(pair.now);
        pair.b.read(pair.now);
        pair.pass(std::time::Duration::from_secs(5));
        let tcp = &mut pair.a.tcp;
        tcp.set_keep_alive(Some(KeepAlive::default()));
        tcp.set_ip(IpFields { dscp: 5, hop_limit: 6 });
        tcp.set_max_payload(1200);
        tcp.set_ack_every(7);
        tcp.shutdown_read();
        assert!(tcp.challenge_limit.allows(pair.now));
        (tcp.sent_plain_syn, tcp.ecn_echo, tcp.soft_error) = (true, true, Some(Unreachable::Host));
        (tcp.urgent, tcp.urgent_sent) = (Some(Seq(8)), Some(Seq(9)));
        (tcp.keep_alive_probes, tcp.keep_alive_probed_at) = (2, pair.now);
        let woken = tcp.idle(Arc::new).unwrap().wake();
        assert_eq!(values(&woken), values(tcp));
        let mut other = woken.idle(Arc::new).unwrap().wake::<TestCarrier>();
        other.set_max_payload(1300);
        let configs = [&woken, &other].map(|tcp| tcp.idle(Arc::new).unwrap().config);
        assert!(configs[0] == configs[1], "the path is not a setting to share");
    }
}
