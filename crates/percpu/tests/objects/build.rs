//! Builds the files in `objects/`, as a user would build them.

use std::path::PathBuf;
use std::process::Command;

/// Builds one of this crate's examples in a target directory of its own, with these compiler flags.
/// The error is the output of cargo.
pub(crate) fn build(example: &str, arguments: &[&str], flags: &str) -> Result<PathBuf, String> {
    let target = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("objects");
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args([
        "build",
        "--quiet",
        "--offline",
        "--manifest-path",
        concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"),
    ]);
    cargo.args(["--example", example, "--message-format", "json-render-diagnostics"]).args(arguments);
    // The objects are always built in the same way, with whatever flags this test was built.
    cargo.env("RUSTFLAGS", flags).env_remove("CARGO_ENCODED_RUSTFLAGS").env_remove("CARGO_BUILD_TARGET");
    let output = cargo.arg("--target-dir").arg(target).output().expect("cargo runs");
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    // The last artifact is the example; its file stands between quotes.
    let messages = String::from_utf8_lossy(&output.stdout).into_owned();
    let (_, files) = messages.rsplit_once("\"filenames\":[\"").ok_or("no artifact")?;
    files.split_once('"').map(|(file, _)| file.into()).ok_or("no file".into())
}
