//! A connection as numbers: it goes on in another process.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::clock::PeerClock;
use super::connection::{Connection, State};
use super::receiver::SavedReceiver;
use super::sender::{SavedSender, SendOptions, Sender};
use super::{Budget, Carrier, Config, Seq};
use crate::Time;

/// What is to be known of a connection to go on with it elsewhere, beside its payload: [`Connection::unread`] and
/// [`Connection::unacknowledged`].
///
/// To another queue of the same process, a connection simply moves. Times are durations here, because another process has another
/// beginning of time. Any format of serde can hold it; the fields are no promise between versions.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Saved {
    state: State,
    sender: SavedSender,
    receiver: SavedReceiver,
    irs: Seq,
    peer_scale: u8,
    scaled: bool,
    echo: bool,
    shut: bool,
    deaf: bool,
    closed: bool,
    urgent: Option<Seq>,
    urgent_sent: Option<Seq>,
    /// The timestamp that would be sent at this moment.
    stamp: u32,
    /// The peer's latest timestamp, and how long ago it came.
    clock: Option<(u32, Duration)>,
    /// How long FIN-WAIT-2 or TIME-WAIT still last.
    remaining: Option<Duration>,
}

impl<C: Carrier> Connection<C> {
    /// The numbers of an established or closing connection; none during the handshake and after the end.
    ///
    /// Nothing may be sent or received on this connection afterwards: there would be two of it.
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
            scaled: self.scaled,
            echo: self.echo,
            shut: self.shut,
            deaf: self.deaf,
            closed: self.closed,
            urgent: self.urgent,
            urgent_sent: self.urgent_sent,
            stamp: self.sender.timestamp(now),
            clock: self.clock.map(|clock| (clock.recent(), clock.age(now))),
            remaining: self.until.map(|until| until.since(now)),
        })
    }

    /// Payload that the user has not read, in order. It was acknowledged, so that the peer does not have it any more.
    pub fn unread(&self) -> impl Iterator<Item = &C::Received> {
        self.receiver.chunks()
    }

    /// Payload that the peer has not acknowledged, in order, with what was not sent.
    pub fn unacknowledged(&self) -> impl Iterator<Item = &C::Sent> {
        self.sender.chunks()
    }

    /// A connection that goes on where another was [saved](Self::save), with its payload. The config is that of the other one.
    ///
    /// What was in flight is repeated if the peer does not acknowledge it, and the congestion window begins anew. Without all of the
    /// payload, the streams have gaps that no peer can detect.
    #[must_use]
    pub fn restore(
        saved: &Saved,
        config: &Config,
        unread: impl IntoIterator<Item = C::Received>,
        unacknowledged: impl IntoIterator<Item = C::Sent>,
        queue: Option<&Budget>,
        now: Time,
    ) -> Self {
        // Timestamps go on from the last one, whatever the beginning of time is here.
        let timestamp_offset = saved.stamp.wrapping_sub((now.micros() / 1000) as u32);
        let options = SendOptions { timestamp_offset, ..config.send };
        let sender = Sender::restore(&saved.sender, unacknowledged, options, now);
        let mut this = Self::new(saved.state, config, sender, queue, now);
        this.receiver.restore(&saved.receiver, unread);
        this.irs = saved.irs;
        this.peer_mss = saved.sender.mss;
        this.peer_scale = saved.peer_scale.min(14);
        this.scaled = saved.scaled;
        (this.sack, this.ecn) = (saved.sender.sack, saved.sender.ecn);
        this.clock = saved.clock.map(|(recent, age)| PeerClock::aged(recent, age, now));
        this.acknowledged = this.receiver.nxt();
        this.echo = saved.echo;
        (this.shut, this.deaf, this.closed) = (saved.shut, saved.deaf, saved.closed);
        (this.urgent, this.urgent_sent) = (saved.urgent, saved.urgent_sent);
        this.until = saved.remaining.map(|remaining| now + remaining);
        // The peer may have waited for an acknowledgement.
        this.acks.at_once();
        this
    }
}

#[cfg(test)]
mod tests {
    use super::super::Received;
    use super::super::testing::{End, Pair, Piece, stream};
    use super::*;

    /// Saves an end as JSON with its payload, and goes on from that with another beginning of time.
    fn move_elsewhere(end: &mut End, config: &Config, now: Time, then: Time) {
        let text = serde_json::to_string(&end.tcp.save(now).unwrap()).unwrap();
        let (unread, unacknowledged): (Vec<_>, Vec<_>) =
            (end.tcp.unread().cloned().collect(), end.tcp.unacknowledged().cloned().collect());
        let saved = serde_json::from_str(&text).unwrap();
        end.tcp = Connection::restore(&saved, config, unread, unacknowledged, None, then);
    }

    /// Both ends move again and again, while a part of what they sent is lost, and the streams have no gap.
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
                pair.a.tcp.timeout(pair.now);
                pair.b.tcp.timeout(pair.now);
            }
            assert!(moved > 0);
            assert_eq!(pair.b.read, Piece::numbered(0, 200_000).bytes(), "seed {seed}");
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
        assert_eq!(pair.a.tcp.deadline(), Some(then + Duration::from_secs(60)));
        pair.b.tcp.close(pair.now);
        let fin = pair.b.output(pair.now).remove(0);
        pair.a.input(&fin, then);
        assert_eq!(pair.a.tcp.state(), State::TimeWait);
        assert!(matches!(pair.a.tcp.recv(then), Ok(Received::End)));
    }

    #[test]
    fn a_handshake_is_not_saved() {
        let pair = Pair::new(&Config::default(), &Config::default());
        assert!(pair.a.tcp.save(pair.now).is_none() && pair.b.tcp.save(pair.now).is_none());
    }
}
