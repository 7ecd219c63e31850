//! passt as the back end: the driver gets an address by DHCP and has its pings answered, through
//! another project's user-mode network. passt insists on the order of messages: the first
//! SET_FEATURES is the driver's whole choice.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use etherparse::{ArpHardwareId, ArpOperation, EtherType, Icmpv4Type, PacketBuilder, SlicedPacket, TransportSlice};
use netmem_packet::{Packet, Poll, RxQueue, TxQueue};
use netmem_pool::PeerShared;
use netmem_testing::debian13::Root;
use netmem_testing::driver::*;
use netmem_testing::{installed, skip};
use netmem_virtio::driver::{NetOptions, QueuePair, RxMode, VirtioNet};
use netmem_virtio::{VhostUser, VhostUserError};

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 7];

struct Passt(Child);

impl Passt {
    /// Starts it, and connects to it. It ends with its first client.
    fn connect(root: &Root, socket: &Path) -> (Self, VhostUser) {
        // In a network namespace of its own, where it may open "ping" sockets.
        let setup = "ip link set lo up && echo 0 2147483647 > /proc/sys/net/ipv4/ping_group_range && exec \"$@\"";
        let passt = root.command("usr/bin/passt");
        let mut command = Command::new("unshare");
        command.args(["--net", "sh", "-c", setup, "sh"]).arg(passt.get_program()).args(passt.get_args());
        command.args(["--vhost-user", "--foreground", "--quiet", "--one-off", "--ipv4-only", "--socket"]).arg(socket);
        let mut passt = Self(command.stdin(Stdio::null()).spawn().unwrap());
        let mut backend = None;
        until(|| {
            assert!(passt.0.try_wait().unwrap().is_none(), "passt has ended");
            backend = match VhostUser::connect(socket) {
                Ok(backend) => Some(backend),
                // It does not listen yet.
                Err(VhostUserError::Connect { .. }) => None,
                Err(e) => panic!("{e}"),
            };
            backend.is_some()
        });
        (passt, backend.unwrap())
    }
}

impl Drop for Passt {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn send(pair: &mut QueuePair, bytes: &[u8]) {
    let mut page = pair.rx.poll(|poll| poll.with_napi(|napi| napi.alloc())).unwrap();
    page.copy_from(64, bytes).unwrap();
    pair.tx.send(Packet::new(page.freeze_range(64..64 + bytes.len()))).unwrap();
    pair.tx.flush();
    pair.tx.complete();
}

/// Sends a question until a frame answers it.
fn ask<T>(pair: &mut QueuePair, question: &[u8], answer: impl Fn(&SlicedPacket<'_>) -> Option<T>) -> T {
    let watchdog = Instant::now() + Duration::from_secs(60);
    loop {
        assert!(Instant::now() < watchdog, "it was not answered");
        send(pair, question);
        let again = Instant::now() + Duration::from_secs(1);
        while Instant::now() < again {
            let mut frames: Vec<Vec<u8>> = Vec::new();
            receive(&mut pair.rx, &mut |p: Packet<PeerShared>| frames.push(p.to_vec()));
            let found = frames.iter().find_map(|f| answer(&SlicedPacket::from_ethernet(f).ok()?));
            if let Some(found) = found {
                return found;
            }
            std::thread::yield_now();
        }
    }
}

/// A DHCP message of this kind, with an address to ask for.
fn dhcp(kind: u8, address: Option<[u8; 4]>) -> Vec<u8> {
    let mut bootp = vec![0; 236];
    (bootp[0], bootp[1], bootp[2]) = (1, 1, 6);
    bootp[4..8].copy_from_slice(&[1, 2, 3, 4]);
    bootp[28..34].copy_from_slice(&MAC);
    bootp.extend([0x63, 0x82, 0x53, 0x63, 53, 1, kind]);
    if let Some(address) = address {
        bootp.extend([50, 4]);
        bootp.extend(address);
    }
    bootp.push(255);
    bootp.resize(300, 0);
    let mut frame = Vec::new();
    let headers = PacketBuilder::ethernet2(MAC, [0xff; 6]).ipv4([0; 4], [0xff; 4], 64).udp(68, 67);
    headers.write(&mut frame, &bootp).unwrap();
    frame
}

/// The kind of a DHCP answer, the address that it assigns, and the router.
fn dhcp_answer(packet: &SlicedPacket<'_>) -> Option<(u8, [u8; 4], [u8; 4])> {
    let Some(TransportSlice::Udp(udp)) = &packet.transport else { return None };
    let bootp = udp.payload();
    let ours = udp.destination_port() == 68 && bootp.get(4..8)? == [1, 2, 3, 4];
    let (mut kind, mut router) = (None, None);
    let mut options = bootp.get(240..).filter(|_| ours)?;
    while let [code, len, rest @ ..] = options {
        match code {
            53 => kind = rest.first().copied(),
            3 => router = rest.first_chunk().copied(),
            _ => {}
        }
        options = rest.get(usize::from(*len)..).unwrap_or_default();
    }
    Some((kind?, bootp.get(16..20)?.try_into().ok()?, router?))
}

#[test]
fn dhcp_and_ping() {
    let _alone = crate::alone();
    if !rustix::process::geteuid().is_root() {
        return skip("a network namespace needs root");
    }
    if let Err(why) = installed(&["unshare", "ip"]) {
        return skip(&why);
    }
    let root = match Root::get() {
        Ok(root) => root,
        Err(why) => return skip(&why),
    };
    let dir = tempfile::tempdir().unwrap();
    for mode in [RxMode::Mergeable, RxMode::Small] {
        let socket = dir.path().join(format!("{mode}.sock"));
        let (mut passt, backend) = Passt::connect(&root, &socket);
        let accounting = Accounting::default();
        let (net, mut pairs) = VirtioNet::probe(backend, accounting.count(NetOptions::new(mode))).unwrap();
        let mut pair = pairs.remove(0);

        let (offer, address, router) = ask(&mut pair, &dhcp(1, None), dhcp_answer);
        assert_eq!(offer, 2);
        let ack = ask(&mut pair, &dhcp(3, Some(address)), |p| dhcp_answer(p).filter(|a| a.0 == 5));
        assert_eq!(ack, (5, address, router));

        let arp = etherparse::ArpPacket::new(
            ArpHardwareId::ETHERNET,
            EtherType::IPV4,
            ArpOperation::REQUEST,
            &MAC,
            &address,
            &[0; 6],
            &router,
        );
        let mut question = Vec::new();
        PacketBuilder::ethernet2(MAC, [0xff; 6]).arp(arp.unwrap()).write(&mut question).unwrap();
        let hardware: [u8; 6] = ask(&mut pair, &question, |p| match &p.net {
            Some(etherparse::NetSlice::Arp(arp)) => arp.sender_hw_addr().try_into().ok(),
            _ => None,
        });

        for seq in 1..=10_u16 {
            let payload = vec![seq as u8; 56 + 100 * usize::from(seq)];
            let mut ping = Vec::new();
            let headers = PacketBuilder::ethernet2(MAC, hardware).ipv4(address, router, 64);
            headers.icmpv4_echo_request(7, seq).write(&mut ping, &payload).unwrap();
            ask(&mut pair, &ping, |p| match &p.transport {
                Some(TransportSlice::Icmpv4(icmp)) => match icmp.icmp_type() {
                    Icmpv4Type::EchoReply(echo) if echo.seq == seq => {
                        assert_eq!(icmp.payload(), payload);
                        Some(())
                    }
                    _ => None,
                },
                _ => None,
            });
        }
        close_clean(pair);
        drop(net);
        accounting.assert_balanced();
        assert!(passt.0.wait().unwrap().success(), "passt has ended with an error");
    }
}
