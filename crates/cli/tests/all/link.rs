//! `--link` and `netmem link`: traffic of the kernel over a bad link.

use crate::command::netns::{Namespace, missing, name, printed};
use crate::command::*;
use std::path::Path;

/// Receives a stream and prints its hash, and how many segments with a wrong checksum came.
const RECEIVE: &str = r#"
import hashlib, socket, sys
s = socket.create_server(("::", 4000), family=socket.AF_INET6, dualstack_ipv6=True)
s.settimeout(60)
for _ in range(int(sys.argv[1])):
    c, _ = s.accept()
    c.settimeout(60)
    h = hashlib.sha256()
    while d := c.recv(1 << 16):
        h.update(d)
    c.sendall(h.hexdigest().encode())
    c.close()
names, values = [l.split() for l in open("/proc/net/snmp") if l.startswith("Tcp:")]
print(values[names.index("InCsumErrors")])
"#;

/// Sends bytes by a seed, and compares the hash that comes back.
const SEND: &str = r#"
import hashlib, random, socket, time, sys
data = random.Random(7).randbytes(int(sys.argv[2]))
for n in range(500):
    try:
        c = socket.create_connection((sys.argv[1], 4000), 60)
        break
    except OSError:
        time.sleep(0.02)
c.sendall(data)
c.shutdown(socket.SHUT_WR)
got = b"".join(iter(lambda: c.recv(100), b""))
sys.exit(0 if got == hashlib.sha256(data).hexdigest().encode() else "the bytes differ")
"#;

fn exists(name: &str) -> bool {
    Path::new("/sys/class/net").join(name).exists()
}

/// The number before `what` in a line of counts.
fn count(line: &str, what: &str) -> u64 {
    let part = line.split([',', ':']).find_map(|part| part.trim().strip_suffix(what));
    part.unwrap_or_else(|| panic!("no `{what}` in: {line}")).trim().parse().unwrap()
}

/// TCP of the kernel, between two namespaces, over a link with every fault: each byte is right,
/// over IPv4 and IPv6, and damaged packets are found by their checksums.
#[test]
fn kernel_meets_kernel_over_a_bad_link() {
    if let Err(why) = missing() {
        return skip(&why);
    }
    let (left, right) = (Namespace::new().unwrap(), Namespace::new().unwrap());
    let taps = [name(), name()];
    let [a, b] = taps.each_ref().map(|tap| format!("tap:{tap}"));
    let link = "loss=2%,delay=1ms,jitter=500us,reorder=1%,duplicate=1%,corrupt=2%,rate=200M,seed=7";
    let mut netmem = background(&["link", &a, &b, "--link", link]);
    // It has set up both taps then, and needs them no longer to be in this namespace.
    netmem.says("tap:");
    assert!(taps.iter().all(|tap| exists(tap)));
    left.takes(&taps[0], &["10.77.0.1/24", "fd77::1/64"]);
    right.takes(&taps[1], &["10.77.0.2/24", "fd77::2/64"]);
    let receiver = right.python(RECEIVE, &["2"]);
    for address in ["10.77.0.2", "fd77::2"] {
        printed(left.python(SEND, &[address, "1000000"]));
    }
    let damaged: u64 = printed(receiver).trim().parse().unwrap();
    assert!(damaged > 0, "no damaged segment was seen");
    netmem.signal(Signal::TERM);
    let (status, out, err) = netmem.end();
    assert_eq!(status, Some(0), "{err}");
    let lines: Vec<_> = out.lines().collect();
    assert!(lines[0].starts_with(&format!("{a} to {b}: ")) && lines[1].starts_with(&format!("{b} to {a}: ")), "{out}");
    // Of at least 1400 packets with data; the way back has acknowledgements.
    for what in ["lost", "duplicated", "reordered", "corrupted"] {
        assert!(count(lines[0], what) > 0, "{out}");
    }
    let [sent, received, lost, duplicated] =
        ["sent", "received", "lost", "duplicated"].map(|what| count(lines[0], what));
    assert!(sent > 1400 && sent - lost + duplicated >= received, "{out}");
}

#[test]
fn a_link_is_between_two_taps() {
    let good = ["link", "tap:a", "tap:b", "--link", "loss=1%"];
    fails(&[&good[..2], &["echo"], &good[3..]].concat(), 2, &["echo", "tap:NAME"]);
    fails(&[&good[..4], &["loss=1"]].concat(), 2, &["percent sign"]);
    fails(&[&good[..4], &["reorder=1%"]].concat(), 2, &["needs a delay"]);
}

/// A device reports what happened on its link, while it runs and at its end; `perf` does, too.
#[test]
fn faults_are_reported() {
    let device = Device::start(&["--port", "gen", "--link", "loss=20%,seed=3"]);
    device.serves_perf();
    let report = device.stats();
    let counter = |direction: &str, name: &str| report["link"][direction][name].as_u64().unwrap();
    let (sent, lost) = (counter("to_driver", "sent"), counter("to_driver", "lost"));
    assert!(sent > 0 && (sent / 10..sent / 2).contains(&lost), "{report}");
    assert_eq!((&report["link"]["options"], &report["link"]["refused"]), (&"loss=20%,seed=3".into(), &0.into()));
    assert_eq!(counter("from_driver", "sent"), 0);
    let Device { mut process, .. } = device;
    process.signal(Signal::TERM);
    let (status, out, err) = process.end();
    assert!(
        status == Some(0) && out.contains("link to the driver: ") && out.contains("refused by the port"),
        "{out}{err}"
    );

    let perf = ["--mode", "small", "--alloc", "pool", "--duration", "20ms", "--runs", "1", "--link", "duplicate=50%"];
    let report = json(&run(&[&perf[..], &["--json"]].concat()));
    let [sent, duplicated] = ["sent", "duplicated"].map(|name| report["link"]["to_driver"][name].as_u64().unwrap());
    assert!((sent / 4..sent).contains(&duplicated), "{report}");
    let text = run(&perf);
    assert!(String::from_utf8_lossy(&text.stdout).contains("link to the driver: "));
}
