//! The ends of streams in device memory: all objects are dropped in every order, in each state of a
//! connection, and events come under traffic.

use crate::stream_scene::{LARGE, Large, RANGES, STATES, Scene, State, take_all};
use netmem_devmem::TokenRange;
use netmem_devmem::stream::{StreamError, StreamFragment, StreamSendError};
use netmem_inet::SocketError;
use netmem_testing::permutations;
use std::time::Duration;

/// Proves MEM-2, MEM-7 and MEM-9: the binding, the stream, the returner, the stack and the driver
/// are dropped in every order, in each state of the connection. Then nothing is left, and no page
/// is lost.
#[test]
fn every_order_of_ends() {
    let orders = permutations(5);
    assert_eq!(orders.len(), 120);
    for (n, order) in orders.iter().enumerate() {
        // Run each order in two of the states.
        for state in [2 * n, 2 * n + 1].map(|n| STATES[n % STATES.len()]) {
            let Scene { mut rig, listener, stream, returner, held, .. } = Scene::new(state);
            let (mut stream, mut returner) = (Some((stream, listener)), Some(returner));
            for part in order {
                match part {
                    0 => match &mut rig.net {
                        Some(net) => net.unbind(rig.binding.take().unwrap()).expect("the device goes on"),
                        None => drop(rig.binding.take()),
                    },
                    1 => drop(stream.take()),
                    2 => {
                        let returner = returner.take().unwrap();
                        let tokens: Vec<TokenRange> = held.iter().map(|held| held.0).collect();
                        std::thread::spawn(move || returner.return_tokens(&tokens).unwrap()).join().unwrap();
                    }
                    3 => rig.drop_stack(),
                    _ => drop((rig.net.take(), rig.driver.take())),
                }
                rig.settle();
            }
            drop(rig.device.take());
            rig.memory.assert_gone();
        }
    }
}

/// Proves MEM-2, MEM-8 and MEM-9: the binding is unbound with data queued, held, in flight and
/// unacknowledged. Unacknowledged data is sent again with the same bytes. Queued data is received.
/// No new range is sent. At the end the memory is released.
#[test]
fn unbound_with_data_everywhere() {
    let Scene { mut rig, mut peer, listener, mut stream, returner, held, sent } = Scene::new(State::Established);
    let binding = rig.binding.take().unwrap();
    let again = binding.reference();
    rig.net.as_mut().unwrap().unbind(binding).unwrap();
    assert!(matches!(stream.send(&again, 0, 1, false), Err(StreamSendError::Unbound { .. })));
    drop(again);
    // Nothing was acknowledged, so all segments are sent again.
    let repeated = rig.pass(Duration::from_secs(3));
    assert!(repeated.iter().any(|segment| segment.seq == sent[0].seq && !segment.payload.is_empty()), "{repeated:?}");
    let mut next = sent;
    next.extend(repeated);
    take_all(&mut rig, &mut peer, next);
    assert_eq!(std::iter::from_fn(|| stream.sent()).count(), 6);
    // Segments 3 to 5 were queued before.
    let mut places = [const { StreamFragment::Empty }; 8];
    let n = stream.recv(&mut places).unwrap();
    let lens = places[..n].iter().map(|place| match place {
        StreamFragment::Device { len, .. } => *len,
        other => panic!("{other:?}"),
    });
    assert_eq!(lens.sum::<u32>(), 3000);
    let mut bytes = [0; 1000];
    rig.memory.read_exact_at(&mut bytes, held[2].1).unwrap();
    assert_eq!(bytes, [2; 1000]);
    assert_eq!(returner.return_tokens(&[held[2].0]), Ok(1));
    // The connection goes on, in host memory.
    peer.give(&mut rig, &[7; 100]);
    assert_eq!(rig.streams.as_ref().unwrap().stats().bindings, 1);
    drop((stream, listener, returner));
    // The last handle has given back the pages that the user held, and the streams have dropped the
    // binding.
    assert_eq!(rig.streams.as_ref().unwrap().stats().bindings, 0);
    rig.settle();
    assert_eq!(format!("{:?}", rig.bindings), "[]", "no queue receives into it");
    drop((rig.streams.take(), rig.stack.take(), rig.net.take(), rig.driver.take(), rig.device.take()));
    rig.memory.assert_gone();
}

/// Proves MEM-2 and MEM-9: the back end dies in each state, with frames that it has not looked at,
/// and another one takes its queues. Each connection goes on: frames in flight are counted, and
/// their data is sent again with the same bytes. No page is lost.
#[test]
fn another_back_end() {
    for state in STATES {
        let Scene { mut rig, mut peer, listener, mut stream, returner, held, sent } = Scene::new(state);
        rig.kill_device();
        let in_flight = rig.in_flight();
        assert_eq!(in_flight > 0, state.in_flight(), "{state:?}");
        rig.connect_device();
        let mut next = sent;
        next.extend(rig.pass(Duration::from_secs(10)));
        let queue = rig.stack.as_mut().unwrap().queues().1.queue();
        assert_eq!(queue.stats().unconfirmed, in_flight, "{state:?}");
        if state == State::SynSent {
            assert!(next.iter().filter(|segment| segment.syn).count() > 1, "SYN comes again");
            peer.syn(&mut rig, false);
            next = rig.settle();
        }
        if state.in_flight() {
            take_all(&mut rig, &mut peer, next);
        }
        assert_eq!(std::iter::from_fn(|| stream.sent()).count() as u64, RANGES, "{state:?}");
        assert!(stream.tcp().is_connected().is_ok(), "{state:?}");
        if !state.peer_has_closed() {
            // Segments that were out of order may follow.
            let readable = stream.tcp().readable();
            peer.give(&mut rig, &[6; 1000]);
            assert!(stream.tcp().readable() >= readable + 1000, "{state:?}");
        }
        let tokens: Vec<_> = held.iter().map(|held| held.0).collect();
        assert_eq!(returner.return_tokens(&tokens), Ok(held.len()));
        drop((stream, listener, returner));
        rig.pass(Duration::from_secs(1));
        rig.close();
    }
}

/// Proves MEM-2 and MEM-9: the back end dies with large segments everywhere, in chains of 17 parts,
/// and another one takes its queues. What the device had written arrives. Segments in flight are
/// counted, and sent again with the same bytes. No page is lost.
#[test]
fn another_back_end_with_large_segments() {
    let mut scene = Large::new();
    scene.rig.kill_device();
    let in_flight = scene.rig.in_flight();
    assert!(in_flight > 0);
    scene.rig.connect_device();
    let mut next = scene.rig.pass(Duration::from_secs(10));
    let queue = scene.rig.stack.as_mut().unwrap().queues().1.queue();
    assert_eq!(queue.stats().unconfirmed, in_flight);
    let (mut all, rig, peer) = (Vec::new(), &mut scene.rig, &mut scene.peer);
    for _ in 0..100 {
        all.extend(peer.take(rig, next));
        next = rig.pass(Duration::from_millis(300));
    }
    assert_eq!(all.len(), RANGES as usize * LARGE);
    assert!(all.iter().all(|&byte| byte == 0xaa));
    let tokens = scene.receive();
    assert_eq!(std::iter::from_fn(|| scene.stream.sent()).count() as u64, RANGES);
    let (rig, peer) = (&mut scene.rig, &mut scene.peer);
    peer.give_large(rig, &[6; LARGE]);
    rig.settle();
    assert_eq!(scene.stream.tcp().readable(), LARGE);
    let Large { mut rig, listener, stream, returner, held, .. } = scene;
    for tokens in tokens.into_iter().chain(held.into_iter().map(|held| held.0)) {
        assert_eq!(returner.return_tokens(&[tokens]), Ok(tokens.count as usize));
    }
    drop((stream, listener, returner));
    rig.pass(Duration::from_secs(1));
    rig.close();
}

/// Proves MEM-1 and MEM-9: the queue is restarted, without the binding and with it again. Data in
/// flight is sent again from where it is, and data that the peer sends meanwhile is received, in
/// host memory or in device memory.
#[test]
fn the_queue_is_restarted() {
    let Scene { mut rig, mut peer, listener, mut stream, returner, held, sent } = Scene::new(State::Established);
    let binding = rig.binding.take().unwrap();
    assert!(rig.net.as_mut().unwrap().detach(0).unwrap());
    // Segments that were out of order follow.
    peer.give(&mut rig, &[6; 1000]);
    peer.seq = peer.seq.wrapping_add(1000);
    rig.net.as_mut().unwrap().attach(&binding, &[0]).unwrap();
    let mut next = sent;
    next.extend(rig.pass(Duration::from_secs(2)));
    take_all(&mut rig, &mut peer, next);
    let mut want = [3, 4, 5, 6, 9].into_iter().flat_map(|byte| [byte; 1000]);
    let mut tokens: Vec<TokenRange> = held.iter().map(|held| held.0).collect();
    let (mut linear, mut device) = (0, 0);
    loop {
        let mut place = [StreamFragment::Empty];
        match stream.recv(&mut place) {
            Ok(1) => {}
            Err(StreamError::Socket(SocketError::WouldBlock)) => break,
            other => panic!("{other:?}"),
        }
        let [place] = place;
        let bytes = match place {
            StreamFragment::Device { offset, len, tokens: more, .. } => {
                let mut bytes = vec![0; len as usize];
                rig.memory.read_exact_at(&mut bytes, offset).unwrap();
                tokens.push(more);
                device += len;
                bytes
            }
            StreamFragment::Linear(host) => {
                linear += host.len();
                host.to_vec()
            }
            StreamFragment::Empty => panic!("nothing was received, and counted"),
        };
        assert!(bytes.into_iter().all(|byte| Some(byte) == want.next()));
    }
    assert_eq!(want.next(), None);
    assert_eq!((linear, device), (1000, 4000));
    let count: u32 = tokens.iter().map(|tokens| tokens.count).sum();
    assert_eq!(returner.return_tokens(&tokens), Ok(count as usize));
    rig.binding = Some(binding);
    drop((stream, listener, returner));
    rig.pass(Duration::from_secs(1));
    assert_eq!(rig.held(), 0);
    rig.close();
}
