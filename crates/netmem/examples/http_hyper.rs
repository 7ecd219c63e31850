//! hyper on netmem's own TCP, behind a tap: programs that are written for tokio's traits run on the
//! stack as they are.
//!
//!     sudo cargo run -p netmem --all-features --example http_hyper
//!     sudo cargo run -p netmem --all-features --example http_hyper serve
//!
//! In the first, a client of the kernel requests a page, and the server ends. The second serves
//! until it is killed; try `curl http://192.0.2.2/`.
//!
//! Needs CAP_NET_ADMIN and `ip` (iproute2). The interface goes when the program ends.
//!
//! Everything but the device is on one thread: a task drives the stack, one accepts, and each
//! connection has one. The thread sleeps in tokio's reactor. hyper reads into its own bytes, so
//! requests are copied out. The body of an answer is a page of the stack's pool, as `Bytes`: hyper
//! passes these on, and they are sent without a copy. Heads are copied in.

use anyhow::Context;
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use netmem::host::on_tap;
use netmem::pool::{SharedPool, TrustedPeer};
use netmem::tcp::tokio::drive;
use netmem::tcp::{ListenOptions, StackOptions, TcpListener, Time};
use std::convert::Infallible;
use std::future::poll_fn;
use std::io::{Read, Write};
use std::process::Command;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tokio::task::LocalSet;

const OURS: &str = "192.0.2.2:80";

/// What is answered: a page.
fn page(pool: &SharedPool<TrustedPeer>) -> Option<Bytes> {
    let mut page = pool.alloc()?;
    page.fill(b'.');
    page[..10].copy_from_slice(b"on netmem\n");
    Some(page.freeze().into())
}

async fn answer(_: Request<Incoming>, body: Bytes) -> Result<Response<Full<Bytes>>, Infallible> {
    Ok(Response::new(Full::new(body)))
}

/// Accepts connections, and spawns a task for each.
async fn serve(mut listener: TcpListener<TrustedPeer>, body: Bytes) -> anyhow::Result<()> {
    loop {
        let stream = poll_fn(|cx| listener.poll_accept(cx)).await?;
        let body = body.clone();
        let service = service_fn(move |request| answer(request, body.clone()));
        // A client that sends no more still reads.
        let connection = http1::Builder::new().half_close(true).serve_connection(TokioIo::new(stream), service);
        tokio::task::spawn_local(async move {
            if let Err(error) = connection.await {
                println!("a connection: {error}");
            }
        });
    }
}

/// Asks for a page by the kernel's stack.
fn client() -> std::io::Result<String> {
    let mut socket = std::net::TcpStream::connect(OURS)?;
    socket.write_all(b"GET /hello HTTP/1.1\r\nHost: netmem\r\nConnection: close\r\n\r\n")?;
    let mut text = String::new();
    socket.read_to_string(&mut text)?;
    Ok(text)
}

fn main() -> anyhow::Result<()> {
    let serves = std::env::args().nth(1).is_some_and(|argument| argument == "serve");
    let name = format!("nmhttp{}", std::process::id() % 1_000_000);
    let mut host = on_tap(&name, 1, &["192.0.2.2/24".parse()?])?;
    // The address of the kernel's side.
    let ip = Command::new("ip").args(["addr", "add", "192.0.2.1/24", "dev", &name]).status().context("ip")?;
    anyhow::ensure!(ip.success(), "`ip addr add` failed: {ip}");

    // The stack is for tokio, and the device behind it has a thread of its own.
    let beginning = Instant::now();
    let now = move || Time::ZERO + beginning.elapsed();
    let queue = host.queues.remove(0);
    let body = page(queue.pool()).context("no page")?;
    let (mut stack, device) = queue.apart(StackOptions::default(), now())?;
    let sockets = stack.sockets();
    let listener = sockets.listen(OURS.parse()?, ListenOptions::default())?;
    println!("{name}: 192.0.2.2 serves HTTP");
    let (done, asked) = oneshot::channel();
    let client = (!serves).then(|| std::thread::spawn(move || (client(), done.send(())).0));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    LocalSet::new().block_on(&runtime, async {
        tokio::select! {
            result = drive(&mut stack, now) => result.map_err(Into::into),
            result = serve(listener, body) => result,
            Ok(()) = asked, if !serves => Ok(()),
        }
    })?;
    // What was written is sent, then FIN.
    stack.finish(now() + Duration::from_secs(5), now)?;
    if let Some(client) = client {
        println!("{}", client.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
    }
    println!("{} bytes were copied to be sent", sockets.stats().copied_sent);
    drop((stack, device));
    Ok(())
}
