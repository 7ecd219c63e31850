//! axum on netmem's own TCP, behind a tap, on tokio's runtime with several threads.
//!
//!     sudo cargo run -p netmem --all-features --example http_axum
//!     sudo cargo run -p netmem --all-features --example http_axum serve
//!
//! In the first, clients of the kernel request pages, and the server ends. The second serves until
//! its standard input ends; try `curl http://192.0.2.2/`, or HTTP/2 with `--http2-prior-knowledge`.
//!
//! Needs CAP_NET_ADMIN and `ip` (iproute2). The interface goes when the program ends.
//!
//! The stack has a thread, which also runs the device, and sleeps when there is nothing to do. The
//! listener and the streams are those of `netmem::tcp::remote`: axum accepts on any thread, and
//! each connection is a task that moves between the threads of the runtime. Payload goes from the
//! tasks to the stack and back through rings of fragments.

use anyhow::Context;
use axum::Router;
use axum::extract::Path;
use axum::routing::get;
use netmem::host::on_tap;
use netmem::pool::TrustedPeer;
use netmem::tcp::{ListenOptions, StackOptions, remote};
use std::future::poll_fn;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;
use tokio::sync::oneshot;

const OURS: &str = "192.0.2.2:80";
const CLIENTS: usize = 8;

/// The stack's listener, as axum accepts from it.
struct Listener(remote::TcpListener<TrustedPeer>);

impl axum::serve::Listener for Listener {
    type Io = remote::TcpStream<TrustedPeer>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, SocketAddr) {
        match poll_fn(|cx| self.0.poll_accept(cx)).await {
            Ok(stream) => {
                let peer = stream.peer_addr();
                (stream, peer)
            }
            // The stack has ended, and so does the program.
            Err(_) => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> std::io::Result<SocketAddr> {
        self.0.local_addr().ok_or_else(|| std::io::ErrorKind::NotConnected.into())
    }
}

/// Runs the stack and its device on this thread, until `stop` is set.
fn run_stack(
    name: &str,
    opened: &mpsc::Sender<(remote::Sockets<TrustedPeer>, netmem::tcp::StackWaker<TrustedPeer>)>,
    stop: &AtomicBool,
) -> anyhow::Result<()> {
    let mut host = on_tap(name, 1, &["192.0.2.2/24".parse()?])?;
    // The address of the kernel's side.
    let ip = Command::new("ip").args(["addr", "add", "192.0.2.1/24", "dev", name]).status().context("ip")?;
    anyhow::ensure!(ip.success(), "`ip addr add` failed: {ip}");
    let mut stack = host.queues.remove(0).start(StackOptions::default())?;
    opened.send((stack.stack().remote(), stack.stack().waker()))?;
    while !stop.load(Ordering::Relaxed) {
        let work = stack.poll();
        stack.pause(work, None)?;
    }
    // What was written is sent, then FIN.
    stack.finish(Duration::from_secs(5))?;
    let stack = stack.stack();
    let open = stack.connections() - stack.connections_in_time_wait();
    println!("{open} connections and {} pages are left", stack.pages());
    Ok(())
}

/// Waits for the end of standard input, and ends the server.
fn wait_for_the_end(done: oneshot::Sender<()>) -> std::io::Result<()> {
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
    // The server may have ended by itself.
    let _ = done.send(());
    Ok(())
}

/// Asks for a page by the kernel's stack.
fn client(number: usize) -> std::io::Result<String> {
    let mut socket = std::net::TcpStream::connect(OURS)?;
    let request = format!("GET /hello/{number} HTTP/1.1\r\nHost: netmem\r\nConnection: close\r\n\r\n");
    socket.write_all(request.as_bytes())?;
    let mut text = String::new();
    socket.read_to_string(&mut text)?;
    Ok(text)
}

/// A client that connects once this has returned is not refused.
async fn listen(sockets: &remote::Sockets<TrustedPeer>) -> anyhow::Result<Listener> {
    let mut listener = sockets.listen(OURS.parse()?, ListenOptions::default());
    println!("{} serves HTTP", poll_fn(|cx| listener.poll_listening(cx)).await?);
    Ok(Listener(listener))
}

async fn serve(listener: Listener, done: oneshot::Receiver<()>) -> anyhow::Result<()> {
    let app = Router::new()
        .route("/", get(|| async { "on netmem\n" }))
        .route("/hello/{name}", get(|Path(name): Path<String>| async move { format!("hello {name}, on netmem\n") }));
    let end = async {
        if done.await.is_err() {
            std::future::pending().await
        }
    };
    axum::serve(listener, app).with_graceful_shutdown(end).await?;
    Ok(())
}

fn main() -> anyhow::Result<()> {
    let serves = std::env::args().nth(1).is_some_and(|argument| argument == "serve");
    let name = format!("nmaxum{}", std::process::id() % 1_000_000);
    let (opens, opened) = mpsc::channel();
    let stop = Arc::new(AtomicBool::new(false));
    let flag = stop.clone();
    let stack = thread::spawn(move || run_stack(&name, &opens, &flag));
    let Ok((sockets, waker)) = opened.recv() else {
        // It has ended, and says why.
        return stack.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let listener = runtime.block_on(listen(&sockets))?;
    let (done, is_done) = oneshot::channel();
    let clients = thread::spawn(move || -> std::io::Result<Vec<String>> {
        if serves {
            return wait_for_the_end(done).map(|()| Vec::new());
        }
        let clients: Vec<_> = (0..CLIENTS).map(|number| thread::spawn(move || client(number))).collect();
        let failed = |_| Err(std::io::Error::other("a client has failed"));
        let pages = clients.into_iter().map(|client| client.join().unwrap_or_else(failed)).collect();
        // The server ends.
        let _ = done.send(());
        pages
    });
    runtime.block_on(serve(listener, is_done))?;
    for page in clients.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))? {
        println!("{page}");
    }
    stop.store(true, Ordering::Relaxed);
    waker.wake();
    stack.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
