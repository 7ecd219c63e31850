//! A program that uses per-CPU data: it runs in the requested mode, also if it is linked statically, and sizes depend
//! on the CPUs that it may use.
#![cfg(all(target_os = "linux", target_env = "gnu"))]

#[path = "objects/build.rs"]
mod build;
#[path = "shared/emulated.rs"]
mod emulated;
#[path = "shared/skip.rs"]
mod skip;

use build::build;
use emulated::is_emulated;
use skip::skip;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

/// A command without the environment variables that choose a mode.
fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.env_remove("NETMEM_PERCPU").env_remove("GLIBC_TUNABLES");
    command
}

/// Returns the text that the program printed after `key`, or its message on standard error if it failed.
fn run(command: &mut Command, key: &str) -> Result<String, String> {
    let output = command.output().expect("it runs");
    if !output.status.success() {
        assert!(output.status.code().is_some(), "killed: {}", output.status);
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    println!("{text}");
    assert!(text.contains("sum: Some(1000)"), "{text}");
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(": "));
    Ok(line.expect("a line").into())
}

/// Each mode can be forced if the machine supports it. If the machine does not support it, or if the mode does not
/// exist, the program ends with an error.
#[test]
fn a_forced_mode() {
    if is_emulated() {
        return skip("it is emulated, and what cargo builds is for another machine");
    }
    let program = build("program", &[], "").expect("a program");
    let best = run(&mut command(&program), "mode").expect("the best mode");
    let forced = |mode: &str| run(command(&program).env("NETMEM_PERCPU", mode), "mode");
    assert_eq!(forced("").as_ref(), Ok(&best));
    assert_eq!(forced("portable").as_deref(), Ok("portable"));
    assert!(forced("fast").is_err_and(|error| error.contains("NETMEM_PERCPU: unknown mode \"fast\"")));
    let modes = ["mm_cid", "cpu_id"];
    let best = modes.iter().position(|mode| *mode == best).unwrap_or(modes.len());
    for (at, mode) in modes.into_iter().enumerate() {
        match forced(mode) {
            Ok(is) => assert!(is == mode && at >= best, "{mode}: {is}"),
            Err(error) => assert!(at < best && error.contains(&format!("{mode} is not available")), "{mode}: {error}"),
        }
        // If the C library registers no areas, neither of the two modes is available. The same holds on machines for
        // which no sequences are written.
        let mut off = command(&program);
        off.env("GLIBC_TUNABLES", "glibc.pthread.rseq=0").env("NETMEM_PERCPU", mode);
        let why = if cfg!(target_arch = "x86_64") { "the C library has registered no" } else { "written for x86-64" };
        assert!(run(&mut off, "mode").is_err_and(|error| error.contains(why)));
    }
}

/// Whether an ELF file of 64 bits names a dynamic linker.
#[cfg(target_arch = "x86_64")]
fn has_interpreter(file: &[u8]) -> bool {
    const PT_INTERP: u64 = 3;
    let number =
        |at: usize, bytes: usize| file[at..at + bytes].iter().rev().fold(0_u64, |n, &byte| n << 8 | u64::from(byte));
    let (start, count) = (number(32, 8) as usize, number(56, 2) as usize);
    (0..count).any(|header| number(start + header * 56, 4) == PT_INTERP)
}

/// A static program runs in the same mode as a dynamic one.
#[test]
#[cfg(target_arch = "x86_64")]
fn a_static_program() {
    let arguments = ["--target", "x86_64-unknown-linux-gnu"];
    let program = match build("program", &arguments, "-C target-feature=+crt-static") {
        Ok(program) => program,
        Err(error) => return skip(&format!("no static program can be linked: {error}")),
    };
    let file = std::fs::read(&program).expect("the program");
    assert!(!has_interpreter(&file), "it is not static");
    let dynamic = build("program", &[], "").expect("a program");
    assert!(has_interpreter(&std::fs::read(&dynamic).expect("the program")));
    let mode = |program: &Path| run(&mut command(program), "mode").expect("a mode");
    assert_eq!(mode(&program), mode(&dynamic));
    let off = |program: &Path| run(command(program).env("GLIBC_TUNABLES", "glibc.pthread.rseq=0"), "mode");
    assert_eq!(off(&program).as_deref(), Ok("portable"));
}

/// A process that may use one CPU counts one CPU, for any number of that CPU.
#[test]
fn sizes_follow_the_affinity() {
    if is_emulated() {
        return skip("it is emulated, and what cargo builds is for another machine");
    }
    let program = build("program", &[], "").expect("a program");
    let on = |cpu: usize| {
        let mut command = command(&program);
        // SAFETY: one system call between fork and exec, on a set of the size that is given.
        unsafe {
            command.pre_exec(move || {
                let mut set: libc::cpu_set_t = std::mem::zeroed();
                libc::CPU_SET(cpu, &mut set);
                match libc::sched_setaffinity(0, size_of_val(&set), &set) {
                    0 => Ok(()),
                    _ => Err(std::io::Error::last_os_error()),
                }
            });
        }
        command
    };
    // Find a CPU that this process may use.
    // SAFETY: a set of no CPUs.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: a place of the size that is given.
    assert_eq!(unsafe { libc::sched_getaffinity(0, size_of_val(&set), &mut set) }, 0);
    // SAFETY: numbers that a set has.
    let cpu = (0..libc::CPU_SETSIZE as usize).rfind(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) });
    assert_eq!(run(&mut on(cpu.expect("a CPU")), "cpus").as_deref(), Ok("1"));
}
