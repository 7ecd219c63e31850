//! Builds programs of C and C++ with two compilers, their warnings as errors.

use netmem_testing::{installed, skip};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

pub(crate) const C: &[&str] = &["gcc", "clang"];
pub(crate) const CPP: &[&str] = &["g++", "clang++"];
const WARNINGS: &[&str] = &["-Wall", "-Wextra", "-Wpedantic", "-Werror"];
pub(crate) const SANITIZERS: &[&str] = &["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"];

pub(crate) fn crate_folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A folder in which the shared library has the name by which programs load it.
pub(crate) fn libraries() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let test = std::env::current_exe().expect("the test's path");
    let library = test.with_file_name("libnetmem_capi.so");
    assert!(library.exists(), "{} was built with the tests", library.display());
    for name in ["libnetmem.so", "libnetmem.so.0"] {
        std::os::unix::fs::symlink(&library, folder.path().join(name)).expect("a link");
    }
    folder
}

pub(crate) fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{out}{err}", output.status);
    out.into_owned()
}

/// Builds a program from `source`, and returns its path.
pub(crate) fn build(compiler: &str, flags: &[&str], source: &str, libraries: &Path) -> PathBuf {
    let program = libraries.join("program");
    let paths: [&OsStr; 4] = ["-I".as_ref(), "include".as_ref(), "-L".as_ref(), libraries.as_os_str()];
    let mut command = Command::new(compiler);
    command
        .current_dir(crate_folder())
        .args(flags)
        .args(WARNINGS)
        .args(paths)
        .arg(source)
        .arg("-o")
        .arg(&program)
        .args(["-lnetmem", "-pthread"]);
    run(&mut command);
    program
}

pub(crate) fn program(path: &Path) -> Command {
    let mut command = Command::new(path);
    // Memory of each CPU is the process's until its end, and is found through mappings, in which no
    // sanitizer looks. That nothing else is lost is in the pools' books.
    command.env("LD_LIBRARY_PATH", path.parent().expect("a folder")).env("ASAN_OPTIONS", "detect_leaks=0");
    command
}

/// Whether the compiler has the sanitizers, which clang has in a package of their own. If not, the
/// running test is reported as skipped in part.
fn sanitizes(compiler: &str) -> bool {
    let folder = tempfile::tempdir().expect("a folder");
    let (source, out) = (folder.path().join("empty.c"), folder.path().join("empty"));
    std::fs::write(&source, "int main(void) { return 0; }\n").expect("a file");
    let language: &[&str] = if CPP.contains(&compiler) { &["-xc++"] } else { &[] };
    let mut command = Command::new(compiler);
    let built = command.args(SANITIZERS).args(language).arg(source).arg("-o").arg(out).output().expect("the compiler");
    if !built.status.success() {
        skip(&format!("{compiler} has no sanitizers (for clang: the package libclang-rt-dev)"));
    }
    built.status.success()
}

/// Builds `source` by each of the compilers, and passes what the first program prints, and the
/// second, to `judge`: see [`each_build`].
pub(crate) fn each(compilers: &[&str], flags: &[&str], source: &str, judge: impl Fn(&str)) {
    each_build(compilers, flags, source, |mut program| judge(&run(&mut program)));
}

/// Builds `source` by each of the compilers, and calls `test` with two programs: that of the first
/// compiler, and that of the last one with sanitizers. If one of them is missing, the other builds
/// both.
pub(crate) fn each_build(compilers: &[&str], flags: &[&str], source: &str, test: impl Fn(Command)) {
    let is_there = |compiler: &&&str| installed(&[compiler]).map_err(|why| skip(&why)).is_ok();
    let compilers: Vec<&str> = compilers.iter().filter(is_there).copied().collect();
    for (at, compiler) in compilers.iter().enumerate() {
        let libraries = libraries();
        let built = build(compiler, flags, source, libraries.path());
        if at == 0 {
            test(program(&built));
        }
    }
    if let Some(compiler) = compilers.iter().rev().find(|compiler| sanitizes(compiler)) {
        let libraries = libraries();
        test(program(&build(compiler, &[flags, SANITIZERS].concat(), source, libraries.path())));
    }
}
