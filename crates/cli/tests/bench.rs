//! `netmem bench` from outside: what it prints and writes, and how it refuses.
#![allow(clippy::unwrap_used, missing_docs)]

use serde_json::Value;
use std::process::{Command, Output};

/// As few and as short runs as there can be.
const SHORT: [&str; 4] = ["--duration", "1ms", "--runs", "2"];

fn run(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_netmem")).args(args).output().unwrap()
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

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

/// Every count with every number of threads, in the mode that the machine has. Proves PERF-1, PERF-3 and REF-7.
#[test]
fn json_has_every_variant() {
    let report: Value = serde_json::from_str(&short(&["bench", "refs", "--json"])).unwrap();
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
                figures(&row["vs_refcount"]);
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
    for goal in report["goals"].as_array().unwrap() {
        let value = figures(goal)[0];
        let bound = goal["bound"].as_f64().unwrap();
        let kept = if goal["at_least"] == true { value >= bound } else { value <= bound };
        assert_eq!(goal["reached"], kept, "{goal}");
    }
    assert_eq!(report["pool"]["inflight"], 0);
}

/// Both layouts under both counts, or the reason why not. Proves REF-6 as far as measuring goes.
#[test]
fn layouts_need_a_writer_and_a_reader() {
    let report = |threads: &str| -> Value {
        serde_json::from_str(&short(&["bench", "refs", "--json", "--threads", threads])).unwrap()
    };
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
    let report: Value = serde_json::from_str(&short(&["bench", "pool", "--json"])).unwrap();
    assert_eq!((&report["command"], &report["suite"]), (&"bench".into(), &"pool".into()));
    let rows = report["variants"].as_array().unwrap();
    let find = |name: &str, threads: u64| {
        let found: Vec<_> = rows.iter().filter(|row| row["name"] == name && row["threads"] == threads).collect();
        assert_eq!(found.len(), 1, "{name} with {threads} threads");
        found[0]
    };
    let alone = [
        ("limit", "vs_malloc"),
        ("in_context", "vs_malloc"),
        ("in_context_burst64", "vs_malloc"),
        ("in_context_fifo", "vs_malloc"),
        ("malloc", "vs_malloc"),
        ("shared", "vs_malloc"),
        ("shared_burst64", "vs_malloc"),
        ("array_queue", "vs_malloc"),
        ("mutex_vec", "vs_malloc"),
        ("frag_clone", ""),
        ("frag_split", ""),
        ("failed_redirect_in_context", "vs_locked_ring_in_context"),
        ("failed_redirect_remote", "vs_locked_ring_in_context"),
        ("locked_ring_in_context", "vs_locked_ring_in_context"),
        ("slow_path", "vs_slow_path"),
        ("slow_path_order_3", "vs_slow_path"),
        ("slow_path_order_9", "vs_slow_path"),
        ("page_per_packet", "vs_slow_path"),
        ("order_0", "vs_slow_path"),
        ("order_3", "vs_slow_path"),
        ("order_9", "vs_slow_path"),
    ];
    let with_others = [
        ("remote", "vs_locked_ring"),
        ("remote_busy_poll", "vs_locked_ring"),
        ("remote_bulk", "vs_locked_ring"),
        ("locked_ring", "vs_locked_ring"),
        ("floor_forward", "vs_locked_ring"),
        ("floor_spsc", "vs_locked_ring"),
        ("malloc_remote", "vs_locked_ring"),
        ("shared", "vs_array_queue"),
        ("shared_burst64", "vs_array_queue"),
        ("array_queue", "vs_array_queue"),
        ("mutex_vec", "vs_array_queue"),
        ("malloc", "vs_array_queue"),
        ("frag_clone_remote", ""),
        ("frag_split_remote", ""),
    ];
    let peers = ["dpdk_mempool", "dpdk_mbuf", "dpdk_mbuf_bulk64", "dpdk_mbuf_burst64"];
    let measured = |row: &Value, versus: &str| {
        let [median, min, max] = figures(row);
        assert!(0.0 < min && min <= median && median <= max && max.is_finite(), "{row}");
        assert_eq!(row["unit"], "ns");
        assert!(versus.is_empty() || figures(&row[versus])[0] > 0.0, "{row}");
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
        measured_or_not(find(name, 1), "vs_malloc", complete);
    }
    // What the kernel lets us do is not a matter of what is installed.
    measured_or_not(find("kernel_live_frames", 1), "", false);
    let cpus = report["machine"]["cpus"].as_u64().unwrap();
    let threads = report["params"]["threads"].as_array().unwrap();
    for n in threads.iter().map(|n| n.as_u64().unwrap()).filter(|&n| n > 1) {
        for (name, versus) in with_others {
            measured(find(name, n), versus);
        }
        measured_or_not(find("dpdk_mbuf_remote", n), "vs_locked_ring", complete);
        measured_or_not(find("dpdk_mempool", n), "vs_array_queue", complete);
    }
    if cpus > 1 {
        measured(find("starved_without_pause", 2), "");
        for name in ["remote_2_sharing", "locked_ring_2_sharing", "remote_4_sharing", "locked_ring_4_sharing"] {
            measured(find(name, 2), "vs_locked_ring");
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
    let report: Value = serde_json::from_str(&short(&["bench", "tokens", "--json"])).unwrap();
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
            let versus = figures(&row["vs_locked_map"]);
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
    let goals = report["goals"].as_array().unwrap();
    // Two ratios in each of four settings with two threads, and flatness in both orders with every number.
    let two = if threads.contains(&2) { 8 } else { 0 };
    assert_eq!(goals.len(), two + 2 * threads.len());
    for goal in goals {
        let (value, bound) = (figures(goal)[0], goal["bound"].as_f64().unwrap());
        let kept = if goal["at_least"] == true { value >= bound } else { value <= bound };
        assert_eq!(goal["reached"], kept, "{goal}");
    }
}

/// Both directions with either count and either kind of tokens, everything accounted for; or why not. Proves PERF-1 and PERF-3 for
/// device memory, and MEM-2 and POOL-5 as far as books say.
#[test]
fn devmem_has_every_variant_in_both_directions() {
    let report: Value = serde_json::from_str(&short(&["bench", "devmem", "--json"])).unwrap();
    assert_eq!((&report["command"], &report["suite"]), (&"bench".into(), &"devmem".into()));
    let rows = report["variants"].as_array().unwrap();
    let sections = [("throughput", "Gb/s"), ("network", "ms"), ("application", "ms"), ("both", "ms"), ("loss", "%")];
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
                // A receiver loses what it has no room for; a sender waits.
                let range = if section != "loss" { f64::MIN_POSITIVE..=f64::MAX } else { 0.0..=100.0 };
                assert!(range.contains(&min) && (section != "loss" || direction == "rx" || max == 0.0), "{row}");
                assert!(row["note"].as_str().unwrap().contains("device took turns with the network"), "{row}");
                if unit == "ms" {
                    let versus = figures(&row["vs_before"]);
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
    assert_eq!(report["goals"].as_array().unwrap().len(), if several { 2 } else { 0 });
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
    // The name of SVG's own language is the only address.
    let addresses = page.matches("://").count() - page.matches("\"http://www.w3.org/2000/svg\"").count();
    assert_eq!(addresses, 0);
    for loads in ["<script", "<link", "src=", "@import"] {
        assert!(!page.contains(loads), "{loads}");
    }
}

/// Proves PERF-3: whatever is asked for is one object.
#[test]
fn several_suites_are_one_object() {
    let report: Value = serde_json::from_str(&short(&["bench", "pool", "refs", "--json", "--threads", "1"])).unwrap();
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
    ] {
        let output = run(args);
        let errors = errors(&output);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {errors}");
        assert!(output.stdout.is_empty() && errors.contains(says), "{args:?} does not say `{says}`: {errors}");
    }
}
