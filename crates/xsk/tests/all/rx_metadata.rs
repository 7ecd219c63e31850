//! A program of the user's own, which writes metadata in front of each frame. It is pinned, and
//! attached by us.
#![allow(clippy::unwrap_used)]

use netmem_packet::{Handler, Packet, Poll, RxQueue, Verdict, XdpFrame};
use netmem_pool::{KernelShared, PeerShared, SystemMemory};
use netmem_testing::namespace::{command, in_namespace};
use netmem_testing::xsk::{Raw, frame, index, memory, on_wire, until, wire};
use netmem_xsk::{Interface, Program, QueueOptions, UmemMemory, UmemOptions, rx_metadata};
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

/// A command of `bpf(2)`, with the first words of its argument.
fn bpf(command: u32, words: &[u32]) -> io::Result<i32> {
    let mut argument = [0u32; 36];
    argument[..words.len()].copy_from_slice(words);
    // SAFETY: an argument of integers; addresses in it are of buffers that the callers keep.
    let rc = unsafe { libc::syscall(libc::SYS_bpf, command, argument.as_mut_ptr(), size_of_val(&argument)) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(rc as i32) }
}

fn open(command: u32, words: &[u32]) -> OwnedFd {
    let fd = bpf(command, words).unwrap();
    // SAFETY: the command has made it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// An address, as two words of an argument.
fn halves<T>(of: *const T) -> [u32; 2] {
    let address = of.addr() as u64;
    [address as u32, (address >> 32) as u32]
}

fn pin(fd: &OwnedFd, at: &Path) {
    let at = CString::new(at.to_str().unwrap()).unwrap();
    let [low, high] = halves(at.as_ptr());
    bpf(6, &[low, high, fd.as_raw_fd() as u32]).unwrap();
}

/// An instruction: operation, destination and source, offset, constant.
fn insn(op: u8, dst: u8, src: u8, offset: i16, constant: i32) -> u64 {
    let low = u64::from(op) | u64::from(dst | src << 4) << 8 | u64::from(offset as u16) << 16;
    low | u64::from(constant as u32) << 32
}

const MARK: i32 = 0x6d65_7461;

/// The user's program: makes 8 bytes of metadata, writes a mark and four bytes of the frame into
/// it, and redirects the frame to the map. A frame whose byte 14 is 0 gets no metadata.
fn program(map: &OwnedFd) -> OwnedFd {
    let code = [
        insn(0xbf, 6, 1, 0, 0),  // r6 = the context
        insn(0x61, 2, 6, 0, 0),  // r2 = data
        insn(0x61, 3, 6, 4, 0),  // r3 = the end of the data
        insn(0xbf, 4, 2, 0, 0),  // r4 = r2
        insn(0x07, 4, 0, 0, 18), // r4 += 18
        insn(0x2d, 4, 3, 13, 0), // a shorter frame: no metadata
        insn(0x61, 7, 2, 14, 0), // r7 = four bytes of the frame
        insn(0x71, 5, 2, 14, 0), // r5 = the first of them
        insn(0x15, 5, 0, 10, 0), // 0: no metadata
        insn(0xbf, 1, 6, 0, 0),  // adjust_meta(context, -8)
        insn(0xb7, 2, 0, 0, -8),
        insn(0x85, 0, 0, 0, 54),
        insn(0x61, 2, 6, 8, 0), // r2 = metadata
        insn(0x61, 3, 6, 0, 0), // r3 = data
        insn(0xbf, 4, 2, 0, 0), // r4 = r2 + 8
        insn(0x07, 4, 0, 0, 8),
        insn(0x2d, 4, 3, 2, 0),               // there is no room for it
        insn(0x62, 2, 0, 0, MARK),            // metadata[0..4] = the mark
        insn(0x63, 2, 7, 4, 0),               // metadata[4..8] = r7
        insn(0x18, 1, 1, 0, map.as_raw_fd()), // redirect_map(map, queue, pass)
        0,
        insn(0x61, 2, 6, 16, 0),
        insn(0xb7, 3, 0, 0, 2),
        insn(0x85, 0, 0, 0, 51),
        insn(0x95, 0, 0, 0, 0),
    ];
    let license = c"MIT";
    let mut log = vec![0u8; 1 << 16];
    let ([code_low, code_high], [license_low, license_high]) = (halves(code.as_ptr()), halves(license.as_ptr()));
    let [log_low, log_high] = halves(log.as_mut_ptr());
    let mut words = [0; 18];
    words[..10].copy_from_slice(&[
        6,
        code.len() as u32,
        code_low,
        code_high,
        license_low,
        license_high,
        1,
        log.len() as u32,
        log_low,
        log_high,
    ]);
    // For frames of several buffers, at an interface.
    (words[11], words[17]) = (1 << 5, 37);
    let fd = bpf(5, &words).unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&log)));
    // SAFETY: the command has made it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

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
        let (program_at, map_at) = (place.path().join("program"), place.path().join("map"));
        let map = open(0, &[17, 4, 4, 1]);
        pin(&map, &map_at);
        pin(&program(&map), &program_at);
        drop(map);

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
