//! The example's self-test: a server on io_uring whose buffers are pages of a pool for every
//! thread.

#[path = "../../examples/io_uring_echo.rs"]
mod example;

use example::{Tested, self_test};

/// Proves POOL-15: the region is a fixed buffer and a provided-buffer ring of io_uring, every byte
/// comes back, and no page is lost.
#[test]
fn the_example_echoes_every_byte_and_loses_no_page() {
    match self_test().expect("a server") {
        Tested::Passed(bytes) => assert!(bytes > 1_000_000, "{bytes} bytes"),
        Tested::Skipped(why) => netmem_testing::skip(&format!("io_uring is not available: {why}")),
    }
}
