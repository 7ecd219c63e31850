//! Programs that must not compile.

/// Neither the guard of a critical section nor a value that was found in it can be used after the
/// section, or on another thread. References cannot be forged. Proves REF-3, REF-5.
#[test]
fn misuse_does_not_compile() {
    trybuild::TestCases::new().compile_fail("tests/ui/*.rs");
}
