//! Programs of the tree, for tests that run them. A test of another package gets no path to them from cargo.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The top of the tree.
pub(crate) const TREE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// Builds what `target` names (cargo's options) where this test was built, unoptimised. Returns the folder that holds the programs.
fn build(target: &[&str]) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("the target folder").to_owned();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--offline", "--target-dir"]).arg(&folder).args(target).current_dir(TREE);
    assert!(cargo.status().expect("cargo can be run").success(), "{target:?} cannot be built");
    folder.join("debug")
}

/// The command: `NETMEM` (relative to the top of the tree), or else built now.
pub(crate) fn netmem() -> PathBuf {
    std::env::var_os("NETMEM").map_or_else(netmem_with_cuda, |path| Path::new(TREE).join(path))
}

/// The command with the feature `cuda`, built now. [`netmem`] builds the same, so that no test replaces another test's command.
pub(crate) fn netmem_with_cuda() -> PathBuf {
    build(&["--package", "netmem-cli", "--features", "cuda"]).join("netmem")
}

/// An example of the package `netmem`, built now.
pub(crate) fn example(name: &str) -> PathBuf {
    build(&["--package", "netmem", "--all-features", "--example", name]).join("examples").join(name)
}
