//! `netmem bench` from outside: what it prints and writes, and how it refuses.
#![allow(clippy::unwrap_used, missing_docs)]

mod command;
mod schema;

use command::{Background, Signal, errors, run};
use serde_json::Value;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// As few and as short runs as there can be.
const SHORT: [&str; 4] = ["--duration", "1ms", "--runs", "2"];

#[track_caller]
fn short(args: &[&str]) -> String {
    let output = run(&[args, &SHORT].concat());
    assert!(output.status.success(), "{}: {}", output.status, errors(&output));
    String::from_utf8(output.stdout).unwrap()
}

#[track_caller]
fn figures(row: &Value) -> [f64; 3] {
    ["median", "min", "max"].map(|key| row[key].as_f64().unwrap_or_else(|| panic!("{key} of {row}")))
}

/// Every goal has the verdict that its value says. How many goals have a value.
#[track_caller]
fn verdicts(report: &Value) -> usize {
    let goals = report["goals"].as_array().unwrap();
    let measured = goals.iter().filter(|goal| match goal.get("value") {
        None => {
            assert!(["skipped", "not run"].iter().any(|word| goal["verdict"] == *word), "{goal}");
            assert!(!goal["why"].as_str().unwrap().is_empty(), "{goal}");
            false
        }
        Some(value) => {
            let (median, bound) = (figures(value)[0], goal["bound"].as_f64().unwrap());
            assert_eq!(goal["judged"], "median", "{goal}");
            let kept = if goal["at_least"] == true { median >= bound } else { median <= bound };
            assert_eq!(goal["verdict"], if kept { "reached" } else { "missed" }, "{goal}");
            true
        }
    });
    measured.count()
}

/// Whether these are the features of rings: each of our devices and drivers agrees on this one.
fn has_rings(features: &Value) -> bool {
    features.as_array().is_some_and(|names| names.iter().any(|name| name == "VIRTIO_F_VERSION_1"))
}

/// The report of a suite, which is as the schema says.
#[track_caller]
fn report(args: &[&str]) -> Value {
    let report: Value = serde_json::from_str(&short(&[args, &["--json"]].concat())).unwrap();
    schema::fits("bench.json", &report);
    report
}

/// Every count with every number of threads, in the mode that the machine has. Proves PERF-1, PERF-3 and REF-7.
#[test]
fn json_has_every_variant() {
    let report = report(&["bench", "refs"]);
    assert_eq!((&report["command"], &report["suite"]), (&"bench".into(), &"refs".into()));
    assert_eq!(report["params"]["runs"], 2);
    let mode = report["machine"]["percpu"].as_str().unwrap();
    assert!(["rseq", "portable"].contains(&mode), "{mode}");
    let rows = report["variants"].as_array().unwrap();
    let find = |name: &str, threads: u64| {
        let found: Vec<_> = rows.iter().filter(|row| row["name"] == name && row["threads"] == threads).collect();
        assert_eq!(found.len(), 1, "{name} with {threads} threads");
        found[0]
    };
    let threads: Vec<u64> =
        report["params"]["threads"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect();
    assert_eq!(threads[0], 1);
    assert_eq!(threads.last().copied(), report["machine"]["cpus"].as_u64());
    for &n in &threads {
        for name in ["plain", "arc", "refcount", "rcuref", "rcuref_batched", "percpuref"] {
            for name in [name.to_owned(), format!("{name}_rotating")] {
                let row = find(&name, n);
                assert_eq!((&row["unit"], &row["per"], &row["runs"]), (&"ns".into(), &"get+put".into(), &2.into()));
                figures(&row["versus"]);
            }
        }
        find("guard", n);
        assert!(n > 1 || figures(find("refcount_retries", n))[2] <= 1.0);
        for others in [1, 64, 4096] {
            find(&format!("kill_{others}"), n);
        }
    }
    for name in ["plain", "arc", "refcount", "rcuref", "rcuref_batched", "percpuref"] {
        find(&format!("final_put_{name}"), 1);
    }
    // Measured, or skipped with the reason: it needs a compiler.
    let peer = find("c_sequence", 1);
    assert!(peer["skipped"].is_string() || figures(peer)[0] > 0.0, "{peer}");
    for row in rows {
        assert_eq!(row["percpu"], mode, "{row}");
        if row["skipped"].is_string() {
            continue;
        }
        let [median, min, max] = figures(row);
        let least = if row["unit"] == "retries" { 0.0 } else { f64::MIN_POSITIVE };
        assert!(least <= min && min <= median && median <= max && max.is_finite(), "{row}");
    }
    verdicts(&report);
    assert_eq!(report["pool"]["inflight"], 0);
}

/// Both layouts under both counts, or the reason why not. Proves REF-6 as far as measuring goes.
#[test]
fn layouts_need_a_writer_and_a_reader() {
    let report = |threads: &str| report(&["bench", "refs", "--threads", threads]);
    let layouts = |report: &Value| -> Vec<Value> {
        let rows = report["variants"].as_array().unwrap();
        rows.iter().filter(|row| row["section"] == "layout").cloned().collect()
    };
    let alone = report("1");
    assert_eq!(layouts(&alone).len(), 8);
    assert!(layouts(&alone).iter().all(|row| row["skipped"].as_str().unwrap().contains("two threads")));
    if alone["machine"]["cpus"].as_u64() > Some(1) {
        let both = report("2");
        for layout in ["beside", "alone"] {
            for count in ["refcount", "rcuref"] {
                for what in ["read", "pair"] {
                    let name = format!("layout_{layout}_{count}_{what}");
                    assert!(layouts(&both).iter().any(|row| row["name"] == *name && row["median"].is_f64()), "{name}");
                }
            }
        }
    }
}

/// Pages by every way, or the reason why not; and none of them is lost. Proves PERF-1 and PERF-3.
#[test]
fn pool_has_every_variant_and_keeps_its_books() {
    let report = report(&["bench", "pool"]);
    assert_eq!((&report["command"], &report["suite"]), (&"bench".into(), &"pool".into()));
    let rows = report["variants"].as_array().unwrap();
    let find = |name: &str, threads: u64| {
        let found: Vec<_> = rows.iter().filter(|row| row["name"] == name && row["threads"] == threads).collect();
        assert_eq!(found.len(), 1, "{name} with {threads} threads");
        found[0]
    };
    let alone = [
        ("limit", "malloc"),
        ("in_context", "malloc"),
        ("in_context_burst64", "malloc"),
        ("in_context_fifo", "malloc"),
        ("malloc", "malloc"),
        ("shared", "malloc"),
        ("shared_burst64", "malloc"),
        ("array_queue", "malloc"),
        ("mutex_vec", "malloc"),
        ("frag_clone", ""),
        ("frag_split", ""),
        ("failed_redirect_in_context", "locked_ring_in_context"),
        ("failed_redirect_remote", "locked_ring_in_context"),
        ("locked_ring_in_context", "locked_ring_in_context"),
        ("slow_path", "slow_path"),
        ("slow_path_order_3", "slow_path"),
        ("slow_path_order_9", "slow_path"),
        ("page_per_packet", "slow_path"),
        ("order_0", "slow_path"),
        ("order_3", "slow_path"),
        ("order_9", "slow_path"),
    ];
    let with_others = [
        ("remote", "locked_ring"),
        ("remote_busy_poll", "locked_ring"),
        ("remote_bulk", "locked_ring"),
        ("locked_ring", "locked_ring"),
        ("floor_forward", "locked_ring"),
        ("floor_spsc", "locked_ring"),
        ("malloc_remote", "locked_ring"),
        ("shared", "array_queue"),
        ("shared_burst64", "array_queue"),
        ("array_queue", "array_queue"),
        ("mutex_vec", "array_queue"),
        ("malloc", "array_queue"),
        ("frag_clone_remote", ""),
        ("frag_split_remote", ""),
    ];
    let peers = ["dpdk_mempool", "dpdk_mbuf", "dpdk_mbuf_bulk64", "dpdk_mbuf_burst64"];
    let measured = |row: &Value, versus: &str| {
        let [median, min, max] = figures(row);
        assert!(0.0 < min && min <= median && median <= max && max.is_finite(), "{row}");
        assert_eq!(row["unit"], "ns");
        assert!(versus.is_empty() || row["versus"]["base"] == versus && figures(&row["versus"])[0] > 0.0, "{row}");
        // 64 bytes and what is around them on the wire take 67.2 ns at 10 Gbit/s.
        let share = row["budget_10g_pct"].as_f64().unwrap();
        assert!((share - median / 67.2 * 100.0).abs() < 1e-6 * share, "{row}");
        assert!((row["budget_100g_pct"].as_f64().unwrap() / share - 10.0).abs() < 1e-6, "{row}");
        assert!(cfg!(not(target_arch = "x86_64")) || row["tsc_cycles"].as_f64() > Some(0.0), "{row}");
    };
    // Where everything is installed that there is, a peer must be there.
    let complete = std::env::var("NETMEM_NO_SKIP").as_deref() == Ok("1");
    let measured_or_not = |row: &Value, versus: &str, complete: bool| match row["skipped"].as_str() {
        Some(why) => assert!(!complete && !why.is_empty() && row["median"].is_null(), "{row}"),
        None => measured(row, versus),
    };
    for (name, versus) in alone {
        measured(find(name, 1), versus);
    }
    for name in peers {
        measured_or_not(find(name, 1), "malloc", complete);
    }
    // What the kernel lets us do is not a matter of what is installed.
    measured_or_not(find("kernel_live_frames", 1), "", false);
    let cpus = report["machine"]["cpus"].as_u64().unwrap();
    let threads = report["params"]["threads"].as_array().unwrap();
    for n in threads.iter().map(|n| n.as_u64().unwrap()).filter(|&n| n > 1) {
        for (name, versus) in with_others {
            measured(find(name, n), versus);
        }
        measured_or_not(find("dpdk_mbuf_remote", n), "locked_ring", complete);
        measured_or_not(find("dpdk_mempool", n), "array_queue", complete);
    }
    if cpus > 1 {
        measured(find("starved_without_pause", 2), "");
        for name in ["remote_2_sharing", "locked_ring_2_sharing", "remote_4_sharing", "locked_ring_4_sharing"] {
            measured(find(name, 2), "locked_ring");
        }
        for magazine in [0, 4, 8, 16, 32, 62] {
            for name in ["remote", "starved"] {
                let row = find(&format!("{name}_magazine_{magazine}"), 2);
                measured(row, "");
                assert_eq!(row["magazine"], magazine);
            }
        }
    } else {
        assert!(find("remote", 2)["skipped"].as_str().unwrap().contains("CPU"));
    }
    let pool = &report["pool"];
    let count = |key: &str| pool[key].as_u64().unwrap();
    assert!(count("allocated") > 0 && count("mapped") > 0);
    assert_eq!((count("allocated"), count("mapped")), (count("returned"), count("unmapped")), "{pool}");
    assert_eq!((count("inflight"), count("leaked")), (0, 0));
}

/// Every way with every number of threads, over one binding and over eight, in order and mixed; and what they take. Proves
/// PERF-1, PERF-3 and, as far as measuring goes, MEM-4.
#[test]
fn tokens_have_every_way_and_setting() {
    let report = report(&["bench", "tokens"]);
    assert_eq!((&report["command"], &report["suite"]), (&"bench".into(), &"tokens".into()));
    let rows = report["variants"].as_array().unwrap();
    let threads: Vec<u64> =
        report["params"]["threads"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect();
    let ways = ["locked_each", "locked_map", "hashed_counts", "rcu_counts", "ranges", "hand_over"];
    for &n in &threads {
        for (way, bindings, sequence) in ways
            .iter()
            .flat_map(|way| [1, 8].map(|n| (way, n)))
            .flat_map(|(w, n)| ["in order", "mixed"].map(|s| (w, n, s)))
        {
            let name = if sequence == "mixed" { format!("{way}_mixed") } else { (*way).to_owned() };
            let found: Vec<_> = rows
                .iter()
                .filter(|row| row["name"] == *name && row["threads"] == n && row["bindings"] == bindings)
                .collect();
            assert_eq!(found.len(), 1, "{name} with {n} threads and {bindings} bindings");
            let row = found[0];
            assert_eq!(
                (&row["sequence"], &row["unit"], &row["per"]),
                (&sequence.into(), &"ns".into(), &"fragment".into())
            );
            let [median, min, max] = figures(row);
            assert!(0.0 < min && min <= median && median <= max && max.is_finite(), "{row}");
            let versus = figures(&row["versus"]);
            assert!(*way != "locked_map" || versus == [1.0; 3], "{row}");
        }
    }
    for way in ["locked_map", "hashed_counts", "rcu_counts", "ranges"] {
        for (what, per, unit) in
            [("memory_page", "page", "B"), ("memory_socket", "socket", "B"), ("set_up", "socket", "ns")]
        {
            let row = rows.iter().find(|row| row["name"] == format!("{what}_{way}")).unwrap();
            assert_eq!((&row["per"], &row["unit"]), (&per.into(), &unit.into()));
            assert!(figures(row)[0] > 0.0, "{row}");
        }
    }
    // A socket takes what it touches, not 80 MB.
    for (name, bytes) in [("memory_page_ranges", 4.0..8.0), ("memory_socket_ranges", 4096.0..100_000.0)] {
        let row = rows.iter().find(|row| row["name"] == name).unwrap();
        assert!(bytes.contains(&figures(row)[0]), "{row}");
    }
    // Two ratios in each of four settings with two threads, and flatness in both orders with every number.
    let two = if threads.contains(&2) { 8 } else { 0 };
    assert_eq!(verdicts(&report), two + 2 * threads.len());
}

/// Every path and program, or why not; the goals; and a route cache in a send path, whose gets are those that the code has. Proves PERF-3 and, as
/// far as measuring goes, REF-8.
#[test]
fn streams_have_every_path() {
    let report = report(&["bench", "streams"]);
    assert_eq!((&report["command"], &report["suite"]), (&"bench".into(), &"streams".into()));
    let rows = report["variants"].as_array().unwrap();
    let find = |section: &str, name: &str, threads: u64| {
        let is = |row: &&Value| row["section"] == section && row["name"] == name && row["threads"] == threads;
        let found: Vec<_> = rows.iter().filter(is).collect();
        assert_eq!(found.len(), 1, "{name} of {section} with {threads} threads");
        found[0]
    };
    let measured = |row: &Value| {
        let [median, min, max] = figures(row);
        assert!(0.0 < min && min <= median && median <= max && max.is_finite(), "{row}");
    };
    let complete = std::env::var("NETMEM_NO_SKIP").as_deref() == Ok("1");
    let measured_or_not = |row: &Value, complete: bool| match row["skipped"].as_str() {
        Some(why) => assert!(!complete && !why.is_empty() && row["median"].is_null(), "{row}"),
        None => measured(row),
    };
    let cpus = report["machine"]["cpus"].as_u64().unwrap();
    let paths = ["ours", "kernel_veth", "ours_to_kernel", "kernel_to_ours", "kernel_taps"];
    for idle in ["sleeping", "polling"] {
        for path in paths.iter().chain(&["smoltcp"]) {
            let (name, here) =
                (format!("{path}_{idle}"), complete && (cpus > 2 || (*path, idle) != ("kernel_taps", "polling")));
            for section in ["bulk: throughput", "bulk: CPU"] {
                measured_or_not(find(section, &name, 2), here);
            }
            if *path != "smoltcp" {
                measured_or_not(find("bulk with offloads: CPU", &name, 2), here);
            }
            if *path != "ours_to_kernel" {
                measured_or_not(find("requests: 99 % are faster", &name, 2), here);
            }
        }
    }
    for name in ["ours", "kernel_veth", "smoltcp"] {
        for section in ["cost of a segment", "cost of a byte"] {
            // The line of so short runs can have any slope.
            let row = find(section, name, 2);
            assert!(row["median"].is_f64() || !complete && row["skipped"].is_string(), "{row}");
        }
    }
    for name in ["ours", "debian"] {
        measured_or_not(find("memcached: CPU of both sides", name, 1), complete);
    }
    let threads = report["params"]["threads"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap());
    for n in threads.chain([2 * cpus]) {
        for count in ["refcount", "rcuref", "percpuref"] {
            for (proto, gets) in [("udp", 2.0), ("connections", 1.0)] {
                let name = format!("{proto}_{count}");
                measured(find("replies: throughput", &name, n));
                let [median, ..] = figures(find("replies: gets", &name, n));
                assert!((0.8..1.2).contains(&(median / gets)), "{name} with {n} threads: {median} gets");
                assert!(count == "refcount" || figures(find("replies: retries", &name, n))[2] == 0.0);
            }
        }
    }
    // Ours and smoltcp, which are compared, have the same rings; the kernel alone has none.
    let features = |section: &str, name: &str, threads| find(section, name, threads)["features"].clone();
    for idle in ["sleeping", "polling"] {
        let [ours, smoltcp, veth] =
            ["ours", "smoltcp", "kernel_veth"].map(|path| features("bulk: throughput", &format!("{path}_{idle}"), 2));
        assert!(veth.is_null() && ours == smoltcp && (!complete || has_rings(&ours)), "{ours} {smoltcp} {veth}");
    }
    assert!(has_rings(&features("replies: throughput", "udp_rcuref", 1)));
    assert_eq!(report["goals"].as_array().unwrap().len(), 7);
    assert!(!complete || verdicts(&report) == 7, "{}", report["goals"]);
}

/// Both directions with either count and either kind of tokens, everything accounted for; or why not. Proves PERF-1 and PERF-3 for
/// device memory, and MEM-2 and POOL-5 as far as books say.
#[test]
fn devmem_has_every_variant_in_both_directions() {
    let report = report(&["bench", "devmem"]);
    assert_eq!((&report["command"], &report["suite"]), (&"bench".into(), &"devmem".into()));
    let rows = report["variants"].as_array().unwrap();
    let sections = [("throughput", "b/s"), ("network", "ns"), ("application", "ns"), ("both", "ns"), ("loss", "%")];
    let several = report["machine"]["cpus"].as_u64() > Some(1);
    for (direction, long) in [("rx", "receive"), ("tx", "transmit")] {
        for variant in ["refcount+locked_map", "percpuref+locked_map", "refcount+ranges", "percpuref+ranges"] {
            let find = |section: &str| {
                let section = format!("{long}: {section}");
                let is = |row: &&Value| row["name"] == variant && row["section"] == *section;
                let found: Vec<_> = rows.iter().filter(is).collect();
                assert_eq!(found.len(), 1, "{variant} of {section}");
                found[0]
            };
            for (section, unit) in sections {
                let row = find(section);
                assert_eq!((&row["direction"], &row["unit"]), (&direction.into(), &unit.into()), "{row}");
                if !several {
                    assert!(row["skipped"].as_str().unwrap().contains("CPU"), "{row}");
                    continue;
                }
                let [median, min, max] = figures(row);
                assert!(min <= median && median <= max && max.is_finite(), "{row}");
                // All variants of a direction have the same rings.
                let same = rows.iter().filter(|other| other["section"] == row["section"]);
                assert!(
                    has_rings(&row["features"]) && same.into_iter().all(|o| o["features"] == row["features"]),
                    "{row}"
                );
                // A receiver loses what it has no room for; a sender waits.
                let range = if section != "loss" { f64::MIN_POSITIVE..=f64::MAX } else { 0.0..=100.0 };
                assert!(range.contains(&min) && (section != "loss" || direction == "rx" || max == 0.0), "{row}");
                assert!(row["note"].as_str().unwrap().contains("device took turns with the network"), "{row}");
                if unit == "ns" {
                    let versus = figures(&row["versus"]);
                    assert!(variant != "refcount+locked_map" || versus == [1.0; 3], "{row}");
                }
            }
            if several {
                let most = |section| figures(find(section))[2];
                let sum = most("network") + most("application");
                assert!(most("both") <= 1.001 * sum, "{variant} {direction}: {} of {sum}", most("both"));
            }
        }
    }
    // Streams, and what a segment of one costs by its length.
    let receive = ["throughput", "network", "application", "both"];
    let transmit = ["throughput", "first lane", "second lane", "both"];
    for (long, parts) in [("stream receive", receive), ("stream transmit", transmit)] {
        for (part, unit) in parts.into_iter().zip(["b/s", "ns", "ns", "ns"]) {
            let of = |row: &&Value| row["section"] == format!("{long}: {part}");
            let found: Vec<_> = rows.iter().filter(of).collect();
            assert_eq!(found.len(), 4, "{long}: {part}");
            let whole = |row: &&Value| row["unit"] == unit && (!several || figures(row)[1] > 0.0);
            assert!(
                found.iter().all(whole) && found.iter().all(|row| several == row["skipped"].is_null()),
                "{found:?}"
            );
        }
    }
    for section in ["segment received", "segment sent"] {
        for (section, unit) in [(section.to_owned(), "ns"), (format!("{section}: throughput"), "b/s")] {
            let found: Vec<_> = rows.iter().filter(|row| row["section"] == section).collect();
            assert_eq!(found.len(), 9, "{section}");
            let whole = |row: &&Value| row["unit"] == unit && (!several || figures(row)[1] > 0.0);
            assert!(found.iter().all(whole), "{found:?}");
        }
    }
    assert_eq!(verdicts(&report), if several { 8 } else { 0 });
    let pool = &report["pool"];
    assert_eq!(pool["allocated"].as_u64() > Some(0), several);
    assert_eq!((&pool["allocated"], &pool["mapped"]), (&pool["returned"], &pool["unmapped"]), "{pool}");
    assert_eq!((&pool["inflight"], &pool["leaked"]), (&0.into(), &0.into()));
}

/// What is missing is said, and the rest is measured: here no tool is found that could build DPDK's program.
#[test]
fn a_peer_that_is_missing_is_listed_with_the_reason() {
    let output = Command::new(env!("CARGO_BIN_EXE_netmem"))
        .args(["bench", "pool", "--json", "--threads", "1"])
        .args(SHORT)
        .env("PATH", "/nowhere")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", errors(&output));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = report["variants"].as_array().unwrap();
    let why = |name: &str| {
        let row = rows.iter().find(|row| row["name"] == name).unwrap();
        row["skipped"].as_str().unwrap_or_else(|| panic!("{row}")).to_owned()
    };
    assert!(why("dpdk_mbuf").contains("libdpdk is not installed"), "{}", why("dpdk_mbuf"));
    assert!(why("remote").contains("a CPU of its own"), "{}", why("remote"));
    assert!(rows.iter().any(|row| row["name"] == "in_context" && row["median"].is_f64()));
}

#[test]
fn a_table_and_a_page_that_loads_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("refs.html");
    std::fs::write(&file, "x".repeat(1 << 20)).unwrap();
    let table = short(&["bench", "all", "--threads", "1", "--html", file.to_str().unwrap()]);
    let words = ["suite refs", "percpuref_rotating", "x refcount", "percpu", "skipped: ", "Goals"];
    for word in words.into_iter().chain([
        "suite pool",
        "in_context_fifo",
        "of 100G",
        "x malloc",
        "leaked 0",
        "suite tokens",
        "ranges_mixed",
        "x locked_map",
        "memory_page_ranges",
        "suite devmem",
        "percpuref+ranges",
    ]) {
        assert!(table.contains(word), "{word}: {table}");
    }
    let page = std::fs::read_to_string(&file).unwrap();
    assert!(page.starts_with("<!DOCTYPE html>") && page.trim_end().ends_with("</html>"));
    assert!(page.matches("<svg").count() >= 8, "charts");
    assert!(["refs", "pool", "tokens", "devmem"].iter().all(|suite| page.contains(&format!("netmem bench {suite}"))));
    well_formed(&page);
    // Narrow screens: the page says that it fits, charts are no wider than 400 pixels, and wide tables scroll by themselves.
    assert!(page.contains("<meta name=\"viewport\" content=\"width=device-width"));
    for svg in page.split("<svg ").skip(1) {
        let width = svg.split_once("width=\"").unwrap().1.split_once('"').unwrap().0;
        assert!(width.parse::<u32>().unwrap() <= 400, "{width}");
    }
    let scrolling = page.matches("<div class=\"scroll\" tabindex=\"0\">\n<table>").count();
    assert!(scrolling > 20 && page.matches("<table").count() == scrolling);
    // Contents: each link leads to one place, and each heading has a link, but for the page's own and that of the contents.
    let (links, places) = (quoted(&page, "href=\"#"), quoted(&page, " id=\""));
    assert_eq!(links, places, "the order of the contents is that of the page");
    assert_eq!(page.matches("<h1").count() + page.matches("<h2").count(), links.len() + 2);
    // The servers of the last suite have more threads than there are CPUs, too: their charts have lines, and so a key.
    assert!(page.contains("<h2 id=\"legend\">") && page.contains("<ul class=\"key\">"));
    // The name of SVG's own language is the only address.
    let addresses = page.matches("://").count() - page.matches("\"http://www.w3.org/2000/svg\"").count();
    assert_eq!(addresses, 0);
    for loads in ["<script", "<link", "src=", "@import"] {
        assert!(!page.contains(loads), "{loads}");
    }
}

/// What follows `before` up to the next quotation mark, each time.
fn quoted<'a>(page: &'a str, before: &str) -> Vec<&'a str> {
    page.split(before).skip(1).map(|rest| rest.split_once('"').unwrap().0).collect()
}

/// Every element is closed where it must be, in the order in which they were opened, and every `<` and `&` of text is escaped.
#[track_caller]
fn well_formed(page: &str) {
    let mut open: Vec<&str> = Vec::new();
    for piece in page.split('<').skip(1) {
        let (tag, text) = piece.split_once('>').unwrap_or_else(|| panic!("<{piece}"));
        let entities = ["amp;", "lt;", "gt;", "quot;"];
        assert!(text.split('&').skip(1).all(|rest| entities.iter().any(|entity| rest.starts_with(entity))), "{text}");
        let name = tag.split_whitespace().next().unwrap();
        match name.strip_prefix('/') {
            Some(name) => assert_eq!(open.pop(), Some(name), "{tag}"),
            None if tag.ends_with('/') || ["!DOCTYPE", "meta"].contains(&name) => {}
            None => open.push(name),
        }
    }
    assert!(open.is_empty(), "{open:?}");
}

/// Proves PERF-3: whatever is asked for is one object.
#[test]
fn several_suites_are_one_object() {
    let report = report(&["bench", "pool", "refs", "--threads", "1"]);
    assert_eq!(report["command"], "bench");
    let suites: Vec<_> = report["suites"].as_array().unwrap().iter().map(|suite| suite["suite"].clone()).collect();
    assert_eq!(suites, ["pool", "refs"]);
}

#[test]
fn bad_arguments_end_it_before_anything_is_measured() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("none").join("x.html");
    let missing = missing.to_str().unwrap();
    for (args, says) in [
        (&["bench"][..], "SUITE"),
        (&["bench", "virtio"], "devmem"),
        (&["bench", "refs", "--threads", "0"], "--threads 0"),
        (&["bench", "refs", "--threads", "100000"], "at most"),
        (&["bench", "refs", "--runs", "0"], "--runs 0"),
        (&["bench", "refs", "--duration", "1h"], "suffix `h`"),
        (&["bench", "refs", "--html", missing], missing),
        (&["bench", "refs", "--html", dir.path().to_str().unwrap()], "directory"),
        (&["bench", "refs", "--rows", "guard,remote"], "--rows remote"),
        (&["bench", "refs", "--list", "--json"], "--json"),
    ] {
        let output = run(args);
        let errors = errors(&output);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {errors}");
        assert!(output.stdout.is_empty() && errors.contains(says), "{args:?} does not say `{says}`: {errors}");
    }
}

/// Each run is in JSON, with what was done: how long it was, what it counted, and where.
#[test]
fn samples_say_what_was_done() {
    let report = report(&["bench", "pool", "--rows", "in_context,limit", "--threads", "1"]);
    let rows = report["variants"].as_array().unwrap();
    assert_eq!(rows.iter().map(|row| row["name"].as_str().unwrap()).collect::<Vec<_>>(), ["limit", "in_context"]);
    for row in rows {
        let samples = row["samples"].as_array().unwrap();
        assert_eq!((samples.len() as u64, row["runs"].as_u64()), (2, Some(2)), "{row}");
        let mut values: Vec<f64> = samples.iter().map(|sample| sample["value"].as_f64().unwrap()).collect();
        values.sort_by(f64::total_cmp);
        let [median, min, max] = figures(row);
        assert_eq!((values[0], values[1]), (min, max));
        assert!(((values[0] + values[1]) / 2.0 - median).abs() < 1e-9, "{row}");
        for sample in samples {
            let of = |key: &str| sample[key].as_u64().unwrap_or_else(|| panic!("{key} of {sample}"));
            // The mean over the operations of the time that they took, within the whole of the run.
            assert!(
                (of("elapsed_ns") as f64 / of("operations") as f64 - sample["value"].as_f64().unwrap()).abs() < 1e-6
            );
            assert!(of("elapsed_ns") <= of("run_ns") && of("operations") > 0, "{sample}");
        }
        // One thread, on the first CPU of the plan.
        assert_eq!(row["cpus"], serde_json::json!([report["params"]["cpus"][0]]));
    }
    assert_eq!(report["done"]["cpus"], rows[0]["cpus"]);
    assert_eq!((&report["done"]["interrupted"], &report["schema"]), (&false.into(), &2.into()));
    assert!(report["done"]["elapsed_s"].as_f64() > Some(0.002), "{}", report["done"]);
}

/// Rows are chosen by name, by section and with stars. Only goals of these rows are in the report; one that needs
/// another row, too, is neither reached nor missed.
#[test]
fn rows_are_listed_and_chosen() {
    let listed = |args: &[&str]| -> Vec<String> {
        let output = run(&[args, &["--list", "--threads", "1"]].concat());
        assert!(output.status.success(), "{}", errors(&output));
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
    };
    let all = listed(&["bench", "all"]);
    assert!(
        ["refs", "pool", "tokens", "devmem", "streams"].iter().all(|suite| all.iter().any(|l| l.starts_with(suite)))
    );
    assert_eq!(listed(&["bench", "all", "--rows", "guard,limit"]), ["refs guard guard 1", "pool one CPU limit 1"]);
    let report = report(&["bench", "refs", "pool", "--rows", "final put,lim*", "--threads", "1", "--check"]);
    let suites = report["suites"].as_array().unwrap();
    let names = |suite: &Value| -> Vec<String> {
        suite["variants"].as_array().unwrap().iter().map(|row| row["name"].as_str().unwrap().to_owned()).collect()
    };
    let chosen = suites.iter().map(names).collect::<Vec<_>>();
    assert!(chosen[0].len() == 6 && chosen[0].iter().all(|name| name.starts_with("final_put_")), "{chosen:?}");
    assert_eq!(chosen[1..], [["limit".to_owned()]]);
    let goals: Vec<_> = suites.iter().flat_map(|suite| suite["goals"].as_array().unwrap()).collect();
    assert!(!goals.is_empty());
    for goal in goals {
        let text = goal["goal"].as_str().unwrap();
        assert!(text.contains("final_put") || text.contains("limit"), "{goal}");
        assert_eq!(goal["verdict"], "not run", "{goal}");
        assert!(goal["why"].as_str().unwrap().contains("was not asked for"), "{goal}");
    }
}

/// `--check` fails where a goal is missed, and where a row is skipped: a figure that is not there is not good enough.
#[test]
fn check_fails_for_missed_goals_and_for_skipped_rows() {
    let bench = |rows: &str, check: &[&str]| {
        let mut command = command::netmem();
        command.args(["bench", "refs", "--threads", "1", "--rows", rows]).args(check).args(SHORT);
        // Without a compiler the counter in C is skipped.
        let output = command.env("PATH", "/nowhere").output().unwrap();
        let out = String::from_utf8(output.stdout.clone()).unwrap();
        (output.status.code(), errors(&output), out)
    };
    let (status, err, out) = bench("c_sequence,percpuref", &["--check"]);
    assert_eq!(status, Some(1), "{err}");
    assert!(err.contains("goals of which a row was skipped: 1; rows skipped: 1: --check makes that an error"), "{err}");
    assert!(out.contains("skipped 1 thread: percpuref / c_sequence <= 1.15: c_sequence: "), "{out}");
    assert_eq!(bench("c_sequence,percpuref", &[]).0, Some(0));
    // No goal has this row: a row that is skipped is enough.
    let (status, err, _) = bench("c_sequence", &["--check"]);
    assert!(status == Some(1) && err.contains("goals of which a row was skipped: 0; rows skipped: 1"), "{err}");
    // Missed or reached: the table says which, and the status is as it says.
    let (status, err, out) = bench("percpuref_rotating", &["--check"]);
    let missed = out.contains("\nmissed  1 thread: percpuref_rotating <= 5 ns: ");
    assert!(missed || out.contains("\nreached 1 thread: percpuref_rotating <= 5 ns: "), "{out}");
    assert_eq!((status, err.contains("goals missed: 1;")), (Some(i32::from(missed)), missed), "{err}{out}");
    // The guard has no goal.
    assert_eq!(bench("guard", &["--check"]).0, Some(0));
}

/// A signal ends the measurement: the runs until then are in the report, in JSON and in the page, which are both whole.
#[test]
fn a_signal_ends_it_with_what_was_measured() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("x.html");
    let mut measured = 0;
    // On a busy machine it can take longer until there is a run.
    for wait in [1, 4, 16] {
        std::fs::write(&file, "old").unwrap();
        let rows = ["bench", "refs", "pool", "--rows", "guard,limit", "--runs", "1000000", "--duration", "1ms"];
        let mut bench = Background::start(&[&rows[..], &["--json", "--html", file.to_str().unwrap()]].concat());
        bench.awaits_signals();
        std::thread::sleep(Duration::from_secs(wait));
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "old", "the file stays until all of it is there");
        bench.signal(Signal::INT);
        let (status, out, err) = bench.end();
        assert_eq!(status, Some(130), "{err}");
        assert!(err.contains("interrupted"), "{err}");
        let report: Value = serde_json::from_str(&out).unwrap();
        schema::fits("bench.json", &report);
        // The second suite was not begun.
        let suites = report["suites"].as_array().unwrap();
        assert_eq!((suites.len(), &suites[0]["suite"]), (1, &"refs".into()));
        assert_eq!(suites[0]["done"]["interrupted"], true);
        let page = std::fs::read_to_string(&file).unwrap();
        well_formed(&page);
        assert!(page.contains("interrupted: the figures are of the runs until then"), "{page}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing else is left");
        measured = suites[0]["variants"][0]["samples"].as_array().unwrap().len();
        if measured > 0 {
            assert_eq!(suites[0]["variants"][0]["runs"].as_u64(), Some(measured as u64));
            break;
        }
    }
    assert!(measured > 0);
}

/// While other programs have the CPUs, the report says so.
#[test]
fn a_report_says_that_other_programs_had_the_cpus() {
    let over = AtomicBool::new(false);
    let args = ["bench", "pool", "--rows", "limit", "--threads", "1", "--duration", "200ms", "--runs", "3"];
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().unwrap().get() {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    std::hint::spin_loop()
                }
            });
        }
        let (table, json) = (run(&args), run(&[&args[..], &["--json"]].concat()));
        over.store(true, Ordering::Relaxed);
        let table = String::from_utf8(table.stdout).unwrap();
        assert!(table.contains("\nwarning: other programs had the CPUs"), "{table}");
        let report = command::json(&json);
        schema::fits("bench.json", &report);
        let [own, others] = ["own_s", "others_s"].map(|key| report["done"]["cpu_time"][key].as_f64().unwrap());
        // The loops here had at least half of a CPU for the 600 ms or more.
        assert!(own > 0.0 && others > 0.2, "{}", report["done"]);
    });
}

/// Tables have units in which numbers are short, and JSON has base units.
#[test]
fn units_scale_in_tables() {
    let args = ["bench", "tokens", "--rows", "memory_socket_ranges,set_up_ranges", "--threads", "1"];
    let table = short(&args);
    let row = |name: &str| table.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{table}"));
    // Some kilobytes; and the first fragment of an 80 GB device needs more than a microsecond.
    assert!(row("memory_socket_ranges").contains(" kB "), "{table}");
    assert!([" us (", " ms ("].iter().any(|unit| row("set_up_ranges").contains(unit)), "{table}");
    for row in report(&args)["variants"].as_array().unwrap() {
        let unit = if row["name"] == "set_up_ranges" { "ns" } else { "B" };
        assert!(row["unit"] == unit && figures(row)[0] > 1000.0, "{row}");
    }
}
