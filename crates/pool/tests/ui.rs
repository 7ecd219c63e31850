//! What must not compile.

/// Proves decisions 2, 3 and 4 (POOL-2, POOL-5, POOL-10): the poll context stays in its poll, on its thread and with its
/// pool; a page that was given away is gone; bytes that a peer can write are never a slice.
#[test]
fn does_not_compile() {
    trybuild::TestCases::new().compile_fail("tests/ui/*.rs");
}
