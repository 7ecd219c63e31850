//! What must not compile.
#![cfg(not(loom))]

/// A critical section cannot be left with its guard or with what was found in it, nor lent to another thread; references
/// cannot be made up. Proves REF-3, REF-5.
#[test]
fn misuse_does_not_compile() {
    trybuild::TestCases::new().compile_fail("tests/ui/*.rs");
}
