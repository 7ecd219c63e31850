//! A configuration that every thread reads and that is replaced while the program runs.
//!
//!     cargo run -p netmem --all-features --example config
//!
//! The configuration is behind a per-CPU count (`PercpuRef`): taking a reference is a plain add on
//! this CPU, so readers on many cores do not slow each other down. `RcuCell` is the place where
//! readers find the present configuration.

use anyhow::Context;
use netmem::refs::{Owner, PercpuRef, RcuCell, Ref, rcu};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

struct Config {
    version: u64,
    mtu: usize,
}

static CONFIG: RcuCell<Config, PercpuRef> = RcuCell::empty();

/// For short use: no reference is counted. The configuration lives at least as long as the critical
/// section.
fn fits(packet: usize) -> bool {
    rcu::read(|guard| CONFIG.load(guard).is_some_and(|config| packet <= config.mtu))
}

/// For longer use: a reference, which keeps this configuration until it is dropped, also after it
/// has been replaced.
fn config() -> Option<Ref<Config, PercpuRef>> {
    CONFIG.get()
}

fn main() -> anyhow::Result<()> {
    CONFIG.store(Some(Owner::try_new(Config { version: 1, mtu: 1500 })?));
    let old = config().context("a configuration was just stored")?;

    let (stop, packets) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let readers = [(); 2].map(|()| {
            scope.spawn(|| {
                let mut newest = 0;
                while !stop.load(Ordering::Relaxed) {
                    // The cell is never empty from the first store on, also while another
                    // configuration is being stored.
                    let config = config().context("there is no configuration")?;
                    // A reader never goes back to an older version.
                    assert!(config.version >= newest);
                    newest = config.version;
                    packets.fetch_add(u64::from(fits(1400)), Ordering::Relaxed);
                }
                anyhow::Ok(())
            })
        });
        // Another configuration every millisecond. Storing it kills the one before, which is freed
        // when its last reader is done.
        for version in 2..=20 {
            std::thread::sleep(Duration::from_millis(1));
            CONFIG.store(Some(Owner::try_new(Config { version, mtu: 9000 })?));
        }
        stop.store(true, Ordering::Relaxed);
        readers
            .into_iter()
            .try_for_each(|reader| reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))?;
        anyhow::Ok(())
    })?;

    let now = config().context("a configuration is stored")?;
    println!("{} packets fitted while versions 2 to {} were stored", packets.into_inner(), now.version);
    println!("version {} is kept by a reference: mtu {}, dying: {}", old.version, old.mtu, Ref::is_dying(&old));
    Ok(())
}
