//! A program that uses per-CPU data: it runs in the requested mode, also if it is linked
//! statically, and sizes depend on the CPUs that it may use.
#[path = "../objects/build.rs"]
mod build;

use build::build;
use netmem_testing::is_emulated;
use netmem_testing::skip;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

/// A command without the environment variables that choose a mode.
fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.env_remove("NETMEM_PERCPU").env_remove("GLIBC_TUNABLES");
    command
}

/// What the program printed.
struct Printed(String);

impl Printed {
    /// The text after `key`.
    fn after(&self, key: &str) -> Option<&str> {
        self.0.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(": "))
    }

    fn mode(&self) -> &str {
        self.after("mode").expect("a mode")
    }

    /// The one warning, if the mode is not the one that was asked for. It is the error that the
    /// program got, too.
    fn warning(&self) -> Option<&str> {
        let mut warnings = self.0.lines().filter_map(|line| line.strip_prefix("warning: "));
        let warning = warnings.next();
        assert!(warnings.next().is_none(), "warned twice: {}", self.0);
        match (warning, self.after("refused")) {
            (Some(warning), Some(error)) => assert!(warning.starts_with(error), "{warning}: {error}"),
            (warning, error) => assert!(warning.is_none() && error.is_none(), "{warning:?}, {error:?}"),
        }
        warning
    }
}

/// Runs the program, which never fails.
fn run(command: &mut Command) -> Printed {
    let output = command.output().expect("it runs");
    let (text, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    println!("{text}{errors}");
    assert!(output.status.success(), "{}: {errors}", output.status);
    assert!(text.contains("sum: Some(1000)"), "{text}");
    Printed(text.into_owned())
}

/// Each mode can be forced if the machine supports it. If the machine does not support it, or if
/// the mode does not exist, the program runs in the best mode, and there is one warning.
#[test]
fn a_forced_mode() {
    if is_emulated() {
        return skip("it is emulated, and what cargo builds is for another machine");
    }
    let program = build("program", &[], "").expect("a program");
    let unforced = run(&mut command(&program));
    let best = unforced.mode();
    assert!(unforced.warning().is_none() && unforced.after("forced") == Some("false"));
    let forced = |mode: &str| run(command(&program).env("NETMEM_PERCPU", mode));
    let empty = forced("");
    assert!(empty.mode() == best && empty.warning().is_none());
    let portable = forced("portable");
    assert!(portable.mode() == "portable" && portable.warning().is_none() && portable.after("forced") == Some("true"));
    let unknown = forced("fast");
    assert_eq!(unknown.mode(), best);
    assert!(unknown.warning().is_some_and(|warning| warning.contains("NETMEM_PERCPU: unknown mode \"fast\"")));
    // A subscriber that panics ends neither the program nor the operation that decided.
    let panics = run(command(&program).env("NETMEM_PERCPU", "fast").env("PANIC_IN_LOG", "1"));
    assert!(panics.mode() == best && panics.warning().is_some());
    let modes = ["mm_cid", "cpu_id"];
    let first = modes.iter().position(|mode| *mode == best).unwrap_or(modes.len());
    for (at, mode) in modes.into_iter().enumerate() {
        let is = forced(mode);
        match is.warning() {
            None => assert!(is.mode() == mode && at >= first, "{mode}"),
            Some(warning) => {
                assert!(is.mode() == best && at < first && warning.contains(&format!("{mode} is not available")));
            }
        }
        // If the C library registers no areas, neither of the two modes is available. The same
        // holds on machines for which no sequences are written.
        let mut off = command(&program);
        let off = run(off.env("GLIBC_TUNABLES", "glibc.pthread.rseq=0").env("NETMEM_PERCPU", mode));
        let why = if cfg!(target_arch = "x86_64") { "the C library has registered no" } else { "written for x86-64" };
        assert!(off.mode() == "portable" && off.warning().is_some_and(|warning| warning.contains(why)));
    }
}

/// A program that runs with more rights than its user does not let the user choose, and does not
/// complain.
#[test]
fn a_program_with_more_rights_ignores_the_variable() {
    // SAFETY: a function without conditions.
    if is_emulated() || unsafe { libc::geteuid() } != 0 {
        return skip("only root can make a program that runs as another user");
    }
    const NOBODY: u32 = 65534;
    let program = build("program", &[], "").expect("a program");
    let best = run(&mut command(&program));
    let copy = program.with_file_name("set-user-id-program");
    std::fs::copy(&program, &copy).expect("a copy");
    std::os::unix::fs::chown(&copy, Some(NOBODY), None).expect("root may");
    std::fs::set_permissions(&copy, std::fs::Permissions::from_mode(0o4755)).expect("root may");
    for value in ["portable", "fast"] {
        let ran = run(command(&copy).env("NETMEM_PERCPU", value));
        if ran.after("secure") != Some("true") {
            return skip("the file system takes no notice of the set-user-ID bit");
        }
        assert_eq!(ran.mode(), best.mode());
        assert!(ran.warning().is_none() && ran.after("forced") == Some("false"));
    }
    std::fs::remove_file(&copy).expect("the copy");
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
    assert_eq!(run(&mut command(&program)).mode(), run(&mut command(&dynamic)).mode());
    assert_eq!(run(command(&program).env("GLIBC_TUNABLES", "glibc.pthread.rseq=0")).mode(), "portable");
}

/// Sizes are for all indices that may come. What threads may use now does not change them: other
/// threads may start, or be moved.
#[test]
fn sizes_do_not_follow_the_affinity() {
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
    let all = run(&mut command(&program));
    assert_eq!(run(&mut on(cpu.expect("a CPU"))).after("cpus"), all.after("cpus"));
    let pretends = run(command(&program).env("NETMEM_PERCPU", "portable_256"));
    assert!(pretends.after("cpus") == Some("256") && pretends.mode() == "portable");
}
