//! A TCP echo server on a tap: the kernel's own network stack is the peer, and payload is sent back from the pages in
//! which it arrived.
//!
//!     sudo cargo run -p netmem --all-features --example tcp_echo_tap            # a client of the kernel sends and compares a megabyte, and the server ends
//!     sudo cargo run -p netmem --all-features --example tcp_echo_tap serve      # echoes until it is killed; try: nc 192.0.2.2 7
//!
//! Needs CAP_NET_ADMIN and `ip` (iproute2). The interface goes when the program ends.
//!
//! ```text
//!   TCP socket ── kernel ── tap ── virtio-net device (thread) ── virtio-net driver ── Stack (this thread) ── Echo
//!   192.0.2.1                                                                         192.0.2.2, port 7
//! ```
//!
//! The loop in `drive` is the code that drives the stack. It polls, serves the sockets, and sleeps when there is nothing to do. The client's
//! thread ends the sleep through a `StackWaker`.

use netmem::device::port::Tap;
use netmem::device::{NetDevice, Options};
use netmem::inet::wire::Mac;
use netmem::inet::{
    Address, Fragment, Host, Interface, ListenOptions, SocketError, Stack, StackOptions, TcpStream, Time,
};
use netmem::packet::PollThenSleep;
use netmem::{Frag, NetOptions, PeerShared, PoolOptions, RxMode, VhostUser, VirtioNet, VirtioRx, VirtioTx};
use std::error::Error;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const OUR_IP: [u8; 4] = [192, 0, 2, 2];

/// A connection, and the payload that was received and not sent back yet.
struct Echo {
    stream: TcpStream<PeerShared>,
    pending: Option<Frag<PeerShared>>,
}

impl Echo {
    /// Sends received payload back. Returns whether the connection goes on.
    fn serve(&mut self) -> Result<bool, SocketError> {
        loop {
            if let Some(frag) = self.pending.take() {
                // The fragment that was received is sent: nothing is copied.
                if let Err((error, frag)) = self.stream.send(frag, false) {
                    self.pending = Some(frag);
                    return if error == SocketError::WouldBlock { Ok(true) } else { Err(error) };
                }
            }
            let mut received = [Fragment::default()];
            match self.stream.recv(&mut received) {
                Ok(0) => return Ok(false),
                Ok(_) => self.pending = received[0].share(),
                Err(SocketError::WouldBlock) => return Ok(true),
                Err(error) => return Err(error),
            }
        }
    }
}

/// Polls the stack and serves its connections until `stop`.
fn drive(
    mut stack: Stack<VirtioRx, VirtioTx>,
    now: impl Fn() -> Time,
    stop: &AtomicBool,
) -> Result<(), Box<dyn Error>> {
    let mut listener = stack.sockets().listen((OUR_IP, 7).into(), ListenOptions::default())?;
    let mut echoes: Vec<Echo> = Vec::new();
    // Polls for 50 us after the last work, then sleeps.
    let mut pause = PollThenSleep::new(Duration::from_micros(50));
    while !stop.load(Ordering::Relaxed) {
        let work = stack.poll(now());
        while let Ok(stream) = listener.accept() {
            echoes.push(Echo { stream, pending: None });
        }
        echoes.retain_mut(|echo| {
            echo.serve().unwrap_or_else(|error| {
                println!("{:?}: {error}", echo.stream);
                false
            })
        });
        // The stack is its own descriptor: frames, other stacks and wakers make it readable. Its timers end the sleep.
        let at_most = stack.next_deadline().map(|at| at.since(now()));
        pause.turn(work, &mut [&mut stack], at_most)?;
    }
    println!("the stack slept: {}", pause.stats().sleeps > 0);
    println!("{:?}", stack.stats());
    Ok(())
}

/// Sends a megabyte by the kernel's stack, and compares the echo.
fn client() -> std::io::Result<()> {
    let mut socket = std::net::TcpStream::connect((std::net::Ipv4Addr::from(OUR_IP), 7))?;
    let sent: Vec<u8> = (0..1_000_000_u32).map(|n| (n.wrapping_mul(0x9E37_79B1) >> 24) as u8).collect();
    let (mut writer, bytes) = (socket.try_clone()?, sent.clone());
    let writing = std::thread::spawn(move || writer.write_all(&bytes).and_then(|()| writer.shutdown(Shutdown::Write)));
    let mut echo = Vec::new();
    socket.read_to_end(&mut echo)?;
    println!("sent {} bytes, and the echo is {}", sent.len(), if echo == sent { "equal" } else { "different" });
    writing.join().map_err(|_| std::io::ErrorKind::Other)?
}

fn main() -> Result<(), Box<dyn Error>> {
    let serve = std::env::args().nth(1).is_some_and(|argument| argument == "serve");
    let name = format!("nmtcp{}", std::process::id() % 10_000_000);

    // The device, plugged into a tap, runs on a thread of its own.
    let mut taps = Tap::open(&name, 1, true)?;
    let added = Command::new("ip").args(["addr", "add", "192.0.2.1/24", "dev", &name]).status()?;
    if !added.success() {
        return Err(format!("`ip addr add` failed: {added}").into());
    }
    let mut device = NetDevice::new(Options::default(), |_| Ok(taps.remove(0)))?;
    let control = device.control();
    let (front, back) = UnixStream::pair()?;
    let connection = control.serve(back)?;
    let stop_device = AtomicBool::new(false);

    std::thread::scope(|scope| {
        let running = scope.spawn(|| device.run(&stop_device, netmem::virtio::Spin::default()));

        // The driver: with offloads, so that segments of up to 64 KiB go to the kernel and come from it as they are.
        let options = NetOptions::new(RxMode::Mergeable).max_frame(65549).pages(2048).tx_pages(1024);
        let (net, mut pairs) = VirtioNet::probe(VhostUser::own_device(front)?, options)?;
        let pool = Arc::new(net.tx_pool(PoolOptions::new("tx"))?);
        let pair = pairs.remove(0);

        // The host, and the stack over its queue pair.
        let address = Address { addr: OUR_IP.into(), prefix_len: 24 };
        let host = Host::new(Interface { mac: Mac([2, 0, 0, 0, 0, 2]), mtu: 1500, addresses: vec![address] });
        let beginning = Instant::now();
        let now = move || Time::ZERO + beginning.elapsed();
        let stack = Stack::new(&host, pair.rx, pair.tx, pool, StackOptions::default(), now())?;
        println!("{name}: 192.0.2.2 echoes TCP port 7");

        let (stop, waker) = (Arc::new(AtomicBool::new(false)), stack.waker());
        let flag = stop.clone();
        let client = (!serve).then(|| {
            std::thread::spawn(move || {
                let outcome = client();
                flag.store(true, Ordering::Relaxed);
                waker.wake();
                outcome
            })
        });
        drive(stack, now, &stop)?;
        if let Some(client) = client {
            client.join().map_err(|_| "the client panicked")??;
        }
        drop(net);

        stop_device.store(true, Ordering::Relaxed);
        control.wake();
        running.join().map_err(|_| "the device panicked")??;
        drop(connection);
        Ok(())
    })
}
