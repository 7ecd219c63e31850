//! A library that contains sequences is unloaded. The test has a process of its own: no other
//! thread may hold a lock when it forks.
#![cfg(all(target_os = "linux", target_env = "gnu"))]

#[path = "objects/build.rs"]
mod build;

use build::build;
use netmem_testing::is_emulated;
use netmem_testing::skip;
use std::ffi::{CStr, CString, c_int};
use std::path::Path;

const FAILED: c_int = 1;
const NOT_LOADED: c_int = 2;
const NO_SEQUENCES: c_int = 3;

extern "C" fn on_signal(_: c_int) {}

/// Runs in a child: loads the library, runs its sequences and unloads it. Afterwards the kernel
/// still reads the descriptor of the last sequence, at every signal and at every restart.
fn load_run_and_unload(library: &CStr) -> c_int {
    const EXPEDITED_RSEQ: c_int = 1 << 7;
    // SAFETY: the function has this type; nothing of the library is used after it was closed. A
    // child has one thread.
    unsafe {
        // The library chooses its mode itself, and uses sequences if the machine supports them.
        libc::unsetenv(c"NETMEM_PERCPU".as_ptr());
        let handle = libc::dlopen(library.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
        if handle.is_null() {
            return FAILED;
        }
        let run = libc::dlsym(handle, c"run_sequences".as_ptr());
        let Some(run) = std::mem::transmute::<*mut libc::c_void, Option<extern "C" fn() -> i32>>(run) else {
            return FAILED;
        };
        libc::signal(libc::SIGUSR1, on_signal as *const () as libc::sighandler_t);
        for _ in 0..1000 {
            match run() {
                1 => (),
                0 => return NO_SEQUENCES,
                _ => return FAILED,
            }
            if libc::dlclose(handle) != 0 {
                return FAILED;
            }
            libc::raise(libc::SIGUSR1);
            libc::syscall(libc::SYS_membarrier, EXPEDITED_RSEQ, 0, 0);
            libc::sched_yield();
            // If the library is not pinned, it is gone now.
            if libc::dlopen(library.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD).is_null() {
                return NOT_LOADED;
            }
        }
        0
    }
}

fn unload(library: &Path) {
    let name = CString::new(library.as_os_str().as_encoded_bytes()).expect("a path");
    // SAFETY: the child leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: ends the child, without what belongs to the parent.
        unsafe { libc::_exit(load_run_and_unload(&name)) };
    }
    let mut status = 0;
    // SAFETY: our own child, and a place for its status.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    let library = library.display();
    assert!(!libc::WIFSIGNALED(status), "{library}: killed by signal {}", libc::WTERMSIG(status));
    match libc::WEXITSTATUS(status) {
        0 => println!("{library}: sequences ran, and it stayed loaded"),
        NO_SEQUENCES => skip(&format!("{library} has no sequences here")),
        NOT_LOADED => panic!("{library}: it was unloaded"),
        _ => panic!("{library}: it did not run"),
    }
}

/// A library that is closed stays loaded, because the kernel reads the descriptors of its
/// sequences. The library is tested in two builds: as the compiler builds it for tests, in many
/// units, and as it builds it for release, where the linker has removed unused code.
#[test]
fn a_library_with_sequences_stays_loaded() {
    if is_emulated() {
        return skip("it is emulated, and what cargo builds is for another machine");
    }
    // The C library reads this variable when a program starts. If by it there are no
    // sequences, the test runs in a program that has them.
    if std::env::var_os("GLIBC_TUNABLES").is_some() {
        let mut again = std::process::Command::new(std::env::current_exe().expect("this program"));
        again.env_remove("GLIBC_TUNABLES").args(["--exact", "a_library_with_sequences_stays_loaded"]);
        return assert!(again.status().expect("it starts").success());
    }
    for profile in ["dev", "release"] {
        unload(&build("loaded", &["--profile", profile], "").expect("a library"));
    }
}
