//! TLS by rustls on netmem's own TCP, behind a tap, on tokio's runtime with several threads.
//!
//!     sudo cargo run -p netmem --all-features --example tls_rustls
//!
//! A server echoes what its clients send. The clients are rustls on sockets of the kernel; they
//! trust the server's certificate, which is made when the program starts, and nothing else. Each
//! compares what comes back with what it sent.
//!
//! Needs CAP_NET_ADMIN and `ip` (iproute2). The interface goes when the program ends.
//!
//! The stack has a thread, which also runs the device. rustls sees tokio's `AsyncRead` and
//! `AsyncWrite` of `netmem::tcp::remote::TcpStream`, as it would see those of tokio's own sockets.
//! TLS copies each byte anyway, to encrypt or decrypt it; so nothing is lost by these traits.

use anyhow::{Context, ensure};
use netmem::host::on_tap;
use netmem::pool::TrustedPeer;
use netmem::tcp::{ListenOptions, StackOptions, StackWaker, remote};
use rcgen::{CertifiedKey, generate_simple_self_signed};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig, StreamOwned};
use std::future::poll_fn;
use std::io::{Read, Write};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;
use tokio_rustls::TlsAcceptor;

const OURS: &str = "192.0.2.2:443";
/// The name in the certificate.
const NAME: &str = "netmem.example";
const CLIENTS: u8 = 4;
/// Bytes that a client sends and gets back, a part at a time.
const BYTES: usize = 1_000_000;
const PART: usize = 20_000;

/// Runs the stack and its device on this thread, until `stop` is set.
fn run_stack(
    name: &str,
    opened: &mpsc::Sender<(remote::Sockets<TrustedPeer>, StackWaker<TrustedPeer>)>,
    stop: &AtomicBool,
) -> anyhow::Result<()> {
    let mut host = on_tap(name, 1, &["192.0.2.2/24".parse()?])?;
    // The address of the kernel's side.
    let ip = Command::new("ip").args(["addr", "add", "192.0.2.1/24", "dev", name]).status().context("ip")?;
    ensure!(ip.success(), "`ip addr add` failed: {ip}");
    let mut stack = host.queues.remove(0).start(StackOptions::default())?;
    opened.send((stack.stack().remote(), stack.stack().waker()))?;
    while !stop.load(Ordering::Relaxed) {
        let work = stack.poll();
        stack.pause(work, None)?;
    }
    // What was written is sent, then FIN.
    stack.finish(Duration::from_secs(5))?;
    Ok(())
}

/// Echoes what a client sends, until it closes.
async fn echo(acceptor: TlsAcceptor, stream: remote::TcpStream<TrustedPeer>) -> anyhow::Result<u64> {
    let (mut from, mut to) = tokio::io::split(acceptor.accept(stream).await?);
    let bytes = tokio::io::copy(&mut from, &mut to).await?;
    tokio::io::AsyncWriteExt::shutdown(&mut to).await?;
    Ok(bytes)
}

/// Serves as many clients as there are.
async fn serve(mut listener: remote::TcpListener<TrustedPeer>, config: ServerConfig) -> anyhow::Result<()> {
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let mut tasks = Vec::new();
    for _ in 0..CLIENTS {
        let stream = poll_fn(|cx| listener.poll_accept(cx)).await?;
        tasks.push(tokio::spawn(echo(acceptor.clone(), stream)));
    }
    for task in tasks {
        println!("echoed {} bytes", task.await??);
    }
    Ok(())
}

/// A client on the kernel's TCP. Returns the version of TLS.
fn client(number: u8, config: Arc<ClientConfig>) -> anyhow::Result<String> {
    let connection = ClientConnection::new(config, ServerName::try_from(NAME)?)?;
    let mut tls = StreamOwned::new(connection, std::net::TcpStream::connect(OURS)?);
    let sent: Vec<u8> = (0..BYTES).map(|n| (n as u8).wrapping_mul(number + 1)).collect();
    let mut received = vec![0; PART];
    for part in sent.chunks(PART) {
        tls.write_all(part)?;
        tls.read_exact(&mut received[..part.len()])?;
        ensure!(received[..part.len()] == *part, "another echo");
    }
    tls.conn.send_close_notify();
    tls.flush()?;
    ensure!(tls.read(&mut received)? == 0, "bytes behind the end");
    Ok(format!("{:?}", tls.conn.protocol_version().context("no version")?))
}

fn main() -> anyhow::Result<()> {
    let CertifiedKey { cert, signing_key } = generate_simple_self_signed([NAME.to_owned()])?;
    let certificate: CertificateDer<'static> = cert.der().clone();
    let key = PrivateKeyDer::Pkcs8(signing_key.serialize_der().into());
    let server = ServerConfig::builder().with_no_client_auth().with_single_cert(vec![certificate.clone()], key)?;
    let mut roots = RootCertStore::empty();
    roots.add(certificate)?;
    let trusting = Arc::new(ClientConfig::builder().with_root_certificates(roots).with_no_client_auth());

    let name = format!("nmtls{}", std::process::id() % 1_000_000);
    let (opens, opened) = mpsc::channel();
    let stop = Arc::new(AtomicBool::new(false));
    let flag = stop.clone();
    let stack = thread::spawn(move || run_stack(&name, &opens, &flag));
    let Ok((sockets, waker)) = opened.recv() else {
        // It has ended, and says why.
        return stack.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let mut listener = sockets.listen(OURS.parse()?, ListenOptions::default());
    // A client that connects once it listens is not refused.
    println!("{} serves TLS", runtime.block_on(poll_fn(|cx| listener.poll_listening(cx)))?);
    let start = |number| {
        let trusting = trusting.clone();
        thread::spawn(move || client(number, trusting))
    };
    let clients: Vec<_> = (0..CLIENTS).map(start).collect();
    runtime.block_on(serve(listener, server))?;
    for client in clients {
        let version = client.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        println!("{BYTES} bytes came back over {version}");
    }
    stop.store(true, Ordering::Relaxed);
    waker.wake();
    stack.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
