//! Many connections are made and ended, and nothing is left of them. `NETMEM_CONNECTIONS=100000`
//! sets their number. The default is a few thousand.

use crate::common::Link;
use netmem_inet::tcp::Config;
use netmem_inet::{ListenOptions, Sockets, TcpListener, TcpStream};
use netmem_pool::Private;
use rustix::thread::{CpuSet, sched_getcpu, sched_setaffinity};
use std::net::SocketAddr;
use std::time::Duration;

/// The number of connections at the same time.
const BATCH: usize = 100;

/// The way in which a connection ends.
#[derive(Clone, Copy, Debug)]
enum End {
    /// The client closes, then the server.
    Client,
    /// The server closes, then the client.
    Server,
    /// The client has not read its payload, and resets.
    Reset,
    /// The server never accepts the connection: the listener is closed.
    Unaccepted,
    /// No socket listens on the port.
    Refused,
    /// The next hop does not answer.
    Unreachable,
}

const ENDS: [End; 6] = [End::Client, End::Server, End::Reset, End::Unaccepted, End::Refused, End::Unreachable];

fn connect(sockets: &Sockets<Private>, to: &str) -> TcpStream<Private> {
    sockets.connect(to.parse().unwrap(), &Config::default()).unwrap()
}

fn listen(link: &Link, port: u16) -> TcpListener<Private> {
    link.far
        .sockets()
        .listen(SocketAddr::from(([0, 0, 0, 0], port)), ListenOptions { backlog: BATCH, ..ListenOptions::default() })
        .unwrap()
}

fn batch(link: &mut Link, listener: &mut TcpListener<Private>, end: End, v6: bool) {
    let sockets = link.near.sockets();
    let port = match end {
        End::Unaccepted => 81,
        End::Refused => 82,
        _ => 80,
    };
    let to = match (end, v6) {
        (End::Unreachable, false) => "10.0.0.9:80".to_owned(),
        (End::Unreachable, true) => "[fd00::9]:80".to_owned(),
        (_, false) => format!("10.0.0.2:{port}"),
        (_, true) => format!("[fd00::2]:{port}"),
    };
    let forgotten = matches!(end, End::Unaccepted).then(|| listen(link, 81));
    let mut clients: Vec<_> = (0..BATCH).map(|_| connect(&sockets, &to)).collect();
    link.settle();
    match end {
        End::Unaccepted => drop(forgotten),
        End::Refused => {}
        End::Unreachable => link.pass(Duration::from_secs(5)),
        End::Client | End::Server | End::Reset => {
            let mut servers: Vec<_> = clients.iter().map(|_| listener.accept().unwrap()).collect();
            let mut bytes = [0; 100];
            for client in &mut clients {
                assert_eq!(client.write(b"request"), Ok(7));
            }
            link.settle();
            for server in &mut servers {
                assert_eq!(server.read(&mut bytes), Ok(7));
                assert_eq!(server.write(&bytes), Ok(100));
            }
            link.settle();
            if !matches!(end, End::Reset) {
                assert!(clients.iter_mut().all(|client| client.read(&mut bytes) == Ok(100)));
            }
            if matches!(end, End::Server) {
                drop(servers);
                link.settle();
            } else {
                clients.clear();
                link.settle();
                drop(servers);
            }
        }
    }
    clients.clear();
    link.settle();
}

fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

/// Keeps this thread on its CPU, where the system allows it. The pools keep pages for each CPU that
/// has used them, so that a thread that moves makes more of them resident.
fn stay() {
    let mut set = CpuSet::new();
    set.set(sched_getcpu());
    let _ = sched_setaffinity(None, &set);
}

#[test]
fn nothing_is_left_of_connections_that_come_and_go() {
    let _alone = crate::alone();
    stay();
    let all: usize = std::env::var("NETMEM_CONNECTIONS").map_or(3600, |all| all.parse().unwrap());
    let mut link = Link::new(true);
    let mut listener = listen(&link, 80);
    let (mut made, mut warm) = (0, None);
    while made < all {
        for (n, end) in ENDS.into_iter().cycle().take(2 * ENDS.len()).enumerate() {
            batch(&mut link, &mut listener, end, n >= ENDS.len());
            made += BATCH;
        }
        // TIME-WAIT has ended, and the entries of neighbours are old.
        link.pass(Duration::from_secs(61));
        assert_eq!((link.near.connections(), link.far.connections()), (0, 0));
        assert_eq!(link.hosts.each_ref().map(|host| host.connections()), [0, 0], "the directory is empty");
        assert_eq!((link.near.pages(), link.far.pages(), link.near_pool.stats().inflight), (0, 0, 0));
        assert_eq!(link.near.poll_timeout().or(link.far.poll_timeout()), None, "no timer is left");
        warm.get_or_insert_with(resident);
    }
    let grown = resident().saturating_sub(warm.unwrap());
    // The pools touch the last of their pages, 12 MiB in total, only after a hundred thousand
    // connections. Afterwards memory does not grow.
    assert!(grown < 4 << 20, "{made} connections: {grown} bytes more after the first");
}
