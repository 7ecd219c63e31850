//! The library that stands in for NVIDIA's driver, `tests/cuda/libcuda.c`.

use crate::tree::{TREE, target_tmpdir};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Builds the library, once per process. Returns its folder, which a program has in
/// `LD_LIBRARY_PATH`. Needs `cc`: the test asks [`installed`](crate::installed) first.
pub fn build() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let folder = target_tmpdir().join("libcuda-stand-in");
        std::fs::create_dir_all(&folder).expect("a folder");
        let source = Path::new(TREE).join("tests/cuda/libcuda.c");
        // Under the first name that is looked for: a library of that name may be installed.
        let (new, name) = (folder.join(std::process::id().to_string()), folder.join("libcuda.so"));
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-fPIC", "-O1", "-o"]).arg(&new).arg(source);
        assert!(cc.status().expect("cc can be run").success());
        std::fs::rename(new, name).expect("both are in one folder");
        folder
    })
}
