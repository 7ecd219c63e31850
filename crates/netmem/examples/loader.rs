//! A loader: it receives files from a Linux sender into device memory, and sends them back. The CPU
//! does not touch their bytes.
//!
//!     netmem device --listen /tmp/nic.sock --port tap:nm0 &
//!     ip addr add 192.0.2.1/24 dev nm0
//!     cargo run --release -p netmem --all-features --example loader -- \
//!         /tmp/nic.sock 192.0.2.2/24 256 2 &
//!     nc -N 192.0.2.2 9000 < model.bin | sha256sum
//!
//! The arguments are the socket of a virtio-net device in another process, the address of this
//! host, megabytes of device memory, and how many files to receive. A memfd stands in for a
//! dma-buf, that is, of the memory of a GPU; this process never maps it. A file ends where its
//! sender ends the stream (`nc -N`). Then it is sent back from device memory.
//!
//! With a fifth argument, the number of an NVIDIA GPU, the memory is of that GPU, and a kernel on
//! the GPU computes a checksum of each file. The device has the same number as its argument:
//! `netmem device --cuda 0`, of a command with the feature `cuda`. This has never run on a GPU
//! (`examples/gpu/mod.rs`).
//!
//! The loader prints the path at which another process can open its memory, and for each file the
//! number of its extents. If its output is not a terminal, it lists them: `OFFSET+LENGTH`. Files
//! stay in the memory until standard input ends.
//!
//! ```text
//!   nc ── kernel ── tap ── netmem device ◄── vhost-user ──► driver ── stack ── streams:
//!                            └─ payload ──► the memory          recv ──► (offset, length, token)
//!                                                               send(offset, length)
//! ```

#[path = "gpu/mod.rs"]
mod gpu;

use anyhow::Context;
use gpu::Checked;
use netmem::device_memory::stream::{
    Bindings, DeviceStream, OnDevice, StreamError, StreamFragment, StreamRx, StreamSendError, StreamTx, Streams,
};
use netmem::device_memory::{Binding, BindingRef, Netdev, TokenRange};
use netmem::net::PollThenSleep;
use netmem::pool::PoolOptions;
use netmem::refs::Worker;
use netmem::tcp::{
    Address, Config, Host, Interface, ListenOptions, Mac, SocketError, Stack, StackOptions, StackWaker, Time,
};
use netmem::virtio::{NetOptions, RxMode, VhostUser, VirtioNet, VirtioRxQueues};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::collections::VecDeque;
use std::fmt::Write;
use std::fs::File;
use std::io::{IsTerminal, Read};
use std::os::fd::IntoRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const PORT: u16 = 9000;
const PAGE: usize = 4096;

/// Bytes of a file, one after the other in the memory.
struct Extent {
    offset: u64,
    len: u32,
}

/// A file that is received, and sent back.
struct Incoming {
    stream: DeviceStream,
    extents: VecDeque<Extent>,
    /// The pages are the loader's until these are returned.
    tokens: Vec<TokenRange>,
    bytes: u64,
    begin: Instant,
    /// The complete file was received, and so many of its extents were sent.
    sent: Option<usize>,
    unacknowledged: usize,
}

impl Incoming {
    fn new(stream: DeviceStream) -> Self {
        let (extents, tokens) = Default::default();
        Self { stream, extents, tokens, bytes: 0, begin: Instant::now(), sent: None, unacknowledged: 0 }
    }

    /// Receives and sends as much as is possible now. Returns true when the file was received and
    /// sent back.
    fn turn(&mut self, memory: &BindingRef, gpu: Option<&Checked>) -> anyhow::Result<bool> {
        while self.sent.is_none() {
            let mut place = [StreamFragment::Empty];
            match self.stream.recv(&mut place) {
                Ok(0) => self.here(gpu)?,
                Ok(_) => self.keep(place)?,
                Err(StreamError::Socket(SocketError::WouldBlock)) => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
        while self.stream.sent().is_some() {
            self.unacknowledged -= 1;
        }
        while let Some(n) = self.sent
            && let Some(Extent { offset, len }) = self.extents.get(n)
        {
            match self.stream.send(memory, *offset, *len, n + 1 < self.extents.len()) {
                Ok(_) => (self.sent, self.unacknowledged) = (Some(n + 1), self.unacknowledged + 1),
                Err(StreamSendError::Socket(SocketError::WouldBlock)) => return Ok(false),
                Err(error) => return Err(error.into()),
            }
            if n + 1 == self.extents.len() {
                self.stream.tcp_mut().shutdown();
            }
        }
        Ok(self.unacknowledged == 0)
    }

    /// The received bytes follow the bytes before them in memory, or begin a new extent.
    fn keep(&mut self, [place]: [StreamFragment; 1]) -> anyhow::Result<()> {
        let StreamFragment::Device { offset, len, tokens, .. } = place else {
            anyhow::bail!("payload came in host memory: the device does not split frames behind their headers");
        };
        self.bytes += u64::from(len);
        self.tokens.push(tokens);
        match self.extents.back_mut() {
            Some(last) if last.offset + u64::from(last.len) == offset && last.len < 1 << 30 => last.len += len,
            _ => self.extents.push_back(Extent { offset, len }),
        }
        Ok(())
    }

    /// Returns the pages of the file.
    fn return_pages(&self) -> anyhow::Result<()> {
        let returner = self.stream.returner();
        for tokens in self.tokens.chunks(64) {
            returner.return_tokens(tokens)?;
        }
        Ok(())
    }

    /// The file was received.
    fn here(&mut self, gpu: Option<&Checked>) -> anyhow::Result<()> {
        let seconds = self.begin.elapsed().as_secs_f64();
        let (peer, rate) = (self.stream.tcp().peer_addr(), self.bytes as f64 / seconds / 1e6);
        println!("file from {peer}: {} bytes in {} extents, {rate:.0} MB/s", self.bytes, self.extents.len());
        // For programs: there is an extent for each segment, if other frames came in between.
        if !std::io::stdout().is_terminal() {
            let mut line = String::new();
            for Extent { offset, len } in &self.extents {
                let _ = write!(line, " {offset}+{len}");
            }
            println!("extents:{line}");
        }
        if let Some(gpu) = gpu {
            println!("checksum: {}", gpu.checksum(self.extents.iter().map(|e| (e.offset, e.len)))?);
        }
        self.sent = Some(0);
        if self.extents.is_empty() {
            self.stream.tcp_mut().shutdown();
        }
        Ok(())
    }
}

/// Binds the memory of the GPU, or a memfd in its place.
fn bind(gpu: Option<&Checked>, pages: usize, worker: &Arc<Worker>) -> anyhow::Result<Binding> {
    if let Some(gpu) = gpu {
        return Ok(Binding::exported(gpu.export()?, gpu.len() as u64, 0, worker)?);
    }
    let memory = File::from(memfd_create("device-memory", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
    ftruncate(&memory, (pages * PAGE) as u64)?;
    let binding = Binding::new(memory.try_clone()?, 0, worker)?;
    // The binding has a descriptor of its own; this one stays open for other processes.
    println!("memory: /proc/{}/fd/{}", std::process::id(), memory.into_raw_fd());
    Ok(binding)
}

/// Standard input ends the loader. Returns a flag that is set then; the stack is woken.
fn end_of_input(waker: StackWaker<OnDevice>) -> Arc<AtomicBool> {
    let ended = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&ended);
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        flag.store(true, Ordering::Relaxed);
        waker.wake();
    });
    ended
}

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [socket, address, megabytes, files, gpu @ ..] = &arguments[..] else {
        anyhow::bail!("usage: loader SOCKET ADDRESS/LENGTH MEGABYTES FILES [GPU]");
    };
    let address: Address = address.parse()?;
    let (pages, files): (usize, usize) = (megabytes.parse::<usize>()? * (1 << 20) / PAGE, files.parse()?);

    // The memory, bound. The worker cleans up when the last reference is gone.
    let worker = Arc::new(Worker::new("cleanup")?);
    let gpu = match gpu.first() {
        Some(number) => Some(Checked::new(number.parse()?, pages * PAGE)?),
        None => None,
    };
    let binding = bind(gpu.as_ref(), pages, &worker)?;

    // The driver of the device behind the socket. Its receive queue is restarted with the memory.
    let options = NetOptions::new(RxMode::Small).tx_pages(2048).device_memory(binding.region().clone());
    let (net, mut pairs) = VirtioNet::probe(VhostUser::own_device(UnixStream::connect(socket)?)?, options)?;
    let pair = pairs.remove(0);
    let queues = VirtioRxQueues::new([pair.rx]);
    let bindings = Bindings::new();
    bindings.add(&binding);
    let rx = StreamRx::new(queues.wait(0).context("a queue")?, &bindings);
    let mut netdev = Netdev::new(queues);
    netdev.attach(&binding, &[0])?;

    // A stack whose payload is in the memory. Some pages are left for the ring and for frames on
    // their way.
    let tx = StreamTx::new(pair.tx.into_split(), net.domain().context("the device has a domain")?);
    let headers = Arc::new(net.tx_pool(PoolOptions::new("headers"))?);
    let interface = Interface { mac: Mac([2, 0, 0, 0, 0, 2]), mtu: 1500, addresses: vec![address] };
    let held = pages.checked_sub(1024).context("at least 5 megabytes of device memory are needed")?;
    let beginning = Instant::now();
    let now = || Time::ZERO + beginning.elapsed();
    let options = StackOptions { pages: held as u32, ..StackOptions::default() };
    let mut stack = Stack::new(&Host::<OnDevice>::new(interface), rx, tx, headers, options, now())?;
    let streams = Streams::new(&mut stack);
    // A whole file is held before any of it goes back, so a connection may have all pages.
    let connection = Config { budget: held as u32, ..Config::default() };
    let options = ListenOptions { connection, ..ListenOptions::default() };
    let mut listener = streams.listen((address.addr, PORT).into(), options)?;

    let ended = end_of_input(stack.waker());
    println!("{}: {files} files to port {PORT}, into {megabytes} MiB", address.addr);

    let memory_of = binding.reference();
    let (mut incoming, mut kept): (Vec<Incoming>, Vec<Incoming>) = (Vec::new(), Vec::new());
    let mut pause = PollThenSleep::new(Duration::from_micros(50));
    while !ended.load(Ordering::Relaxed) || kept.len() < files {
        let work = stack.poll(now());
        while let Ok(stream) = listener.accept() {
            incoming.push(Incoming::new(stream));
        }
        let mut n = 0;
        while let Some(file) = incoming.get_mut(n) {
            if file.turn(&memory_of, gpu.as_ref())? {
                kept.push(incoming.swap_remove(n));
                println!("{} files are back", kept.len());
            } else {
                n += 1;
            }
        }
        let at_most = stack.poll_timeout().map(|at| at.since(now()));
        pause.turn(work, &mut [&mut stack], at_most)?;
    }

    // The pages are returned, and the memory is released.
    kept.iter().try_for_each(Incoming::return_pages)?;
    drop((kept, incoming, listener, streams, memory_of));
    // What was written is sent, then FIN.
    stack.finish(now() + Duration::from_secs(5), now)?;
    println!("{:?}", stack.stats());
    drop(stack);
    netdev.unbind(binding)?;
    Ok(())
}
