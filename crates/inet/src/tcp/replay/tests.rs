//! Recordings of two ends over a bad link, and their replay.

use std::time::Duration;

use super::*;
use crate::tcp::testing::{Pair, Ring, stream};
use crate::tcp::{DeliveryError, State};

/// Runs two ends over a link with losses and full rings, with calls of all kinds. Returns the
/// recordings as JSON, and the final states.
fn recorded(seed: u64) -> [(String, State); 2] {
    let mut random = fastrand::Rng::with_seed(seed);
    let config = Config {
        record: 100_000,
        receive_buffer: random.u32(3000..100_000),
        timestamps: random.bool(),
        sack: random.bool(),
        ..Config::default()
    };
    let mut pair = Pair::new(&config, &config);
    let mut sent = 0;
    for _ in 0..400 {
        let (to, from) = if random.bool() { (&mut pair.a, &mut pair.b) } else { (&mut pair.b, &mut pair.a) };
        let mut ring = Ring { room: random.usize(0..8), ..Ring::new() };
        let _ = from.tcp.poll_transmit(pair.now, &mut ring);
        for sent in ring.segments.iter().filter(|_| random.u8(0..20) > 0) {
            to.input(sent, pair.now);
        }
        match random.u8(0..60) {
            0..15 => {
                sent += usize::from(from.tcp.send(stream(sent, 900), random.bool()).is_ok()) * 900;
            }
            // The payload has more parts than one transmission has chunks.
            15..20 => {
                let (mut whole, more) = (stream(sent, 900), random.bool());
                for _ in 0..30 {
                    let mut part = whole.clone();
                    part.truncate(30);
                    whole.advance(30);
                    sent += usize::from(from.tcp.send(part, more).is_ok()) * 30;
                }
            }
            20..30 => from.read(pair.now),
            30 => from.tcp.set_nodelay(random.bool()),
            31 => from.tcp.set_cork(random.bool()),
            32 => from.tcp.set_quick_ack(random.bool()),
            33 => {
                let too_big = DeliveryError::TooBig { max_payload: 800 };
                _ = from.tcp.handle_delivery_error(too_big, Some(from.tcp.una()), pair.now);
            }
            34 => from.tcp.mark_urgent(),
            35 if seed.is_multiple_of(3) => from.tcp.shutdown(),
            36 if seed.is_multiple_of(7) => from.tcp.close(pair.now),
            _ => {}
        }
        pair.now += Duration::from_micros(random.u64(0..20_000));
        for end in [&mut pair.a, &mut pair.b] {
            if end.tcp.poll_timeout().is_some_and(|at| at <= pair.now) {
                end.tcp.handle_timeout(pair.now);
            }
        }
    }
    [&pair.a, &pair.b].map(|end| (serde_json::to_string(end.tcp.recording().unwrap()).unwrap(), end.tcp.state()))
}

#[test]
fn what_was_recorded_happens_again() {
    for seed in 0..30 {
        for (n, (text, state)) in recorded(seed).into_iter().enumerate() {
            let recording: Recording = serde_json::from_str(&text).unwrap();
            let again = recording.replay().unwrap_or_else(|diverged| panic!("seed {seed}, end {n}: {diverged}"));
            assert_eq!(again.state(), state, "seed {seed}, end {n}");
            assert!(recording.len() > 200);
        }
    }
}

#[test]
fn a_difference_is_found() {
    let [(text, _), _] = recorded(1);
    let mut recording: Recording = serde_json::from_str(&text).unwrap();
    let lost = recording.steps.iter().position(|step| matches!(step, Step::Segment { .. })).unwrap();
    recording.steps.remove(lost);
    assert!(matches!(recording.replay(), Err(Diverged { step }) if step >= lost));
}

#[test]
fn a_recording_is_bounded() {
    let config = Config { record: 10, ..Config::default() };
    let mut pair = Pair::connected(&config, &config);
    for n in 0..100 {
        pair.a.tcp.send(stream(n, 1), false).unwrap();
        pair.settle();
    }
    assert_eq!(pair.a.tcp.recording().map(Recording::len), Some(10));
    assert!(pair.a.tcp.recording().is_some_and(|recording| recording.sent.is_empty()));
}
