//! A process that may lock little memory. The limit applies to the whole process, so the test runs
//! itself in a child.

use netmem_pool::{Private, RegionError, RegionOptions};
use netmem_testing::skip;
use std::io::Write;
use std::process::Command;

const CHILD: &str = "NETMEM_TEST_MEMLOCK";
const LIMIT: u64 = 1 << 20;

/// Proves POOL-13: if the memlock limit is too small, the error names the limit, and nothing leaks.
#[test]
fn the_memlock_limit() {
    if std::env::var_os(CHILD).is_none() {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "memlock::the_memlock_limit", "--nocapture"])
            .env(CHILD, "1")
            .output()
            .unwrap();
        // Written past the runner's capture, because the child may report that it was skipped.
        std::io::stderr().write_all(&child.stderr).unwrap();
        return assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stdout));
    }
    let limit = libc::rlimit { rlim_cur: LIMIT, rlim_max: LIMIT };
    // SAFETY: both calls change only this child. Root may lock any amount, so the child changes to
    // another user.
    unsafe {
        assert_eq!(libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit), 0);
        if libc::geteuid() == 0 && libc::setresuid(65534, 65534, 65534) != 0 {
            return skip("root here can neither be limited nor become somebody else");
        }
    }
    let build = |lock| RegionOptions::new(1024).huge_pages(false).lock(lock).build::<Private>();
    match build(true).unwrap_err() {
        RegionError::Memlock { bytes, limit } => assert_eq!((bytes, limit), (4 << 20, LIMIT)),
        other => panic!("{other}"),
    }
    let mapped = || {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        statm.split_whitespace().next().unwrap().parse::<usize>().unwrap() * 4096
    };
    let before = mapped();
    for _ in 0..50 {
        assert!(build(true).is_err());
    }
    let error = build(true).unwrap_err().to_string();
    assert!(error.contains("ulimit -l") && error.contains(&LIMIT.to_string()), "{error}");
    assert!(mapped() < before + (100 << 20), "50 times 4 MiB were left behind");
    assert!(build(false).is_ok());
}
