//! A program that counts, and says in which mode and for how many CPUs.

use netmem_percpu::{Counter, Mode, cpus, mode};

fn main() -> Result<(), Box<dyn std::error::Error>> {
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
