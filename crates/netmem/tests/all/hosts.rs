//! Hosts on taps and interfaces: every queue answers, and what stops is an error. The servers among
//! the examples keep what a client does not read.

use netmem::host::{Behind, Driven, OpenError, Opened, Queue, TapOptions, on_tap, on_xsk};
use netmem::net::{RxQueue, TxQueue, Wait};
use netmem::pool::Mapped;
use netmem::tcp::{Address, ListenOptions, StackOptions};
use netmem_testing::namespace::{self, in_a_network, in_peer_namespace, ip};
use netmem_testing::pausing::{answer_after_a_pause, echo_after_a_pause};
use netmem_testing::{installed, skip};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;
use std::time::Duration;

pub(crate) const OURS: &str = "198.18.11.2/24";
const SERVER: &str = "198.18.11.2:7";
const CLIENT: &str = "198.18.11.1/24";

fn ours() -> Vec<Address> {
    vec![OURS.parse().unwrap()]
}

/// Sets up a tap, and assigns the kernel's address on it.
pub(crate) fn kernel_side(tap: &str) {
    ip(&format!("addr add {CLIENT} dev {tap}"));
    ip(&format!("link set {tap} up"));
}

/// Two interfaces with two queues each. The first is for the host, and the other is the client's.
pub(crate) fn interfaces() {
    ip("link add v0 numrxqueues 2 numtxqueues 2 type veth peer name v1 numrxqueues 2 numtxqueues 2");
    for end in ["v0", "v1"] {
        namespace::command(&format!("ethtool -K {end} tx off rx off gso off tso off gro off txvlan off rxvlan off"));
    }
    ip("link set v0 up");
}

/// Answers each connection with the number of its queue, until `stop`.
fn number<R, T, D>(queue: Queue<R, T, D>, number: u8, stop: &AtomicBool)
where
    R: RxQueue<Mem: Mapped> + Wait,
    T: TxQueue<Mem = R::Mem> + Wait,
    D: Behind,
{
    let mut stack = queue.start(StackOptions::default()).unwrap();
    let mut listener = stack.sockets().listen("0.0.0.0:7".parse().unwrap(), ListenOptions::default()).unwrap();
    let mut streams = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let work = stack.poll();
        while let Ok(mut stream) = listener.accept() {
            stream.write(&[number]).unwrap();
            stream.shutdown();
            streams.push(stream);
        }
        stack.pause(work, Some(Duration::from_millis(10))).unwrap();
    }
}

/// Runs `client` while each queue is served. Returns how many connections the queues have answered.
fn served<R, T, D>(opened: Opened<R::Mem, Queue<R, T, D>>, client: impl FnOnce() -> Vec<u8>) -> Vec<usize>
where
    R: RxQueue<Mem: Mapped> + Wait + Send,
    T: TxQueue<Mem = R::Mem> + Wait + Send,
    D: Behind,
{
    let (stop, queues) = (AtomicBool::new(false), opened.queues.len());
    std::thread::scope(|scope| {
        for (n, queue) in opened.queues.into_iter().enumerate() {
            let stop = &stop;
            scope.spawn(move || number(queue, n as u8, stop));
        }
        let answers = client();
        stop.store(true, Ordering::Relaxed);
        (0..queues).map(|n| answers.iter().filter(|answer| usize::from(**answer) == n).count()).collect()
    })
}

/// Opens 100 connections, one after the other. Each must be answered.
fn connects() -> Vec<u8> {
    let ask = |_| {
        let mut answer = [0];
        TcpStream::connect(SERVER).unwrap().read_exact(&mut answer).unwrap();
        answer[0]
    };
    (0..100).map(ask).collect()
}

/// With two queues, all connections are answered, by both stacks.
#[test]
fn each_queue_of_a_tap_answers() {
    in_a_network(|| {
        let opened = on_tap("t0", 2, &ours()).unwrap();
        kernel_side("t0");
        let answered = served(opened, connects);
        assert_eq!(answered.iter().sum::<usize>(), 100);
        assert!(answered.iter().all(|queue| *queue > 0), "{answered:?}");
    });
}

/// The kernel sends a host segments of its MTU.
#[test]
fn the_peer_keeps_to_the_mtu_of_the_options() {
    in_a_network(|| {
        for mtu in [1300_u16, 9000] {
            let opened = TapOptions::new().mtu(mtu).open("t0", 1, &ours()).unwrap();
            kernel_side("t0");
            ip("link set t0 mtu 9000");
            let answered = served(opened, || {
                let mut answer = [0];
                let mut socket = TcpStream::connect(SERVER).unwrap();
                socket.read_exact(&mut answer).unwrap();
                let (mut segment, mut size) = (0_i32, 4);
                let (at, level) = ((&raw mut segment).cast(), libc::IPPROTO_TCP);
                // SAFETY: the option is an integer.
                let got = unsafe { libc::getsockopt(socket.as_raw_fd(), level, libc::TCP_MAXSEG, at, &raw mut size) };
                // Without the headers of IP and TCP, and timestamps.
                assert_eq!((got, segment), (0, i32::from(mtu) - 52));
                answer.to_vec()
            });
            assert_eq!(answered, [1]);
        }
    });
}

/// The same on an interface, beside the kernel.
#[test]
fn each_queue_of_an_interface_answers() {
    namespace::in_namespace(|| {
        interfaces();
        let opened = on_xsk("v0", &ours()).unwrap();
        assert_eq!(opened.queues.len(), 2);
        let answered = served(opened, || {
            let (tell, told) = std::sync::mpsc::channel();
            let peer = in_peer_namespace("v1", move || {
                kernel_side("v1");
                tell.send(connects()).unwrap();
            });
            let answers = told.recv();
            peer.join().unwrap();
            answers.unwrap()
        });
        assert_eq!(answered.iter().sum::<usize>(), 100);
        assert!(answered.iter().all(|queue| *queue > 0), "{answered:?}");
    });
}

/// Accepts a connection behind a tap, writes until the stream accepts no more, and finishes within
/// this time. Returns how many bytes were written, and how many connections were reset. `client`
/// has the other end of the connection.
fn finishes<C: Send>(within: Duration, client: impl FnOnce(TcpStream) -> C + Send) -> (usize, usize, C) {
    let mut stack = on_tap("t0", 1, &ours()).unwrap().queues.remove(0).start(StackOptions::default()).unwrap();
    kernel_side("t0");
    let mut listener = stack.sockets().listen("0.0.0.0:7".parse().unwrap(), ListenOptions::default()).unwrap();
    std::thread::scope(|scope| {
        let (tell, connected) = std::sync::mpsc::channel();
        let client = scope.spawn(move || {
            let socket = TcpStream::connect(SERVER).unwrap();
            tell.send(()).unwrap();
            client(socket)
        });
        let mut stream = loop {
            let work = stack.poll();
            if let Ok(stream) = listener.accept() {
                break stream;
            }
            stack.pause(work, None).unwrap();
        };
        connected.recv().unwrap();
        let mut written = 0;
        while let Ok(n) = stream.write(&[1; 4096]) {
            written += n;
        }
        let reset = stack.finish(within).unwrap();
        (written, reset, client.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}

/// What was written is sent before the end, which is in order.
#[test]
fn a_host_that_finishes_sends_what_was_written() {
    in_a_network(|| {
        let (written, reset, read) = finishes(Duration::from_secs(600), |mut socket| {
            let mut bytes = Vec::new();
            socket.read_to_end(&mut bytes).unwrap();
            bytes.len()
        });
        assert!(written > 0);
        assert_eq!((read, reset), (written, 0));
    });
}

/// A connection that is left at the deadline is reset, and its peer sees that.
#[test]
fn a_host_that_cannot_finish_resets() {
    in_a_network(|| {
        let (_, reset, error) =
            finishes(Duration::ZERO, |mut socket| socket.read_to_end(&mut Vec::new()).unwrap_err().kind());
        assert_eq!((reset, error), (1, std::io::ErrorKind::ConnectionReset));
    });
}

/// What cannot be opened is named: an address of the kernel would be answered for twice.
#[test]
fn what_cannot_be_opened() {
    in_a_network(|| {
        assert!(matches!(on_tap("t0", 1, &[]).unwrap_err(), OpenError::NoAddress));
        ip("addr add 198.18.11.2/32 dev lo");
        let addr: IpAddr = [198, 18, 11, 2].into();
        let error = on_tap("t0", 1, &ours()).unwrap_err();
        assert!(matches!(error, OpenError::Kernel(taken) if taken == addr), "{error}");
        assert!(matches!(on_xsk("lo", &ours()).unwrap_err(), OpenError::Kernel(taken) if taken == addr));
        ip("addr del 198.18.11.2/32 dev lo");
        let own = Address { addr: std::net::Ipv6Addr::LOCALHOST.into(), prefix_len: 128 };
        let error = on_tap("t0", 1, &[own]).unwrap_err();
        assert!(matches!(error, OpenError::Kernel(_)), "{error}");
        std::fs::write("/proc/sys/net/ipv4/ip_nonlocal_bind", "1").unwrap();
        on_tap("t0", 1, &ours()).unwrap();
        let v6 = [OURS, "fd00::2/64"].map(|own| own.parse().unwrap());
        for (mtu, addresses) in [(575, &v6[..1]), (9217, &v6[..1]), (1279, &v6)] {
            let error = TapOptions::new().mtu(mtu).open("t0", 1, addresses).unwrap_err();
            assert!(matches!(error, OpenError::Mtu { .. }), "{error}");
        }
        let error = on_tap("a name that is too long", 1, &ours()).unwrap_err();
        assert!(matches!(error, OpenError::Port(_)), "{error}");
    });
}

/// Polls until the stack has stopped. Returns why.
fn stops<R, T, D>(stack: &mut Driven<R, T, D>) -> String
where
    R: RxQueue<Mem: Mapped> + Wait,
    T: TxQueue<Mem = R::Mem> + Wait,
    D: Behind,
{
    loop {
        let work = stack.poll();
        if let Err(error) = stack.pause(work, None) {
            let error = anyhow::Error::new(error);
            return format!("{error:#}");
        }
    }
}

/// A thread that sleeps is woken when its tap or interface goes, and has the reason.
#[test]
fn a_host_whose_tap_is_gone_stops() {
    in_a_network(|| {
        let mut stack = on_tap("t0", 1, &ours()).unwrap().queues.remove(0).start(StackOptions::default()).unwrap();
        while stack.poll() > 0 {}
        ip("link del t0");
        let error = stops(&mut stack);
        assert!(error.contains("t0"), "{error}");
    });
}

#[test]
fn a_host_whose_interface_is_gone_stops() {
    namespace::in_namespace(|| {
        interfaces();
        let mut stack = on_xsk("v0", &ours()).unwrap().queues.remove(0).start(StackOptions::default()).unwrap();
        while stack.poll() > 0 {}
        ip("link del v0");
        let error = stops(&mut stack);
        assert!(error.contains("of v0 has stopped: the interface is gone"), "{error}");
    });
}

/// A stack that other code drives, with the device on a thread of its own, is told that the tap is
/// gone, too.
#[test]
fn a_stack_apart_from_its_device_stops_with_it() {
    in_a_network(|| {
        let now = netmem::tcp::Time::ZERO;
        let queue = on_tap("t0", 1, &ours()).unwrap().queues.remove(0);
        let (mut stack, device) = queue.apart(StackOptions::default(), now).unwrap();
        let mut pause = netmem::net::PollThenSleep::new(Duration::ZERO);
        ip("link del t0");
        let error = loop {
            let work = stack.poll(now);
            if let Err(error) = pause.turn(work, &mut [&mut stack], None) {
                break error;
            }
        };
        assert_eq!(error.kind(), std::io::ErrorKind::NotConnected, "{error}");
        drop((stack, device));
    });
}

/// An example that runs until its standard input ends, or until it is killed.
pub(crate) struct Example(pub(crate) Child, Receiver<(bool, String)>);

impl Example {
    /// Starts it in this thread's network, and waits for a line that has `ready` in it, on standard
    /// output or standard error.
    pub(crate) fn start(name: &str, words: &str, ready: &str) -> Self {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
        let program = folder.join("debug/examples").join(name);
        let mut command = Command::new(program);
        command.args(words.split_whitespace()).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let (tell, told) = std::sync::mpsc::channel();
        let mut example = Self(command.spawn().unwrap(), told);
        let (out, err) = (example.0.stdout.take().unwrap(), example.0.stderr.take().unwrap());
        let streams: [Box<dyn Read + Send>; 2] = [Box::new(out), Box::new(err)];
        for stream in streams {
            let (tell, ready) = (tell.clone(), ready.to_owned());
            std::thread::spawn(move || {
                for line in BufReader::new(stream).lines().map_while(Result::ok) {
                    let is_ready = line.contains(&ready);
                    let _ = tell.send((is_ready, line));
                }
            });
        }
        drop(tell);
        let mut said = String::new();
        while let Ok((is_ready, line)) = example.1.recv() {
            if is_ready {
                return example;
            }
            said += &line;
        }
        panic!("{name} has ended: {said}");
    }

    /// Ends its standard input, and waits until it has ended in order. Returns what it has written
    /// since it was ready.
    fn end(mut self) -> String {
        drop(self.0.stdin.take());
        let said: Vec<String> = self.1.iter().map(|(_, line)| line).collect();
        let said = said.join("\n");
        assert!(self.0.wait().unwrap().success(), "{said}");
        said
    }
}

impl Drop for Example {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Builds examples, as this test was built.
pub(crate) fn build(names: &[&str]) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--offline", "--target-dir"]).arg(folder).current_dir(env!("CARGO_MANIFEST_DIR"));
    cargo.args(["--package", "netmem", "--all-features"]);
    names.iter().for_each(|name| _ = cargo.args(["--example", name]));
    assert!(cargo.status().unwrap().success());
    folder.to_owned()
}

/// Where the examples behind a tap have the server.
fn at(port: u16) -> SocketAddr {
    ([192, 0, 2, 2], port).into()
}

/// A client that pauses gets back all that it sent.
#[test]
fn tcp_echo_tap_keeps_what_is_not_read() {
    build(&["tcp_echo_tap"]);
    in_a_network(|| {
        let _server = Example::start("tcp_echo_tap", "serve", "echoes TCP port 7");
        echo_after_a_pause(at(7));
    });
}

#[test]
fn tcp_queues_keeps_what_is_not_read() {
    build(&["tcp_queues"]);
    in_a_network(|| {
        let _server = Example::start("tcp_queues", "tap t0 2 192.0.2.2/24", "ready: TCP port 7, 2 queues");
        ip("addr add 192.0.2.1/24 dev t0");
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| echo_after_a_pause(at(7)));
            }
        });
    });
}

#[test]
fn tcp_queues_keeps_what_is_not_read_on_an_interface_and_ends_in_order() {
    build(&["tcp_queues"]);
    namespace::in_namespace(|| {
        interfaces();
        let mut server = Example::start("tcp_queues", &format!("xsk v0 {OURS}"), "ready: TCP port 7, 2 queues");
        let stdin = server.0.stdin.take();
        let peer = in_peer_namespace("v1", move || {
            kernel_side("v1");
            for _ in 0..2 {
                echo_after_a_pause(SERVER.parse().unwrap());
            }
            // A connection that is open when the server ends. It is the server that closes it.
            let mut open = TcpStream::connect(SERVER).unwrap();
            open.write_all(b"x").unwrap();
            open.read_exact(&mut [0]).unwrap();
            drop(stdin);
            assert_eq!(open.read(&mut [0]).unwrap(), 0);
        });
        peer.join().unwrap();
        assert!(server.0.wait().unwrap().success());
    });
}

/// hyper asks tokio's traits how much was taken: requests that are sent without a pause are all
/// answered, in order.
#[test]
fn http_hyper_keeps_what_is_not_read() {
    const REQUESTS: usize = 5000;
    build(&["http_hyper"]);
    in_a_network(|| {
        let _server = Example::start("http_hyper", "serve", "serves");
        let request = "GET / HTTP/1.1\r\nHost: netmem\r\n\r\n".repeat(REQUESTS - 1);
        let last = "GET / HTTP/1.1\r\nHost: netmem\r\nConnection: close\r\n\r\n";
        let answer = answer_after_a_pause(at(80), [request.as_bytes(), last.as_bytes()].concat());
        let heads = answer.windows(15).filter(|bytes| *bytes == b"HTTP/1.1 200 OK").count();
        let bodies = answer.iter().filter(|byte| **byte == b'.').count();
        // Each head has one dot.
        assert_eq!((heads, bodies), (REQUESTS, REQUESTS * (1 + 4096 - 10)));
    });
}

/// h2load multiplexes requests of HTTP/2, whose tasks run on any thread. None fails, and nothing is
/// left.
#[test]
fn http_axum_answers_h2load() {
    if let Err(why) = installed(&["h2load"]) {
        return skip(&why);
    }
    build(&["http_axum"]);
    in_a_network(|| {
        let server = Example::start("http_axum", "serve", "serves HTTP");
        for requests in ["-n 3000 -c 10 -m 20", "-n 300 -c 100 -m 3"] {
            let out = namespace::command(&format!("h2load {requests} http://192.0.2.2/hello/h2load"));
            let total: u32 = requests.split(' ').nth(1).unwrap().parse().unwrap();
            assert!(out.contains("Application protocol: h2c"), "{out}");
            assert!(out.contains(&format!("{total} done, {total} succeeded, 0 failed, 0 errored")), "{out}");
            assert!(out.contains(&format!("status codes: {total} 2xx")), "{out}");
        }
        let said = server.end();
        assert!(said.lines().any(|line| line == "0 connections and 0 pages are left"), "{said}");
    });
}
