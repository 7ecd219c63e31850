//! `netmem device` as a service: front ends that come, go, flood and wait, and resources that are
//! short.

use crate::command::*;
use netmem::net::{Poll, RxQueue};
use netmem::virtio::{NetOptions, RxMode, VhostUser, VirtioNet};
use rustix::process::{Resource, Rlimit, prlimit};
use std::collections::BTreeMap;
use std::fs::DirEntry;
use std::io::{BufRead, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

/// A message of the front end: GET_FEATURES, which is answered with 8 bytes.
fn asks_features(mut stream: &UnixStream) -> std::io::Result<[u8; 20]> {
    let mut answer = [0; 20];
    stream.write_all(&[1u32, 1, 0].map(u32::to_le_bytes).concat())?;
    stream.read_exact(&mut answer)?;
    Ok(answer)
}

#[track_caller]
fn is_hung_up_on(mut stream: UnixStream) {
    match stream.read(&mut [0]) {
        Ok(0) => {}
        Err(e) if e.kind() == ErrorKind::ConnectionReset => {}
        other => panic!("{other:?}"),
    }
}

/// Ends a connection. To drop it would not do: while another test's thread starts a program, that
/// program has a copy of each descriptor, until it runs.
fn hang_up(stream: &UnixStream) {
    stream.shutdown(Shutdown::Both).unwrap();
}

/// A connect to a socket with a full backlog blocks for as long as its process accepts nothing.
#[test]
fn a_full_backlog_belongs_to_a_live_process() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("full.sock");
    let listener = UnixListener::bind(&path).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let _queued = UnixStream::connect(&path).unwrap();
    let path = path.to_str().unwrap();
    let mut device = background(&["device", "--listen", path, "--port", "sink"]);
    let (status, _, err) = device.end();
    assert_eq!(status, Some(1), "{err}");
    assert!(err.contains("another process listens"), "{err}");
}

/// Connections that are dead before they are accepted are dropped in one go: none of them is
/// served.
#[test]
fn dead_connections_do_not_delay_the_next_front_end() {
    let device = Device::start(&["--port", "gen"]);
    device.process.signal(Signal::STOP);
    let dead: Vec<_> = (0..127).map(|_| device.connect()).collect();
    dead.iter().for_each(hang_up);
    device.process.signal(Signal::CONT);
    device.serves_perf();
    assert_eq!((device.front_ends("dead"), device.front_ends("served")), (127, 1));
    device.ends_at(Signal::TERM);
}

#[test]
fn a_busy_device_hangs_up_and_an_ended_front_end_makes_room() {
    let device = Device::start(&["--port", "sink"]);
    let mut current = device.connect();
    asks_features(&current).unwrap();
    for round in 1..=20 {
        is_hung_up_on(device.connect());
        assert_eq!(device.front_ends("busy"), round);
        assert_eq!(device.stats()["front_ends"]["connected"], true);
        // The next one connects before the device can have noticed that this one has ended.
        hang_up(&current);
        current = device.connect();
        asks_features(&current).unwrap();
        assert_eq!(device.front_ends("served"), round + 1);
    }
    device.ends_at(Signal::TERM);
}

/// Whatever a front end does or leaves undone, a signal ends the device.
#[test]
fn signals_end_a_device_with_a_silent_front_end() {
    for sent in [&[][..], &[1, 0, 0], &[1u32, 1, 0].map(u32::to_le_bytes).concat()[..7]] {
        let device = Device::start(&["--port", "gen"]);
        let mut silent = device.connect();
        silent.write_all(sent).unwrap();
        await_that(|| device.front_ends("served") == 1);
        device.ends_at(Signal::INT);
        is_hung_up_on(silent);
    }
}

/// Proves NET-10 for descriptors: a shortage costs the front ends that meet it.
#[test]
fn a_shortage_of_descriptors_drops_front_ends_and_passes() {
    let device = Device::start(&["--port", "gen"]);
    device.serves_perf();
    await_that(|| device.stats()["front_ends"]["connected"] == false);
    let descriptors = Path::new("/proc").join(device.process.0.id().to_string()).join("fd");
    let lowest_free = || (0..).find(|n: &u64| descriptors.join(n.to_string()).symlink_metadata().is_err()).unwrap();
    let limit = |current| {
        let limit = Rlimit { current: Some(current), maximum: None };
        let old = prlimit(Some(device.pid()), Resource::Nofile, Rlimit { maximum: old_maximum(), ..limit });
        old.unwrap()
    };
    fn old_maximum() -> Option<u64> {
        rustix::process::getrlimit(Resource::Nofile).maximum
    }
    // Every slot is in use: the spare one accepts the connection, and closes it.
    let before = limit(lowest_free()).current.unwrap();
    is_hung_up_on(device.connect());
    // Not even that: the connection stays where it is, and is looked at now and then.
    let begin = Instant::now();
    limit(6);
    let waits = device.connect();
    // On a machine with much else to do, the device may not run for a while.
    std::thread::sleep(Duration::from_millis(500));
    limit(before);
    asks_features(&waits).unwrap();
    let (short, most) = (device.front_ends("short"), begin.elapsed().as_millis() as u64 / 10);
    assert!((1..most).contains(&short), "{short}: it spins while descriptors are short");
    hang_up(&waits);
    device.serves_perf();
    device.ends_at(Signal::TERM);
}

#[test]
fn too_few_descriptors_are_named() {
    let netmem = env!("CARGO_BIN_EXE_netmem");
    let limited = |limit: &str, args: &str| {
        let script = format!("ulimit {limit} && exec {netmem} {args}");
        std::process::Command::new("sh").args(["-c", &script]).output().unwrap()
    };
    let perf = "perf --mode small --alloc pool --duration 20ms --runs 1";
    let dir = tempfile::tempdir().unwrap();
    let device = format!("device --listen {}/x.sock --port gen", dir.path().display());
    for args in [perf, &device] {
        let output = limited("-n 16", args);
        assert_eq!(output.status.code(), Some(1));
        assert!(errors(&output).contains("may open 16; raise the limit"), "{}", errors(&output));
    }
    // A soft limit is raised.
    let output = limited("-S -n 16", perf);
    assert!(output.status.success(), "{}", errors(&output));
}

/// The statistics are there while a front end is, and for clients that do not read. The first queue
/// pair has all traffic: its counters are those of the device.
#[test]
fn statistics_are_served_while_the_device_runs() {
    let device = Device::start(&["--port", "gen", "--queues", "2"]);
    let silent: Vec<_> = (0..300).map(|_| UnixStream::connect(&device.stats).unwrap()).collect();
    device.serves_perf();
    await_that(|| device.stats()["front_ends"]["connected"] == false);
    let report = device.stats();
    assert_eq!((&report["command"], &report["queues"], &report["port"]), (&"device".into(), &2.into(), &"gen".into()));
    for name in ["rx_frames", "rx_bytes", "tx_frames", "tx_bytes"] {
        let of = |pair: usize| report["pairs"][pair][name].clone();
        assert_eq!((of(0), of(1)), (report["counters"][name].clone(), 0.into()), "{name}");
    }
    assert!(report["counters"]["rx_frames"].as_u64() > Some(0), "{report}");
    assert_eq!(report["drops"]["too_big"], 0);
    assert_eq!(report["queue_errors"]["avail_jump"], 0);
    let descriptors = Path::new("/proc").join(device.process.0.id().to_string()).join("fd").read_dir().unwrap().count();
    assert!(descriptors < 50, "{descriptors}: clients that do not read are kept");
    drop(silent);
    device.ends_at(Signal::TERM);
}

#[test]
fn the_statistics_of_all_queue_pairs() {
    let device = Device::start(&["--port", "sink", "--queues", "127"]);
    let report = device.stats();
    let pairs = report["pairs"].as_array().unwrap();
    assert_eq!(pairs.len(), 127);
    let names = ["dropped", "rx_bytes", "rx_frames", "tx_bytes", "tx_frames"];
    assert!(pairs.iter().all(|pair| pair.as_object().unwrap().keys().eq(names)), "{report}");
    device.ends_at(Signal::TERM);
}

/// With `--connect`, the front end is the one that listens, and may come later, go, and come again.
#[test]
fn a_device_connects_to_a_front_end_that_listens() {
    let dir = tempfile::tempdir().unwrap();
    let [path, stats_path] = ["qemu.sock", "stats.sock"].map(|name| dir.path().join(name));
    let args = ["device", "--connect", path.to_str().unwrap(), "--stats", stats_path.to_str().unwrap()];
    let mut device = background(&[&args[..], &["--port", "echo", "--mac", "02:00:00:00:00:09"]].concat());
    await_that(|| stats_path.exists());
    for _ in 0..3 {
        let listener = UnixListener::bind(&path).unwrap();
        let (stream, _) = listener.accept().unwrap();
        let stream = patient(stream);
        let answer = asks_features(&stream).unwrap();
        let offered = u64::from_le_bytes(*answer.last_chunk().unwrap());
        assert!(offered & 1 << 5 != 0, "VIRTIO_NET_F_MAC");
        std::fs::remove_file(&path).unwrap();
    }
    await_that(|| stats(&stats_path)["front_ends"]["connected"] == false);
    assert_eq!(stats(&stats_path)["front_ends"]["served"], 3);
    device.signal(Signal::TERM);
    assert_eq!(device.end().0, Some(0));
}

#[test]
fn descriptors_can_be_inherited() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut device = with_descriptor(theirs, &["device", "--port", "sink"]);
    asks_features(&patient(ours.try_clone().unwrap())).unwrap();
    drop(ours);
    // Its front end has left, and no other can come.
    let (status, out, err) = device.end();
    assert_eq!(status, Some(0), "{err}");
    assert!(out.starts_with("front end left"), "{out}");

    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("inherited.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let mut device = with_descriptor(listener, &["device", "--port", "sink"]);
    for _ in 0..3 {
        let stream = patient(UnixStream::connect(&path).unwrap());
        asks_features(&stream).unwrap();
        hang_up(&stream);
    }
    device.signal(Signal::TERM);
    assert_eq!(device.end().0, Some(0));
    assert!(path.exists(), "the path is its owner's");

    // SAFETY: a new descriptor, which is handed on.
    let file = unsafe { OwnedFd::from_raw_fd(libc::dup(0)) };
    let (status, _, err) = with_descriptor(file, &["device", "--port", "sink"]).end();
    assert!(status == Some(1) && err.contains("not a Unix stream socket"), "{err}");
    fails(&["device", "--fd", "777", "--port", "sink"], 1, &["--fd 777", "no such descriptor"]);
}

/// Both processes of a multi-queue tap are told that they share it: also the first one, if it
/// checks when each of them has detached the queue of its second pair, which no front end uses. It
/// is stopped until then.
#[test]
fn two_devices_with_one_tap_are_warned() {
    let name = format!("nmd{}", std::process::id() % 100_000_000);
    let dir = tempfile::tempdir().unwrap();
    let start = |n: usize| {
        let (socket, port) = (dir.path().join(n.to_string()), format!("tap:{name}"));
        let args = ["device", "--listen", socket.to_str().unwrap(), "--port", &port, "--queues", "2"];
        let mut device = background(&args);
        let mut ended = None;
        await_that(|| {
            ended = device.0.try_wait().unwrap();
            socket.exists() || ended.is_some()
        });
        (device, ended.is_none())
    };
    let (mut first, up) = start(1);
    if !up {
        return skip(&format!("no tap can be had here: {}", first.end().2.trim()));
    }
    let queues = std::path::PathBuf::from(format!("/sys/class/net/{name}/queues"));
    if !queues.exists() {
        return skip("sysfs does not show the tap");
    }
    let attached = |want: usize| {
        let transmit = |entry: &std::io::Result<DirEntry>| {
            entry.as_ref().unwrap().file_name().to_str().unwrap().starts_with("tx-")
        };
        await_that(|| queues.read_dir().unwrap().filter(transmit).count() == want);
    };
    attached(1);
    first.signal(Signal::STOP);
    let (mut second, up) = start(2);
    assert!(up, "{}", second.end().2);
    attached(2);
    first.signal(Signal::CONT);
    let (warned, comes) = std::sync::mpsc::channel();
    let mut errors = std::io::BufReader::new(first.0.stderr.take().unwrap()).lines();
    std::thread::spawn(move || warned.send(errors.any(|line| line.unwrap().contains("another process has queues"))));
    assert_eq!(comes.recv_timeout(Duration::from_secs(20)), Ok(true));
    second.signal(Signal::TERM);
    let (status, _, err) = second.end();
    assert!(status == Some(0) && err.contains("other processes have 1 of its 3 queues"), "{err}");
    first.signal(Signal::TERM);
    assert_eq!(first.0.wait().unwrap().code(), Some(0));
}

/// Voluntary and other context switches of each thread of a process.
fn switches(pid: u32) -> BTreeMap<String, Vec<String>> {
    let of = |task: std::io::Result<DirEntry>| {
        let status = std::fs::read_to_string(task.unwrap().path().join("status")).unwrap();
        let name = status.lines().next().unwrap().to_owned();
        (name, status.lines().filter(|line| line.contains("ctxt_switches")).map(str::to_owned).collect())
    };
    Path::new("/proc").join(pid.to_string()).join("task").read_dir().unwrap().map(of).collect()
}

/// Whether all threads of a process sleep.
fn asleep(pid: u32) -> bool {
    let sleeps = |task: std::io::Result<DirEntry>| {
        let status = std::fs::read_to_string(task.unwrap().path().join("status")).unwrap();
        status.lines().any(|line| line == "State:\tS (sleeping)")
    };
    Path::new("/proc").join(pid.to_string()).join("task").read_dir().unwrap().all(sleeps)
}

/// An idle device executes nothing: with 16 queue pairs on two threads and a driver that is
/// connected and idle, no thread of the process is scheduled in ten seconds.
#[test]
fn an_idle_device_makes_no_context_switches() {
    let device = Device::start(&["--port", "echo", "--queues", "16", "--threads", "2"]);
    let backend = VhostUser::connect(&device.socket).unwrap();
    let (net, mut pairs) = VirtioNet::probe(backend, NetOptions::new(RxMode::Mergeable).pairs(16)).unwrap();
    for pair in &mut pairs {
        // Buffers are posted, and the device is told.
        pair.rx.poll(|poll| poll.receive(64, &mut |_| ()));
    }
    let count = |name: &str| device.stats()["counters"][name].as_u64().unwrap();
    await_that(|| {
        let counters = &device.stats()["counters"];
        counters["sleeps"].as_u64().unwrap() == counters["wakes"].as_u64().unwrap() + 2
    });
    // The thread that answers the requests for statistics falls asleep as well.
    await_that(|| asleep(device.process.0.id()));
    let before = switches(device.process.0.id());
    assert!(before.len() >= 4, "main thread, two of the device, one for messages: {before:?}");
    std::thread::sleep(Duration::from_secs(10));
    assert_eq!(switches(device.process.0.id()), before);
    drop((pairs, net));
    await_that(|| count("woken_by_control") > 0);
    device.ends_at(Signal::TERM);
}
