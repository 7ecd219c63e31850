//! Sockets and senders on a trusted device work as on any other device.

use crate::memory_common::{Memory, all, echoed, until, worker};
use netmem_devmem::{Binding, BindingRef, Endpoint, FlowTable, Fragment, Netdev, RecvError, Sender, SocketOptions};
use netmem_packet::TxQueue;
use netmem_pool::{PoolOptions, TrustedPeer};
use netmem_refs::PercpuRef;
use netmem_virtio::VhostUser;
use netmem_virtio::device::port::Echo;
use netmem_virtio::device::{NetDevice, Options};
use netmem_virtio::driver::{NetOptions, RxMode, SplitOptions, VirtioNet, VirtioRxQueues};
use std::os::unix::net::UnixStream;

/// Datagrams go from a binding to an echo and back to it. Bytes in host memory are copied out, as
/// for any peer; the rest is in the binding. All pages are returned.
#[test]
fn there_and_back_on_a_trusted_device() {
    let (worker, memory) = (worker(), Memory::pages(300));
    let binding = Binding::new(memory.fd(), 0, &worker).unwrap();
    let mut device =
        NetDevice::new(Options { split_headers: false, ..Options::default() }, |_| Ok(Echo::new())).unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let connection = device.control().serve(theirs).unwrap();
    // SAFETY: the device is the one above, which writes no buffer that it has handed back.
    let options = unsafe { NetOptions::trust_peer(RxMode::Small) };
    let options = options.tx_pages(128).device_memory(binding.region().clone());
    let (net, mut pairs) = VirtioNet::probe(VhostUser::own_device(ours).unwrap(), options).unwrap();
    let pair = pairs.remove(0);
    let mut tx = pair.tx.into_split::<BindingRef>();
    // Eight bytes of each payload stay with the headers.
    let queues = VirtioRxQueues::new([pair.rx]).header_bytes(SplitOptions::UDP_V4 + 8).cache(16);
    let mut netdev = Netdev::new(queues.clone());
    netdev.attach(&binding, &[0]).unwrap();

    let table = FlowTable::new(echoed());
    let (mut socket, mut queue) = (table.bind(all(9), &SocketOptions::new()).unwrap(), table.queue(&binding));
    let headers = net.tx_pool(PoolOptions::new("headers")).unwrap();
    let end = |mac, addr: &str| Endpoint { mac: [mac; 6], addr: addr.parse().unwrap() };
    let mut sender: Sender<PercpuRef, TrustedPeer> =
        Sender::new(&binding, net.domain().unwrap(), headers, end(2, "10.0.0.1:7"), end(4, "10.0.0.2:9")).unwrap();
    for round in 0..500_u64 {
        let len = 9 + (round * 7919 % 1400) as usize;
        let sent: Vec<u8> = (0..len as u64).map(|i| (i * 31 + round * 7) as u8).collect();
        memory.write_all_at(&sent, 290 * 4096).unwrap();
        sender.send(&mut tx, &[(290 * 4096, len as u32)]).unwrap();
        tx.flush();
        let mut out = [Fragment::Empty, Fragment::Empty];
        until(|| {
            device.poll();
            queues.get(0).unwrap().split().unwrap().poll(|poll| poll.receive(64, &mut queue));
            tx.complete();
            match socket.recv(&mut out) {
                Ok(received) => received.end && received.verified && received.fragments == 2,
                Err(error) => error != RecvError::Empty,
            }
        });
        let [Fragment::Linear(host), Fragment::Device { offset, len, token, .. }] = out else { panic!("{out:?}") };
        let mut got = vec![0; 8 + len as usize];
        host.copy_to(0, &mut got[..8]).unwrap();
        memory.read_exact_at(&mut got[8..], offset).unwrap();
        assert!(got == sent, "round {round}");
        assert_eq!(socket.returner().return_tokens(&[token.into()]), Ok(1));
    }
    netdev.unbind(binding).unwrap();
    drop((sender, queue, socket, tx, netdev, queues, net, connection, device));
    memory.assert_gone();
}
