//! The two ends of a transfer, on any socket that quinn has.
//!
//! A request is a stream of the client's: a byte that says what it asks for, 8 bytes of length, and
//! the payload, if the client sends it. The server keeps at most 64 MiB, and serves one connection
//! at a time: a client that stays keeps the others waiting.

use anyhow::{Context, bail, ensure};
use bytes::Bytes;
use quinn::{
    AsyncUdpSocket, ClientConfig, Connection, Endpoint, EndpointConfig, RecvStream, SendStream, ServerConfig,
    TokioRuntime, TransportConfig, VarInt,
};
use rcgen::{CertifiedKey, generate_simple_self_signed};
use rustix::time::{ClockId, clock_gettime};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};

/// The name in the certificate.
const NAME: &str = "netmem.example";
/// The server keeps the payload, sends what it has kept, drops the payload, sends as many bytes.
const KEEP: u8 = b'k';
const FETCH: u8 = b'f';
const PUT: u8 = b'p';
const GET: u8 = b'g';
/// The most bytes that the server keeps. The client chooses how many it sends.
const MOST_KEPT: u64 = 64 << 20;
/// Bytes that are written at once.
const CHUNK: usize = 256 * 1024;
/// Bytes that may be in flight, at least as many as a socket's buffer can hold.
const WINDOW: u32 = 4 << 20;

/// Whose CPU time is measured.
#[derive(Clone, Copy)]
pub(crate) enum Side {
    Process,
    Thread,
}

impl Side {
    /// CPU time so far, in nanoseconds.
    pub(crate) fn cpu(self) -> u64 {
        let time = clock_gettime(match self {
            Self::Process => ClockId::ProcessCPUTime,
            Self::Thread => ClockId::ThreadCPUTime,
        });
        time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
    }
}

/// The server's certificate and its key.
pub(crate) struct Certificate(CertifiedKey<rcgen::KeyPair>);

impl Certificate {
    pub(crate) fn new() -> anyhow::Result<Self> {
        Ok(Self(generate_simple_self_signed([NAME.to_owned()])?))
    }

    pub(crate) fn der(&self) -> &[u8] {
        self.0.cert.der()
    }
}

/// A runtime of this thread.
pub(crate) fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}

/// The same for both ends, and for all sockets. The congestion control is CUBIC, quinn's default.
fn transport() -> Arc<TransportConfig> {
    let mut transport = TransportConfig::default();
    transport.stream_receive_window(VarInt::from_u32(WINDOW)).receive_window(VarInt::from_u32(WINDOW));
    transport.send_window(WINDOW.into());
    Arc::new(transport)
}

/// Serves so many clients, one after the other. Prints what each request has cost.
pub(crate) async fn serve(
    socket: Arc<dyn AsyncUdpSocket>,
    own: &Certificate,
    clients: usize,
    side: Side,
) -> anyhow::Result<()> {
    let key = PrivateKeyDer::Pkcs8(own.0.signing_key.serialize_der().into());
    let mut config = ServerConfig::with_single_cert(vec![own.0.cert.der().clone()], key)?;
    config.transport_config(transport());
    let runtime = Arc::new(TokioRuntime);
    let endpoint = Endpoint::new_with_abstract_socket(EndpointConfig::default(), Some(config), socket, runtime)?;
    let kept = Mutex::new(Bytes::new());
    for _ in 0..clients {
        let incoming = endpoint.accept().await.context("the socket has ended")?;
        // A client that goes away costs its own connection alone.
        if let Err(error) = answer(incoming, &kept, side).await {
            eprintln!("a connection has ended: {error:#}");
        }
    }
    Ok(())
}

async fn answer(incoming: quinn::Incoming, kept: &Mutex<Bytes>, side: Side) -> anyhow::Result<()> {
    let connection = incoming.await?;
    loop {
        let (mut send, mut receive) = match connection.accept_bi().await {
            Ok(stream) => stream,
            Err(quinn::ConnectionError::ApplicationClosed(_)) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        let before = side.cpu();
        let mut request = [0; 9];
        receive.read_exact(&mut request).await?;
        let [what, len @ ..] = request;
        let len = u64::from_be_bytes(len);
        let stored = || kept.lock().unwrap_or_else(PoisonError::into_inner);
        match what {
            KEEP => {
                ensure!(len <= MOST_KEPT, "{len} bytes are more than the server keeps");
                let bytes = receive.read_to_end(usize::try_from(len)?).await?;
                *stored() = bytes.into();
                send.write_all(b"ok").await?;
            }
            FETCH => {
                let bytes = stored().clone();
                send.write_chunk(bytes).await?;
            }
            PUT => {
                ensure!(skip(&mut receive).await? == len, "not as many bytes as were announced");
                send.write_all(b"ok").await?;
            }
            GET => write(&mut send, len).await?,
            _ => bail!("an unknown request"),
        }
        send.finish()?;
        // Until the client has all of it, or has closed the connection because it has.
        let _ = send.stopped().await;
        println!("server {} {len} bytes {} ns", char::from(what), side.cpu() - before);
    }
}

/// Reads to the end. Returns how many bytes there were.
async fn skip(receive: &mut RecvStream) -> anyhow::Result<u64> {
    let mut len = 0;
    while let Some(chunk) = receive.read_chunk(usize::MAX, true).await? {
        len += chunk.bytes.len() as u64;
    }
    Ok(len)
}

async fn write(send: &mut SendStream, len: u64) -> anyhow::Result<()> {
    let (chunk, mut left) = (Bytes::from(vec![0x5a; CHUNK]), len);
    while left > 0 {
        let n = left.min(CHUNK as u64);
        send.write_chunk(chunk.slice(..n as usize)).await?;
        left -= n;
    }
    Ok(())
}

/// Connects to a server whose certificate is `trusted`.
async fn connect(endpoint: &Endpoint, server: SocketAddr, trusted: &[u8]) -> anyhow::Result<Connection> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from(trusted))?;
    let mut config = ClientConfig::with_root_certificates(Arc::new(roots))?;
    config.transport_config(transport());
    endpoint.connect_with(config, server, NAME)?.await.context("cannot connect")
}

fn kernel() -> std::io::Result<Endpoint> {
    Endpoint::client((Ipv4Addr::UNSPECIFIED, 0).into())
}

/// Sends `file`, fetches it, and compares.
pub(crate) async fn copy(server: SocketAddr, trusted: &[u8], file: Vec<u8>) -> anyhow::Result<()> {
    let (endpoint, file) = (kernel()?, Bytes::from(file));
    let connection = connect(&endpoint, server, trusted).await?;
    let (mut send, mut receive) = request(&connection, KEEP, file.len() as u64).await?;
    send.write_chunk(file.clone()).await?;
    send.finish()?;
    ensure!(receive.read_to_end(2).await? == b"ok", "the server has not kept the file");
    let (mut send, mut receive) = request(&connection, FETCH, file.len() as u64).await?;
    send.finish()?;
    let back = receive.read_to_end(file.len()).await?;
    ensure!(back == file, "another file came back: {} bytes of {}", back.len(), file.len());
    let lost = connection.stats().path.lost_packets;
    println!("sent {} bytes, and the file that came back is equal; {lost} packets were lost", file.len());
    connection.close(VarInt::from_u32(0), b"");
    endpoint.wait_idle().await;
    Ok(())
}

/// Sends or fetches so many MiB by a socket of the kernel, and prints what it has cost.
pub(crate) async fn measure(server: SocketAddr, trusted: &[u8], put: bool, mib: u64) -> anyhow::Result<()> {
    transfer(&kernel()?, server, trusted, (put, mib << 20), Side::Process).await
}

/// Sends or fetches so many bytes, and prints what it has cost.
pub(crate) async fn transfer(
    endpoint: &Endpoint,
    server: SocketAddr,
    trusted: &[u8],
    (put, len): (bool, u64),
    side: Side,
) -> anyhow::Result<()> {
    let connection = connect(endpoint, server, trusted).await?;
    let (start, before) = (std::time::Instant::now(), side.cpu());
    let (mut send, mut receive) = request(&connection, if put { PUT } else { GET }, len).await?;
    if put {
        write(&mut send, len).await?;
        send.finish()?;
        ensure!(receive.read_to_end(2).await? == b"ok", "the server has not answered");
    } else {
        send.finish()?;
        ensure!(skip(&mut receive).await? == len, "not as many bytes as were asked for");
    }
    let (what, ns) = (if put { "put" } else { "get" }, side.cpu() - before);
    let path = connection.stats().path;
    println!(
        "client {what} {len} bytes {ns} ns in {} us; {} packets were lost, MTU {}",
        start.elapsed().as_micros(),
        path.lost_packets,
        path.current_mtu
    );
    connection.close(VarInt::from_u32(0), b"");
    endpoint.wait_idle().await;
    Ok(())
}

async fn request(connection: &Connection, what: u8, len: u64) -> anyhow::Result<(SendStream, RecvStream)> {
    let (mut send, receive) = connection.open_bi().await?;
    send.write_all(&[&[what][..], &len.to_be_bytes()].concat()).await?;
    Ok((send, receive))
}
