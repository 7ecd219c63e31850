//! hyper on netmem's own TCP, behind a tap: programs that are written for tokio's traits run on the stack as they are.
//!
//!     sudo cargo run -p netmem --all-features --example http_hyper            # a client of the kernel asks for a page, and the server ends
//!     sudo cargo run -p netmem --all-features --example http_hyper serve      # serves until it is killed; try: curl http://192.0.2.2/
//!
//! Needs CAP_NET_ADMIN and `ip` (iproute2). The interface goes when the program ends.
//!
//! Everything but the device is on one thread: a task drives the stack, one accepts, and each connection has one. The thread sleeps in tokio's
//! reactor. hyper reads into its own bytes, so requests are copied out. The body of an answer is a page of the stack's pool, as `Bytes`: hyper
//! passes these on, and they are sent without a copy. Heads are copied in.

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use netmem::device::port::Tap;
use netmem::device::{NetDevice, Options};
use netmem::inet::stack::tokio::drive;
use netmem::inet::wire::Mac;
use netmem::inet::{Address, Host, Interface, ListenOptions, Stack, StackOptions, TcpListener, Time};
use netmem::pool::{SharedPool, TrustedPeer};
use netmem::virtio::Spin;
use netmem::{NetOptions, PoolOptions, QueuePair, RxMode, VhostUser, VirtioNet};
use std::convert::Infallible;
use std::error::Error;
use std::future::poll_fn;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use tokio::sync::oneshot;
use tokio::task::LocalSet;

const OUR_IP: [u8; 4] = [192, 0, 2, 2];

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

/// Accepts connections, and gives each a task.
async fn serve(mut listener: TcpListener<TrustedPeer>, body: Bytes) -> Result<(), Box<dyn Error>> {
    loop {
        let stream = poll_fn(|cx| listener.poll_accept(cx)).await?;
        let body = body.clone();
        let service = service_fn(move |request| answer(request, body.clone()));
        let connection = http1::Builder::new().serve_connection(TokioIo::new(stream), service);
        tokio::task::spawn_local(async move {
            if let Err(error) = connection.await {
                println!("a connection: {error}");
            }
        });
    }
}

/// Asks for a page by the kernel's stack.
fn client() -> std::io::Result<String> {
    let mut socket = std::net::TcpStream::connect((std::net::Ipv4Addr::from(OUR_IP), 80))?;
    socket.write_all(b"GET /hello HTTP/1.1\r\nHost: netmem\r\nConnection: close\r\n\r\n")?;
    let mut text = String::new();
    socket.read_to_string(&mut text)?;
    Ok(text)
}

fn main() -> Result<(), Box<dyn Error>> {
    let serves = std::env::args().nth(1).is_some_and(|argument| argument == "serve");
    let name = format!("nmhttp{}", std::process::id() % 1_000_000);
    let mut taps = Tap::open(&name, 1, true)?;
    let added = Command::new("ip").args(["addr", "add", "192.0.2.1/24", "dev", &name]).status()?;
    if !added.success() {
        return Err(format!("`ip addr add` failed: {added}").into());
    }

    // The device, on a thread of its own, and the driver.
    let mut device = NetDevice::new(Options::default(), |_| Ok(taps.remove(0)))?;
    let (control, stop) = (device.control(), Arc::new(AtomicBool::new(false)));
    let (front, back) = UnixStream::pair()?;
    let connection = control.serve(back)?;
    let device = std::thread::spawn({
        let stop = stop.clone();
        move || device.run(&stop, Spin::default())
    });
    // SAFETY: the back end is the device of this process, which writes to posted buffers alone.
    let options = unsafe { NetOptions::<TrustedPeer>::trust_peer(RxMode::Mergeable) }.tx_pages(1024);
    let (net, mut pairs) = VirtioNet::probe(VhostUser::own_device(front)?, options)?;
    let QueuePair { rx, tx } = pairs.remove(0);

    // The stack, and the tasks over it.
    let beginning = Instant::now();
    let now = move || Time::ZERO + beginning.elapsed();
    let addresses = vec![Address { addr: OUR_IP.into(), prefix_len: 24 }];
    let host = Host::new(Interface { mac: Mac([2, 0, 0, 0, 0, 2]), mtu: 1500, addresses });
    let pool = Arc::new(net.tx_pool(PoolOptions::new("tx"))?);
    let body = page(&pool).ok_or("no page")?;
    let stack = Stack::new(&host, rx, tx, pool, StackOptions::default(), now())?;
    let sockets = stack.sockets();
    let listener = sockets.listen((OUR_IP, 80).into(), ListenOptions::default())?;
    let (done, asked) = oneshot::channel();
    let client = (!serves).then(|| std::thread::spawn(move || (client(), done.send(())).0));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    LocalSet::new().block_on(&runtime, async {
        tokio::select! {
            result = drive(stack, now) => result.map_err(Into::into),
            result = serve(listener, body) => result,
            Ok(()) = asked, if !serves => Ok(()),
        }
    })?;
    if let Some(client) = client {
        println!("{}", client.join().map_err(|_| "the client panicked")??);
    }

    println!("{} bytes were copied to be sent", sockets.stats().copied_sent);
    drop(net);
    stop.store(true, Ordering::Relaxed);
    control.wake();
    device.join().map_err(|_| "the device panicked")??;
    connection.wait()?;
    Ok(())
}
