//! Segments that arrive: what each of them changes, and how it is answered.

use std::time::Duration;

use super::*;
use crate::tcp::testing::{End, Pair, Sent, SharedBytes, start, stream};
use crate::tcp::{Config, Event, KeepAlive, ReadOutcome, SackBlocks, Timestamps};

/// A configuration without timestamps, so that PAWS does not reject the segment first.
fn plain() -> Config {
    Config { timestamps: false, ..Config::default() }
}

fn pair() -> Pair {
    Pair::connected(&plain(), &plain())
}

fn is_ack(sent: &[Sent], seq: Seq, ack: Seq) -> bool {
    matches!(sent, [one] if one.header.flags == Flags::ACK && (one.header.seq, one.header.ack) == (seq, ack))
}

#[test]
fn the_handshake_agrees_on_options() {
    let base = Config { receive_buffer: 1 << 20, ..Config::default() };
    for bits in 0..64_u8 {
        let side = |shift: u8| Config {
            window_scaling: bits >> shift & 1 > 0,
            sack: bits >> (shift + 1) & 1 > 0,
            timestamps: bits >> (shift + 2) & 1 > 0,
            ..base
        };
        let pair = Pair::connected(&side(0), &side(3));
        let both = |bit: u8| bits >> bit & 1 > 0 && bits >> (bit + 3) & 1 > 0;
        for tcp in [&pair.a.tcp, &pair.b.tcp] {
            assert_eq!(
                (tcp.window_scaling, tcp.sack, tcp.peer_clock.is_some()),
                (both(0), both(1), both(2)),
                "{bits:06b}"
            );
            assert_eq!(tcp.peer_scale, if both(0) { 5 } else { 0 });
        }
        let [syn, syn_ack, ack] = [0, 1, 2].map(|n| pair.log[n].1.header);
        assert_eq!((syn.flags, syn_ack.flags, ack.flags), (Flags::SYN, Flags::SYN.with(Flags::ACK), Flags::ACK));
        assert_eq!((syn.options.mss, syn_ack.options.mss, ack.options.mss), (Some(1460), Some(1460), None));
        assert_eq!(syn_ack.options.window_scale.is_some(), both(0));
        assert_eq!((syn.window, syn_ack.window), (u16::MAX, u16::MAX), "the window of SYN is not scaled");
    }
}

#[test]
fn without_an_mss_option_segments_have_the_default_size() {
    let mut pair = Pair::new(&plain(), &plain());
    let mut syn_ack = pair.b.output(pair.now).remove(0);
    syn_ack.header.options.mss = None;
    pair.a.input(&syn_ack, pair.now);
    pair.a.tcp.send(stream(0, 5000), false).unwrap();
    assert_eq!(pair.a.output(pair.now).iter().map(Sent::len).max(), Some(536));
}

#[test]
fn segments_of_a_poll_share_an_acknowledgement() {
    let mut pair = pair();
    pair.a.tcp.send(stream(0, 14_600), false).unwrap();
    let sent = pair.a.output(pair.now);
    assert_eq!(sent.len(), 10);
    sent.iter().for_each(|sent| pair.b.input(sent, pair.now));
    assert_eq!(pair.b.output(pair.now).len(), 1);
}

#[test]
fn a_window_that_shrinks_is_tolerated() {
    let mut pair = pair();
    pair.a.tcp.send(stream(0, 14_600), false).unwrap();
    let sent = pair.a.output(pair.now);
    let una = pair.a.tcp.una();
    // The peer shrinks its window, and has received the first segment only.
    let header = Header { ack: una + 1460, window: 0, ..pair.b.tcp.header(pair.b.tcp.una(), Flags::ACK, pair.now).0 };
    assert!(pair.a.answer(header, pair.now).is_empty());
    assert_eq!((pair.a.tcp.una(), pair.a.tcp.state()), (una + 1460, State::Established));
    // The peer acknowledges what was sent beyond its window, and the rest follows when the
    // window is open.
    sent.iter().for_each(|sent| pair.b.input(sent, pair.now));
    pair.a.tcp.send(stream(14_600, 5000), false).unwrap();
    for _ in 0..100 {
        pair.pass(Duration::from_millis(100));
        pair.b.read(pair.now);
    }
    assert_eq!(pair.b.read, SharedBytes::numbered(0, 19_600).bytes());
}

#[test]
fn a_window_may_stay_closed_for_days() {
    let mut pair = Pair::connected(&plain(), &Config { receive_buffer: 1000, fixed_window: true, ..plain() });
    pair.a.tcp.send(stream(0, 2000), false).unwrap();
    pair.pass(Duration::from_secs(3 * 24 * 3600));
    assert_eq!((pair.a.tcp.state(), pair.b.tcp.readable()), (State::Established, 1000));
}

#[test]
fn both_sides_open_at_the_same_time() {
    let mut pair = Pair::new(&Config::default(), &Config::default());
    pair.b = End::new(Connection::connect(&Config::default(), start(5), None, pair.now));
    let (one, two) = (pair.log.remove(0).1, pair.b.output(pair.now).remove(0));
    pair.a.input(&two, pair.now);
    pair.b.input(&one, pair.now);
    assert_eq!((pair.a.tcp.state(), pair.b.tcp.state()), (State::SynReceived, State::SynReceived));
    pair.settle();
    assert_eq!((pair.a.tcp.state(), pair.b.tcp.state()), (State::Established, State::Established));
    pair.a.tcp.send(stream(0, 100), false).unwrap();
    pair.settle();
    pair.b.read(pair.now);
    assert_eq!(pair.b.read, SharedBytes::numbered(0, 100).bytes());
}

#[test]
fn a_forged_answer_to_syn_is_reset() {
    let mut pair = Pair::new(&plain(), &plain());
    let mut forged = pair.header_of_a(Flags::SYN.with(Flags::ACK));
    forged.ack = pair.a.tcp.una();
    let reset = pair.a.answer(forged, pair.now).remove(0).header;
    assert_eq!((reset.flags, reset.seq), (Flags::RST, forged.ack));
    forged.flags = Flags::RST.with(Flags::ACK);
    assert!(pair.a.answer(forged, pair.now).is_empty());
    assert_eq!(pair.a.tcp.state(), State::SynSent);
    forged.ack = pair.a.tcp.una() + 1;
    pair.a.answer(forged, pair.now);
    assert_eq!(pair.a.events, [Event::Closed(Some(Error::Refused))]);
}

#[test]
fn syn_ack_is_repeated_for_a_repeated_syn() {
    let mut pair = Pair::new(&plain(), &plain());
    let first = pair.b.output(pair.now).remove(0);
    let syn = pair.log[0].1.header;
    assert_eq!(pair.b.answer(syn, pair.now).remove(0).header, first.header);
}

#[test]
fn payload_with_syn_ack_is_taken() {
    let mut pair = Pair::new(&plain(), &plain());
    let mut syn_ack = pair.b.output(pair.now).remove(0);
    let irs = syn_ack.header.seq;
    syn_ack.payload = vec![SharedBytes::numbered(irs.0 + 1, 10)];
    pair.a.input(&syn_ack, pair.now);
    assert!(is_ack(&pair.a.output(pair.now), pair.a.tcp.una(), irs + 11));
}

#[test]
fn only_the_exact_number_resets() {
    let mut pair = pair();
    let mut reset = pair.header_of_a(Flags::RST);
    let (una, nxt) = (pair.b.tcp.una(), pair.b.tcp.receiver.nxt());
    reset.seq = nxt + 1;
    assert!(is_ack(&pair.b.answer(reset, pair.now), una, nxt), "a challenge");
    for far in [nxt - 1, nxt + (1 << 24)] {
        reset.seq = far;
        assert!(pair.b.answer(reset, pair.now).is_empty());
    }
    assert_eq!(pair.b.tcp.state(), State::Established);
    reset.seq = nxt;
    assert!(pair.b.answer(reset, pair.now).is_empty());
    assert_eq!(pair.b.events, [Event::Closed(Some(Error::Reset))]);
    assert!(pair.b.tcp.is_gone());
    assert_eq!(pair.b.tcp.recv(pair.now).err(), Some(Error::Reset));
}

#[test]
fn a_reset_counts_while_the_window_is_closed() {
    let mut pair = Pair::connected(&plain(), &Config { receive_buffer: 100, fixed_window: true, ..plain() });
    pair.a.tcp.send(stream(0, 200), false).unwrap();
    pair.settle();
    let mut reset = pair.header_of_a(Flags::RST);
    reset.seq = pair.b.tcp.receiver.nxt();
    pair.b.answer(reset, pair.now);
    assert_eq!(pair.b.tcp.failure(), Some(Error::Reset));
    pair.b.read(pair.now);
    assert_eq!(pair.b.read.len(), 100, "what came before the reset can be read");
    assert_eq!(pair.b.tcp.recv(pair.now).err(), Some(Error::Reset));
}

#[test]
fn a_syn_in_the_window_is_challenged() {
    let mut pair = pair();
    let (una, nxt) = (pair.b.tcp.una(), pair.b.tcp.receiver.nxt());
    for seq in [nxt, nxt + 5, nxt - 1, nxt + (1 << 30)] {
        let syn = Header { seq, ..pair.header_of_a(Flags::SYN) };
        assert!(is_ack(&pair.b.answer(syn, pair.now), una, nxt), "{seq:?}");
    }
    assert_eq!(pair.b.tcp.state(), State::Established);
}

#[test]
fn a_segment_without_ack_is_dropped() {
    let mut pair = pair();
    let header = pair.header_of_a(Flags::PSH);
    assert!(pair.b.answer_text(header, 10, pair.now).is_empty());
    assert_eq!(pair.b.tcp.readable(), 0);
}

#[test]
fn an_acknowledgement_of_what_was_not_sent_is_challenged() {
    let mut pair = pair();
    let (una, nxt) = (pair.b.tcp.una(), pair.b.tcp.receiver.nxt());
    let mut header = pair.header_of_a(Flags::ACK);
    let max_window = pair.b.tcp.sender.max_window();
    for ack in [una + 1, una - max_window - 1] {
        header.ack = ack;
        assert!(is_ack(&pair.b.answer_text(header, 10, pair.now), una, nxt), "{ack:?}");
        assert_eq!(pair.b.tcp.readable(), 0, "{ack:?}");
    }
    header.ack = una - max_window;
    pair.b.answer_text(header, 10, pair.now);
    assert_eq!(pair.b.tcp.readable(), 10, "an old acknowledgement does not matter");
}

#[test]
fn answers_to_unacceptable_segments_are_limited() {
    let mut pair = pair();
    let mut header = pair.header_of_a(Flags::ACK);
    header.seq = header.seq - 1;
    let answers: usize = (0..100).map(|_| pair.b.answer(header, pair.now).len()).sum();
    assert_eq!(answers, 8);
}

#[test]
fn payload_that_is_known_is_acknowledged_and_reported() {
    let mut pair = pair();
    let header = pair.header_of_a(Flags::ACK);
    pair.b.answer_text(header, 10, pair.now);
    for _ in 0..20 {
        let answer = pair.b.answer_text(header, 10, pair.now).remove(0).header;
        assert_eq!(answer.ack, header.seq + 10);
        assert_eq!(*answer.options.sack, [(header.seq, header.seq + 10)]);
    }
}

#[test]
fn old_timestamps_are_dropped_and_answered() {
    let mut pair = Pair::connected(&Config::default(), &Config::default());
    let mut header = pair.header_of_a(Flags::ACK);
    let recent = header.options.timestamps.unwrap().value;
    header.options.timestamps.as_mut().unwrap().value = recent.wrapping_sub(1);
    let answer = pair.b.answer_text(header, 10, pair.now).remove(0).header;
    assert_eq!((answer.ack, pair.b.tcp.readable()), (header.seq, 0));
    header.options.timestamps = None;
    assert!(pair.b.answer_text(header, 10, pair.now).is_empty(), "a timestamp is missing");
    // A reset has no timestamp, or an old one.
    header.flags = Flags::RST;
    pair.b.answer(header, pair.now);
    assert_eq!(pair.b.tcp.failure(), Some(Error::Reset));
}

#[test]
fn the_echoed_timestamp_is_of_the_segment_that_was_acknowledged_first() {
    let mut pair = Pair::connected(&Config::default(), &Config::default());
    let mut header = pair.header_of_a(Flags::ACK);
    let value = header.options.timestamps.unwrap().value;
    let mut with = |header: &mut Header, seq: Seq, value: u32| {
        header.seq = seq;
        header.options.timestamps = Some(Timestamps { value, ..header.options.timestamps.unwrap() });
        pair.b.answer_text(*header, 10, pair.now).remove(0).header.options.timestamps.unwrap().echo
    };
    let first = header.seq;
    assert_eq!(with(&mut header, first + 10, value.wrapping_add(5)), value, "out of order");
    assert_eq!(with(&mut header, first, value.wrapping_add(3)), value.wrapping_add(3), "it fills the gap");
}

#[test]
fn an_unsent_acknowledgement_does_not_move_the_clock() {
    let mut pair = Pair::connected(&Config::default(), &Config::default());
    let mut header = pair.header_of_a(Flags::ACK);
    let value = header.options.timestamps.unwrap().value;
    let mut forged = header;
    forged.ack += 9999;
    forged.options.timestamps = Some(Timestamps { value: value.wrapping_add(100_000), echo: 0 });
    pair.b.answer(forged, pair.now);
    header.options.timestamps = Some(Timestamps { value: value.wrapping_add(1), echo: 0 });
    let answer = pair.b.answer_text(header, 10, pair.now).remove(0).header;
    assert_eq!((answer.options.timestamps.unwrap().echo, pair.b.tcp.readable()), (value.wrapping_add(1), 10));
}

#[test]
fn urgent_data_is_announced_and_read_in_line() {
    let mut pair = pair();
    pair.a.tcp.send(stream(0, 5000), false).unwrap();
    pair.a.tcp.mark_urgent();
    pair.a.tcp.send(stream(5000, 1000), false).unwrap();
    let sent = pair.settle();
    assert!(pair.b.events.contains(&Event::Urgent));
    assert_eq!(pair.b.tcp.urgent(), Some(5000));
    for (_, sent) in sent.iter().filter(|(from_a, _)| *from_a) {
        let place = sent.header.seq - (pair.a.tcp.una() - 6000);
        assert_eq!(sent.has(Flags::URG), place < 5000);
        assert!(!sent.has(Flags::URG) || u32::from(sent.header.urgent) + place == 5000);
    }
    pair.b.read(pair.now);
    assert_eq!((pair.b.read.len(), pair.b.tcp.urgent()), (6000, None));
    assert_eq!(pair.b.read, SharedBytes::numbered(0, 6000).bytes());
}

#[test]
fn a_congestion_mark_is_echoed_until_the_window_was_reduced() {
    let ask = Config { ecn: Ecn::Request, ..Config::default() };
    let mut pair = Pair::connected(&ask, &Config::default());
    assert_eq!(pair.log[0].1.header.flags, Flags::SYN.with(Flags::ECE).with(Flags::CWR));
    assert_eq!(pair.log[1].1.header.flags, Flags::SYN.with(Flags::ACK).with(Flags::ECE));
    pair.a.tcp.send(stream(0, 3000), false).unwrap();
    let mut sent = pair.a.output(pair.now);
    assert!(sent.iter().all(|sent| sent.ect));
    let marked = sent.remove(0);
    pair.b.tcp.handle_segment(
        &marked.header,
        marked.payload,
        SegmentMeta { len: 1448, segments: 1, ce: true },
        pair.now,
    );
    let back = pair.b.output(pair.now);
    assert!(back[0].has(Flags::ECE) && !back[0].ect);
    back.iter().for_each(|back| pair.a.input(back, pair.now));
    for sent in sent {
        pair.b.input(&sent, pair.now);
        let back = pair.b.output(pair.now);
        assert!(back.iter().all(|back| back.has(Flags::ECE)), "until CWR");
        back.iter().for_each(|back| pair.a.input(back, pair.now));
    }
    pair.a.tcp.send(stream(3000, 1000), false).unwrap();
    let next = pair.settle();
    assert!(next[0].1.has(Flags::CWR) && !next[1].1.has(Flags::ECE), "{next:?}");
    // A peer that refuses ECN.
    let pair = Pair::connected(&ask, &Config { ecn: Ecn::Off, ..Config::default() });
    assert!(!pair.a.tcp.ecn && !pair.b.tcp.ecn && !pair.log[1].1.has(Flags::ECE));
}

#[test]
fn a_window_probe_is_answered() {
    let mut pair = Pair::connected(&plain(), &Config { receive_buffer: 1000, fixed_window: true, ..plain() });
    pair.a.tcp.send(stream(0, 3000), false).unwrap();
    let sent = pair.pass(Duration::from_secs(3));
    assert_eq!(pair.b.tcp.readable(), 1000);
    let answers = sent.iter().filter(|(from_a, sent)| !from_a && sent.header.window == 0).count();
    assert!(answers >= 3, "{answers}");
    // One byte is behind the window.
    let header = Header { seq: pair.b.tcp.receiver.nxt(), ..pair.header_of_a(Flags::ACK) };
    let nxt = header.seq;
    assert_eq!(pair.b.answer_text(header, 1, pair.now).remove(0).header.ack, nxt);
    // The window opens, and the stream goes on.
    for _ in 0..20 {
        pair.b.read(pair.now);
        pair.pass(Duration::from_millis(100));
    }
    assert_eq!(pair.b.read, SharedBytes::numbered(0, 3000).bytes());
}

#[test]
fn an_acknowledgement_is_delayed_but_not_for_long() {
    let mut pair = pair();
    pair.b.tcp.set_quick_ack(false);
    pair.a.tcp.send(stream(0, 100), false).unwrap();
    assert!(pair.settle().iter().all(|(from_a, _)| *from_a));
    assert!(pair.pass(Duration::from_millis(39)).is_empty());
    assert_eq!(pair.pass(Duration::from_millis(1)).len(), 1);
}

#[test]
fn out_of_order_payload_is_acknowledged_at_once_with_blocks() {
    let mut pair = pair();
    pair.b.tcp.set_quick_ack(false);
    let first = pair.header_of_a(Flags::ACK);
    let at = |n: u32| Header { seq: first.seq + n, ..first };
    let blocks = |sent: Vec<Sent>| -> Vec<_> {
        sent[0].header.options.sack.iter().map(|(from, to)| (*from - first.seq, *to - first.seq)).collect()
    };
    assert_eq!(blocks(pair.b.answer_text(at(10), 10, pair.now)), [(10, 20)]);
    assert_eq!(blocks(pair.b.answer_text(at(30), 10, pair.now)), [(30, 40), (10, 20)]);
    // A segment with payload has no room for the blocks, so a separate acknowledgement is sent.
    pair.b.tcp.send(stream(0, 1460), false).unwrap();
    let sent = pair.b.answer_text(at(50), 10, pair.now);
    assert_eq!((sent.len(), sent[0].len(), sent[1].len()), (2, 0, 1460));
    assert_eq!(blocks(sent), [(50, 60), (30, 40), (10, 20)]);
    let filled = pair.b.answer_text(at(0), 10, pair.now);
    assert_eq!(filled[0].header.ack, first.seq + 20);
    assert_eq!(blocks(filled), [(50, 60), (30, 40)]);
}

#[test]
fn an_idle_peer_is_asked_and_then_given_up() {
    let keep_alive = KeepAlive { idle: Duration::from_secs(10), interval: Duration::from_secs(1), probes: 3 };
    let mut pair = Pair::connected(&Config { keep_alive: Some(keep_alive), ..Config::default() }, &Config::default());
    let asked = pair.pass(Duration::from_secs(21));
    let probes: Vec<_> = asked.iter().filter(|(from_a, _)| *from_a).collect();
    assert_eq!((asked.len(), probes.len()), (4, 2));
    assert_eq!((probes[0].1.header.seq, probes[0].1.len()), (pair.a.tcp.una() - 1, 0));
    // The peer does not answer any more.
    let mut sent = 0;
    while pair.a.tcp.state() == State::Established {
        pair.now = pair.a.tcp.poll_timeout().unwrap();
        pair.a.tcp.handle_timeout(pair.now);
        sent += pair.a.output(pair.now).len();
    }
    assert_eq!((sent, pair.a.events.last()), (4, Some(&Event::Closed(Some(Error::TimedOut)))));
}

/// If the thread was busy for long, or the machine was asleep, the sender sends one probe and
/// waits for its answer.
#[test]
fn probes_of_an_idle_peer_are_apart_although_the_timer_is_late() {
    let keep_alive = KeepAlive { idle: Duration::from_secs(10), interval: Duration::from_secs(1), probes: 3 };
    let config = Config { keep_alive: Some(keep_alive), ..Config::default() };
    let mut pair = Pair::connected(&config, &Config::default());
    let late = pair.now + Duration::from_secs(1000);
    pair.a.tcp.handle_timeout(late);
    let probe = pair.a.output(late).remove(0);
    assert_eq!(pair.a.tcp.poll_timeout(), Some(late + Duration::from_secs(1)), "the deadline is not in the past");
    pair.b.input(&probe, late);
    pair.b.output(late).iter().for_each(|answer| pair.a.input(answer, late));
    assert_eq!(pair.a.tcp.poll_timeout(), Some(late + Duration::from_secs(10)));
}

#[test]
fn the_window_of_a_keep_alive_probe_is_promised() {
    let keep_alive = Some(KeepAlive { idle: Duration::from_secs(10), ..KeepAlive::default() });
    let config = Config { receive_buffer: 8 * 1460, fixed_window: true, keep_alive, ..plain() };
    let mut pair = Pair::connected(&plain(), &config);
    pair.a.tcp.send(stream(0, 5 * 1460), false).unwrap();
    pair.pass(Duration::from_secs(1));
    // Three segments are promised. Room for a fourth one is no reason for a window update.
    assert!(matches!(pair.b.tcp.recv(pair.now), Ok(ReadOutcome::Chunk(chunk)) if chunk.len() == 1460));
    assert!(pair.settle().is_empty());
    let probe = pair.pass(Duration::from_secs(10)).remove(0).1.header;
    assert_eq!(probe.window, 4 * 1460);
    pair.b.answer_text(pair.header_of_a(Flags::ACK), 4 * 1460, pair.now);
    assert_eq!(pair.b.tcp.readable(), 8 * 1460);
}

/// Random segments: none of them changes an established connection, and none increases its
/// memory.
#[test]
fn forged_segments_change_nothing() {
    let mut pair = Pair::connected(&Config::default(), &Config::default());
    let mut random = fastrand::Rng::with_seed(9);
    let window = pair.b.tcp.receiver.nxt();
    for n in 0..20_000_u64 {
        let mut header = pair.header_of_a(Flags(random.u8(..)));
        // The attacker is not on the path: it knows the ports, but not the numbers.
        (header.seq, header.ack) = (Seq(random.u32(..)), Seq(random.u32(..)));
        (header.window, header.urgent) = (random.u16(..), random.u16(..));
        header.options.timestamps =
            (random.u8(0..4) > 0).then(|| Timestamps { value: random.u32(..), echo: random.u32(..) });
        let mut sack = SackBlocks::default();
        while random.bool() && sack.push(Seq(random.u32(..)), Seq(random.u32(..))) {}
        header.options.sack = sack;
        let len = random.u32(0..3000);
        if header.seq == window && header.flags.has(Flags::RST) {
            continue;
        }
        pair.b.answer_text(header, len, pair.now + Duration::from_millis(n));
        assert_eq!(pair.b.tcp.state(), State::Established);
        assert!(pair.b.tcp.info(pair.now).buffers <= Config::default().budget);
    }
    pair.now += Duration::from_secs(21);
    pair.a.tcp.send(stream(0, 100_000), false).unwrap();
    for _ in 0..200 {
        pair.pass(Duration::from_millis(100));
        pair.b.read(pair.now);
    }
    assert!(pair.b.read.len() >= 100_000);
}
