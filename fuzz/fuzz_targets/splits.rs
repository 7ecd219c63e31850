//! Header split and large receive offload: frames that a peer on the wire could send, our device,
//! and our driver.
//!
//! The bytes are frames: whole ones, with VLAN tags, options of IPv4, extension headers of IPv6 and
//! options of TCP, and frames that were cut off or changed. The device splits them, and joins
//! segments of a flow; the driver receives them into host memory and device memory. Both believe
//! each other, and all is on this thread. A whole frame is split behind its headers, and no byte of
//! its flow's payload is lost, changed, or out of order.
#![no_main]

use libfuzzer_sys::fuzz_target;
use netmem_fuzz::{Input, file};
use netmem_packet::{Checksum, SplitFrame};
use netmem_pool::{Region, RegionProvider};
use netmem_virtio::VhostUser;
use netmem_virtio::device::port::{ALL_OFFLOADS, Port};
use netmem_virtio::device::{Connection, NetDevice, Options};
use netmem_virtio::driver::{NetOptions, RxMode, SplitOptions, VirtioNet, VirtioSplitRx, VirtioTx};
use netmem_virtio::net::{VnetHdr, feature};
use rustix::fd::OwnedFd;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::os::unix::net::UnixStream;

/// Flows of whole frames.
const FLOWS: usize = 8;
/// The last byte of the destination's Ethernet address of a frame that is no whole one.
const CHANGED: u8 = 0xff;

thread_local! {
    /// One for each mode, for all inputs: it is at the end of an input as it was at the beginning.
    static RIGS: RefCell<[DeviceAndDriver; 2]> = RefCell::new([
        DeviceAndDriver::new(RxMode::Small, SplitOptions::TCP_V6, 0),
        DeviceAndDriver::new(RxMode::Big, SplitOptions::TCP_V4, feature::INDIRECT_DESC),
    ]);
}

fuzz_target!(|data: &[u8]| {
    let mut input = Input(data);
    RIGS.with_borrow_mut(|rigs| rigs[input.below(2)].run(&mut input));
});

/// Frames in wire form.
struct WireFrames(VecDeque<Vec<u8>>);

impl Port for WireFrames {
    const WANTS_BYTES: bool = false;
    const FEATURES: u64 = ALL_OFFLOADS;

    fn peek(&mut self) -> Option<&[u8]> {
        self.0.front().map(|wire| &wire[..])
    }

    fn consume(&mut self) {
        self.0.pop_front();
    }

    fn send(&mut self, _: &[u8]) -> bool {
        true
    }
}

struct DeviceAndDriver {
    device: NetDevice<WireFrames>,
    rx: VirtioSplitRx,
    memory: OwnedFd,
    /// Pages of device memory that are out of the pool when all buffers are posted and no frame is
    /// held.
    out: u64,
    _driver: (VirtioNet, VirtioTx, Connection),
}

impl DeviceAndDriver {
    fn new(mode: RxMode, header_bytes: u16, rings: u64) -> Self {
        let mut port = Some(WireFrames(VecDeque::new()));
        let device = NetDevice::new(Options::default(), |_| Ok(port.take().expect("one pair"))).expect("a device");
        let (ours, theirs) = UnixStream::pair().expect("a socket pair");
        let connection = device.control().serve(theirs).expect("a connection");
        let memory = file(2048 * 4096);
        let region = Region::unmapped(memory.try_clone().expect("a descriptor"), 0).expect("device memory");
        let provider = RegionProvider::new(region);
        let options = NetOptions::new(mode).ring_size(64).ring_features(rings).pages(256).tx_pages(8);
        let backend = VhostUser::own_device(ours).expect("the device answers");
        let (net, mut pairs) =
            VirtioNet::probe(backend, options.device_memory(provider.region().clone())).expect("a driver");
        let pair = pairs.pop().expect("a pair");
        let split = SplitOptions::new(provider).header_bytes(header_bytes).cache(64);
        let Ok(restarted) = pair.rx.restart_split(&split) else { panic!("the queue is restarted") };
        let mut rx = restarted.queue;
        assert!(rx.splits_headers());
        let out = rx.pool_stats().1.inflight();
        Self { device, rx, memory, out, _driver: (net, pair.tx, connection) }
    }

    fn run(&mut self, input: &mut Input) {
        let mut flows: [Flow; FLOWS] = std::array::from_fn(|number| Flow::new(number, input));
        while !input.is_empty() {
            let mut wires = VecDeque::new();
            for _ in 0..1 + input.below(40) {
                let number = input.below(FLOWS);
                let frame = if input.u8() & 3 != 0 { flows[number].next(input) } else { flows[number].changed(input) };
                wires.push_back([&VnetHdr::PLAIN.to_bytes()[..], &frame].concat());
            }
            self.device.ports()[0].0 = wires;
            let mut frames: Vec<SplitFrame> = Vec::new();
            loop {
                let moved = self.device.poll();
                let got = self.rx.poll(|poll| poll.receive(64, &mut |frame| frames.push(frame)));
                if moved == 0 && got == 0 {
                    break;
                }
            }
            assert!(self.device.ports()[0].0.is_empty(), "frames are left");
            frames.iter().for_each(|frame| self.seen(frame, &mut flows));
            // The order in which pages go home.
            while !frames.is_empty() {
                drop(frames.swap_remove(input.below(256) % frames.len()));
            }
        }
        for flow in &flows {
            assert!(
                flow.sent == flow.received,
                "flow {}: {} bytes, {} received",
                flow.number,
                flow.sent.len(),
                flow.received.len()
            );
        }
        let stats = self.rx.stats();
        assert!(stats.stopped.is_none() && stats.bad_header == 0, "the driver does not believe the device: {stats:?}");
        assert_eq!(self.rx.pool_stats().1.inflight(), self.out, "pages were lost");
    }

    fn seen(&self, frame: &SplitFrame, flows: &mut [Flow]) {
        let (room, payload) = (self.rx.header_bytes(), frame.payload());
        let mut bytes = vec![0; frame.head().len()];
        frame.head().copy_to(0, &mut bytes).expect("the head can be read");
        assert!((14..=room).contains(&bytes.len()));
        for frag in payload.fragments() {
            let at = bytes.len();
            bytes.resize(at + frag.len(), 0);
            let n = rustix::io::pread(&self.memory, &mut bytes[at..], frag.file_offset()).expect("it can be read");
            assert_eq!(n, frag.len());
        }
        let Some(flow) = flows.get_mut(usize::from(bytes[5])) else { return assert_eq!(bytes[5], CHANGED) };
        assert_eq!(frame.head().len(), if flow.headers <= room { flow.headers } else { room }, "the split");
        assert_eq!(frame.meta.checksum == Checksum::Unknown, flow.wrong, "what the device has verified");
        if let Some(gso) = frame.meta.gso {
            assert!(flow.tcp && !flow.wrong && usize::from(gso.headers) == flow.headers);
        }
        flow.received.extend_from_slice(&bytes[flow.headers..]);
    }
}

/// Frames that follow each other, of one shape.
struct Flow {
    number: usize,
    tcp: bool,
    /// Its checksums are wrong.
    wrong: bool,
    /// Ethernet and IP, up to the transport header.
    outer: Vec<u8>,
    l3: usize,
    /// Bytes of options of TCP.
    options: usize,
    headers: usize,
    sent: Vec<u8>,
    received: Vec<u8>,
}

impl Flow {
    fn new(number: usize, input: &mut Input) -> Self {
        let shape = input.u8();
        let (tcp, v6, wrong) = (shape & 3 != 0, shape & 4 != 0, shape & 56 == 8);
        let protocol = if tcp { 6 } else { 17 };
        let mut outer = vec![2, 0, 0, 0, 0, number as u8, 4, 4, 4, 4, 4, 4];
        for tag in 0..usize::from(shape >> 6).saturating_sub(1) {
            outer.extend([if tag == 0 { 0x88 } else { 0x81 }, if tag == 0 { 0xa8 } else { 0 }, 0, tag as u8]);
        }
        let l3 = outer.len() + 2;
        if v6 {
            let extensions = input.below(4);
            let kinds: Vec<u8> = (0..extensions).map(|_| [0, 60][input.below(2)]).chain([protocol]).collect();
            outer.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 0, kinds[0], 64]);
            outer.extend([[0xfd; 16], [0xfe; 16]].concat());
            for kind in &kinds[1..] {
                let words = input.below(12);
                outer.extend([*kind, words as u8]);
                outer.extend(vec![1; 6 + 8 * words]);
            }
        } else {
            let words = input.below(16).saturating_sub(5);
            outer.extend([
                8,
                0,
                0x45 + words as u8,
                0,
                0,
                0,
                0,
                0,
                0x40,
                0,
                64,
                protocol,
                0,
                0,
                10,
                0,
                0,
                1,
                10,
                0,
                0,
                2,
            ]);
            outer.extend(vec![1; 4 * words]);
        }
        let options = if tcp { 4 * (input.below(16).saturating_sub(5)) } else { 0 };
        let headers = outer.len() + if tcp { 20 + options } else { 8 };
        Self { number, tcp, wrong, outer, l3, options, headers, sent: Vec::new(), received: Vec::new() }
    }

    /// The next whole frame. It has payload, and may have padding.
    fn next(&mut self, input: &mut Input) -> Vec<u8> {
        let len = 1 + [input.u16(), 1447, 511, 99][input.below(4)] as usize % 1448;
        let at = self.sent.len();
        self.sent.extend((at..at + len).map(|at| (at * 7 + at / 256 + self.number) as u8));
        let mut frame = self.frame(at, len);
        frame.resize(frame.len() + input.below(32).saturating_sub(16), 0xee);
        frame
    }

    /// A frame of this flow that was changed, with or without payload.
    fn changed(&mut self, input: &mut Input) -> Vec<u8> {
        let (len, before) = (input.number(&[]) as usize % 1448, self.sent.len());
        self.sent.resize(before + len, 0x5a);
        let mut frame = self.frame(before, len);
        self.sent.truncate(before);
        frame[5] = CHANGED;
        for _ in 0..input.below(8) {
            let at = 12 + input.number(&[self.l3 as u64, self.headers as u64]) as usize % (frame.len() - 12);
            frame[at] = input.u8();
        }
        if input.u8() & 1 != 0 {
            let end = input.number(&[self.l3 as u64, self.outer.len() as u64, self.headers as u64]) as usize;
            frame.truncate(end.max(14));
        }
        frame
    }

    fn frame(&self, at: usize, len: usize) -> Vec<u8> {
        let (l3, l4, payload) = (self.l3, self.outer.len(), &self.sent[at..at + len]);
        let mut frame = self.outer.clone();
        // Each flow has its own ports.
        frame.extend([0x40, self.number as u8, 0x50, self.number as u8]);
        if self.tcp {
            frame.extend((at as u32).wrapping_sub(3000).to_be_bytes());
            frame.extend([0, 0, 0, 9, 0x50 + 4 * self.options as u8, 0x10, 1, 1, 0, 0, 0, 0]);
            frame.extend(vec![1; self.options]);
        } else {
            frame.extend((8 + len as u16).to_be_bytes());
            frame.extend([0, 0]);
        }
        frame.extend_from_slice(payload);
        let (v6, end) = (frame[l3] >> 4 == 6, frame.len());
        if v6 {
            frame[l3 + 4..l3 + 6].copy_from_slice(&((end - l3 - 40) as u16).to_be_bytes());
        } else {
            frame[l3 + 2..l3 + 4].copy_from_slice(&((end - l3) as u16).to_be_bytes());
            let sum = !sum(&frame[l3..l4], 0);
            frame[l3 + 10..l3 + 12].copy_from_slice(&sum.to_be_bytes());
        }
        let addresses = if v6 { l3 + 8..l3 + 40 } else { l3 + 12..l3 + 20 };
        let pseudo = sum(&frame[addresses], (if self.tcp { 6 } else { 17 }) + (end - l4) as u32);
        let place = l4 + if self.tcp { 16 } else { 6 };
        let right = match !sum(&frame[l4..], pseudo.into()) {
            0 if !self.tcp => 0xffff,
            right => right,
        };
        // In one's complement, no other number but its complement is the same.
        let written = if self.wrong { right ^ 0x0180 } else { right };
        frame[place..place + 2].copy_from_slice(&written.to_be_bytes());
        frame
    }
}

/// The sum of 16-bit words in one's complement.
fn sum(bytes: &[u8], start: u32) -> u16 {
    let words = bytes.chunks(2).map(|word| u32::from(u16::from_be_bytes([word[0], *word.get(1).unwrap_or(&0)])));
    let sum = words.sum::<u32>() + start;
    let sum = (sum >> 16) + (sum & 0xffff);
    ((sum >> 16) + (sum & 0xffff)) as u16
}
