//! The state of a connection as plain numbers, with which it continues in another process.
//!
//! Why numbers and not the value: a `Connection` has references to payload and to budgets, and its
//! times count from the start of its process.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::clock::PeerClock;
use super::connection::Connection;
use super::receiver::SavedReceiver;
use super::sender::{SavedSender, SendOptions, Sender};
use super::state::State;
use super::{Budget, Carrier, Config, Seq};
use crate::time::Time;

/// The state that another process needs to continue with a connection. The payload is separate:
/// [`Connection::unread`] and [`Connection::unacknowledged`].
///
/// To another queue of the same process, a connection is simply moved. Times are stored as
/// durations, because another process has another beginning of time. The state can be stored in any
/// format of serde. The fields may change between versions.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Saved {
    state: State,
    sender: SavedSender,
    receiver: SavedReceiver,
    irs: Seq,
    peer_scale: u8,
    window_scaling: bool,
    /// Whether marks of the peer's data are echoed. Whether this side's data is ECN-capable is in
    /// `sender`.
    ecn: bool,
    ecn_echo: bool,
    send_shutdown: bool,
    recv_shutdown: bool,
    closed: bool,
    urgent: Option<Seq>,
    urgent_sent: Option<Seq>,
    /// The timestamp that would be sent at the time of saving.
    stamp: u32,
    /// The peer's latest timestamp, and how long ago it was received.
    peer_clock: Option<(u32, Duration)>,
    /// The remaining time of FIN-WAIT-2 or TIME-WAIT, or until an orphan is reset.
    remaining: Option<Duration>,
}

impl<C: Carrier> Connection<C> {
    /// The state of an established or closing connection. `None` during the handshake and after the
    /// end.
    ///
    /// **Warning:** send and receive nothing on this connection afterwards. Otherwise two
    /// connections would use the same sequence numbers.
    #[must_use]
    pub fn save(&self, now: Time) -> Option<Saved> {
        if matches!(self.state, State::SynSent | State::SynReceived | State::Closed) {
            return None;
        }
        Some(Saved {
            state: self.state,
            sender: self.sender.save()?,
            receiver: self.receiver.save(),
            irs: self.irs,
            peer_scale: self.peer_scale,
            window_scaling: self.window_scaling,
            ecn: self.ecn,
            ecn_echo: self.ecn_echo,
            send_shutdown: self.send_shutdown,
            recv_shutdown: self.recv_shutdown,
            closed: self.closed,
            urgent: self.urgent,
            urgent_sent: self.urgent_sent,
            stamp: self.sender.timestamp(now),
            peer_clock: self.peer_clock.map(|clock| (clock.recent(), clock.age(now))),
            remaining: self.expires_at.map(|until| until.since(now)),
        })
    }

    /// Payload that the user has not read, in order. It was acknowledged, so the peer does not have
    /// it any more.
    pub fn unread(&self) -> impl Iterator<Item = &C::Received> {
        self.receiver.chunks()
    }

    /// Payload that the peer has not acknowledged, in order. This includes payload that was not
    /// sent yet.
    pub fn unacknowledged(&self) -> impl Iterator<Item = &C::Sent> {
        self.sender.chunks()
    }

    /// A connection that continues from the state of another one that was [saved](Self::save), with
    /// its payload. `config` must be that of the other connection.
    ///
    /// Payload that was in flight is sent again if the peer does not acknowledge it, and the
    /// congestion window begins anew.
    ///
    /// **Warning:** if a part of the payload is missing, the streams have gaps that the peer cannot
    /// detect.
    #[must_use]
    pub fn restore(
        saved: &Saved,
        config: &Config,
        unread: impl IntoIterator<Item = C::Received>,
        unacknowledged: impl IntoIterator<Item = C::Sent>,
        queue: Option<&Budget>,
        now: Time,
    ) -> Self {
        // Timestamps continue from the last one, because the two processes have different
        // beginnings of time.
        let timestamp_offset = saved.stamp.wrapping_sub((now.micros() / 1000) as u32);
        let options = SendOptions { timestamp_offset, ..config.send };
        let sender = Sender::restore(&saved.sender, unacknowledged, options, now);
        let mut this = Self::new(saved.state, config, sender, queue, now);
        this.receiver.restore(&saved.receiver, unread);
        this.irs = saved.irs;
        this.peer_mss = saved.sender.mss;
        this.peer_scale = saved.peer_scale.min(14);
        this.window_scaling = saved.window_scaling;
        (this.sack, this.ecn) = (saved.sender.sack, saved.ecn);
        this.peer_clock = saved.peer_clock.map(|(recent, age)| PeerClock::aged(recent, age, now));
        this.last_acknowledged = this.receiver.nxt();
        this.ecn_echo = saved.ecn_echo;
        (this.send_shutdown, this.recv_shutdown, this.closed) =
            (saved.send_shutdown, saved.recv_shutdown, saved.closed);
        (this.urgent, this.urgent_sent) = (saved.urgent, saved.urgent_sent);
        this.expires_at = saved.remaining.map(|remaining| now + remaining);
        this.restart_orphan_progress();
        // The peer may have waited for an acknowledgement meanwhile.
        this.acks.at_once();
        this
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{End, Pair, SharedBytes, stream};
    use super::super::{Flags, ReadOutcome};
    use super::*;

    /// Saves an end as JSON with its payload, and continues from that with another beginning of
    /// time.
    fn move_elsewhere(end: &mut End, config: &Config, now: Time, then: Time) {
        let text = serde_json::to_string(&end.tcp.save(now).unwrap()).unwrap();
        let (unread, unacknowledged): (Vec<_>, Vec<_>) =
            (end.tcp.unread().cloned().collect(), end.tcp.unacknowledged().cloned().collect());
        let saved = serde_json::from_str(&text).unwrap();
        end.tcp = Connection::restore(&saved, config, unread, unacknowledged, None, then);
    }

    /// Both ends are saved and restored again and again, while a part of what they sent is lost.
    /// The streams have no gap.
    #[test]
    fn a_connection_goes_on_elsewhere() {
        for seed in 0..40 {
            let mut random = fastrand::Rng::with_seed(seed);
            let config = Config { timestamps: random.bool(), sack: random.bool(), ..Config::default() };
            let mut pair = Pair::connected(&config, &config);
            let (mut sent, mut moved) = (0, 0);
            for _ in 0..20_000 {
                if pair.b.read.len() == 200_000 {
                    break;
                }
                if sent < 200_000 && pair.a.tcp.send(stream(sent, 4000), false).is_ok() {
                    sent += 4000;
                }
                let out = pair.a.output(pair.now);
                out.iter().filter(|_| random.u8(0..10) > 0).for_each(|sent| pair.b.input(sent, pair.now));
                let out = pair.b.output(pair.now);
                out.iter().filter(|_| random.u8(0..10) > 0).for_each(|sent| pair.a.input(sent, pair.now));
                if random.u8(0..4) == 0 {
                    pair.b.read(pair.now);
                }
                if random.u8(0..20) == 0 {
                    let (end, now) = (if random.bool() { &mut pair.a } else { &mut pair.b }, pair.now);
                    move_elsewhere(end, &config, now, now);
                    moved += 1;
                }
                pair.now += Duration::from_millis(random.u64(0..50));
                pair.a.tcp.handle_timeout(pair.now);
                pair.b.tcp.handle_timeout(pair.now);
            }
            assert!(moved > 0);
            assert_eq!(pair.b.read, SharedBytes::numbered(0, 200_000).bytes(), "seed {seed}");
        }
    }

    #[test]
    fn timestamps_and_timers_go_on_although_time_begins_anew() {
        let config = Config::default();
        let mut pair = Pair::connected(&config, &config);
        pair.a.tcp.close(pair.now);
        pair.settle();
        let (before, then) = (pair.a.tcp.sender.timestamp(pair.now), Time::from_micros(5));
        move_elsewhere(&mut pair.a, &config, pair.now, then);
        assert_eq!(pair.a.tcp.sender.timestamp(then + Duration::from_millis(3)), before.wrapping_add(3));
        assert_eq!(pair.a.tcp.state(), State::FinWait2);
        assert_eq!(pair.a.tcp.poll_timeout(), Some(then + Duration::from_secs(60)));
        assert!(pair.a.output(then).iter().all(|sent| !sent.has(Flags::FIN)), "FIN is acknowledged");
        pair.b.tcp.close(pair.now);
        let fin = pair.b.output(pair.now).remove(0);
        pair.a.input(&fin, then);
        assert_eq!(pair.a.tcp.state(), State::TimeWait);
        assert!(matches!(pair.a.tcp.recv(then), Ok(ReadOutcome::End)));
    }

    /// Changes some of the numbers and flags of a value, at random.
    fn change(value: &mut serde_json::Value, random: &mut fastrand::Rng) {
        use serde_json::Value;
        match value {
            Value::Object(fields) => fields.values_mut().for_each(|field| change(field, random)),
            Value::Array(items) => items.iter_mut().for_each(|item| change(item, random)),
            Value::Bool(flag) if random.u8(0..8) == 0 => *flag = !*flag,
            Value::Number(number) if random.u8(0..6) == 0 => {
                let before = number.as_u64().unwrap_or(0);
                let bit = 1 << random.u32(0..32);
                let numbers =
                    [0, 1, before ^ bit, before + 1, before.wrapping_sub(1), 0x7fff_ffff, 0xffff_ffff, 0xffff];
                *number = numbers[random.usize(0..numbers.len())].into();
            }
            _ => {}
        }
    }

    /// With any numbers in the saved state, the connection can be used. So can its peer, whose
    /// state does not match any more.
    #[test]
    fn any_numbers_make_a_connection() {
        let mut restored = 0;
        for seed in 0..3000 {
            let mut random = fastrand::Rng::with_seed(seed);
            let config = Config { timestamps: random.bool(), sack: random.bool(), ..Config::default() };
            let mut pair = Pair::connected(&config, &config);
            pair.a.tcp.send(stream(0, 5000), false).unwrap();
            pair.b.tcp.send(stream(0, 3000), false).unwrap();
            for sent in pair.b.output(pair.now) {
                pair.a.input(&sent, pair.now);
            }
            if random.bool() {
                pair.a.tcp.shutdown();
                pair.a.output(pair.now);
            }
            let mut value = serde_json::to_value(pair.a.tcp.save(pair.now).unwrap()).unwrap();
            let (unread, unacknowledged): (Vec<_>, Vec<_>) =
                (pair.a.tcp.unread().cloned().collect(), pair.a.tcp.unacknowledged().cloned().collect());
            change(&mut value, &mut random);
            let Ok(saved) = serde_json::from_value(value) else { continue };
            restored += 1;
            pair.a.tcp = Connection::restore(&saved, &config, unread, unacknowledged, None, pair.now);
            for n in 0..20 {
                let _ = pair.a.tcp.send(stream(5000 + 100 * n, 100), false);
                for sent in pair.a.output(pair.now) {
                    pair.b.input(&sent, pair.now);
                }
                for sent in pair.b.output(pair.now) {
                    pair.a.input(&sent, pair.now);
                }
                while let Ok(ReadOutcome::Chunk(_)) = pair.a.tcp.recv(pair.now) {}
                pair.now += Duration::from_millis(random.u64(0..3000));
                pair.a.tcp.handle_timeout(pair.now);
                pair.b.tcp.handle_timeout(pair.now);
                if n == 15 {
                    pair.a.tcp.close(pair.now);
                }
            }
            assert!(pair.a.tcp.save(pair.now).is_none_or(|saved| serde_json::to_string(&saved).is_ok()));
        }
        assert!(restored > 2000, "{restored}");
    }

    #[test]
    fn a_handshake_is_not_saved() {
        let pair = Pair::new(&Config::default(), &Config::default());
        assert!(pair.a.tcp.save(pair.now).is_none() && pair.b.tcp.save(pair.now).is_none());
    }
}
