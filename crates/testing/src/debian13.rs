//! The programs of Debian 13, which `tests/peers/debian13.sh` unpacks.

use crate::tree::{TREE, target_tmpdir};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The root that the programs are in.
pub struct Root(PathBuf);

impl Root {
    /// The root, unpacked first if it is not there; or why the archive cannot be had.
    pub fn get() -> Result<Self, String> {
        let directory = target_tmpdir().join("debian13");
        let script = Path::new(TREE).join("tests/peers/debian13.sh");
        let output = Command::new(script).arg(&directory).output().expect("debian13.sh can be run");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
        if let Some(why) = said.lines().find_map(|line| line.strip_prefix("skipped: ")) {
            return Err(why.to_owned());
        }
        Ok(Self(directory.join("root")))
    }

    /// A file of the root.
    pub fn path(&self, file: &str) -> PathBuf {
        self.0.join(file)
    }

    /// A program of the root, started by the root's own loader and with its own libraries.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.0.join("usr/lib64/ld-linux-x86-64.so.2"));
        command.arg("--library-path").arg(self.0.join("usr/lib/x86_64-linux-gnu")).arg(self.0.join(program));
        command
    }
}
