//! The virtio driver and device of C, each with Netmem's other side of Rust as its peer.

use crate::build::{C, CPP, build, each_build, libraries};
use netmem_testing::driver::DeviceThread;
use netmem_testing::{installed, skip};
use netmem_virtio::device::port::{Gen, Port};
use netmem_virtio::socket::Listener;
use std::io::{BufRead, BufReader, Read};
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
    netmem_testing::driver::until(|| device.stats.rx_frames.load(Relaxed) == FRAMES);
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
    netmem_testing::driver::until(|| connection.is_finished());
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

/// Runs a test with the counter under valgrind.
fn under_valgrind(test: impl FnOnce(Command)) {
    if let Err(why) = installed(&["gcc", "valgrind"]) {
        skip(&why);
        return;
    }
    let libraries = libraries();
    let built = build("gcc", &["-std=c11", "-g"], "c/packet_counter.c", libraries.path());
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--error-exitcode=9", "--quiet"]).arg(&built).env("LD_LIBRARY_PATH", libraries.path());
    test(valgrind);
}

#[test]
fn valgrind_finds_no_error_in_the_counter_of_a_device() {
    under_valgrind(counts_of_a_device);
}

/// The counter ends when its device does, and tells what it has counted.
#[test]
fn the_counter_ends_with_its_device() {
    each_build(&["gcc"], &["-std=c11"], "c/packet_counter.c", |mut program| {
        let port = Gen::new(60, Some(FRAMES)).expect("a frame");
        let (mut device, mut counter) = connected(port, program.stderr(Stdio::null()));
        netmem_testing::driver::until(|| device.stats.rx_frames.load(Relaxed) == FRAMES);
        drop(device.connection.take());
        let report = counter.report();
        assert!(report.starts_with(&format!("{FRAMES} frames, ")), "{report}");
    });
}
