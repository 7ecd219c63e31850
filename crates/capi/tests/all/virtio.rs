//! The virtio driver and device of C, each with Netmem's other side of Rust as its peer.

use crate::build::{C, CPP, build, each_build, libraries, run};
use netmem_packet::{Checksum, Gso, GsoKind, Meta, Packet, TxQueue};
use netmem_pool::{PeerShared, PoolOptions};
use netmem_testing::driver::tcp::tcp;
use netmem_testing::driver::testpmd::{Dpdk, Testpmd};
use netmem_testing::driver::{DeviceThread, until};
use netmem_testing::{installed, skip};
use netmem_virtio::VhostUser;
use netmem_virtio::device::port::{Gen, Port};
use netmem_virtio::device::{NetDevice, Options};
use netmem_virtio::driver::{NetOptions, Offload, QueuePair, RxMode, VirtioNet};
use netmem_virtio::socket::Listener;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// As long as other tests wait.
const PATIENCE: Duration = Duration::from_secs(60);
const FRAMES: u64 = 5000;

/// A packet counter that is ready.
struct Counter {
    child: Child,
    out: BufReader<ChildStdout>,
}

impl Counter {
    fn start(program: &mut Command) -> Self {
        let mut child = program
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{program:?}: {error}"));
        let out = BufReader::new(child.stdout.take().expect("a pipe"));
        Self { child, out }
    }

    fn ready(&mut self) {
        let mut line = String::new();
        self.out.read_line(&mut line).expect("a line");
        assert_eq!(line, "ready\n");
    }

    /// Waits for the program's end, and returns its report.
    fn report(&mut self) -> String {
        let mut report = String::new();
        self.out.read_to_string(&mut report).expect("the report");
        assert!(self.child.wait().expect("an end").success(), "{report}");
        report
    }

    /// Ends the program's standard input, and returns its report.
    fn end(mut self) -> String {
        drop(self.child.stdin.take());
        self.report()
    }
}

/// A test that fails leaves no program behind.
impl Drop for Counter {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A device that listens on a socket of its own, and the counter that is connected to it.
fn connected<P: Port + 'static>(port: P, program: &mut Command) -> (DeviceThread<P>, Counter) {
    let mut device = DeviceThread::one(port);
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("socket");
    let listener = Listener::bind(&socket).expect("a socket");
    let mut counter = Counter::start(program.arg("connect").arg(&socket));
    let stream = listener.accept(PATIENCE).expect("a driver");
    device.connection = Some(device.control.serve(stream).expect("a connection"));
    counter.ready();
    (device, counter)
}

/// The counter counts each frame that a device sends.
fn counts_of_a_device(mut program: Command) {
    let port = Gen::new(60, Some(FRAMES)).expect("a frame");
    let (device, counter) = connected(port, &mut program);
    until(|| device.stats.rx_frames.load(Relaxed) == FRAMES);
    let bytes = FRAMES * 60;
    assert_eq!(
        counter.end(),
        format!(
            "{FRAMES} frames, {bytes} bytes: IPv4 {FRAMES}, IPv6 0, ARP 0, other 0; \
             lost: runts 0, bad header 0, not negotiated 0; pages held 0\n"
        )
    );
    // The queues were stopped as the specification says, before the connection ended.
    let connection = device.connection.as_ref().expect("a connection");
    until(|| connection.is_finished());
    assert_eq!(device.stats.connection_errors.load(Relaxed), 0);
}

#[test]
fn frames_of_a_device_are_counted_in_c() {
    each_build(C, &["-std=c11"], "c/packet_counter.c", counts_of_a_device);
}

#[test]
fn frames_of_a_device_are_counted_in_cpp() {
    each_build(CPP, &["-std=c++17", "-xc++"], "c/packet_counter.c", counts_of_a_device);
}

/// A driver of Rust that is connected to the counter, and sends.
struct Guest {
    net: VirtioNet,
    pair: QueuePair,
    sent: u64,
}

impl Guest {
    fn connect(socket: &Path, offload: Offload) -> Self {
        let options = NetOptions::new(RxMode::Mergeable).max_frame(65549).offloads(offload).tx_pages(256);
        let (net, mut pairs) =
            VirtioNet::probe(VhostUser::connect(socket).expect("a device"), options).expect("a driver");
        Self { net, pair: pairs.remove(0), sent: 0 }
    }

    /// Sends a frame, and waits until the device has read it.
    fn send(&mut self, bytes: &[u8], meta: Meta) {
        let pool = self.net.tx_pool(PoolOptions::new("guest")).expect("a pool");
        let mut packet = None::<Packet<PeerShared>>;
        for part in bytes.chunks(4000) {
            let mut page = pool.alloc().expect("a page");
            page.copy_from(64, part).expect("room");
            let frag = page.freeze_range(64..64 + part.len());
            match &mut packet {
                None => packet = Some(Packet::new(frag)),
                Some(packet) => packet.push(frag).expect("a frame"),
            }
        }
        let mut packet = packet.expect("bytes");
        packet.meta = meta;
        self.pair.tx.send(packet).expect("room");
        self.pair.tx.flush();
        self.sent += 1;
        until(|| {
            self.pair.tx.complete();
            self.pair.tx.stats().completed == self.sent
        });
    }
}

/// A counter that listens, on a socket in a folder.
fn listening(program: &mut Command) -> (Counter, tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("socket");
    let mut counter = Counter::start(program.arg("listen").arg(&socket));
    counter.ready();
    (counter, folder, socket)
}

/// The counter counts each frame of two guests, one after the other, and what is wrong with some.
fn counts_of_guests(mut program: Command) {
    let (counter, _folder, socket) = listening(&mut program);
    let mut frame = Gen::new(60, None).expect("a frame").frame().to_vec();
    for ether_type in [[0x08, 0x00], [0x86, 0xdd], [0x08, 0x06], [0x88, 0xb5]] {
        // The second waits until the first has gone.
        let mut guest = Guest::connect(&socket, Offload::None);
        frame[12..14].copy_from_slice(&ether_type);
        for _ in 0..50 {
            guest.send(&frame, Meta::default());
        }
        guest.send(&frame[..13], Meta::default());
    }
    assert_eq!(
        counter.end(),
        "200 frames, 12000 bytes: IPv4 50, IPv6 50, ARP 50, other 50; \
         lost: runts 4, bad header 0, not negotiated 0, no page 0; rings stopped 0\n"
    );
    assert!(!socket.exists());
}

#[test]
fn frames_of_guests_are_counted_in_c() {
    each_build(C, &["-std=c11"], "c/packet_counter.c", counts_of_guests);
}

#[test]
fn frames_of_guests_are_counted_in_cpp() {
    each_build(CPP, &["-std=c++17", "-xc++"], "c/packet_counter.c", counts_of_guests);
}

#[test]
fn valgrind_finds_no_error_in_the_counter_of_guests() {
    under_valgrind("c/packet_counter.c", counts_of_guests);
}

/// A guest leaves checksums and segments to the device: what is received has both done.
#[test]
fn offloads_of_a_guest_are_done() {
    each_build(&["gcc"], &["-std=c11"], "c/packet_counter.c", |mut program| {
        let (counter, _folder, socket) = listening(&mut program);
        let mut guest = Guest::connect(&socket, Offload::All);
        let segment = tcp(false, 1, 0, &[], &[7; 4000]);
        let headers = (segment.len() - 4000) as u16;
        let checksum = Checksum::Partial { start: 34, offset: 16 };
        let gso = Some(Gso { kind: GsoKind::TcpV4, size: 1000, headers, ecn: false });
        guest.send(&segment, Meta { checksum, gso });
        guest.send(&tcp(false, 1, 4000, &[], &[7; 10]), Meta { checksum, gso: None });
        let bytes = 4000 + 10 + 5 * u64::from(headers);
        let report = counter.end();
        assert!(report.starts_with(&format!("5 frames, {bytes} bytes: IPv4 5, ")), "{report}");
    });
}

/// Each of two queue pairs, on a thread of its own.
#[test]
fn two_queue_pairs_on_two_threads() {
    each_build(&["g++"], &["-std=c++17"], "tests/all/virtio_pairs.cpp", |mut program| {
        let options = Options { max_pairs: 2, ..Options::default() };
        let port = |_| Gen::new(60, Some(FRAMES));
        let device = DeviceThread::new(NetDevice::new(options, port).expect("a device"));
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("socket");
        let listener = Listener::bind(&socket).expect("a socket");
        let control = device.control.clone();
        let served = std::thread::spawn(move || {
            let stream = listener.accept(PATIENCE).expect("a driver");
            control.handle(stream).expect("a connection without an error");
        });
        let out = run(program.arg(&socket).arg(FRAMES.to_string()));
        assert_eq!(out, format!("{FRAMES} and {FRAMES} frames\n"));
        served.join().expect("no panic");
    });
}

/// DPDK's device sends the driver's frames back.
#[test]
fn the_device_is_dpdk() {
    each_build(&["g++"], &["-std=c++17"], "tests/all/virtio_peer.cpp", |mut program| {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("socket");
        let Some(_device) = Testpmd::start(&socket, false) else { return };
        until(|| socket.exists());
        let out = run(program.arg("connect").arg(&socket).arg("20000"));
        assert_eq!(out, "each frame was received\n");
    });
}

/// DPDK's driver is the guest.
#[test]
fn the_driver_is_dpdk() {
    each_build(&["g++"], &["-std=c++17"], "tests/all/virtio_peer.cpp", |mut program| {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("socket");
        let mut device = Counter::start(program.arg("listen").arg(&socket).arg("20000"));
        device.ready();
        let guest = format!("net_virtio_user0,path={},queues=1", socket.display());
        let Some(_driver) = Testpmd::run(Dpdk::System, &guest, "--forward-mode=txonly", "") else { return };
        assert_eq!(device.report(), "each frame was received\n");
    });
}

/// A front end that sends no message of the protocol is dropped and reported, and the next is
/// served.
#[test]
fn a_front_end_that_is_none_is_dropped() {
    each_build(&["gcc"], &["-std=c11"], "c/packet_counter.c", |mut program| {
        let (mut counter, _folder, socket) = listening(program.stderr(Stdio::piped()));
        let mut none = UnixStream::connect(&socket).expect("a device");
        none.write_all(&[0xff; 64]).expect("sent");
        assert_eq!(none.read(&mut [0]).unwrap_or(0), 0, "the device hangs up");
        let mut guest = Guest::connect(&socket, Offload::None);
        guest.send(Gen::new(60, None).expect("a frame").frame(), Meta::default());
        let errors = counter.child.stderr.take().expect("a pipe");
        let report = counter.end();
        assert!(report.starts_with("1 frames, 60 bytes: IPv4 1, "), "{report}");
        let told = std::io::read_to_string(errors).expect("a text");
        assert!(told.starts_with("a virtual machine was dropped: the vhost-user connection failed"), "{told}");
    });
}

/// Runs a program with the paths of two sockets that are not there.
fn with_two_sockets(mut program: Command, expected: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    assert_eq!(run(program.args(["one", "two"].map(|name| folder.path().join(name)))), expected);
}

/// The driver and the device of C as each other's peers: frames of one and of several fragments,
/// what is refused, dropped and full, waiting, a device that goes, and misuse.
#[test]
fn what_driver_and_device_do_in_c() {
    if !cfg!(debug_assertions) {
        skip("the library is built without debug assertions, so that misuse is undefined");
        return;
    }
    let test = |program| with_two_sockets(program, "the driver and the device did what the header says\n");
    each_build(C, &["-std=c11"], "tests/all/virtio.c", test);
    each_build(CPP, &["-std=c++17", "-xc++"], "tests/all/virtio.c", test);
}

#[test]
fn valgrind_finds_no_error_in_driver_and_device() {
    if !cfg!(debug_assertions) {
        skip("the library is built without debug assertions, so that misuse is undefined");
        return;
    }
    under_valgrind("tests/all/virtio.c", |program| {
        with_two_sockets(program, "the driver and the device did what the header says\n");
    });
}

#[test]
fn the_wrappers_of_driver_and_device() {
    each_build(CPP, &["-std=c++17"], "tests/all/virtio_wrappers.cpp", |mut program| {
        let folder = tempfile::tempdir().expect("a folder");
        let out = run(program.arg(folder.path().join("socket")));
        assert_eq!(out, "1000 frames there and back; 1000 received, 1000 sent, 0 pages held\n");
    });
}

/// Runs a test with a program under valgrind.
fn under_valgrind(source: &str, test: impl FnOnce(Command)) {
    if let Err(why) = installed(&["gcc", "valgrind"]) {
        skip(&why);
        return;
    }
    let libraries = libraries();
    let built = build("gcc", &["-std=c11", "-g"], source, libraries.path());
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--error-exitcode=9", "--quiet"]).arg(&built).env("LD_LIBRARY_PATH", libraries.path());
    test(valgrind);
}

#[test]
fn valgrind_finds_no_error_in_the_counter_of_a_device() {
    under_valgrind("c/packet_counter.c", counts_of_a_device);
}

/// The counter ends when its device does, and tells what it has counted.
#[test]
fn the_counter_ends_with_its_device() {
    each_build(&["gcc"], &["-std=c11"], "c/packet_counter.c", |mut program| {
        let port = Gen::new(60, Some(FRAMES)).expect("a frame");
        let (mut device, mut counter) = connected(port, program.stderr(Stdio::null()));
        until(|| device.stats.rx_frames.load(Relaxed) == FRAMES);
        drop(device.connection.take());
        let report = counter.report();
        assert!(report.starts_with(&format!("{FRAMES} frames, ")), "{report}");
    });
}
