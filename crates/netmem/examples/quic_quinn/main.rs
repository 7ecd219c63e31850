//! QUIC by quinn on netmem's own UDP, behind a tap or on a network interface.
//!
//!     sudo cargo run -p netmem --all-features --example quic_quinn
//!
//! A server on the stack behind a tap keeps the file that a client sends, and sends it back. The
//! client is quinn on a socket of the kernel. It compares the two, and trusts the server's
//! certificate alone, which is made when the program starts. The interface goes when the program
//! ends.
//!
//! With words, the two are processes of their own, and measure what they cost:
//!
//!     quic_quinn serve tap NAME ADDRESS/PREFIX CERTIFICATE      the server; it writes its certificate,
//!     quic_quinn serve xsk INTERFACE ADDRESS/PREFIX CERTIFICATE and ends with standard input
//!     quic_quinn serve xsk INTERFACE task ADDRESS/PREFIX CERTIFICATE
//!                                                               the stack is a task of quinn's thread
//!     quic_quinn serve kernel ADDRESS CERTIFICATE               the same on a socket of the kernel
//!     quic_quinn copy ADDRESS CERTIFICATE FILE                  sends the file, fetches it, and compares
//!     quic_quinn put|get ADDRESS CERTIFICATE MIB                sends or fetches so many MiB
//!     quic_quinn memory put|get MIB                             both ends in memory
//!
//! `put` and `get` print the nanoseconds of CPU time that the client took, and the server prints
//! its own. `memory` prints those of two threads: what quinn and rustls take without any network.
//! `bench/peers/quinn.sh` subtracts these from those.
//!
//! Needs CAP_NET_ADMIN for a tap, and CAP_NET_RAW, CAP_BPF and CAP_PERFMON as well for an
//! interface; `ip` (iproute2).
//!
//! ```text
//!   quinn: tasks ── remote::UdpSocket ── rings ── stack, on a thread ── tap, or AF_XDP
//! ```
//!
//! quinn sees `quinn::AsyncUdpSocket`, which the feature `quinn` implements: groups of datagrams
//! that it sends by one call, and groups that it receives.

mod ends;
mod memory;
mod stack;

use anyhow::{Context, bail, ensure};
use ends::{Certificate, Side};
use netmem::host::{on_tap, on_xsk};
use quinn::{AsyncUdpSocket, Runtime, TokioRuntime};
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::thread;

const USAGE: &str = "usage: see the head of crates/netmem/examples/quic_quinn/main.rs";
const PORT: u16 = 4433;
/// Bytes of the file in the first form.
const FILE: usize = 20_000_000;

/// Runs the server until standard input ends.
async fn serve(socket: Arc<dyn AsyncUdpSocket>, certificate: &Path) -> anyhow::Result<()> {
    let own = Certificate::new()?;
    std::fs::write(certificate, own.der())?;
    println!("serves QUIC on {}", socket.local_addr()?);
    tokio::select! {
        served = ends::serve(socket, &own, usize::MAX, Side::Process) => served,
        _ = stack::standard_input_ends() => Ok(()),
    }
}

/// Runs the server on the words behind `serve`.
fn serve_on(words: &[&str]) -> anyhow::Result<()> {
    let [on, rest @ .., address, certificate] = words else { bail!(USAGE) };
    let certificate = Path::new(certificate);
    if *on == "kernel" {
        return ends::runtime()?.block_on(async {
            let socket = std::net::UdpSocket::bind(local(address.parse()?))?;
            serve(TokioRuntime.wrap_udp_socket(socket)?, certificate).await
        });
    }
    let address: netmem::tcp::Address = address.parse()?;
    let at = local(address.addr);
    let on_a_thread = |socket| ends::runtime()?.block_on(serve(socket, certificate));
    match (*on, rest) {
        ("tap", [name]) => stack::with_socket(on_tap(name, 1, &[address])?, at, on_a_thread),
        ("xsk", [name]) => stack::with_socket(on_xsk(name, &[address])?, at, on_a_thread),
        ("xsk", [name, "task"]) => stack::with_task(on_xsk(name, &[address])?, at, |socket| serve(socket, certificate)),
        _ => bail!(USAGE),
    }
}

/// The first form.
fn both() -> anyhow::Result<()> {
    let name = format!("nmquic{}", std::process::id() % 1_000_000);
    let opened = on_tap(&name, 1, &["192.0.2.2/24".parse()?])?;
    // The address of the kernel's side.
    let ip = Command::new("ip").args(["addr", "add", "192.0.2.1/24", "dev", &name]).status().context("ip")?;
    ensure!(ip.success(), "`ip addr add` failed: {ip}");
    let server = SocketAddr::from(([192, 0, 2, 2], PORT));
    stack::with_socket(opened, server, |socket| {
        let own = Certificate::new()?;
        let trusted = own.der().to_vec();
        let client = thread::spawn(move || -> anyhow::Result<()> {
            let file: Vec<u8> = (0..FILE as u64).map(|n| (n.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8).collect();
            ends::runtime()?.block_on(ends::copy(server, &trusted, file))
        });
        ends::runtime()?.block_on(async {
            println!("{server} serves QUIC");
            let ended = tokio::task::spawn_blocking(|| client.join());
            tokio::select! {
                served = ends::serve(socket, &own, usize::MAX, Side::Process) => served,
                ended = ended => ended?.unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            }
        })
    })
}

fn main() -> anyhow::Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        [] => both(),
        ["serve", ..] => serve_on(&words[1..]),
        ["copy", address, certificate, file] => {
            let (trusted, file) = (std::fs::read(certificate)?, std::fs::read(file)?);
            ends::runtime()?.block_on(ends::copy(local(address.parse()?), &trusted, file))
        }
        [word @ ("put" | "get"), address, certificate, mib] => {
            let trusted = std::fs::read(certificate)?;
            let measured = ends::measure(local(address.parse()?), &trusted, word == "put", mib.parse()?);
            ends::runtime()?.block_on(measured)
        }
        ["memory", word @ ("put" | "get"), mib] => memory::measure(word == "put", mib.parse()?),
        _ => bail!(USAGE),
    }
}

fn local(address: IpAddr) -> SocketAddr {
    SocketAddr::new(address, PORT)
}
