//! Files and programs of the tree, for tests that read, build or run them. Cargo passes a test no
//! path to what other packages have.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The top of the tree.
pub const TREE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// A page of `docs/`, by its path there.
#[track_caller]
pub fn page(path: &str) -> String {
    let path = Path::new(TREE).join("docs").join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The target folder of cargo that has this test program.
pub fn target() -> PathBuf {
    // `target/debug/deps/PROGRAM`, or an example in the folder beside `deps`.
    let program = std::env::current_exe().expect("this program");
    program.ancestors().nth(3).expect("the target folder").to_owned()
}

/// The folder for what tests write: `CARGO_TARGET_TMPDIR` of the packages' own tests.
pub fn target_tmpdir() -> PathBuf {
    target().join("tmp")
}

/// Builds what `target` names (cargo's options) where this test was built, unoptimised. Returns the
/// folder that holds the programs.
pub fn build(options: &[&str]) -> PathBuf {
    let folder = target();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--offline", "--target-dir"]).arg(&folder).args(options).current_dir(TREE);
    assert!(cargo.status().expect("cargo can be run").success(), "{options:?} cannot be built");
    folder.join("debug")
}

/// The command: `NETMEM` (relative to the top of the tree), or else built now.
pub fn netmem() -> PathBuf {
    std::env::var_os("NETMEM").map_or_else(netmem_with_cuda, |path| Path::new(TREE).join(path))
}

/// The command with the feature `cuda`, built now. [`netmem`] builds the same, so that no test
/// replaces another test's command.
pub fn netmem_with_cuda() -> PathBuf {
    build(&["--package", "netmem-cli", "--features", "cuda"]).join("netmem")
}

/// An example of the package `netmem`, built now.
pub fn example(name: &str) -> PathBuf {
    build(&["--package", "netmem", "--all-features", "--example", name]).join("examples").join(name)
}

/// An example of the package `netmem-tests`, built now.
pub fn example_of_tests(name: &str) -> PathBuf {
    build(&["--package", "netmem-tests", "--example", name]).join("examples").join(name)
}

/// Builds the programs that scripts in `bench/peers` run, in the folder beside [`netmem`]:
/// optimised if `NETMEM` names the command, which is then a release build.
pub fn build_peers() {
    let mut options = vec!["--package", "netmem-bench", "--example", "virtio_peer", "--example", "turns"];
    options.extend(std::env::var_os("NETMEM").map(|_| "--release"));
    build(&options);
}
