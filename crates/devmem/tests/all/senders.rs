//! Sending from bindings: headers, checks, the references of fragments, and a binding that is
//! unbound meanwhile.

use crate::memory_common::{Memory, bind, worker};
use etherparse::{NetSlice, SlicedPacket, TransportSlice};
use netmem_devmem::{Binding, BindingRef, Endpoint, SendError, Sender, SenderError};
use netmem_packet::{Checksum, DeviceFrag, Packet, Reach, Sendable, SplitTxQueue, TxQueue};
use netmem_pool::{
    CountingDomain, DmaDomain, Frag, PeerShared, PoolOptions, RegionOptions, RegionProvider, SharedPool, VhostDomain,
};
use std::sync::Arc;

/// A frame: the headers, the checksum information, and the payload by address and length.
type Sent = (Vec<u8>, Checksum, Vec<(u64, u32)>);

/// A queue with room for some frames. A frame is done when it is completed.
struct Fake {
    room: usize,
    sent: Vec<Sent>,
    held: Vec<(Packet<PeerShared>, Vec<BindingRef>)>,
}

impl Fake {
    fn new(room: usize) -> Self {
        Self { room, sent: Vec::new(), held: Vec::new() }
    }
}

impl TxQueue for Fake {
    type Mem = PeerShared;

    fn send(&mut self, packet: Packet<PeerShared>) -> Result<(), Packet<PeerShared>> {
        Err(packet)
    }

    fn sendable(&self, _: &Packet<PeerShared>) -> Sendable {
        Sendable::Never
    }

    fn flush(&mut self) {}

    fn complete(&mut self) -> usize {
        let done = self.held.len();
        self.held.clear();
        done
    }

    fn reach(&self, _: &Frag<PeerShared>) -> Reach {
        Reach::Never
    }
}

impl SplitTxQueue<BindingRef> for Fake {
    fn send_split(
        &mut self,
        head: Packet<PeerShared>,
        payload: &mut Vec<DeviceFrag<BindingRef>>,
    ) -> Result<(), Packet<PeerShared>> {
        if self.held.len() == self.room {
            return Err(head);
        }
        self.sent.push((head.to_vec(), head.meta.checksum, payload.iter().map(|f| (f.dma, f.len)).collect()));
        self.held.push((head, payload.drain(..).map(|f| f.holder).collect()));
        Ok(())
    }

    fn sendable_split(&self, head: &Packet<PeerShared>, _: &[DeviceFrag<BindingRef>]) -> Sendable {
        self.sendable(head)
    }
}

fn endpoint(addr: &str, mac: u8) -> Endpoint {
    Endpoint { mac: [mac; 6], addr: addr.parse().unwrap() }
}

fn headers(pages: usize) -> SharedPool<PeerShared> {
    let region = RegionOptions::new(pages).huge_pages(false).build::<PeerShared>().unwrap();
    PoolOptions::new("headers").limit(pages).build_shared(RegionProvider::new(region), None).unwrap()
}

struct Rig {
    memory: Memory,
    binding: Binding,
    domain: Arc<CountingDomain<VhostDomain>>,
    base: u64,
}

impl Rig {
    fn new() -> (Self, Sender) {
        let (memory, binding) = bind(8, &worker());
        let table = VhostDomain::new::<PeerShared>(&[]).and_device(binding.region().clone());
        let base = table.regions()[0].bus();
        let rig = Self { memory, binding, domain: Arc::new(CountingDomain::new(table)), base };
        let sender = rig.sender("10.0.0.1:7", "10.0.0.2:9");
        (rig, sender)
    }

    fn domain(&self) -> Arc<dyn DmaDomain> {
        self.domain.clone()
    }

    fn sender(&self, local: &str, peer: &str) -> Sender {
        Sender::new(&self.binding, &self.domain(), headers(16), endpoint(local, 2), endpoint(peer, 4)).unwrap()
    }

    /// Drops everything. The end of the binding unmaps its memory from the domain.
    #[track_caller]
    fn assert_gone(self) {
        let Self { memory, binding, domain, .. } = self;
        drop(binding);
        crate::memory_common::until(|| domain.unmaps() == 1);
        assert_eq!(domain.maps(), 1);
        drop(domain);
        memory.assert_gone();
    }
}

/// Proves MEM-8: the headers are right, the payload is sent by address, and the device completes
/// the checksum to the right one.
#[test]
fn frames_as_they_must_be() {
    let (rig, _) = Rig::new();
    let data: Vec<u8> = (0..999_u32).map(|i| (i * 7) as u8).collect();
    for (local, peer) in [("10.0.0.1:7", "10.0.0.2:9"), ("[fd00::1]:7", "[fd00::2]:9")] {
        let (mut sender, mut queue) = (rig.sender(local, peer), Fake::new(4));
        sender.send(&mut queue, &[(4096, 500), (100, 499)]).unwrap();
        let (head, checksum, payload) = queue.sent.pop().unwrap();
        assert_eq!(payload, [(rig.base + 4096, 500), (rig.base + 100, 499)]);
        let start = head.len() - 8;
        assert_eq!(checksum, Checksum::Partial { start: start as u16, offset: 6 });
        // Complete the checksum as a device does.
        let mut frame = [head, data.clone()].concat();
        let sum: u32 =
            frame[start..].chunks(2).map(|w| u32::from(w[0]) << 8 | w.get(1).map_or(0, |b| u32::from(*b))).sum();
        let sum = (sum & 0xffff) + (sum >> 16);
        let sum = !(((sum & 0xffff) + (sum >> 16)) as u16);
        frame[start + 6..start + 8].copy_from_slice(&sum.to_be_bytes());
        let parsed = SlicedPacket::from_ethernet(&frame).unwrap();
        let Some(TransportSlice::Udp(udp)) = &parsed.transport else { panic!("not UDP") };
        assert_eq!((udp.source_port(), udp.destination_port(), udp.payload()), (7, 9, &data[..]));
        let right = match &parsed.net {
            Some(NetSlice::Ipv4(ip)) => udp.to_header().calc_checksum_ipv4(&ip.header().to_header(), &data),
            Some(NetSlice::Ipv6(ip)) => udp.to_header().calc_checksum_ipv6(&ip.header().to_header(), &data),
            _ => panic!("not IP"),
        };
        assert_eq!(right.unwrap(), sum);
        if let Some(NetSlice::Ipv4(ip)) = &parsed.net {
            assert_eq!(ip.header().header_checksum(), ip.header().to_header().calc_header_checksum());
        }
    }
    rig.assert_gone();
}

/// Proves MEM-8: if a fragment is not in the binding, or a datagram does not fit into a frame, the
/// error names the reason, and no reference is kept.
#[test]
fn what_cannot_be_sent() {
    let (rig, mut sender) = Rig::new();
    let (mut queue, id, have) = (Fake::new(1), rig.binding.id(), 8 * 4096);
    for (offset, len) in [(have, 1), (have - 1, 2), (u64::MAX, 2), (0, u32::MAX), (u64::MAX - 1, u32::MAX), (5, 0)] {
        let refused = SendError::Range { binding: id, offset, len, have };
        assert_eq!(sender.send(&mut queue, &[(0, 1), (offset, len)]), Err(refused));
    }
    assert_eq!(sender.send(&mut queue, &[(0, 10); 18]), Err(SendError::Fragments { fragments: 18 }));
    assert_eq!(sender.most(), 1472);
    assert_eq!(sender.send(&mut queue, &[(0, 1000), (0, 473)]), Err(SendError::TooLong { bytes: 1473, most: 1472 }));
    assert!(queue.sent.is_empty());
    sender.send(&mut queue, &[(have - 1472, 1472)]).unwrap();
    assert_eq!(sender.send(&mut queue, &[(0, 1)]), Err(SendError::Queue));
    queue.complete();
    sender.send(&mut queue, &[]).unwrap();
    let (v4, v6) = (endpoint("10.0.0.1:7", 2), endpoint("[fd00::2]:9", 4));
    let error = Sender::new(&rig.binding, &rig.domain(), headers(16), v4, v6).unwrap_err();
    assert!(matches!(error, SenderError::Family { .. }), "{error:?}");
    let stranger: Arc<dyn DmaDomain> = Arc::new(VhostDomain::new::<PeerShared>(&[]));
    let error = Sender::new(&rig.binding, &stranger, headers(16), v4, v4).unwrap_err();
    assert!(matches!(error, SenderError::Map(_)), "{error:?}");
    drop((queue, sender));
    rig.assert_gone();
}

/// Proves MEM-8: if the device has all pages for headers, sending is an error without other
/// effects. Completion returns the pages.
#[test]
fn no_page_for_headers() {
    let (rig, _) = Rig::new();
    let (local, peer) = (endpoint("10.0.0.1:7", 2), endpoint("10.0.0.2:9", 4));
    let mut sender = Sender::new(&rig.binding, &rig.domain(), headers(3), local, peer).unwrap();
    let mut queue = Fake::new(100);
    for _ in 0..10 {
        for _ in 0..3 {
            sender.send(&mut queue, &[(0, 10)]).unwrap();
        }
        assert_eq!(sender.send(&mut queue, &[(0, 10)]), Err(SendError::NoPage));
        assert_eq!(queue.complete(), 3);
    }
    drop((sender, queue));
    rig.assert_gone();
}

/// Proves MEM-8 and MEM-2: an unbound binding refuses new datagrams. Messages from before can be
/// sent, and sent again. Each fragment holds the binding, and the completion of the last one
/// releases it.
#[test]
fn unbound_while_frames_are_out() {
    let (Rig { memory, binding, domain, .. }, mut sender) = Rig::new();
    let mut queue = Fake::new(100);
    let message = sender.message(&[(0, 100), (4096, 100)]).unwrap();
    sender.send(&mut queue, &[(0, 1)]).unwrap();
    let id = binding.id();
    drop(binding);
    assert_eq!(sender.send(&mut queue, &[(0, 1)]), Err(SendError::Unbound { binding: id }));
    assert!(matches!(sender.message(&[(0, 1)]), Err(SendError::Unbound { .. })));
    for _ in 0..3 {
        sender.send_again(&mut queue, &message).unwrap();
    }
    assert_eq!((queue.sent.len(), queue.sent[3].2.len()), (4, 2));
    drop((sender, message));
    queue.held.drain(..3);
    assert_eq!((domain.unmaps(), memory.descriptors()), (0, 1));
    assert_eq!(queue.complete(), 1);
    crate::memory_common::until(|| domain.unmaps() == 1);
    drop(domain);
    memory.assert_gone();
}

/// Proves MEM-8: a sender of another binding does not send a message.
#[test]
fn a_message_of_another_binding() {
    let ((rig, sender), (other_rig, mut other)) = (Rig::new(), Rig::new());
    let message = sender.message(&[(0, 100)]).unwrap();
    let error = other.send_again(&mut Fake::new(1), &message).unwrap_err();
    assert!(matches!(error, SendError::Range { .. }), "{error:?}");
    drop((message, sender, other));
    rig.assert_gone();
    other_rig.assert_gone();
}

/// Proves MEM-8: several threads send from bindings, with headers from one pool, while the bindings
/// are unbound. Each datagram is refused or sent, and no reference or page stays.
#[test]
fn unbound_while_others_send() {
    for _ in 0..50 {
        let (Rig { memory, binding, domain, .. }, _) = Rig::new();
        let any: Arc<dyn DmaDomain> = domain.clone();
        let (local, peer) = (endpoint("10.0.0.1:7", 2), endpoint("10.0.0.2:9", 4));
        let headers = Arc::new(headers(32));
        let senders = [(); 2].map(|()| Sender::new(&binding, &any, headers.clone(), local, peer).unwrap());
        let (sent, sending) = std::sync::mpsc::channel();
        std::thread::scope(|s| {
            for mut sender in senders {
                let sent = sent.clone();
                s.spawn(move || {
                    let mut queue = Fake::new(8);
                    loop {
                        match sender.send(&mut queue, &[(0, 100), (5000, 100)]) {
                            Ok(()) => _ = sent.send(()),
                            Err(SendError::Queue) => assert_eq!(queue.complete(), 8),
                            Err(error) => return assert!(matches!(error, SendError::Unbound { .. }), "{error:?}"),
                        }
                    }
                });
            }
            (0..50).for_each(|_| sending.recv().unwrap());
            binding.unbind().unwrap();
        });
        drop(any);
        crate::memory_common::until(|| domain.unmaps() == 1);
        drop(domain);
        memory.assert_gone();
    }
}
