//! Streams in device memory over our own device with two receive queues, while another thread
//! changes what the queues receive into and the device changes which queue a connection's segments
//! go to. The kernel's TCP is the peer, behind a tap.
//!
//! ```text
//!   kernel's TCP ◄──► tap ◄──► device, in another process: steers by connection
//!                                ├──► queue 0 ──► binding, or host memory ──► stack 0
//!                                └──► queue 1 ──► host memory ──► stack 1 ──► stack 0
//! ```

use crate::device_end::{DeviceEnd, Span, pattern};
use crate::kernel_common::{addresses, in_a_network};
use crate::memory_common::{Memory, worker};
use crate::net_common::Harness;
use crate::stream_common::{HELD, OurStack, PAGES, PATIENCE, kernel, our};
use netmem_devmem::Binding;
use netmem_devmem::stream::{
    Bindings, DeviceStream, InFlight, OnDevice, StreamError, StreamFragment, StreamRx, StreamTx, Streams,
};
use netmem_inet::wire::Mac;
use netmem_inet::{Address, Host, Interface, ListenOptions, SocketError, Stack, StackOptions, Time};
use netmem_pool::{PeerShared, PoolOptions, SharedPool};
use netmem_virtio::driver::{NetOptions, SplitOptions};
use std::collections::HashMap;
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

const PORT: u16 = 7;
/// Bindings that are made one after the other.
const ROUNDS: usize = 6;

/// Two stacks of one host, each with a queue pair of one device.
struct Ours {
    stacks: [OurStack; 2],
    streams: Streams,
    bindings: Bindings,
    memories: Vec<Memory>,
    end: DeviceEnd,
    headers: Arc<SharedPool<PeerShared>>,
    beginning: Instant,
}

impl Ours {
    /// Device memories of `pages`, which the device's process knows. The queues receive into host
    /// memory.
    fn new(pages: &[usize]) -> Result<(Self, Harness<InFlight>), String> {
        let memories: Vec<Memory> = pages.iter().map(|&pages| Memory::pages(pages)).collect();
        let mut end = DeviceEnd::spawn("nm0", 2, None, &memories.iter().collect::<Vec<_>>());
        addresses("nm0")?;
        let front = end.front.take().unwrap();
        let late = |options: NetOptions| options.late_device_memory().tx_pages(1024);
        let mut harness: Harness<InFlight> = Harness::of(front, 2, SplitOptions::TCP_V6, late);
        let addresses = vec![Address { addr: our(false), prefix_len: 24 }];
        let host = Host::<OnDevice>::new(Interface { mac: Mac([2, 0, 0, 0, 0, 2]), mtu: 1500, addresses });
        let bindings = Bindings::new();
        let headers = Arc::new(harness.device.tx_pool(PoolOptions::new("headers")).unwrap());
        let stacks = [0, 1].map(|queue| {
            let rx = StreamRx::new(harness.queues().wait(queue).unwrap(), &bindings);
            let tx = StreamTx::new(harness.tx.remove(0), harness.device.domain().unwrap());
            let options = StackOptions { pages: HELD, ..StackOptions::default() };
            Stack::new(&host, rx, tx, headers.clone(), options, Time::ZERO).unwrap()
        });
        let mut stacks = stacks;
        let streams = Streams::new(&mut stacks[0]);
        Ok((Self { stacks, streams, bindings, memories, end, headers, beginning: Instant::now() }, harness))
    }

    /// Polls both stacks, and waits for a moment if there is nothing to do.
    #[track_caller]
    fn turn(&mut self) {
        assert!(self.beginning.elapsed() < PATIENCE, "it never happens: {:?}", self.stacks[0].stats());
        let now = Time::ZERO + self.beginning.elapsed();
        if self.stacks.iter_mut().map(|stack| stack.poll(now)).sum::<usize>() == 0 {
            thread::sleep(Duration::from_micros(50));
        }
        assert!(self.memories.iter().all(|memory| memory.mappings() == 0), "device memory is mapped here");
    }

    /// The kernel connects, and sends until it is told to close. Returns our side of the
    /// connection, and the kernel's.
    fn connect(&mut self) -> (DeviceStream, Sending) {
        let mut listener = self.streams.listen(([0, 0, 0, 0], PORT).into(), ListenOptions::default()).unwrap();
        let enough = Arc::new(AtomicBool::new(false));
        let flag = enough.clone();
        let thread = thread::spawn(move || {
            let mut stream = TcpStream::connect(SocketAddr::new(our(false), PORT)).unwrap();
            let (seed, mut bytes, mut sent) = (stream.local_addr().unwrap().port().into(), vec![0; 50_000], 0);
            while !flag.load(Ordering::Relaxed) {
                pattern(seed, sent, &mut bytes);
                stream.write_all(&bytes).unwrap();
                sent += bytes.len() as u64;
            }
            sent
        });
        loop {
            self.turn();
            match listener.accept() {
                Ok(stream) => return (stream, Sending { enough, thread }),
                Err(error) => assert_eq!(error, SocketError::WouldBlock),
            }
        }
    }

    /// Receives what is queued, checks it, and gives the tokens back. Returns false at the end of
    /// the stream. `memory_of` returns which memory a binding is of.
    #[track_caller]
    fn receive(&mut self, stream: &mut DeviceStream, got: &mut Got, memory_of: impl Fn(u64) -> usize) -> bool {
        let mut places = [const { StreamFragment::Empty }; 16];
        let n = match stream.recv(&mut places) {
            Ok(0) => return false,
            Ok(n) => n,
            Err(StreamError::Socket(SocketError::WouldBlock)) => return true,
            Err(error) => panic!("{error}"),
        };
        let seed = stream.tcp().peer_addr().port().into();
        for place in &places[..n] {
            let len = match place {
                StreamFragment::Device { binding, offset, len, tokens } => {
                    let memory = memory_of(*binding);
                    self.end.check(&[Span { memory, offset: *offset, len: *len, seed, position: got.position }]);
                    assert_eq!(stream.returner().return_tokens(&[*tokens]), Ok(tokens.count as usize));
                    got.in_device[memory] += u64::from(*len);
                    u64::from(*len)
                }
                StreamFragment::Linear(host) => {
                    let (is, mut want) = (host.to_vec(), vec![0; host.len()]);
                    pattern(seed, got.position, &mut want);
                    assert!(is == want, "{} bytes in host memory at {} are wrong", is.len(), got.position);
                    got.in_host += is.len() as u64;
                    is.len() as u64
                }
                StreamFragment::Empty => panic!("nothing was received, and counted"),
            };
            got.position += len;
        }
        true
    }

    /// Drops everything, and checks that no page is held.
    fn close(mut self, harness: Harness<InFlight>) {
        while self.stacks[0].connections() > self.stacks[0].connections_in_time_wait() {
            self.turn();
        }
        let Self { stacks, streams, bindings, memories, end, headers, .. } = self;
        for stack in &stacks {
            let stats = stack.stats();
            assert_eq!((stack.pages(), stats.refused, stats.malformed, stats.resets), (0, 0, 0, 0), "{stats:?}");
        }
        drop((streams, bindings));
        drop(stacks.map(Stack::into_queues));
        drop(harness);
        assert_eq!(Arc::into_inner(headers).unwrap().close().outstanding, 0, "header pages are home");
        memories.iter().for_each(Memory::assert_gone);
        drop(end);
    }
}

/// The kernel's side of a connection.
struct Sending {
    /// Asks it to close.
    enough: Arc<AtomicBool>,
    /// Returns the number of bytes that it has sent.
    thread: thread::JoinHandle<u64>,
}

/// Bytes that were received.
#[derive(Clone, Copy, Default)]
struct Got {
    position: u64,
    /// By memory.
    in_device: [u64; ROUNDS],
    in_host: u64,
}

/// Proves MEM-1 and MEM-9: under traffic, the device steers a connection from the queue with device
/// memory to one with host memory and back. Segments by the wrong queue go to the stack of the
/// connection, and are delivered as linear. No byte is lost or wrong.
#[test]
fn a_connection_is_steered_from_queue_to_queue() {
    /// Bytes that come by a queue before the connection is steered to the other one.
    const PHASE: u64 = 150_000;
    const PHASES: u64 = 20;
    in_a_network(|| {
        let (mut ours, mut harness) = Ours::new(&[PAGES])?;
        let binding = Binding::new(ours.memories[0].fd(), 0, &worker()).unwrap();
        ours.bindings.add(&binding);
        harness.net.attach(&binding, &[0]).unwrap();
        let (mut stream, peer) = ours.connect();
        let remote = stream.tcp().peer_addr();
        assert_eq!(remote.ip(), kernel(false));
        let (mut got, mut phase) = (Got::default(), 0);
        while ours.receive(&mut stream, &mut got, |_| 0) {
            // Both kinds of memory have so many bytes at least. Payload that the device took before
            // it was steered may come later.
            let by_queue = [got.in_device[0], got.in_host];
            if by_queue[phase as usize % 2] >= (phase / 2 + 1) * PHASE {
                phase += 1;
                ours.end.steer(remote, SocketAddr::new(our(false), PORT), (phase % 2) as u8);
                peer.enough.fetch_or(phase == PHASES, Ordering::Relaxed);
            }
            ours.turn();
        }
        assert_eq!(got.position, peer.thread.join().unwrap());
        let (in_device, in_host) = (got.in_device[0], got.in_host);
        assert!(phase >= PHASES && in_device.min(in_host) >= PHASES / 2 * PHASE, "{phase}: {in_device} {in_host}");
        let stats = stream.stats();
        assert_eq!((stats.device_bytes, stats.linear_bytes), (in_device, in_host));
        // Segments may be merged before they are handed over.
        assert!(ours.stacks[1].stats().handed_over > 5, "{:?}", ours.stacks[1].stats());
        assert_eq!(ours.stacks[0].queues().0.foreign(), 0);
        drop(stream);
        harness.net.unbind(binding).unwrap();
        ours.close(harness);
        Ok(())
    });
}

/// Proves MEM-1, MEM-2 and MEM-9: under traffic, another thread makes bindings, adds each to the
/// list of the stack's queue, attaches the queue to it, and unbinds it. The connection has
/// fragments of all of them, and linear payload in between. No frame is dropped because its binding
/// is not known.
#[test]
fn bindings_come_and_go() {
    /// Bytes that are received in the memory of each binding, and in host memory after it.
    const EACH: u64 = 100_000;
    in_a_network(|| {
        let (mut ours, harness) = Ours::new(&[PAGES; ROUNDS])?;
        let (mut stream, peer) = ours.connect();
        let known: Arc<Mutex<HashMap<u64, usize>>> = Arc::default();
        let received: Arc<Mutex<Got>> = Arc::default();
        let control = {
            let (bindings, known, received) = (ours.bindings.clone(), known.clone(), received.clone());
            let fds: Vec<_> = ours.memories.iter().map(Memory::fd).collect();
            let enough = peer.enough.clone();
            thread::spawn(move || {
                let (worker, mut harness, so_far) = (worker(), harness, || *received.lock().unwrap());
                for (n, fd) in fds.into_iter().enumerate() {
                    let binding = Binding::new(fd, 0, &worker).unwrap();
                    known.lock().unwrap().insert(binding.id(), n);
                    bindings.add(&binding);
                    harness.net.attach(&binding, &[0]).unwrap();
                    crate::memory_common::until(|| so_far().in_device[n] >= EACH);
                    harness.net.unbind(binding).unwrap();
                    let before = so_far().in_host;
                    crate::memory_common::until(|| so_far().in_host >= before + EACH);
                }
                enough.store(true, Ordering::Relaxed);
                harness
            })
        };
        let mut got = Got::default();
        while ours.receive(&mut stream, &mut got, |id| known.lock().unwrap()[&id]) {
            *received.lock().unwrap() = got;
            ours.turn();
        }
        let harness = control.join().unwrap();
        assert_eq!(got.position, peer.thread.join().unwrap());
        assert_eq!(ours.stacks[0].queues().0.foreign(), 0);
        drop(stream);
        // All pages of the bindings were returned, so the next polls remove the bindings from the
        // list.
        while format!("{:?}", ours.bindings) != "[]" {
            ours.turn();
        }
        ours.close(harness);
        Ok(())
    });
}
