//! The back end of a device dies under streams in device memory.

use crate::Count;
use crate::stream_scene::{CHAIN, Large, RANGES, STATES, Scene, State};
use netmem_devmem::lost_pages;
use netmem_devmem::stream::{StreamError, StreamFragment, StreamSendError};
use netmem_inet::SocketError;
use netmem_inet::tcp::Error;

/// Pages that the device has.
const POSTED: u64 = 128;

/// Proves POOL-11, MEM-2 and MEM-9: the back end dies for good, in each state, with frames that it
/// has not looked at. The user informs the stack. Each connection ends with that error. Payload
/// that arrived before can be received. Pages that users hold stay valid and come home. Ranges that
/// the device may still read are held until the queue is dropped. Posted pages are lost and
/// counted.
#[test]
fn a_back_end_that_dies() {
    let _alone = Count::begin();
    a_back_end_that_dies_with_large_segments();
    for state in STATES {
        let before = lost_pages();
        let Scene { mut rig, listener, mut stream, returner, held, .. } = Scene::new(state);
        rig.kill_device();
        assert_eq!(rig.in_flight() > 0, state.in_flight(), "{state:?}");
        rig.stack.as_mut().unwrap().handle_device_gone();
        rig.settle();
        // Only the connection whose handle the user has is left.
        assert_eq!(rig.stack.as_ref().unwrap().connections(), 1, "{state:?}");
        if let Some(held) = held.first_chunk::<2>() {
            let mut bytes = [0; 1000];
            rig.memory.read_exact_at(&mut bytes, held[1].1).unwrap();
            assert_eq!(bytes, [1; 1000]);
            assert_eq!(returner.return_tokens(&[held[0].0, held[1].0]), Ok(2));
        }
        let (mut bytes, mut place) = (0, [StreamFragment::Empty]);
        let end = loop {
            match stream.recv(&mut place) {
                Ok(n) if n > 0 => match &place {
                    [StreamFragment::Device { len, .. }] => bytes += len,
                    other => panic!("{other:?}"),
                },
                other => break other,
            }
        };
        let gone = SocketError::Closed(Error::DeviceGone);
        assert_eq!(bytes, if held.is_empty() { 0 } else { 3000 }, "{state:?}: what came before");
        assert_eq!(end, if state.peer_has_closed() { Ok(0) } else { Err(StreamError::Socket(gone)) }, "{state:?}");
        assert_eq!(stream.tcp().is_connected(), Err(gone), "{state:?}");
        let from = rig.binding.as_ref().unwrap().reference();
        let refused = stream.send(&from, 0, 1, false);
        assert!(matches!(refused, Err(StreamSendError::Socket(error)) if error == gone), "{state:?}: {refused:?}");
        drop(from);
        let sent = std::iter::from_fn(|| stream.sent()).count() as u64;
        rig.drop_stack();
        let rest = std::iter::from_fn(|| stream.sent()).count() as u64;
        let payload_in_flight = state.in_flight() && !matches!(state, State::SynSent | State::SynReceived);
        assert_eq!((sent + rest, rest > 0), (RANGES, payload_in_flight), "{state:?}");
        drop((stream, listener, returner));
        drop((rig.net.take(), rig.driver.take(), rig.binding.take()));
        crate::memory_common::until(|| rig.memory.descriptors() == 0);
        crate::memory_common::until(|| lost_pages() > before);
        assert_eq!(lost_pages() - before, POSTED, "{state:?}");
    }
}

/// The same with chains of 17 parts and large segments everywhere: what the device had written
/// arrives, what it may still read is held, and the pages of posted chains are lost and counted, no
/// others.
fn a_back_end_that_dies_with_large_segments() {
    let before = lost_pages();
    let mut scene = Large::new();
    scene.rig.kill_device();
    assert!(scene.rig.in_flight() > 0);
    let posted = scene.rig.posted() as u64;
    scene.rig.stack.as_mut().unwrap().handle_device_gone();
    scene.rig.settle();
    let tokens = scene.receive();
    let Large { mut rig, listener, mut stream, returner, held, .. } = scene;
    let gone = SocketError::Closed(Error::DeviceGone);
    assert_eq!(stream.recv(&mut [StreamFragment::Empty]), Err(StreamError::Socket(gone)));
    for tokens in tokens.into_iter().chain(held.into_iter().map(|held| held.0)) {
        assert_eq!(returner.return_tokens(&[tokens]), Ok(tokens.count as usize));
    }
    let sent = std::iter::from_fn(|| stream.sent()).count() as u64;
    assert!(sent < RANGES, "the device may still read some");
    rig.drop_stack();
    assert_eq!(sent + std::iter::from_fn(|| stream.sent()).count() as u64, RANGES);
    drop((stream, listener, returner));
    drop((rig.net.take(), rig.driver.take(), rig.binding.take()));
    crate::memory_common::until(|| rig.memory.descriptors() == 0);
    crate::memory_common::until(|| lost_pages() > before);
    assert_eq!(lost_pages() - before, posted * CHAIN);
}
