//! A program that counts, and prints its mode and the number of CPUs.

use netmem_percpu::{Counter, Mode, cpus, mode};

/// This also runs when the process ends because its mode is not available, unless exit handlers are skipped then.
extern "C" fn at_exit() {
    mode();
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // SAFETY: a function without conditions.
    assert_eq!(unsafe { libc::atexit(at_exit) }, 0);
    let counter = Counter::new()?;
    (0..1000).try_for_each(|_| counter.add(1))?;
    match mode() {
        Mode::Rseq(index) => println!("mode: {index}"),
        mode => println!("mode: {mode}"),
    }
    println!("cpus: {}", cpus());
    println!("sum: {:?}", counter.close()?);
    Ok(())
}
