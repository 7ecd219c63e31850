//! How a test reports that something it needs is missing.

use std::io::Write;

/// The packages of Debian that have programs of other names.
const PACKAGES: [(&str, &str); 27] = [
    ("abidiff", "abigail-tools"),
    ("abidw", "abigail-tools"),
    ("awk", "mawk"),
    ("cc", "gcc"),
    ("clang++", "clang"),
    ("dpdk-testpmd", "dpdk-dev"),
    ("diff", "diffutils"),
    ("dpkg-architecture", "dpkg-dev"),
    ("dpkg-deb", "dpkg"),
    ("dpkg-shlibdeps", "dpkg-dev"),
    ("h2load", "nghttp2-client"),
    ("ip", "iproute2"),
    ("memcslap", "libmemcached-tools"),
    ("mpirun", "openmpi-bin"),
    ("nc", "netcat-openbsd"),
    ("nginx", "nginx-light"),
    ("nm", "binutils"),
    ("objdump", "binutils"),
    ("ping", "iputils-ping"),
    ("prlimit", "util-linux"),
    ("promtool", "prometheus"),
    ("setpriv", "util-linux"),
    ("stdbuf", "coreutils"),
    ("taskset", "util-linux"),
    ("timeout", "coreutils"),
    ("umount", "mount"),
    ("unshare", "util-linux"),
];

/// Reports a skipped test, past the test runner's capture. If `NETMEM_NO_SKIP=1` promises that
/// everything is installed, the test fails.
#[track_caller]
pub fn skip(why: &str) {
    assert!(std::env::var("NETMEM_NO_SKIP").as_deref() != Ok("1"), "skipped, and NETMEM_NO_SKIP is set: {why}");
    let thread = std::thread::current();
    let _ = writeln!(std::io::stderr(), "skipped: {}: {why}", thread.name().unwrap_or("a test"));
}

/// An error names the first of these programs that is not on the search path. A test that starts a
/// program asks first, because a machine that builds the tree need not have the program.
/// `tests/tree/programs.rs` checks that each test does.
pub fn installed(programs: &[&str]) -> Result<(), String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let absent = programs.iter().find(|program| !std::env::split_paths(&path).any(|dir| dir.join(program).is_file()));
    let Some(program) = absent else { return Ok(()) };
    let package = PACKAGES.iter().find(|(name, _)| name == program).map_or(*program, |(_, package)| package);
    Err(format!("{program} is not installed (on Debian: package {package})"))
}
