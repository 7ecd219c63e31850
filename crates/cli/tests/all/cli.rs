//! The command from outside: what it prints, how it ends, and what it leaves behind.

use crate::command::*;
use crate::liar::Lie;
use netmem_testing::schema;
use serde_json::Value;
use std::io::Read;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

fn capture(dir: &Path, name: &str, records: &[(usize, usize)]) -> String {
    let mut file = Vec::new();
    file.extend(0xa1b2_c3d4u32.to_le_bytes());
    file.extend([2u16, 4].map(u16::to_le_bytes).concat());
    file.extend([0u32, 0, 1 << 20, 1].map(u32::to_le_bytes).concat());
    for &(claimed, present) in records {
        file.extend([0, 0, claimed as u32, claimed as u32].map(u32::to_le_bytes).concat());
        file.extend(vec![0x5a; present]);
    }
    let path = dir.join(name);
    std::fs::write(&path, file).unwrap();
    format!("pcap:{}", path.display())
}

const SHORT: [&str; 4] = ["--duration", "20ms", "--runs", "1"];

fn short<'a>(args: &[&'a str]) -> Vec<&'a str> {
    [args, &SHORT].concat()
}

#[track_caller]
fn balances(report: &Value) {
    for pool in ["pool", "page", "frags"] {
        let pool = &report[pool];
        assert_eq!(pool["allocated"], pool["returned"], "{pool}");
        assert_eq!(pool["mapped"], pool["unmapped"], "{pool}");
        assert_eq!((&pool["inflight"], &pool["leaked"]), (&0.into(), &0.into()), "{pool}");
    }
}

/// A driver that sleeps is woken for packets at a fixed rate, whichever way it asks for signals,
/// and the report has how often.
#[test]
fn a_driver_that_sleeps() {
    let report = json(&run(&["--spin", "20", "--rate", "500", "--duration", "0.2", "--json"]));
    schema::fits("crates/cli/schema/perf.json", &report);
    let rows = report["rows"].as_array().unwrap();
    let events: Vec<_> = rows.iter().map(|row| row["events"].as_str().unwrap()).collect();
    assert_eq!(events, ["flag", "index"]);
    for row in rows {
        let [wakeups, sleeps] = ["wakeups", "sleeps"].map(|key| row[key].as_u64().unwrap());
        assert!(wakeups > 0 && wakeups <= sleeps, "{row}");
        assert!(row["signals_per_packet"].as_f64().unwrap() > 0.0, "{row}");
        let q = &row["idle_to_busy_ns"];
        let [p50, max] = ["p50", "max"].map(|key| q[key].as_u64().unwrap());
        assert!(p50 > 100 && p50 <= max, "{row}");
        let counted: u64 = row["histogram"].as_array().unwrap().iter().map(|step| step[1].as_u64().unwrap()).sum();
        assert!(counted > 0 && counted <= wakeups, "{row}");
    }
    let output = run(&["--spin", "20", "--rate", "500", "--duration", "0.1"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("idle to busy at 500 packets/s, index:"), "{text}");
}

/// The contract of `--json`; proves PERF-3, and POOL-1 and POOL-5 as a user sees them.
#[test]
fn json_fulfils_the_contract_and_pages_balance() {
    let report = json(&run(&short(&["--json"])));
    schema::fits("crates/cli/schema/perf.json", &report);
    assert_eq!((&report["netmem"], &report["command"]), (&env!("CARGO_PKG_VERSION").into(), &"perf".into()));
    for key in ["cpus", "kernel", "percpu", "hugepages"] {
        assert!(!report["machine"][key].is_null(), "{key}");
    }
    assert_eq!(report["params"]["runs"], 1);
    let rows = report["variants"].as_array().unwrap();
    let names: Vec<_> = rows.iter().map(|r| format!("{} {} {}", r["name"], r["alloc"], r["consumer"])).collect();
    assert_eq!(rows.len(), 12, "{names:?}");
    for row in rows {
        assert_eq!((&row["unit"], &row["runs"], &row["queues"]), (&"packets/s".into(), &1.into(), &1.into()));
        for key in ["median", "min", "max", "ns_per_packet", "bits_per_s"] {
            assert!(row[key].as_f64().unwrap() > 0.0, "{key} of {row}");
        }
        // In so short a time the device may have got none of the CPU's.
        assert!(row["device_ns_per_packet"].is_number(), "{row}");
        assert_eq!(row["change_pct"].is_number(), row["alloc"] == "pool", "{row}");
        assert_eq!(row["bytes"], row["frames"].as_u64().unwrap() * row["size"].as_u64().unwrap());
    }
    balances(&report);
    let [pool, page] = ["pool", "page"].map(|pool| report[pool].clone());
    assert!(pool["errors"].is_object() && pool["allocated"].as_u64() > pool["mapped"].as_u64(), "{pool}");
    assert_eq!(page["allocated"], page["mapped"], "a page per packet maps each of them");
    let frags = ["allocated", "mapped"].map(|key| report["frags"][key].as_u64().unwrap());
    assert!(frags[1] > 0 && frags[1] <= frags[0] / 8, "blocks are mapped, not buffers: {frags:?}");
    // The pool against each of both, and the kernel's gains where packets are dropped in the poll
    // context.
    let compared = report["comparisons"].as_array().unwrap();
    assert_eq!(compared.len(), 8, "{compared:?}");
    assert!(compared.iter().all(|c| c["rate"]["median_pct"].is_number() && c["ns"]["median_pct"].is_number()));
    let goals = report["goals"].as_array().unwrap();
    let of = |judged: &str| goals.iter().filter(|goal| goal["judged"] == judged).count();
    assert_eq!((of("range"), of("median")), (8, 6), "{goals:?}");
    goals.iter().for_each(as_its_value_says);
}

/// A goal that was measured is reached or missed as its value and its bound say.
#[track_caller]
fn as_its_value_says(goal: &Value) {
    let [bound, median, min, max] = ["/bound", "/value/median", "/value/min", "/value/max"]
        .map(|at| goal.pointer(at).and_then(Value::as_f64).unwrap_or_else(|| panic!("{at} of {goal}")));
    assert!(min <= median && median <= max, "{goal}");
    let whole = goal["judged"] == "range";
    let reached = match goal["at_least"].as_bool().unwrap() {
        true => (if whole { min } else { median }) >= bound,
        false => (if whole { max } else { median }) <= bound,
    };
    assert_eq!(goal["verdict"], if reached { "reached" } else { "missed" }, "{goal}");
}

/// `--check` fails for a missed goal and for a skipped row, after the report.
#[test]
fn check_fails_for_missed_goals_and_for_skipped_rows() {
    let check = |args: &[&str]| {
        let output = run(&short(&[args, &["--json"]].concat()));
        let report: Value =
            serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {}", errors(&output)));
        schema::fits("crates/cli/schema/perf.json", &report);
        (output.status.code(), errors(&output), report["goals"].as_array().unwrap().clone())
    };
    // Big-packet mode has no pool: two of the three rows are skipped, and with them the goals of
    // both pairs.
    let (status, err, goals) = check(&["--mode", "big", "--check"]);
    assert!(goals.iter().all(|goal| goal["verdict"] == "skipped") && goals.len() == 2, "{goals:?}");
    let says = "goals missed: 0; goals of which a row was skipped: 2; rows skipped: 2: --check makes that an error";
    assert!(status == Some(1) && err.contains(says), "{err}");
    assert_eq!(check(&["--mode", "big"]).0, Some(0));
    // Missed or reached: the status is as the goals say.
    let (status, err, goals) = check(&["--mode", "small", "--check"]);
    goals.iter().for_each(as_its_value_says);
    let missed = goals.iter().filter(|goal| goal["verdict"] == "missed").count();
    assert_eq!(status, Some(i32::from(missed > 0)), "{err}");
    assert!(missed == 0 || err.contains(&format!("goals missed: {missed};")), "{err}");
    // One row alone is compared with nothing.
    let (status, err, goals) = check(&["--mode", "small", "--alloc", "pool", "--check"]);
    assert!(status == Some(0) && goals.is_empty(), "{err}");
    // A goal that a measurement cannot have is no goal that it reaches.
    for args in [&["--spin", "20"][..], &["--proto", "tcp"], &["--against", env!("CARGO_BIN_EXE_netmem")]] {
        fails(&[&["--check"], args].concat(), 2, &["--check"]);
    }
}

#[test]
fn every_mode_verdict_consumer_and_number_of_queues() {
    for args in [
        &["--mode", "big"][..],
        &["--mode", "mergeable", "--size", "60,65549"],
        &["--mode", "small", "--size", "1518", "--xdp", "drop", "--queues", "1,3"],
        &["--mode", "small", "--xdp", "tx"],
        &["--mode", "mergeable", "--consumer", "other", "--size", "9000", "--queues", "2"],
        &["--mode", "small", "--ring", "1024"],
    ] {
        let report = json(&run(&[&short(args)[..], &["--json"]].concat()));
        balances(&report);
        for row in report["variants"].as_array().unwrap() {
            assert!(row["skipped"].is_string() || row["frames"].as_u64().unwrap() > 0, "{row}");
        }
    }
}

#[test]
fn one_cpu_is_enough() {
    if let Err(why) = installed(&["taskset"]) {
        return skip(&why);
    }
    let mask = ["-c", "0", env!("CARGO_BIN_EXE_netmem")];
    let args = short(&["--mode", "small", "--consumer", "other", "--json"]);
    let mut reports = Vec::new();
    // The driver's own time is without the time that it lends to the device: both together cannot
    // take more than there is. If another program gets the CPU in the middle of a pass of the
    // device, the device's time is too long. So one of several reports must hold.
    let holds = |report: &Value| {
        report["variants"].as_array().unwrap().iter().all(|row| {
            let [driver, device, rate] =
                ["ns_per_packet", "device_ns_per_packet", "median"].map(|key| row[key].as_f64().unwrap());
            (driver + device) * rate < 1e9
        })
    };
    while reports.len() < 20 && !reports.last().is_some_and(holds) {
        let output = Command::new("taskset").args(mask).args(&args).output().unwrap();
        reports.push(json(&output));
        balances(&reports[reports.len() - 1]);
    }
    assert!(reports.last().is_some_and(holds), "{reports:?}");
}

#[test]
fn the_table_fits_and_names_the_machine() {
    let output = run(&short(&["perf", "--mode", "small"]));
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && (table.contains("percpu rseq") || table.contains("percpu portable")), "{table}");
    assert!(table.contains("small-64") && table.contains("leaked 0"), "{table}");
    let rows = table.lines().filter(|line| line.starts_with("small") || line.starts_with("variant"));
    assert!(rows.map(|line| line.chars().count()).max() <= Some(100), "{table}");
}

#[test]
fn bad_arguments_end_in_status_2() {
    for (args, says) in [
        (&["--size", "59"][..], "59"),
        (&["--mode", "small", "--size", "1519"], "1518"),
        (&["--size", "64k"], "64k"),
        (&["--queues", "0"], "--queues 0"),
        (&["--queues", "128"], "127"),
        (&["--consumer", "4095"], "CPU 4095"),
        (&["--cpus", "net=4095"], "CPU 4095"),
        (&["--duration", "5m"], "suffix `m`"),
        (&["--device", "xsk:"], "name of an interface"),
        (&["--against", "/nowhere/netmem"], "/nowhere/netmem"),
        (&["--ring", "100"], "power of two"),
        (&["device", "--listen", "/tmp/x", "--port", "gen", "--size", "1"], "--size 1"),
        (&["device", "--listen", "/tmp/x", "--port", "gen", "--queues", "0"], "--queues 0"),
        (&["device", "--listen", "/tmp/x", "--port", "gen", "--cpu", "4095"], "CPU 4095"),
        (&["device", "--port", "gen"], "--listen"),
        (&["frobnicate"], "frobnicate"),
    ] {
        fails(args, 2, &[says]);
    }
}

#[test]
fn captures_that_cannot_be_played_are_named() {
    let dir = tempfile::tempdir().unwrap();
    for (name, records, says) in [
        ("cut.pcap", &[(60, 60), (60, 20)][..], "record 2"),
        ("none.pcap", &[], "no frames"),
        ("empty.pcap", &[(0, 0)], "record 1"),
        ("long.pcap", &[(60, 60), (60, 60), (65550, 65550)], "record 3"),
    ] {
        fails(&["--port", &capture(dir.path(), name, records)], 1, &[name, says]);
    }
    fails(&["--port", "pcap:/nowhere/x.pcap"], 1, &["/nowhere/x.pcap"]);
    // An open of a pipe would wait for its writer.
    let pipe = dir.path().join("pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR).unwrap();
    let port = format!("pcap:{}", pipe.display());
    fails(&["--port", &port], 1, &["no process writes"]);
    fails(&["device", "--listen", "/tmp/x", "--port", &port], 1, &["no process writes"]);
}

#[test]
fn a_capture_is_replayed() {
    let dir = tempfile::tempdir().unwrap();
    let port = capture(dir.path(), "mixed.pcap", &[(60, 60), (1514, 1514), (9000, 9000), (65549, 65549)]);
    for mode in ["small", "mergeable", "big"] {
        let report = json(&run(&short(&["--port", &port, "--mode", mode, "--json"])));
        balances(&report);
        let row = report["variants"].as_array().unwrap().iter().find(|row| row["skipped"].is_null()).unwrap();
        assert!(row["frames"].as_u64() > Some(0) && row["name"] == format!("{mode}-pcap"), "{row}");
        // Two of the four do not fit a small buffer.
        assert_eq!(row["device_drops"]["too_big"].is_number(), mode == "small", "{row}");
    }
}

#[test]
fn backends_that_are_none() {
    fails(&["--device", "vhost-user:/nowhere/x.sock"], 1, &["/nowhere/x.sock", "start the backend"]);
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("http.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let server = std::thread::spawn(move || {
        use std::io::Write;
        let (mut stream, _) = listener.accept().unwrap();
        let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n");
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let device = format!("vhost-user:{}", socket.display());
    fails(&["--device", &device], 1, &["vhost-user"]);
    server.join().unwrap();
}

#[test]
fn a_device_serves_one_front_end_after_another_and_leaves_nothing() {
    let (mut device, socket, dir) = device("gen");
    let backend = format!("vhost-user:{}", socket.display());
    for mode in ["small", "mergeable"] {
        let report = json(&run(&short(&["--device", &backend, "--mode", mode, "--size", "64", "--json"])));
        balances(&report);
        let rows = report["variants"].as_array().unwrap();
        assert!(rows.iter().all(|row| row["frames"].as_u64() > Some(0) && row["device_ns_per_packet"].is_null()));
    }
    fails(&short(&["--device", &backend, "--queues", "2"]), 1, &["2 queue pairs", "has 1"]);
    device.signal(Signal::TERM);
    let (status, out, err) = device.end();
    assert_eq!(status, Some(0), "{err}");
    // Each of two modes with three allocators, and the one that wanted more.
    assert_eq!(out.lines().filter(|line| line.starts_with("front end left")).count(), 7, "{out}");
    assert_eq!(dir.path().read_dir().unwrap().count(), 0);
}

/// The driver listens and the device connects, again for each run.
#[test]
fn a_back_end_may_connect_to_the_driver() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("driver.sock");
    let path = socket.to_str().unwrap();
    let mut device = background(&["device", "--connect", path, "--port", "gen"]);
    let listen = format!("vhost-user-listen:{path}");
    let args = ["--device", &listen, "--mode", "small", "--size", "64", "--duration", "20ms", "--runs", "2", "--json"];
    let report = json(&run(&args));
    balances(&report);
    assert_eq!(report["params"]["device"], listen);
    let rows = report["variants"].as_array().unwrap();
    assert!(rows.len() == 3 && rows.iter().all(|row| row["frames"].as_u64() > Some(0)), "{report}");
    assert!(!socket.exists(), "it is removed");
    device.signal(Signal::TERM);
    assert_eq!(device.end().0, Some(0));
    // No back end comes: a signal ends the wait.
    let mut waits = background(&["--device", &listen]);
    waits.says(&format!("listening on {path}: waiting for a back end to connect"));
    assert!(socket.exists());
    waits.signal(Signal::INT);
    let (status, _, err) = waits.end();
    assert!(status == Some(130) && err.contains("interrupted"), "{err}");
}

#[test]
fn the_driver_uses_a_descriptor() {
    let (front, back) = std::os::unix::net::UnixStream::pair().unwrap();
    let mut device = with_descriptor(back, &["device", "--port", "gen"]);
    let args = ["--mode", "small", "--alloc", "pool", "--size", "64", "--duration", "20ms", "--runs", "1"];
    let (status, out, err) = with_descriptor(front, &args).end();
    assert_eq!(status, Some(0), "{err}");
    assert!(out.contains("leaked 0"), "{out}");
    assert_eq!(device.end().0, Some(0));
    fails(&[&["--fd", "777"][..], &args].concat(), 1, &["--fd 777", "no such descriptor"]);
}

#[test]
fn sockets_that_are_taken_and_sockets_that_are_stale() {
    let (first, socket, dir) = device("sink");
    let path = socket.to_str().unwrap();
    fails(&["device", "--listen", path, "--port", "gen"], 1, &[path, "another process listens"]);
    drop(first);
    assert!(socket.exists(), "it was killed");
    let mut second = background(&["device", "--listen", path, "--port", "echo"]);
    await_that(|| std::os::unix::net::UnixStream::connect(&socket).is_ok());
    second.signal(Signal::INT);
    assert_eq!(second.end().0, Some(0));
    assert!(!socket.exists());
    let file = dir.path().join("file");
    std::fs::write(&file, "precious").unwrap();
    fails(&["device", "--listen", file.to_str().unwrap(), "--port", "gen"], 1, &["no socket"]);
    assert_eq!(std::fs::read(&file).unwrap(), b"precious");
    fails(&["device", "--listen", "/nowhere/x.sock", "--port", "gen"], 1, &["/nowhere/x.sock"]);
}

#[test]
fn a_backend_that_dies_ends_the_run() {
    let mut device = Device::start(&["--port", "gen"]);
    let backend = format!("vhost-user:{}", device.socket.display());
    let mut perf = background(&["--device", &backend, "--mode", "small", "--alloc", "pool", "--duration", "15"]);
    // More than a ring holds: the driver has probed the device, and polls.
    await_that(|| device.stats()["counters"]["rx_frames"].as_u64() > Some(1 << 16));
    device.process.0.kill().unwrap();
    let (status, _, err) = perf.end();
    assert_eq!(status, Some(1), "{err}");
    assert!(err.contains("hung up") && err.contains(device.socket.to_str().unwrap()), "{err}");
}

/// A back end that breaks the rules of a ring that nothing is sent on, or that does not stop: the
/// run fails, although frames came and every other page came back.
#[test]
fn a_backend_that_breaks_a_ring_fails_the_run() {
    for (lie, says) in
        [(Lie::None, ""), (Lie::TransmitIndex, "broke the rules of a ring"), (Lie::NoStop, "did not confirm")]
    {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("lie.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let backend = std::thread::spawn(move || crate::liar::serve(&listener.accept().unwrap().0, lie));
        let device = format!("vhost-user:{}", socket.display());
        let args = short(&["--device", &device, "--mode", "small", "--alloc", "pool", "--json"]);
        if lie == Lie::None {
            balances(&json(&run(&args)));
        } else {
            fails(&args, 1, &["small-vhost-user pool", says]);
        }
        backend.join().unwrap();
    }
}

#[test]
fn a_backend_without_traffic_is_not_a_measurement() {
    let (_device, socket, _dir) = device("sink");
    let backend = format!("vhost-user:{}", socket.display());
    fails(&short(&["--device", &backend, "--mode", "small"]), 1, &["no packets"]);
}

#[test]
fn signals_end_a_run_in_order() {
    for (signal, ends) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let mut perf = background(&["--duration", "15", "--mode", "small"]);
        let threads = PathBuf::from(format!("/proc/{}/task", perf.0.id()));
        let names =
            |task: std::io::Result<std::fs::DirEntry>| std::fs::read_to_string(task.ok()?.path().join("comm")).ok();
        await_that(|| threads.read_dir().unwrap().filter_map(names).any(|name| name == "netmem-driver\n"));
        // A device thread, a driver thread and the one that speaks vhost-user, and none of them
        // detached.
        perf.signal(signal);
        let (status, out, err) = perf.end();
        assert_eq!(status, Some(ends), "{err}");
        assert!(err.contains("interrupted") && out.contains("interrupted") && out.contains("no run"), "{err}{out}");
    }
}

#[test]
fn two_builds_are_compared() {
    let this = env!("CARGO_BIN_EXE_netmem");
    let args = ["--against", this, "--mode", "small", "--duration", "10ms", "--runs", "2", "--json"];
    let report = json(&run(&args));
    schema::fits("crates/cli/schema/perf.json", &report);
    let rows = report["compared"].as_array().unwrap();
    // Packets per second and driver time of three rows. Two pairs show nothing.
    assert_eq!((rows.len(), &report["pairs"]), (6, &2.into()));
    assert!(rows.iter().all(|row| row["change"]["interval"].is_array() && row["other_median"].as_f64() > Some(0.0)));
    assert!(rows.iter().all(|row| row["verdict"] == "no_difference" && row["p"] == 1.0), "{report}");
    let args = "perf --against THIS --proto tcp --rr 64,64 --duration 50ms --runs 2";
    let text = run(&args.split(' ').map(|arg| if arg == "THIS" { this } else { arg }).collect::<Vec<_>>());
    let text = String::from_utf8_lossy(&text.stdout);
    // At matched throughput, too.
    assert!(text.contains("tcp-rr-netmem-netmem ") && text.contains("tcp-rr-netmem-netmem at "), "{text}");
    assert!(text.contains("too few") && text.contains("no difference"), "{text}");
    fails(&["--against", "/bin/false", "--duration", "10ms", "--runs", "1"], 1, &["/bin/false", "failed"]);
    fails(&["--against", "/bin/true", "--duration", "10ms", "--runs", "1"], 1, &["/bin/true", "JSON"]);
}

/// The system's error is in a message once, and the advice with it.
#[test]
fn an_error_of_the_system_is_printed_once() {
    for args in [
        &["perf", "--device", "vhost-user:/nonexistent/s"][..],
        &["device", "--port", "gen", "--listen", "/nonexistent/s"],
        &["device", "--port", "pcap:/nonexistent/s", "--listen", "/nonexistent/s"],
    ] {
        let output = run(args);
        let said = errors(&output);
        assert_eq!(said.matches("(os error 2)").count(), 1, "{args:?}: {said}");
        assert!(!output.status.success() && said.matches("No such file").count() == 1, "{args:?}: {said}");
    }
}

#[test]
fn info_tells_what_there_is() {
    let info = json(&run(&["info", "--json"]));
    for key in ["kernel", "cpus_online", "percpu", "membarrier", "hugepages", "af_xdp", "capabilities"] {
        assert!(!info[key].is_null(), "{key}");
    }
    let text = run(&["info"]);
    assert!(text.status.success() && String::from_utf8_lossy(&text.stdout).contains("per CPU"));
}

/// The options that the lines of a help text begin with.
fn options(help: &str) -> Vec<String> {
    let line = |line: &str| {
        // Some have a short form before: `-h, --help`.
        let (short, option) = line.trim_start().split_once("--")?;
        let end = option.find(|c: char| c != '-' && !c.is_ascii_alphanumeric()).unwrap_or(option.len());
        (line.starts_with("  ") && (short.is_empty() || short.starts_with('-'))).then(|| option[..end].to_owned())
    };
    help.lines().filter_map(line).collect()
}

/// A package has a man page for each subcommand with each of its options, and completions that know
/// them.
#[test]
fn man_pages_and_completions_name_every_subcommand_and_option() {
    let help = String::from_utf8(run(&["--help"]).stdout).unwrap();
    let listed = help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let names: Vec<&str> =
        listed.filter_map(|line| line.split_whitespace().next()).filter(|&name| name != "help").collect();
    assert!(names.contains(&"perf") && !names.contains(&"pages"), "{help}");

    let dir = tempfile::tempdir().unwrap();
    let output = run(&["pages", dir.path().to_str().unwrap()]);
    assert!(output.status.success(), "{}", errors(&output));
    let read = |file: &str| std::fs::read_to_string(dir.path().join(file)).unwrap_or_else(|e| panic!("{file}: {e}"));
    // In a man page, a hyphen is `\-`.
    let main = read("man1/netmem.1");
    for name in &names {
        assert!(main.contains(&format!("netmem\\-{name}(1)")), "{name}: {main}");
        let page = read(&format!("man1/netmem-{name}.1"));
        assert!(page.contains(&format!("netmem\\-{name}")), "{name}");
        let help = String::from_utf8(run(&[name, "--help"]).stdout).unwrap();
        let options = options(&help);
        assert!(
            options.contains(&"help".into()) && options.len() > usize::from(*name != "link"),
            "{name}: {options:?}"
        );
        let bash = read("completions/netmem.bash");
        let (_, case) = bash.split_once(&format!("        netmem__subcmd__{name})\n")).unwrap();
        let known = case.lines().next().unwrap();
        for option in options {
            assert!(page.contains(&format!("\\-\\-{}", option.replace('-', "\\-"))), "{name} --{option}: {page}");
            assert!(known.split([' ', '"']).any(|word| word == format!("--{option}")), "{name} --{option}: {known}");
        }
    }
    for file in ["netmem.bash", "_netmem", "netmem.fish", "netmem.elv", "_netmem.ps1"] {
        let completions = read(&format!("completions/{file}"));
        for name in &names {
            assert!(completions.contains(name), "{file}: {name}");
        }
        assert!(completions.contains("against"), "{file}");
    }
}

/// `info` shows the mode of per-CPU data that was forced. With one that cannot be had, the command
/// fails.
#[test]
fn info_shows_a_forced_mode() {
    let info = |mode: &str| netmem().env("NETMEM_PERCPU", mode).args(["info", "--json"]).output().unwrap();
    let portable = json(&info("portable"));
    assert_eq!(portable["percpu"]["mode"], "portable");
    assert_eq!(portable["percpu"]["why_not"], "NETMEM_PERCPU=portable");
    let unknown = info("fast");
    assert!(!unknown.status.success());
    assert!(errors(&unknown).contains("NETMEM_PERCPU: unknown mode \"fast\""), "{}", errors(&unknown));
    // A mode that the machine has not, too: `.ci/run` asks this way which modes it has.
    let off =
        netmem().env("GLIBC_TUNABLES", "glibc.pthread.rseq=0").env("NETMEM_PERCPU", "cpu_id").arg("info").output();
    let off = off.unwrap();
    assert!(!off.status.success() && off.stdout.is_empty(), "{off:?}");
    assert_eq!(errors(&off).matches("NETMEM_PERCPU: cpu_id is not available").count(), 1, "{}", errors(&off));
}

/// What the kernel sends into a tap is received; a tap in use is not taken, and none is left
/// behind.
#[test]
fn taps_come_and_go() {
    let name = format!("nmc{}", std::process::id() % 100_000_000);
    let port = format!("tap:{name}");
    let interface = PathBuf::from(format!("/sys/class/net/{name}"));
    let mut perf = background(&["--port", &port, "--alloc", "pool", "--duration", "15", "--json"]);
    let mut ended = None;
    await_that(|| {
        ended = perf.0.try_wait().unwrap();
        interface.exists() || ended.is_some()
    });
    if ended.is_some() {
        let (status, _, err) = perf.end();
        assert_eq!(status, Some(1));
        assert!(err.contains(&name), "{err}");
        return skip(&format!("no tap can be had here: {}", err.trim()));
    }
    fails(&["--port", &port, "--duration", "1"], 1, &[&name, "taken"]);
    let sent = || std::fs::read_to_string(interface.join("statistics/tx_packets")).unwrap_or_default();
    // The kernel's IPv6 sends packets on every new link.
    std::thread::sleep(Duration::from_millis(1500));
    let sent: u64 = sent().trim().parse().unwrap();
    perf.signal(Signal::INT);
    let (status, out, err) = perf.end();
    assert_eq!(status, Some(0), "{err}");
    assert!(err.contains("ready"), "{err}");
    let report: Value = serde_json::from_str(&out).unwrap();
    balances(&report);
    let row = &report["variants"][0];
    assert!(row["frames"].as_u64().unwrap() + row["dropped"].as_u64().unwrap() >= sent, "{row}");
    assert!(!interface.exists());
}
