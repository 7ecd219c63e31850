//! Frames and their headers: virtio-net headers, edits of frames and packets, and the parsing and
//! checksums of ports.
//!
//! An edited frame is compared with a vector of bytes that was edited in the same way.
#![no_main]

use libfuzzer_sys::fuzz_target;
use netmem_fuzz::Input;
use netmem_packet::{Checksum, Meta, Packet, XdpFrame};
use netmem_pool::{Napi, PAGE_SIZE, PagePool, PoolOptions, Private, RegionOptions, RegionProvider};
use netmem_virtio::device::port::{ALL_OFFLOADS, Echo, Port, PortError, Steering};
use netmem_virtio::net::{HeaderFault, Offloads, VnetHdr, feature};
use std::cell::RefCell;

thread_local! {
    static POOL: RefCell<PagePool<Private>> = RefCell::new({
        let region = RegionOptions::new(64).build().expect("memory for pages");
        PoolOptions::new("fuzz").cache(64).build(RegionProvider::new(region), None).expect("a pool")
    });
}

fuzz_target!(|data: &[u8]| {
    let mut input = Input(data);
    match input.u8() % 4 {
        0 => header(&mut input),
        1 => edits(&mut input),
        2 => steered(&mut input),
        _ => echoed(&mut input),
    }
});

/// A header is judged: what is accepted was negotiated, and can be true.
fn header(input: &mut Input) {
    let features = input.number(&[feature::CSUM, feature::GUEST_CSUM, feature::GUEST_TSO4, feature::HOST_TSO4]);
    let features = if input.u8() & 1 == 0 { features } else { input.u64() };
    let len = input.number(&[60, 1514, 65549]) as usize % (1 << 17);
    let mut bytes = [0; VnetHdr::LEN];
    let from = input.bytes(VnetHdr::LEN);
    bytes[..from.len()].copy_from_slice(from);
    let header = VnetHdr::from_bytes(bytes);
    assert_eq!(header.to_bytes(), bytes);
    let (csum, segments) = (
        [feature::GUEST_CSUM, feature::CSUM],
        [
            feature::GUEST_TSO4 | feature::GUEST_TSO6 | feature::GUEST_UFO | feature::GUEST_USO4 | feature::GUEST_USO6,
            feature::HOST_TSO4 | feature::HOST_TSO6 | feature::HOST_UFO | feature::HOST_USO,
        ],
    );
    for (i, offloads) in [Offloads::received(features), Offloads::sent(features)].into_iter().enumerate() {
        match offloads.check(header, len) {
            Ok(h) => {
                assert!(h.flags == 0 || features & csum[i] != 0);
                assert!(h.gso_type == 0 || features & segments[i] != 0);
                let end = usize::from(h.csum_start) + usize::from(h.csum_offset) + 2;
                assert!(h.flags & VnetHdr::NEEDS_CSUM == 0 || end <= len);
                assert!(h.gso_type == 0 || len / usize::from(h.gso_size) < 300);
                assert_eq!(VnetHdr { flags: header.flags, ..h }, header, "only flags are ignored");
                // Judged again, it is as good.
                assert_eq!(offloads.check(h, len), Ok(h));
            }
            Err(HeaderFault::NotNegotiated) => assert!(features != u64::MAX),
            Err(_) => assert!(header.flags != 0 || header.gso_type != 0),
        }
    }
}

/// A frame of one or several buffers is edited, as an XDP program does and then as a packet.
fn edits(input: &mut Input) {
    POOL.with_borrow_mut(|pool| {
        let inflight = pool.stats().inflight();
        pool.poll(|napi| {
            let (mut frame, mut model) = filled(input, napi);
            while !input.is_empty() && edit_frame(input, napi, &mut frame, &mut model) {
                assert_eq!(frame.len(), model.len());
                sane(frame.meta, model.len());
            }
            let mut packet = frame.into_packet();
            while !input.is_empty() {
                edit_packet(input, napi, &mut packet, &mut model);
                sane(packet.meta, model.len());
                same(&packet, &model);
            }
            same(&packet, &model);
        });
        assert_eq!(pool.stats().inflight(), inflight, "a page was lost");
    });
}

/// A frame of one or several buffers, and the same bytes in a vector.
fn filled(input: &mut Input, napi: &mut Napi<'_, Private>) -> (XdpFrame<Private>, Vec<u8>) {
    let (start, len) = (usize::from(input.u16()) % 2048, 14 + usize::from(input.u16()) % 2034);
    let mut model: Vec<u8> = (0..len).map(|i| (i * 7) as u8).collect();
    let mut page = napi.alloc().expect("a page");
    page[start..start + len].copy_from_slice(&model);
    let mut frame = XdpFrame::new(page, start, len);
    for i in 0..input.below(20) {
        let mut page = napi.alloc().expect("a page");
        let n = input.below(256) * 16;
        page[..n].fill(i as u8);
        if frame.push(page.freeze_range(0..n)).is_err() {
            assert!(i >= netmem_packet::MAX_FRAGS);
            break;
        }
        model.resize(model.len() + n, i as u8);
    }
    frame.meta = meta(input, model.len());
    (frame, model)
}

/// One call of an XDP program, and the same edit of the vector. False: the program ends.
fn edit_frame(
    input: &mut Input,
    napi: &mut Napi<'_, Private>,
    frame: &mut XdpFrame<Private>,
    model: &mut Vec<u8>,
) -> bool {
    match input.below(8) {
        0 => {
            let by = input.u16() as i16;
            if frame.adjust_head(by.into()).is_ok() {
                if by >= 0 {
                    model.drain(..by as usize);
                } else {
                    let head = vec![0x5a; usize::from(by.unsigned_abs())];
                    frame.write_at(0, &head).expect("the headroom is the frame's now");
                    model.splice(..0, head);
                }
            }
        }
        1 => {
            let by = input.u16() as i16;
            let before = frame.len();
            if frame.adjust_tail(by.into()).is_ok() {
                assert_eq!(frame.len(), before.saturating_add_signed(by.into()));
                if by > 0 {
                    frame.write_at(before, &vec![0xa5; by as usize]).expect("the tail is the frame's now");
                }
                model.resize(frame.len(), 0xa5);
            }
        }
        2 => {
            let (at, n) = (input.u16().into(), input.below(64));
            let bytes = input.bytes(n);
            let fits = usize::checked_add(at, bytes.len()).is_some_and(|end| end <= model.len());
            if frame.write_at(at, bytes).is_ok() {
                assert!(fits);
                model[at..at + bytes.len()].copy_from_slice(bytes);
            }
        }
        3 => {
            let (at, mut to) = (usize::from(input.u16()), vec![0; input.below(256)]);
            let read = frame.copy_to(at, &mut to);
            let inside = at + to.len() <= model.len();
            // No bytes are anywhere.
            assert!(read.is_ok() == inside || to.is_empty());
            assert!(!inside || to == model[at..at + to.len()]);
        }
        4 => drop(frame.linearise(napi)),
        _ => return false,
    }
    true
}

/// One call on a packet, and the same edit of the vector.
fn edit_packet(input: &mut Input, napi: &mut Napi<'_, Private>, packet: &mut Packet<Private>, model: &mut Vec<u8>) {
    match input.below(4) {
        0 => {
            let n = input.number(&[model.len() as u64]) as usize;
            let pulled = packet.pull(n);
            assert_eq!(pulled.is_ok(), n <= model.len());
            if pulled.is_ok() {
                model.drain(..n);
            }
        }
        1 => {
            let n = input.number(&[model.len() as u64]) as usize;
            packet.truncate(n);
            model.truncate(n);
        }
        2 => {
            let n = input.below(64);
            let header = input.bytes(n);
            if packet.prepend(header) {
                model.splice(..0, header.iter().copied());
            }
        }
        _ => {
            let (len, headroom) = (input.number(&[]) as usize, input.number(&[]) as usize);
            if let Some(page) = napi.alloc() {
                let _ = packet.copy_head(len % (1 << 16), page, headroom % PAGE_SIZE);
            }
        }
    }
}

fn meta(input: &mut Input, len: usize) -> Meta {
    let mut meta = Meta::default();
    if input.u8() & 1 != 0 {
        let (start, offset) = (input.u16(), u16::from(input.u8()));
        if usize::from(start) + usize::from(offset) + 2 <= len {
            meta.checksum = Checksum::Partial { start, offset };
        }
    }
    meta
}

/// An edit keeps the place of the checksum in the frame.
fn sane(meta: Meta, len: usize) {
    if let Checksum::Partial { start, offset } = meta.checksum {
        assert!(usize::from(start) + usize::from(offset) + 2 <= len, "{meta:?} of {len} bytes");
    }
}

fn same(packet: &Packet<Private>, model: &[u8]) {
    assert_eq!(packet.len(), model.len());
    assert!(packet.to_vec() == model, "the bytes differ");
}

/// A port that has one frame.
struct One(Option<Vec<u8>>);

impl Port for One {
    const WANTS_BYTES: bool = true;
    const FEATURES: u64 = ALL_OFFLOADS;

    fn peek(&mut self) -> Option<&[u8]> {
        self.0.as_deref()
    }

    fn consume(&mut self) {
        self.0 = None;
    }

    fn send(&mut self, _: &[u8]) -> bool {
        true
    }

    fn negotiated(&mut self, _: u64) -> Result<(), PortError> {
        Ok(())
    }
}

/// A frame is steered by its UDP port, and verified if its checksum is right.
fn steered(input: &mut Input) {
    let steering = Steering::new();
    let (port, queue) = (input.u16(), input.u8() % 3);
    steering.steer(port, queue);
    let wire = [&VnetHdr::PLAIN.to_bytes()[..], input.0].concat();
    let mut ports = steering.spread(One(Some(wire.clone())), 2).expect("descriptors");
    for port in &mut ports {
        let _ = port.negotiated(feature::GUEST_CSUM);
        port.served(true);
    }
    let mut seen = 0;
    for port in &mut ports {
        if let Some(got) = port.peek() {
            let mut plain = got.to_vec();
            plain[0] &= !VnetHdr::DATA_VALID;
            assert!(plain == wire);
            seen += 1;
            port.consume();
        }
    }
    // A frame for the first queue may have been found from the second.
    seen += usize::from(ports[0].peek().is_some());
    assert_eq!(seen, 1, "the frame went to one queue");
}

/// A frame is echoed as it came, with its header and its addresses exchanged. What the driver does
/// not accept, the device mends.
fn echoed(input: &mut Input) {
    let mut echo = Echo::new();
    let features = input.u64() & ALL_OFFLOADS;
    let _ = echo.negotiated(features);
    let Some((header, frame)) = input.0.split_first_chunk::<{ VnetHdr::LEN }>() else { return };
    // As the device does, before a port has it.
    let Ok(header) = Offloads::sent(features).check(VnetHdr::from_bytes(*header), frame.len()) else { return };
    if !echo.send(&[&header.to_bytes(), frame].concat()) {
        return;
    }
    let back = echo.peek().expect("it was taken").to_vec();
    let (back_header, back) = back.split_first_chunk::<{ VnetHdr::LEN }>().expect("a header");
    assert_eq!(VnetHdr::from_bytes(*back_header), VnetHdr { num_buffers: 1, ..header });
    assert!(back[..6] == frame[6..12] && back[6..12] == frame[..6] && back[12..] == frame[12..]);
    echo.consume();
    assert!(echo.peek().is_none());
}
