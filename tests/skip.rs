//! How a test reports that something it needs is missing. Shared: packages link it into `tests/shared`.

use std::io::Write;

/// Reports a skipped test, past the test runner's capture. If `NETMEM_NO_SKIP=1` promises that everything is installed,
/// the test fails.
#[track_caller]
pub(crate) fn skip(why: &str) {
    assert!(std::env::var("NETMEM_NO_SKIP").as_deref() != Ok("1"), "skipped, and NETMEM_NO_SKIP is set: {why}");
    let thread = std::thread::current();
    let _ = writeln!(std::io::stderr(), "skipped: {}: {why}", thread.name().unwrap_or("a test"));
}
