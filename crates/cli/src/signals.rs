//! Ctrl-C and its relatives end a run in order: a flag that everything looks at, so that nothing is left behind.

use anyhow::Context;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

const ENDING: [i32; 3] = [SIGINT, SIGTERM, SIGHUP];

/// A flag that is set by the signals that end a program. A second signal ends it at once.
pub(crate) fn stop_flag() -> anyhow::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in ENDING {
        // In this order: the first signal finds the flag clear, and sets it.
        signal_hook::flag::register_conditional_shutdown(signal, 1, stop.clone())
            .and_then(|_| signal_hook::flag::register(signal, stop.clone()))
            .with_context(|| format!("cannot handle signal {signal}"))?;
    }
    Ok(stop)
}

/// A descriptor that becomes readable at the first of the signals that end a program, for a thread that sleeps in `poll`.
pub(crate) fn stop_descriptor() -> anyhow::Result<UnixStream> {
    let (reader, writer) = UnixStream::pair().context("cannot make a socket pair")?;
    for signal in ENDING {
        let writer = writer.try_clone().context("cannot duplicate a descriptor")?;
        signal_hook::low_level::pipe::register(signal, writer)
            .with_context(|| format!("cannot handle signal {signal}"))?;
    }
    Ok(reader)
}
