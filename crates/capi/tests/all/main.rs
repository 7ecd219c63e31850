//! The header and the library as C and C++ use them: built by two compilers, with their warnings as
//! errors, and run, also under the address and undefined-behaviour sanitizers and valgrind.

use netmem_testing::{installed, skip};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

const C: &[&str] = &["gcc", "clang"];
const CPP: &[&str] = &["g++", "clang++"];
const WARNINGS: &[&str] = &["-Wall", "-Wextra", "-Wpedantic", "-Werror"];
const SANITIZERS: &[&str] = &["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"];

fn crate_folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A folder in which the shared library has the name by which programs load it.
fn libraries() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let test = std::env::current_exe().expect("the test's path");
    let library = test.with_file_name("libnetmem_capi.so");
    assert!(library.exists(), "{} was built with the tests", library.display());
    for name in ["libnetmem.so", "libnetmem.so.0"] {
        std::os::unix::fs::symlink(&library, folder.path().join(name)).expect("a link");
    }
    folder
}

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{out}{err}", output.status);
    out.into_owned()
}

/// Builds a program from `source`, and returns its path.
fn build(compiler: &str, flags: &[&str], source: &str, libraries: &Path) -> PathBuf {
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

fn program(path: &Path) -> Command {
    let mut command = Command::new(path);
    // Memory of each CPU is the process's until its end, and is found through mappings, in which no
    // sanitizer looks. That nothing else is lost is in the pools' books.
    command.env("LD_LIBRARY_PATH", path.parent().expect("a folder")).env("ASAN_OPTIONS", "detect_leaks=0");
    command
}

/// Builds and runs `source` by each of the compilers, without and with sanitizers.
fn each(compilers: &[&str], flags: &[&str], source: &str, judge: impl Fn(&str)) {
    for compiler in compilers {
        if let Err(why) = installed(&[compiler]) {
            skip(&why);
            continue;
        }
        let libraries = libraries();
        judge(&run(&mut program(&build(compiler, flags, source, libraries.path()))));
        let sanitized = [flags, SANITIZERS].concat();
        judge(&run(&mut program(&build(compiler, &sanitized, source, libraries.path()))));
    }
}

fn books_balance(out: &str) {
    assert_eq!(out, "packets 100000: allocated 100000, returned 100000, in flight 0\n");
}

#[test]
fn pages_cross_threads_in_c() {
    each(C, &["-std=c11"], "c/hand_over.c", books_balance);
}

#[test]
fn pages_cross_threads_in_cpp() {
    each(CPP, &["-std=c++17", "-xc++"], "c/hand_over.c", books_balance);
}

#[test]
fn the_three_counts() {
    each(C, &["-std=c11"], "c/counts.c", |out| {
        assert!(out.ends_with("rcuref: 1000 routes, freed 1000\npercpu_ref: ended 1 time\n"), "{out}");
    });
}

#[test]
fn the_wrappers() {
    each(CPP, &["-std=c++17"], "c/wrappers.cpp", |out| {
        assert!(out.starts_with("payload: 1 page in flight\n8 threads waited for 4 pages\nno pages: "), "{out}");
    });
}

/// The header's table of misuse, of which a part is found by debug assertions only.
#[test]
fn misuse_is_an_error() {
    if !cfg!(debug_assertions) {
        skip("the library is built without debug assertions, so that misuse is undefined");
        return;
    }
    each(C, &["-std=c11"], "tests/all/misuse.c", |out| assert_eq!(out, "each misuse was found\n"));
    each(CPP, &["-std=c++17", "-xc++"], "tests/all/misuse.c", |out| assert_eq!(out, "each misuse was found\n"));
}

#[test]
fn valgrind_finds_no_error() {
    if let Err(why) = installed(&["gcc", "valgrind"]) {
        skip(&why);
        return;
    }
    let libraries = libraries();
    let built = build("gcc", &["-std=c11", "-g"], "c/hand_over.c", libraries.path());
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--error-exitcode=9", "--quiet"]).arg(&built).arg("2000").env("LD_LIBRARY_PATH", libraries.path());
    assert_eq!(run(&mut valgrind), "packets 2000: allocated 2000, returned 2000, in flight 0\n");
}

#[test]
fn the_header_is_of_this_tree() {
    if installed(&["cbindgen"]).is_err() {
        skip("cbindgen is not installed (cargo install cbindgen; Debian's is too old)");
        return;
    }
    let mut cbindgen = Command::new("cbindgen");
    cbindgen.current_dir(crate_folder()).args([
        "--config",
        "cbindgen.toml",
        "--crate",
        "netmem-capi",
        "--verify",
        "--output",
        "include/netmem.h",
    ]);
    run(&mut cbindgen);
}

/// The header declares what the library exports, and its types are those of the committed dump.
#[test]
fn the_binary_interface_is_the_committed_one() {
    if let Err(why) = installed(&["abidiff", "abidw", "awk", "gcc", "nm"]) {
        skip(&why);
        return;
    }
    let libraries = libraries();
    run(Command::new(crate_folder().join("abi.sh")).arg(libraries.path().join("libnetmem.so")));
}
