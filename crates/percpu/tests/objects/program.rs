//! A program that counts, and prints its mode and the number of CPUs.

use netmem_percpu::{Counter, Mode, cpus, forced_mode, mode};
use std::fmt::Debug;
use tracing::field::{Field, Visit};
use tracing::{Event, Metadata, Subscriber, span};

/// Prints the messages of events. It uses the library itself, as a subscriber may.
struct Print;

impl Visit for Print {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            println!("warning: {value:?} ({})", mode());
        }
    }
}

impl Subscriber for Print {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        event.record(&mut Print);
        assert!(std::env::var_os("PANIC_IN_LOG").is_none(), "this panic is part of the test");
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    tracing::subscriber::set_global_default(Print)?;
    let counter = Counter::new()?;
    (0..1000).try_for_each(|_| counter.add(1))?;
    match mode() {
        Mode::Rseq(index) => println!("mode: {index}"),
        mode => println!("mode: {mode}"),
    }
    match forced_mode() {
        Ok(forced) => println!("forced: {}", forced.is_some()),
        Err(error) => println!("refused: {error}"),
    }
    println!("cpus: {}", cpus());
    // SAFETY: reads what the kernel handed to the process.
    println!("secure: {}", unsafe { libc::getauxval(libc::AT_SECURE) } != 0);
    println!("sum: {:?}", counter.close()?);
    Ok(())
}
