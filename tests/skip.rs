//! How a test says that it needs what is not here. Shared by the crates' integration tests (`#[path]`).

use std::io::Write;

/// Says so, past the test runner's capture; a failure where `NETMEM_NO_SKIP=1` promises that everything is installed.
#[track_caller]
pub(crate) fn skip(why: &str) {
    assert!(std::env::var("NETMEM_NO_SKIP").as_deref() != Ok("1"), "skipped, and NETMEM_NO_SKIP is set: {why}");
    let thread = std::thread::current();
    let _ = writeln!(std::io::stderr(), "skipped: {}: {why}", thread.name().unwrap_or("a test"));
}
