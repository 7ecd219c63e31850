//! Programs that must not compile.

/// Proves POOL-2, POOL-5 and POOL-10: the poll context stays in its poll, on its thread and with
/// its pool. A page that was moved out cannot be used. Bytes that a peer can write are never a
/// slice.
#[test]
fn does_not_compile() {
    trybuild::TestCases::new().compile_fail("tests/ui/*.rs");
}
