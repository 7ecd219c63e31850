//! A program of the user's own, which writes metadata in front of each frame. It is pinned, and
//! attached by us.
#![allow(clippy::unwrap_used)]

use netmem_packet::{Handler, Packet, Poll, RxQueue, Verdict, XdpFrame};
use netmem_pool::{KernelShared, PeerShared, SystemMemory};
use netmem_testing::metadata_program::{MARK, pin_metadata_program};
use netmem_testing::namespace::{command, in_namespace};
use netmem_testing::xsk::{Raw, frame, index, memory, on_wire, until, wire};
use netmem_xsk::{Interface, Program, QueueOptions, UmemMemory, UmemOptions, rx_metadata};
use std::os::fd::AsFd;

/// Reads the metadata of each frame.
struct Read<'a>(&'a mut dyn FnMut(Option<[u8; 8]>, Vec<u8>));

impl<M: UmemMemory> Handler<M> for Read<'_> {
    fn run(&mut self, frame: &mut XdpFrame<M>) -> Verdict {
        // More than there is in front of the frame.
        assert_eq!(rx_metadata::<M, 4096>(frame), None);
        let metadata = rx_metadata(frame);
        let mut bytes = vec![0; frame.len()];
        frame.copy_to(0, &mut bytes).unwrap();
        (self.0)(metadata, bytes);
        Verdict::Drop
    }

    fn pass(&mut self, _: Packet<M>) {}
}

fn metadata_is_read<M: UmemMemory + SystemMemory>(umem: &UmemOptions) {
    in_namespace(|| {
        let (ours, theirs) = wire(1500);
        let place = tempfile::tempdir().unwrap();
        command(&format!("mount -t bpf bpf {}", place.path().display()));
        let (program_at, map_at) = pin_metadata_program(place.path());

        let program = Program::attach_pinned(index(&ours), None, &program_at, &map_at).unwrap();
        let (memory, umem) = memory::<M>(4096, umem);
        let (mut rx, tx) = umem.open(index(&ours), 0, memory, on_wire(QueueOptions::new())).unwrap();
        program.insert(0, rx.socket().as_fd()).unwrap();
        let peer = Raw::new(&theirs);
        let sent = |i: usize| {
            let mut sent = frame(60 + 7 * i, i as u64);
            // Every third has no metadata.
            sent[14] = if i.is_multiple_of(3) { 0 } else { sent[14] | 1 };
            sent
        };
        let mut next = 0;
        for i in 0..200 {
            peer.send(&sent(i));
            until("a frame", || {
                let mut check = |metadata: Option<[u8; 8]>, bytes: Vec<u8>| {
                    let sent = sent(next);
                    assert_eq!(bytes, sent);
                    let want = [&MARK.to_ne_bytes()[..], &sent[14..18]].concat();
                    // What a frame without metadata has there is anything, but not that of this
                    // frame.
                    assert_eq!(
                        metadata.unwrap() == want[..],
                        !next.is_multiple_of(3),
                        "{next}: {metadata:02x?} {want:02x?}"
                    );
                    next += 1;
                };
                rx.poll(|poll| poll.receive(64, &mut Read(&mut check)));
                (next == i + 1).then_some(())
            });
        }
        let pool = rx.pool_stats();
        assert_eq!((rx.stats().frames, rx.stats().dropped, rx.stats().stopped), (200, 200, None));
        let pages = rx.posted().div_ceil(4096 / umem.chunk_size()) as u64;
        assert!((pages..=pages + 1).contains(&pool.inflight()), "{pool:?}");
        drop((rx, tx, program));
        // Ours is gone, and what the user has pinned is not.
        assert_eq!(Interface::by_name(&ours).unwrap().programs, []);
        assert!(program_at.exists() && map_at.exists());
        command(&format!("umount {}", place.path().display()));
    });
}

#[test]
fn metadata_of_received_frames() {
    metadata_is_read::<KernelShared>(&UmemOptions::new());
}

/// The peer of the memory may change it: metadata is copied out, once, like the frame.
#[test]
fn metadata_in_memory_of_a_peer_behind_headroom() {
    metadata_is_read::<PeerShared>(&UmemOptions::new().chunk(2048).headroom(64));
}
