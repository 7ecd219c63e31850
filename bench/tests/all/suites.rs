//! Each suite has its rows and goals, and accounts for its pages.

use crate::command::{figures, has_rings, report, verdicts};
use serde_json::Value;

/// Every count with every number of threads, in the mode that the machine has. Proves PERF-1,
/// PERF-3 and REF-7.
#[test]
fn json_has_every_variant() {
    let report = report(&["refs"]);
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
    let report = |threads: &str| report(&["refs", "--threads", threads]);
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

/// Rows of the pool with one thread, each with the row that it is compared with.
const ALONE: [(&str, &str); 23] = [
    ("limit", "malloc"),
    ("in_context", "malloc"),
    ("in_context_burst64", "malloc"),
    ("in_context_fifo", "malloc"),
    ("malloc", "malloc"),
    ("private_array", "malloc"),
    ("shared", "malloc"),
    ("bare_sequences", "malloc"),
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

/// Rows of the pool with more threads.
const WITH_OTHERS: [(&str, &str); 17] = [
    ("remote", "locked_ring"),
    ("remote_busy_poll", "locked_ring"),
    ("remote_bulk", "locked_ring"),
    ("locked_ring", "locked_ring"),
    ("floor_forward", "locked_ring"),
    ("floor_spsc", "locked_ring"),
    ("fair", "locked_ring"),
    ("fair_drop", "locked_ring"),
    ("malloc_remote", "locked_ring"),
    ("private_array", "array_queue"),
    ("shared", "array_queue"),
    ("shared_burst64", "array_queue"),
    ("array_queue", "array_queue"),
    ("mutex_vec", "array_queue"),
    ("malloc", "array_queue"),
    ("frag_clone_remote", ""),
    ("frag_split_remote", ""),
];

/// A row of the pool has a value, and the costs for a packet that follow from it.
#[track_caller]
fn pool_row(row: &Value, versus: &str) {
    let [median, min, max] = figures(row);
    assert!(0.0 < min && min <= median && median <= max && max.is_finite(), "{row}");
    assert_eq!(row["unit"], "ns");
    assert!(versus.is_empty() || row["versus"]["base"] == versus && figures(&row["versus"])[0] > 0.0, "{row}");
    // 64 bytes and what is around them on the wire take 67.2 ns at 10 Gbit/s.
    let share = row["budget_10g_pct"].as_f64().unwrap();
    assert!((share - median / 67.2 * 100.0).abs() < 1e-6 * share, "{row}");
    assert!((row["budget_100g_pct"].as_f64().unwrap() / share - 10.0).abs() < 1e-6, "{row}");
    assert!(cfg!(not(target_arch = "x86_64")) || row["tsc_cycles"].as_f64() > Some(0.0), "{row}");
}

/// Pages by every way, or the reason why not; and none of them is lost. Proves PERF-1 and PERF-3.
#[test]
fn pool_has_every_variant_and_keeps_its_books() {
    let report = report(&["pool"]);
    assert_eq!((&report["command"], &report["suite"]), (&"bench".into(), &"pool".into()));
    let rows = report["variants"].as_array().unwrap();
    let find = |name: &str, threads: u64| {
        let found: Vec<_> = rows.iter().filter(|row| row["name"] == name && row["threads"] == threads).collect();
        assert_eq!(found.len(), 1, "{name} with {threads} threads");
        found[0]
    };
    let peers = ["dpdk_mempool", "dpdk_mbuf", "dpdk_mbuf_bulk64", "dpdk_mbuf_burst64"];
    // Where everything is installed that there is, a peer must be there.
    let complete = std::env::var("NETMEM_NO_SKIP").as_deref() == Ok("1");
    let measured_or_not = |row: &Value, versus: &str, complete: bool| match row["skipped"].as_str() {
        Some(why) => assert!(!complete && !why.is_empty() && row["median"].is_null(), "{row}"),
        None => pool_row(row, versus),
    };
    for (name, versus) in ALONE {
        pool_row(find(name, 1), versus);
    }
    for name in peers {
        measured_or_not(find(name, 1), "malloc", complete);
    }
    // What the kernel lets us do is not a matter of what is installed.
    measured_or_not(find("kernel_live_frames", 1), "", false);
    let cpus = report["machine"]["cpus"].as_u64().unwrap();
    let threads = report["params"]["threads"].as_array().unwrap();
    for n in threads.iter().map(|n| n.as_u64().unwrap()).filter(|&n| n > 1) {
        for (name, versus) in WITH_OTHERS {
            pool_row(find(name, n), versus);
        }
        measured_or_not(find("dpdk_mbuf_remote", n), "locked_ring", complete);
        measured_or_not(find("dpdk_mempool", n), "array_queue", complete);
    }
    if cpus > 1 {
        pool_row(find("starved_without_pause", 2), "");
        for name in ["remote_2_sharing", "locked_ring_2_sharing", "remote_4_sharing", "locked_ring_4_sharing"] {
            pool_row(find(name, 2), "locked_ring");
        }
        for magazine in [0, 4, 8, 16, 32, 62] {
            for name in ["remote", "starved"] {
                let row = find(&format!("{name}_magazine_{magazine}"), 2);
                pool_row(row, "");
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

/// Every way with every number of threads, over one binding and over eight, in order and mixed; and
/// what they take. Proves PERF-1, PERF-3 and, as far as measuring goes, MEM-4.
#[test]
fn tokens_have_every_way_and_setting() {
    let report = report(&["tokens"]);
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
    // A socket uses what it touches, not 80 MB: of each page two numbers, in blocks of 16.
    for (name, bytes) in [("memory_page_ranges", 8.0..24.0), ("memory_socket_ranges", 256.0..1500.0)] {
        let row = rows.iter().find(|row| row["name"] == name).unwrap();
        assert!(bytes.contains(&figures(row)[0]), "{row}");
    }
    // In each of four settings, three ratios with two threads and two with one; and flatness in
    // both orders with one.
    let [one, two] = [(1, 4 * 2 + 2), (2, 4 * 3)].map(|(n, goals)| if threads.contains(&n) { goals } else { 0 });
    assert_eq!(verdicts(&report), one + two);
}

const TURNS: &str = "both ends and the device in turns on one thread";

/// Rows of replies, by each kind of count.
fn replies_count<'a>(report: &'a Value, find: impl Fn(&str, &str, u64) -> &'a Value, measured: impl Fn(&Value)) {
    let cpus = report["machine"]["cpus"].as_u64().unwrap();
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
}

/// Every path and program, or why not; the goals; and a route cache in a send path, whose gets are
/// those that the code has. Proves PERF-3 and, as far as measuring goes, REF-8.
#[test]
fn streams_have_every_path() {
    let report = report(&["streams", "--long"]);
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
    for idle in ["sleeping", "polling"] {
        for path in ["ours", "kernel_veth", "smoltcp"] {
            for section in ["bulk, dropped at once: CPU", "bulk with checksum offload: throughput"] {
                measured_or_not(find(section, &format!("{path}_{idle}"), 2), complete);
            }
        }
    }
    for (of, name) in [("", "ours"), ("", "smoltcp"), ("requests: ", "ours"), ("requests: ", "smoltcp")] {
        measured(find(&format!("{of}{TURNS}"), name, 1));
    }
    for name in ["ours", "kernel_veth", "smoltcp"] {
        for section in ["cost of a segment", "cost of a byte"] {
            // The line of so short runs can have any slope.
            let row = find(section, name, 2);
            assert!(row["median"].is_f64() || !complete && row["skipped"].is_string(), "{row}");
        }
    }
    for name in ["ours_sleeping", "kernel_veth_sleeping"] {
        measured_or_not(find("HTTP, a connection for each request: CPU", name, 2), complete);
    }
    for threads in 1..=cpus.min(2) {
        for name in ["ours", "plain"] {
            measured(find("both ends and a part of the device for each thread", name, threads));
        }
    }
    for name in ["ours", "debian"] {
        measured_or_not(find("memcached: CPU of both sides", name, 1), complete);
    }
    replies_count(&report, find, measured);
    // Ours and smoltcp, which are compared, have the same rings; the kernel alone has none.
    let features = |section: &str, name: &str, threads| find(section, name, threads)["features"].clone();
    for idle in ["sleeping", "polling"] {
        let [ours, smoltcp, veth] =
            ["ours", "smoltcp", "kernel_veth"].map(|path| features("bulk: throughput", &format!("{path}_{idle}"), 2));
        assert!(veth.is_null() && ours == smoltcp && (!complete || has_rings(&ours)), "{ours} {smoltcp} {veth}");
    }
    assert!(has_rings(&features("replies: throughput", "udp_rcuref", 1)));
    assert_eq!(report["goals"].as_array().unwrap().len(), 20);
    // Two of them may have none in so short a run: of the line, and of the ticks in user mode.
    assert!(!complete || verdicts(&report) >= 18, "{}", report["goals"]);
}

/// Both directions with either count and either kind of tokens, everything accounted for; or why
/// not. Proves PERF-1 and PERF-3 for device memory, and MEM-2 and POOL-5 as far as accounting say.
#[test]
fn devmem_has_every_variant_in_both_directions() {
    let report = report(&["devmem"]);
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
