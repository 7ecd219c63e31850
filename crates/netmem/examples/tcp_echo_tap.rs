//! A TCP echo server on a tap: the kernel's own network stack is the peer, and payload is sent back
//! from the pages in which it arrived.
//!
//!     sudo cargo run -p netmem --all-features --example tcp_echo_tap
//!     sudo cargo run -p netmem --all-features --example tcp_echo_tap serve
//!
//! In the first, a client of the kernel sends and compares a megabyte, and the server ends. The
//! second echoes until it is killed; try `nc 192.0.2.2 7`.
//!
//! Needs CAP_NET_ADMIN and `ip` (iproute2). The interface goes when the program ends.
//!
//! ```text
//!   TCP socket ── kernel ── tap ── virtio-net device ── virtio-net driver ── Stack ── Echo
//!   192.0.2.1                      └──────── all on this thread ────────┘    192.0.2.2, port 7
//! ```

use anyhow::Context;
use netmem::host::on_tap;
use netmem::pool::{Frag, TrustedPeer};
use netmem::tcp::{Fragment, ListenOptions, SocketError, StackOptions, TcpStream};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const OURS: &str = "192.0.2.2:7";

/// A connection, and the payload that was received and not sent back yet.
struct Echo {
    stream: TcpStream<TrustedPeer>,
    pending: Option<Frag<TrustedPeer>>,
}

impl Echo {
    /// Sends received payload back. Returns whether the connection goes on.
    fn serve(&mut self) -> Result<bool, SocketError> {
        loop {
            if let Some(frag) = self.pending.take() {
                // The fragment that was received is sent: nothing is copied. If the peer does not
                // read, the stream accepts no more, and the fragment is kept. Nothing is received
                // meanwhile, so the peer's window closes.
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

/// Sends a megabyte by the kernel's stack, and compares the echo.
fn client() -> anyhow::Result<()> {
    let mut socket = std::net::TcpStream::connect(OURS)?;
    let sent: Vec<u8> = (0..1_000_000_u32).map(|n| (n.wrapping_mul(0x9E37_79B1) >> 24) as u8).collect();
    let (mut writer, bytes) = (socket.try_clone()?, sent.clone());
    let writing = std::thread::spawn(move || writer.write_all(&bytes).and_then(|()| writer.shutdown(Shutdown::Write)));
    let mut echo = Vec::new();
    socket.read_to_end(&mut echo)?;
    println!("sent {} bytes, and the echo is {}", sent.len(), if echo == sent { "equal" } else { "different" });
    writing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
    Ok(())
}

fn main() -> anyhow::Result<()> {
    let serve = std::env::args().nth(1).is_some_and(|argument| argument == "serve");
    let name = format!("nmtcp{}", std::process::id() % 10_000_000);
    let mut host = on_tap(&name, 1, &["192.0.2.2/24".parse()?])?;
    // The address of the kernel's side.
    let ip = Command::new("ip").args(["addr", "add", "192.0.2.1/24", "dev", &name]).status().context("ip")?;
    anyhow::ensure!(ip.success(), "`ip addr add` failed: {ip}");
    let mut stack = host.queues.remove(0).start(StackOptions::default())?;
    let mut listener = stack.sockets().listen(OURS.parse()?, ListenOptions::default())?;
    println!("{name}: 192.0.2.2 echoes TCP port 7");

    // Another thread ends the loop, and wakes this one for that.
    let (stop, waker) = (Arc::new(AtomicBool::new(false)), stack.stack().waker());
    let flag = stop.clone();
    let client = (!serve).then(|| {
        std::thread::spawn(move || {
            let outcome = client();
            flag.store(true, Ordering::Relaxed);
            waker.wake();
            outcome
        })
    });
    let mut echoes: Vec<Echo> = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let work = stack.poll();
        while let Ok(stream) = listener.accept() {
            echoes.push(Echo { stream, pending: None });
        }
        echoes.retain_mut(|echo| {
            echo.serve().unwrap_or_else(|error| {
                println!("{:?}: {error}", echo.stream);
                false
            })
        });
        stack.pause(work, None)?;
    }
    // What was written is sent, then FIN.
    stack.finish(Duration::from_secs(5))?;
    println!("{:?}", stack.stack().stats());
    client.map_or(Ok(()), |client| client.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
}
