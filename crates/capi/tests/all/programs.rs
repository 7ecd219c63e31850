//! The programs that need nothing but a compiler, the header and the binary interface.

use crate::build::{C, CPP, build, crate_folder, each, each_build, libraries, run};
use netmem_testing::{installed, skip};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

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

/// The header's table of misuse, of which a part is found by debug assertions only. Proves CAPI-3.
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
fn the_library_is_never_unloaded() {
    // Linked to what is called only: the program loads the library by itself.
    each(C, &["-std=c11", "-Wl,--as-needed"], "tests/all/unload.c", |out| assert_eq!(out, "NETMEM_OK\n"));
}

/// Each function that runs code of the program: an exception of that code ends in an abort, and not
/// in the frames of the library.
#[test]
fn a_callback_that_throws_aborts() {
    for callback in ["release", "page", "read", "call"] {
        each_build(CPP, &["-std=c++17"], "tests/all/throws.cpp", |mut program| {
            let ended = program.arg(callback).output().expect("a program");
            let (out, err) = (String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
            assert_eq!(out, format!("{callback} throws\n"), "{err}");
            assert_eq!(ended.status.signal(), Some(libc::SIGABRT), "{callback}: {:?} {err}", ended.status);
        });
    }
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
/// Proves CAPI-1.
#[test]
fn the_binary_interface_is_the_committed_one() {
    if let Err(why) = installed(&["abidiff", "abidw", "awk", "gcc", "nm"]) {
        skip(&why);
        return;
    }
    let libraries = libraries();
    run(Command::new(crate_folder().join("abi.sh")).arg(libraries.path().join("libnetmem.so")));
}
