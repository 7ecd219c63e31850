//! The device is in another process, and device memory is mapped only there. The bytes in it are
//! checked from that side.
//!
//! ```text
//!   kernel's UDP ◄──► tap ◄──► device's process ◄── vhost-user ──► driver, sockets, sender
//!                                                                  this process
//! ```

use crate::device_end::{DeviceEnd, Span, pattern};
use crate::kernel_common::{addresses, in_a_network, ip};
use crate::memory_common::{Memory, all, interface, until, worker};
use crate::net_common::{Harness, InTests, endpoint};
use netmem_devmem::{Binding, FlowTable, Fragment, SocketOptions};
use netmem_packet::TxQueue;
use netmem_pool::FileMapping;
use netmem_virtio::driver::SplitOptions;
use std::net::UdpSocket;
use std::os::fd::AsFd;

/// Proves MEM-1, MEM-3, MEM-8 and POOL-10: datagrams of the kernel land in device memory, where the
/// device's process finds them as they were sent, and go back from there. This process never has a
/// mapping of that memory.
#[test]
fn datagrams_that_only_the_device_sees() {
    const DATAGRAMS: u64 = 1000;
    in_a_network(|| {
        let (worker, memory) = (worker(), Memory::pages(512));
        let binding = Binding::new(memory.fd(), 0, &worker).unwrap();
        let mut end = DeviceEnd::spawn("nm0", 1, None, &[&memory]);
        addresses("nm0")?;
        ip("neigh add 10.79.0.2 lladdr 02:00:00:00:00:02 dev nm0 nud permanent")?;
        let region = binding.region().clone();
        let front = end.front.take().unwrap();
        let mut harness: Harness = Harness::of(front, 1, SplitOptions::UDP_V4, |options| options.device_memory(region));
        harness.net.attach(&binding, &[0]).unwrap();
        let table = FlowTable::new(interface([2, 0, 0, 0, 0, 2], &["10.79.0.2"]));
        let kernel = UdpSocket::bind("10.79.0.1:7").unwrap();
        let (mut socket, mut queue) = (table.bind(all(9), &SocketOptions::new()).unwrap(), table.queue(&binding));
        let mut ends = [endpoint(2, "10.79.0.2:9"), endpoint(2, "10.79.0.1:7")];
        (ends[0].mac, ends[1].mac) = ([2, 0, 0, 0, 0, 2], [2, 0, 0, 0, 0, 1]);
        let mut sender = harness.sender(&binding, ends[0], ends[1]);
        let (returner, mut out) = (socket.returner(), [Fragment::Empty]);
        for seed in 0..DATAGRAMS {
            let mut bytes = vec![0; 1 + (seed * 7919 % 1472) as usize];
            pattern(seed, 0, &mut bytes);
            kernel.send_to(&bytes, "10.79.0.2:9").unwrap();
            until(|| {
                harness.queues().poll(0, &mut queue);
                socket.recv(&mut out).is_ok()
            });
            let [Fragment::Device { offset, len, token, .. }] = out else { panic!("not in device memory: {out:?}") };
            assert_eq!(len as usize, bytes.len());
            end.check(&[Span { memory: 0, offset, len, seed, position: 0 }]);
            sender.send(&mut harness.tx[0], &[(offset, len)]).unwrap();
            harness.tx[0].flush();
            let mut back = [0; 2000];
            let n = kernel.recv(&mut back).unwrap();
            assert!(back[..n] == bytes, "datagram {seed} comes back with other bytes");
            until(|| harness.tx[0].complete() == 1);
            assert_eq!(returner.return_tokens(&[token.into()]), Ok(1));
            assert_eq!(memory.mappings(), 0, "device memory is mapped here");
        }
        // Check that the test finds a mapping if there is one.
        let window = FileMapping::new(memory.fd().as_fd(), 0, 1).unwrap();
        assert_eq!(memory.mappings(), 1);
        drop(window);
        drop((sender, socket, returner, queue, table));
        harness.net.unbind(binding).unwrap();
        drop(harness);
        memory.assert_gone();
        Ok(())
    });
}
