//! Programs that must not compile. The pool's own rules are tested with the pool.

/// Proves NET-6 and POOL-5 as far as types can: a poll stays in its poll, on its thread and with
/// its queue; a packet that was sent is gone; a received byte is never a slice.
#[test]
fn does_not_compile() {
    trybuild::TestCases::new().compile_fail("tests/ui/*.rs");
}
