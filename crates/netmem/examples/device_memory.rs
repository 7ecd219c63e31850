//! Datagrams in device memory: payloads that this process sends and receives and never maps.
//!
//!     cargo run -p netmem --all-features --example device_memory
//!
//! A memfd stands in for a dma-buf, that is, of the memory of a GPU. It is bound, and a queue
//! of the device receives into it: headers go to host memory and payloads to the binding. A socket
//! reports the offset of a payload in the binding, and a token for it. When the token is given
//! back, the page returns to its pool. Bytes are written and read with system calls on the memfd
//! here; a GPU would use them where they are.

use anyhow::Context;
use netmem::device::port::Echo;
use netmem::device::{NetDevice, Options};
use netmem::device_memory::{
    Address, Binding, Endpoint, FlowTable, Fragment, Interface, Mac, Netdev, Sender, SocketOptions,
};
use netmem::net::TxQueue;
use netmem::pool::PoolOptions;
use netmem::refs::Worker;
use netmem::virtio::{NetOptions, RxMode, VhostUser, VirtioNet, VirtioRxQueues};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

fn main() -> anyhow::Result<()> {
    // 256 pages of memory. Sealing is allowed, because the binding seals the file: it must not
    // shrink while it is bound.
    let memory = File::from(memfd_create("device-memory", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
    ftruncate(&memory, 256 * 4096)?;

    // The worker's thread cleans up when the last reference to a binding is dropped, on any thread.
    let worker = Arc::new(Worker::new("cleanup")?);
    let binding = Binding::new(memory.try_clone()?, 0, &worker)?;

    // A device that sends all frames back, and a driver that adds to the device's table the
    // binding's memory.
    let mut device = NetDevice::new(Options::default(), |_| Ok(Echo::new()))?;
    let (front, back) = UnixStream::pair()?;
    let connection = device.control().serve(back)?;
    let options = NetOptions::new(RxMode::Small).tx_pages(64).device_memory(binding.region().clone());
    let (net, mut pairs) = VirtioNet::probe(VhostUser::own_device(front)?, options)?;
    let pair = pairs.remove(0);

    // Attaching restarts the queue: from now on it receives into the binding.
    let queues = VirtioRxQueues::new([pair.rx]);
    let mut netdev = Netdev::new(queues.clone());
    netdev.attach(&binding, &[0])?;

    // A UDP socket on port 9 of the interface's address, and the end of it that the polling thread
    // has. The echo exchanges the Ethernet addresses and no others, so frames to 10.0.0.2 come back
    // to the sender's Ethernet address.
    let address = Address { addr: "10.0.0.2".parse()?, prefix_len: 24 };
    let table = FlowTable::new(Interface { mac: Mac([2, 0, 0, 0, 0, 1]), mtu: 1500, addresses: vec![address] });
    let mut socket = table.bind("10.0.0.2:9".parse()?, &SocketOptions::new())?;
    let mut flows = table.queue(&binding);

    // Sends from the binding. Its headers come from a pool of host memory.
    let headers = net.tx_pool(PoolOptions::new("headers"))?;
    let domain = net.domain().context("the device has a domain")?;
    let local = Endpoint { mac: [2, 0, 0, 0, 0, 1], addr: "10.0.0.1:7".parse()? };
    let peer = Endpoint { mac: [2, 0, 0, 0, 0, 2], addr: "10.0.0.2:9".parse()? };
    let mut sender = Sender::new(&binding, domain, headers, local, peer)?;
    let mut tx = pair.tx.into_split();

    // A payload in the last page of the memory, sent as one datagram.
    let payload = b"computed on the device";
    let place = 255 * 4096;
    memory.write_all_at(payload, place)?;
    sender.send(&mut tx, &[(place, payload.len() as u32)])?;
    tx.flush();

    // The echo comes back into another page.
    let mut out = [Fragment::Empty];
    let received = loop {
        device.poll(); // as a rule on a thread of its own
        tx.complete();
        if let Some(mut queue) = queues.get(0)
            && let Some(rx) = queue.split()
        {
            rx.poll(|poll| poll.receive(64, &mut flows));
        }
        if let Ok(received) = socket.recv(&mut out) {
            break received;
        }
    };
    let [Fragment::Device { offset, len, token, .. }] = out else {
        anyhow::bail!("the payload is not in device memory");
    };
    let mut bytes = vec![0; len as usize];
    memory.read_exact_at(&mut bytes, offset)?;
    println!("sent from offset {place}, received {len} bytes at offset {offset} from {}", received.peer);
    println!("the payload: {:?}", String::from_utf8_lossy(&bytes));
    assert_eq!(bytes, payload);

    // The token is returned, on any thread, and the page returns to its pool.
    let returner = socket.returner();
    println!("tokens returned: {}", returner.return_tokens(&[token.into()])?);

    // The queue is restarted without the binding, and the memory is released.
    netdev.detach(0)?;
    netdev.unbind(binding)?;
    drop((sender, socket, flows, returner, tx, queues, netdev, net, connection));
    Ok(())
}
