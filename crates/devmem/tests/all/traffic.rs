//! Bindings on queues of our device: they are bound and unbound under traffic, queues receive into
//! them, and senders send from them.

use crate::memory_common::{Memory, all, echoed, until, worker};
use crate::net_common::{Harness, InTests, endpoint};
use netmem_devmem::{
    AttachError, Binding, FlowQueue, FlowTable, Fragment, RecvError, SendError, Sender, Socket, SocketOptions,
    TokenRange,
};
use netmem_packet::{Poll, RxQueue, TxQueue};
use netmem_pool::{Device, Region};
use netmem_virtio::device::port::Echo;
use netmem_virtio::driver::{NetError, NetOptions, SplitOptions};
use std::sync::Arc;

/// A device that sends back every frame.
fn echo(bindings: &[&Binding]) -> Harness {
    let regions: Vec<_> = bindings.iter().map(|b| b.region()).collect();
    Harness::new(vec![Echo::new()], &regions, SplitOptions::UDP_V4)
}

fn sender(harness: &Harness, binding: &Binding) -> Sender {
    harness.sender(binding, endpoint(2, "10.0.0.1:7"), endpoint(4, "10.0.0.2:9"))
}

/// Sends a part of a binding, and receives it in another.
#[track_caller]
fn round_trip(
    harness: &mut Harness,
    sender: &mut Sender,
    queue: &mut FlowQueue,
    socket: &mut Socket,
    part: (u64, u32),
) -> Got {
    let mut tx = harness.tx.pop().unwrap();
    sender.send(&mut tx, &[part]).unwrap();
    tx.flush();
    let mut out = [Fragment::Empty];
    until(|| {
        harness.queues().poll(0, queue);
        tx.complete();
        match socket.recv(&mut out) {
            Ok(received) => {
                assert!(received.end && received.verified && received.fragments == 1);
                true
            }
            Err(error) => {
                assert_eq!(error, RecvError::Empty);
                false
            }
        }
    });
    harness.tx.push(tx);
    let [Fragment::Device { binding, offset, len, token }] = out else { panic!("not in device memory") };
    Got { binding, offset, len, token: token.into() }
}

struct Got {
    binding: u64,
    offset: u64,
    len: u32,
    token: TokenRange,
}

fn bytes(seed: u64, len: u32) -> Vec<u8> {
    (0..u64::from(len)).map(|i| (seed.wrapping_mul(0x9e37_79b9).wrapping_add(i * 31) >> 3) as u8).collect()
}

/// Proves MEM-1, MEM-3, MEM-8 and POOL-10: bytes go from one place of a binding to the device and
/// back to another place, many times its pages. This process reads only the headers. Then all pages
/// are returned, and nothing was mapped.
#[test]
fn there_and_back() {
    let worker = worker();
    let memory = Memory::pages(512);
    let binding = Binding::new(memory.fd(), 0, &worker).unwrap();
    let mut harness = echo(&[&binding]);
    harness.net.attach(&binding, &[0]).unwrap();
    assert!(matches!(harness.net.attach(&binding, &[0]), Err(AttachError::Taken { queue: 0, .. })));
    let table = FlowTable::new(echoed());
    let (mut socket, mut queue) = (table.bind(all(9), &SocketOptions::new()).unwrap(), table.queue(&binding));
    let (mut sender, returner) = (sender(&harness, &binding), socket.returner());
    let place = 500 * 4096;
    let mut held = Vec::new();
    for round in 0..2000 {
        let len = 1 + (round * 7919 % 1472) as u32;
        let sent = bytes(round, len);
        memory.write_all_at(&sent, place + round % 100).unwrap();
        let got = round_trip(&mut harness, &mut sender, &mut queue, &mut socket, (place + round % 100, len));
        let mut received = vec![0; got.len as usize];
        memory.read_exact_at(&mut received, got.offset).unwrap();
        assert!((got.binding, got.len) == (binding.id(), len) && received == sent, "round {round}");
        held.push(got.token);
        if held.len() == 100 {
            assert_eq!(returner.return_tokens(&held), Ok(100));
            held.clear();
        }
    }
    // The mapping of the device, which is in this process and maps the memory that it is given.
    assert_eq!(memory.mappings(), 1);
    assert_eq!(socket.stats().fragments, 2000);
    {
        let queues = harness.queues();
        let mut rx = queues.queue(0);
        let rx = rx.split().unwrap();
        assert_eq!(rx.pool_stats().1.inflight() - rx.posted() as u64, 0);
    }
    harness.net.unbind(binding).unwrap();
    drop((sender, queue, socket, returner, harness));
    memory.assert_gone();
}

/// Proves MEM-1 and MEM-2: a binding is unbound with data held. The queue is then attached to
/// another binding of the same device, and back, while one socket goes on receiving.
#[test]
fn one_binding_after_the_other() {
    let worker = worker();
    let memories = [Memory::pages(300), Memory::pages(300)];
    let mut bindings = memories.each_ref().map(|m| Some(Binding::new(m.fd(), 0, &worker).unwrap()));
    let mut harness = echo(&[bindings[0].as_ref().unwrap(), bindings[1].as_ref().unwrap()]);
    let table = FlowTable::new(echoed());
    let mut socket = table.bind(all(9), &SocketOptions::new()).unwrap();
    let returner = socket.returner();
    let mut held = Vec::new();
    for round in 0..6 {
        let binding = bindings[round % 2].as_ref().unwrap();
        harness.net.attach(binding, &[0]).unwrap();
        let (mut queue, mut sender) = (table.queue(binding), sender(&harness, binding));
        for _ in 0..5 {
            let got = round_trip(&mut harness, &mut sender, &mut queue, &mut socket, (290 * 4096, 500));
            assert_eq!(got.binding, binding.id());
            held.push(got.token);
        }
        drop((queue, sender));
        assert!(harness.net.detach(0).unwrap());
    }
    assert_eq!(socket.stats().bindings, 2);
    let starts: std::collections::BTreeSet<_> = held.iter().map(|t| t.start).collect();
    assert_eq!(starts.len(), 30, "a page is held once, and no token belongs to two pages");
    let [first, second] = bindings.each_mut().map(|b| b.take().unwrap());
    harness.net.unbind(first).unwrap();
    harness.net.unbind(second).unwrap();
    assert_eq!(returner.return_tokens(&held), Ok(30));
    assert_eq!(socket.stats().bindings, 0);
    drop(harness);
    memories.iter().for_each(Memory::assert_gone);
}

/// Proves MEM-1: a device without checksum offload gets no device memory; the queue goes on with
/// host memory.
#[test]
fn memory_that_the_device_cannot_have() {
    let worker = worker();
    let memory = Memory::pages(300);
    let binding = Binding::new(memory.fd(), 0, &worker).unwrap();
    let mut harness: Harness = Harness::with(vec![Echo::new()], SplitOptions::UDP_V4, |options| options);
    let error = harness.net.attach(&binding, &[0]).unwrap_err();
    assert!(matches!(&error, AttachError::Memory { binding: id, .. } if *id == binding.id()), "{error:?}");
    assert!(harness.net.attached(0).is_none());
    harness.queues().queue(0).host().unwrap().poll(|poll| poll.receive(64, &mut |_| panic!("nothing was sent")));
    binding.unbind().unwrap();
    memory.assert_gone();
}

/// Proves NET-11: memory is bound while the device runs, and is used to send and to receive. It is
/// removed from the device with its binding. Pages that users hold keep it there.
#[test]
fn memory_comes_and_goes_while_the_device_runs() {
    let worker = worker();
    let mut harness: Harness = Harness::with(vec![Echo::new()], SplitOptions::UDP_V4, NetOptions::late_device_memory);
    let table = FlowTable::new(echoed());
    let mut socket = table.bind(all(9), &SocketOptions::new()).unwrap();
    let returner = socket.returner();
    for round in 0..20 {
        let memory = Memory::pages(300);
        let binding = Binding::new(memory.fd(), 0, &worker).unwrap();
        assert_eq!(memory.mappings(), 0);
        harness.net.attach(&binding, &[0]).unwrap();
        assert_eq!(memory.mappings(), 1);
        let (mut queue, mut sender) = (table.queue(&binding), sender(&harness, &binding));
        let mut held = Vec::new();
        for n in 0..5 {
            let sent = bytes(round + n, 700);
            memory.write_all_at(&sent, 290 * 4096).unwrap();
            let got = round_trip(&mut harness, &mut sender, &mut queue, &mut socket, (290 * 4096, 700));
            let mut received = vec![0; 700];
            memory.read_exact_at(&mut received, got.offset).unwrap();
            assert_eq!((got.binding, received), (binding.id(), sent));
            held.push(got.token);
        }
        let region = binding.region().clone();
        let error = harness.device.remove_device_memory(&region).unwrap_err();
        assert!(matches!(error, NetError::MemoryInUse { mapped: 1.. }), "{error:?}");
        drop((queue, sender, region));
        harness.net.unbind(binding).unwrap();
        assert_eq!(memory.mappings(), 1, "tokens are out");
        assert_eq!(returner.return_tokens(&held), Ok(5));
        until(|| memory.mappings() == 0);
        memory.assert_gone();
    }
}

/// Proves NET-11: a device accepts as many regions as it has room for, and no more. Removing a
/// region makes room.
#[test]
fn more_memory_than_the_device_can_have() {
    let harness: Harness = Harness::with(vec![Echo::new()], SplitOptions::UDP_V4, NetOptions::late_device_memory);
    let memory = Memory::pages(1);
    let region = || Arc::new(Region::<Device>::unmapped(memory.fd(), 0).unwrap());
    let slots = netmem_virtio::guest_memory::MAX_REGIONS;
    // The regions of the pages and of the rings are in the table already.
    let all: Vec<_> = (2..slots).map(|_| region()).collect();
    all.iter().for_each(|region| harness.device.add_device_memory(region).unwrap());
    harness.device.add_device_memory(&all[7]).unwrap();
    assert_eq!(memory.mappings(), all.len());
    let more = region();
    let error = harness.device.add_device_memory(&more).unwrap_err();
    assert!(matches!(error, NetError::MemorySlots { slots: 509 }), "{error:?}");
    assert!(!harness.device.remove_device_memory(&more).unwrap());
    assert!(harness.device.remove_device_memory(&all[300]).unwrap());
    assert!(!harness.device.remove_device_memory(&all[300]).unwrap());
    harness.device.add_device_memory(&more).unwrap();
    assert_eq!(memory.mappings(), all.len());
    assert!(harness.device.is_connected());
}

/// Proves POOL-11 and MEM-2: the device, the queue, the socket and the binding are dropped in
/// different orders, with data held, queued and posted.
#[test]
fn orders_of_device_and_socket() {
    for order in 0..4 {
        let worker = worker();
        let memory = Memory::pages(300);
        let binding = Binding::new(memory.fd(), 0, &worker).unwrap();
        let mut harness = echo(&[&binding]);
        harness.net.attach(&binding, &[0]).unwrap();
        let table = FlowTable::new(echoed());
        let (mut socket, mut queue) = (table.bind(all(9), &SocketOptions::new()).unwrap(), table.queue(&binding));
        let mut sender = sender(&harness, &binding);
        let got = round_trip(&mut harness, &mut sender, &mut queue, &mut socket, (290 * 4096, 500));
        let memory_of = binding.reference();
        for _ in 0..10 {
            sender.send(&mut harness.tx[0], &[(290 * 4096, 500)]).unwrap();
        }
        harness.tx[0].flush();
        until(|| {
            harness.queues().poll(0, &mut queue);
            socket.stats().queued == 10
        });
        match order {
            0 => {
                drop((harness, binding));
                drop((socket, queue, sender));
            }
            1 => {
                drop(binding);
                assert_eq!(
                    sender.send(&mut harness.tx[0], &[(0, 1)]),
                    Err(SendError::Unbound { binding: got.binding })
                );
                drop((queue, sender, socket));
                drop(harness);
            }
            2 => {
                drop((socket, sender));
                drop(harness);
                drop((queue, binding));
            }
            _ => {
                assert_eq!(socket.returner().return_tokens(&[got.token]), Ok(1));
                drop((queue, sender));
                harness.net.unbind(binding).unwrap();
                drop(socket);
                assert!(harness.device.is_connected());
                drop(harness);
            }
        }
        assert_eq!(memory_of.stats().in_use, 0, "order {order}");
        drop(memory_of);
        memory.assert_gone();
    }
}
