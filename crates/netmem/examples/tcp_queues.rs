//! A TCP echo server with a stack and a thread for each queue, behind a tap or on a network
//! interface.
//!
//!     cargo run --release -p netmem --all-features --example tcp_queues -- tap nm0 2 192.0.2.2/24
//!     cargo run --release -p netmem --all-features --example tcp_queues -- xsk eth1 192.0.2.2/24
//!
//! On an interface it serves by all queues that are in use. The kernel keeps its own
//! addresses. Needs CAP_NET_ADMIN for a tap, and CAP_NET_RAW, CAP_BPF and CAP_PERFMON as well for
//! an interface. Ends with standard input.
//!
//! ```text
//!   kernel or wire ──┬── queue 0 ── stack ── thread 0 ──┐
//!                    └── queue 1 ── stack ── thread 1 ──┴── one host: addresses, ports,
//!                                                           routes, a directory of connections
//! ```
//!
//! Each stack listens on the same port. A connection lives on one stack; the stacks hand its
//! segments over if they come by another queue.

use anyhow::Context;
use netmem::host::{Behind, Opened, Queue, on_tap, on_xsk};
use netmem::net::{RxQueue, TxQueue, Wait};
use netmem::pool::Mapped;
use netmem::tcp::{ListenOptions, SocketError, StackOptions, TcpStream};
use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How soon a thread notices the end of standard input.
const LOOK: Duration = Duration::from_millis(100);
/// How long the clients have at the end, to acknowledge what was written.
const END: Duration = Duration::from_secs(5);

/// A connection, and the bytes that were read and that the stream has not accepted yet.
struct Echo<M: Mapped> {
    stream: TcpStream<M>,
    rest: Vec<u8>,
}

impl<M: Mapped> Echo<M> {
    /// Writes what was read. Returns whether the connection goes on.
    fn serve(&mut self) -> Result<bool, SocketError> {
        loop {
            while !self.rest.is_empty() {
                match self.stream.write(&self.rest) {
                    // The stream accepts as many bytes as it has room for, and the others are kept.
                    Ok(taken) => drop(self.rest.drain(..taken)),
                    // The peer does not read. Nothing more is read from it, until it does.
                    Err(SocketError::WouldBlock) => return Ok(true),
                    Err(error) => return Err(error),
                }
            }
            let mut bytes = [0; 4096];
            match self.stream.read(&mut bytes) {
                Ok(0) => return Ok(false),
                Ok(n) => self.rest.extend_from_slice(&bytes[..n]),
                Err(SocketError::WouldBlock) => return Ok(true),
                Err(error) => return Err(error),
            }
        }
    }
}

/// Serves by one queue until `stop`, on the thread that calls this. Returns how many connections
/// there were.
fn serve<R, T, D>(queue: Queue<R, T, D>, stop: &AtomicBool) -> anyhow::Result<u64>
where
    R: RxQueue<Mem: Mapped> + Wait,
    T: TxQueue<Mem = R::Mem> + Wait,
    D: Behind,
{
    let mut stack = queue.start(StackOptions::default())?;
    let mut listener = stack.sockets().listen("0.0.0.0:7".parse()?, ListenOptions::default())?;
    let (mut echoes, mut connections) = (Vec::new(), 0);
    while !stop.load(Ordering::Relaxed) {
        let work = stack.poll();
        while let Ok(stream) = listener.accept() {
            connections += 1;
            echoes.push(Echo { stream, rest: Vec::new() });
        }
        // A connection that has failed ends by itself.
        echoes.retain_mut(|echo| echo.serve().unwrap_or(false));
        stack.pause(work, Some(LOOK))?;
    }
    // What was written is sent, then FIN. A client that is left waits for no answer.
    let reset = stack.finish(END)?;
    if reset > 0 {
        println!("{reset} connections were reset");
    }
    Ok(connections)
}

/// Serves by all queues of a host, each on a thread.
fn serve_all<R, T, D>(opened: Opened<R::Mem, Queue<R, T, D>>, stop: &AtomicBool) -> anyhow::Result<()>
where
    R: RxQueue<Mem: Mapped> + Wait + Send,
    T: TxQueue<Mem = R::Mem> + Wait + Send,
    D: Behind,
{
    eprintln!("ready: TCP port 7, {} queues", opened.queues.len());
    std::thread::scope(|scope| {
        let serve = |queue| {
            scope.spawn(|| {
                let served = serve(queue, stop);
                // If one queue cannot go on, the program ends.
                stop.store(true, Ordering::Relaxed);
                served
            })
        };
        let threads: Vec<_> = opened.queues.into_iter().map(serve).collect();
        for (number, thread) in threads.into_iter().enumerate() {
            let connections = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            println!("queue {number}: {connections} connections");
        }
        Ok(())
    })
}

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let stop = Arc::new(AtomicBool::new(false));
    let flag = stop.clone();
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        flag.store(true, Ordering::Relaxed);
    });
    match words[..] {
        ["tap", name, queues, address] => {
            serve_all(on_tap(name, queues.parse().context("QUEUES")?, &[address.parse()?])?, &stop)
        }
        ["xsk", interface, address] => serve_all(on_xsk(interface, &[address.parse()?])?, &stop),
        _ => anyhow::bail!("usage: tcp_queues tap NAME QUEUES ADDRESS/LEN, or tcp_queues xsk INTERFACE ADDRESS/LEN"),
    }
}
