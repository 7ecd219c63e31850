//! How a test detects that an emulator such as `qemu-aarch64` runs it.

use std::path::PathBuf;

/// Whether an emulator runs this program: then it was built for another machine than the cargo that
/// built it. The emulator's system calls have limits that the kernel's do not have, and programs
/// that a test starts are for the machine that runs the emulator.
pub fn is_emulated() -> bool {
    // The machine of an ELF file is in its bytes 18 and 19.
    let machine = |file: PathBuf| std::fs::read(file).expect("a program")[18..20].to_vec();
    machine(env!("CARGO").into()) != machine(std::env::current_exe().expect("this program"))
}
