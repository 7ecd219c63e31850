//! `--pcap`: captures of what crosses the ports, read back by tshark.

use crate::command::netns::{Namespace, missing, name, printed};
use crate::command::*;
use std::path::Path;
use std::process::Command;

/// How many packets of a capture a filter of Wireshark's shows.
fn count(file: &Path, filter: &str) -> usize {
    shown(file, filter).len()
}

/// The packets of a capture that a filter of Wireshark's shows: number, time, comment, summary.
fn shown(file: &Path, filter: &str) -> Vec<String> {
    let mut tshark = Command::new("tshark");
    // Checksums are not verified unless asked for.
    tshark.args(["-n", "-o", "tcp.check_checksum:TRUE", "-o", "ip.check_checksum:TRUE", "-r"]).arg(file);
    let fields = ["frame.number", "frame.time_relative", "frame.comment", "_ws.col.Info"];
    tshark.args(["-Y", filter, "-T", "fields"]).args(fields.iter().flat_map(|field| ["-e", field]));
    let output = tshark.output().unwrap();
    assert!(output.status.success(), "{filter}: {}", errors(&output));
    String::from_utf8_lossy(&output.stdout).lines().map(Into::into).collect()
}

/// Flows between two stacks over a link that loses packets: each packet is there once, lost ones
/// with the reason, and all checksums are right.
#[test]
fn flows_over_a_bad_link_are_captured() {
    if let Err(why) = installed(&["tshark"]) {
        return skip(&why);
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("flows.pcapng");
    let args = "perf --proto tcp --rr 64,2000 --duration 100ms --runs 1 --link loss=5%,seed=3 --json --pcap";
    let report = json(&run(&args.split(' ').chain([file.to_str().unwrap()]).collect::<Vec<_>>()));
    let sum = |event: &str| ["to_driver", "from_driver"].map(|way| report["link"][way][event].as_u64().unwrap());
    let (lost, received) = (sum("lost").iter().sum::<u64>() as usize, sum("received").iter().sum::<u64>() as usize);
    assert!(lost > 0 && report["link"]["refused"] == 0, "{report}");
    assert_eq!(count(&file, "frame.comment == \"dropped: lost on the link\""), lost, "{report}");
    // What had arrived when the run ended may not have been received.
    let whole = count(&file, "!frame.comment");
    assert!(whole <= received && received <= whole + 64, "{whole} packets: {report}");
    assert!(count(&file, "tcp.len == 64 && frame.packet_flags_direction == 2") > 0, "requests are outbound");
    assert!(count(&file, "tcp.len > 0 && frame.packet_flags_direction == 1") > 0, "answers are inbound");
    assert_eq!(count(&file, "tcp.checksum.status == 0 || ip.checksum.status == 0"), 0);
    assert_eq!(count(&file, "!tcp && !arp && !icmpv6"), 0);
}

/// The kernel's traffic with a server, which loses nothing.
#[test]
fn a_servers_packets_are_captured() {
    if let Err(why) = missing().and(installed(&["tshark"])) {
        return skip(&why);
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("serve.pcapng");
    let (tap, clients) = (name(), Namespace::new().unwrap());
    let port = format!("tap:{tap}");
    let args = ["serve", "echo", "--port", &port, "--addr", "10.79.0.2/24", "--pcap", file.to_str().unwrap()];
    let mut server = background(&args);
    server.says("ready: echo");
    clients.takes(&tap, &["10.79.0.1/24"]);
    let echo = "import socket\ns = socket.create_connection((\"10.79.0.2\", 7), 60)\ns.sendall(b'x' * 20000)\n\
                n = 0\nwhile n < 20000: n += len(s.recv(20000))\ns.close()\n";
    printed(clients.python(echo, &[]));
    server.signal(Signal::TERM);
    let (status, out, err) = server.end();
    assert_eq!(status, Some(0), "{err}");
    assert!(out.contains("served 1 connections") && !out.contains("link to the driver"), "{out}");
    // Packets, not large segments, and both of the ends.
    let wrong = shown(&file, "tcp.len > 1460 || tcp.checksum.status == 0 || frame.comment");
    assert!(wrong.is_empty(), "{wrong:#?} of {:#?}", shown(&file, ""));
    assert_eq!(count(&file, "tcp.flags.syn == 1"), 2);
    assert!(count(&file, "tcp.dstport == 7 && tcp.len > 0 && frame.packet_flags_direction == 1") >= 14);
    assert!(count(&file, "tcp.srcport == 7 && tcp.len > 0 && frame.packet_flags_direction == 2") >= 14);
}

#[test]
fn captures_that_cannot_be_written() {
    let device = ["device", "--listen", "/nowhere/device", "--port", "echo", "--pcap"];
    fails(&[&device[..], &["/nowhere/file"]].concat(), 1, &["--pcap /nowhere/file", "No such file"]);
    let perf = ["perf", "--proto", "tcp", "--duration", "50ms", "--runs", "1", "--pcap"];
    // What was measured is printed all the same.
    let (status, out, err) = background(&[&perf[..], &["/dev/full"]].concat()).end();
    assert!(status == Some(1) && err.contains("--pcap /dev/full") && err.contains("No space left"), "{err}");
    assert!(out.contains("b/s"), "{out}");
    fails(&["perf", "--device", "vhost-user:/x", "--pcap", "/x"], 2, &["--pcap", "`netmem device`"]);
}
