//! The codec as a front end uses it: any bytes as the answers of a back end.
//!
//! The first byte chooses between one answer, which is decoded, encoded and decoded again, and a
//! stream of answers to a driver that connects and probes. Neither leaves a descriptor open, and
//! neither waits: the stream ends.
#![no_main]

use libfuzzer_sys::fuzz_target;
use netmem_fuzz::{Input, file, next_descriptor};
use netmem_virtio::VhostUser;
use netmem_virtio::driver::{NetOptions, RxMode, VirtioNet};
use netmem_virtio::fuzz::reply;
use netmem_virtio::net::feature;
use rustix::fd::{AsFd, OwnedFd};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, sendmsg};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;

fuzz_target!(|data: &[u8]| {
    let before = next_descriptor();
    let mut input = Input(data);
    if input.u8() & 1 == 0 {
        let (asked, answered) = (u32::from(input.u8() % 48), input.u8());
        // Most answers are to what was asked.
        let answered = if answered < 240 { asked } else { answered.into() };
        let flags = if input.u8() < 240 { 5 } else { input.u32() };
        let fds = (0..input.below(10)).map(|_| file(0)).collect();
        reply(asked, answered, flags, input.0, fds);
    } else {
        stream(input);
    }
    assert_eq!(next_descriptor(), before, "a descriptor was left open");
});

/// A back end that has sent all its answers.
fn stream(mut input: Input) {
    let (ours, theirs) = UnixStream::pair().expect("a socket pair");
    let fds: Vec<OwnedFd> = (0..input.below(12).saturating_sub(8)).map(|_| file(0)).collect();
    let fields = feature::MAC | feature::STATUS | feature::MTU | feature::SPEED_DUPLEX;
    let offered = feature::VERSION_1 | feature::MRG_RXBUF | feature::CSUM | fields;
    let offered = offered | if input.u8() & 1 == 0 { 0 } else { feature::VHOST_USER_PROTOCOL };
    let mut bytes = Vec::new();
    // The answers that lead on are right, until the bytes change them.
    while !input.is_empty() && bytes.len() < 4096 {
        let choice = input.u8();
        let mut answer = |request: u32, value: u64| {
            bytes.extend([request, 5, 8].into_iter().flat_map(u32::to_ne_bytes));
            bytes.extend(value.to_ne_bytes());
        };
        match choice {
            0..48 => answer(1, offered),
            48..96 => answer(15, input.number(&[9, 0x1_0019, 0x1_1019, 0x219, 0x1_0219])),
            96..108 => answer(17, input.number(&[1, 0x8000])),
            108..112 => {
                // The configuration space, of its length or another.
                let len = if choice < 111 { 17 } else { input.below(32) };
                bytes.extend([24, 5, 12 + len as u32, 0, len as u32, 0].into_iter().flat_map(u32::to_ne_bytes));
                bytes.extend(input.bytes(len));
            }
            112..224 => answer(u32::from(choice - 112) % 48, input.number(&[15])),
            _ => {
                let n = input.below(32);
                bytes.extend(input.bytes(n));
            }
        }
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    if !borrowed.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&borrowed));
    }
    let _ = sendmsg(&theirs, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL);
    rustix::net::shutdown(&theirs, Shutdown::Write).expect("the end of what it says");
    let Ok(backend) = VhostUser::own_device(ours) else { return };
    let _ = VirtioNet::probe(backend, NetOptions::new(RxMode::Small).ring_size(2).pages(4).cache(2));
}
