//! The codec for `fuzz/`.

use super::message::{HEADER, MAX_FDS, MAX_PAYLOAD, Message, RawMessage, Reply, Request};
use super::received::Received;
use std::os::fd::OwnedFd;

/// A packet as [`MessageSocket`](super::message_socket::MessageSocket) would make it of these
/// parts. The descriptors are closed if it would make none.
fn packet(request: u32, flags: u32, payload: &[u8], fds: Vec<OwnedFd>) -> Option<RawMessage> {
    let mut header = [0; HEADER];
    let size = payload.len().min(MAX_PAYLOAD + 1);
    for (to, word) in header.as_chunks_mut().0.iter_mut().zip([request, flags, size as u32]) {
        *to = word.to_ne_bytes();
    }
    let (packet, size) = RawMessage::with_header(&header).ok()?;
    assert!(size <= MAX_PAYLOAD);
    let fds: Vec<_> = fds.into_iter().map(Received::from).collect();
    (fds.len() <= MAX_FDS).then(|| RawMessage { payload: payload[..size].to_vec(), fds, ..packet })
}

/// The parts of what was encoded, as they would come again; `fds` in the place of its descriptors.
fn again(bytes: &[u8], fds: Vec<Received>) -> RawMessage {
    let (header, payload) = bytes.split_first_chunk().expect("a header");
    let (packet, size) = RawMessage::with_header(header).expect("our own messages have a valid header");
    assert_eq!(size, payload.len());
    RawMessage { payload: payload.to_vec(), fds, ..packet }
}

fn duplicates(fds: &[std::os::fd::BorrowedFd<'_>]) -> Vec<Received> {
    fds.iter().map(|fd| fd.try_clone_to_owned().expect("a descriptor").into()).collect()
}

/// Decodes a message of a front end, and what is decoded again after it was encoded.
pub fn request(request: u32, flags: u32, payload: &[u8], fds: Vec<OwnedFd>) {
    let Some(packet) = packet(request, flags, payload, fds) else { return };
    let need_reply = packet.needs_reply();
    let Ok(message) = Message::decode(packet) else { return };
    assert_eq!(message.request(), Request(request));
    let frame = message.encode(need_reply);
    let packet = again(&frame.bytes, duplicates(&frame.fds));
    assert_eq!(packet.needs_reply(), need_reply);
    let second = Message::decode(packet).expect("what was encoded can be decoded");
    let encoded = second.encode(need_reply);
    assert_eq!((encoded.bytes, encoded.fds.len()), (frame.bytes, frame.fds.len()), "{message:?}");
}

/// Decodes an answer of a back end to the message `asked`, and what is decoded again after it was
/// encoded.
pub fn reply(asked: u32, answered: u32, flags: u32, payload: &[u8], fds: Vec<OwnedFd>) {
    let asked = Request(asked);
    let Some(packet) = packet(answered, flags, payload, fds) else { return };
    let Ok(reply) = Reply::decode(packet, asked) else { return };
    assert_eq!(asked, Request(answered));
    let frame = reply.encode(asked);
    let second = Reply::decode(again(&frame.bytes, duplicates(&frame.fds)), asked);
    let second = second.expect("what was encoded can be decoded");
    let encoded = second.encode(asked);
    assert_eq!((encoded.bytes, encoded.fds.len()), (frame.bytes, frame.fds.len()), "{reply:?}");
}

/// A message for a device's session.
pub(crate) fn message(request: u32, payload: &[u8], fds: Vec<OwnedFd>) -> Option<Message<Received>> {
    Message::decode(packet(request, 1, payload, fds)?).ok()
}
