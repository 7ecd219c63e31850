//! Signals that end a run in order. They set a flag, which every loop reads, so that each command
//! cleans up before it ends.

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};

const ENDING: [i32; 3] = [SIGINT, SIGTERM, SIGHUP];

/// The exit status of a command that this signal ended, as shells report it.
fn status(signal: i32) -> i32 {
    128 + signal
}

/// The signal that came last, or 0.
static CAME: LazyLock<Arc<AtomicUsize>> = LazyLock::new(Arc::default);

/// The exit status of a command that a signal has ended, if one has come.
pub fn exit_status() -> Option<u8> {
    let signal = i32::try_from(CAME.load(Ordering::Relaxed)).ok().filter(|&signal| signal > 0)?;
    u8::try_from(status(signal)).ok()
}

/// Names what failed, and keeps the kind of the error.
fn failed(what: impl std::fmt::Display) -> impl FnOnce(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{what}: {error}"))
}

/// A flag that is set by the signals that end a program. A second signal ends it at once.
///
/// # Errors
///
/// A handler cannot be registered.
pub fn stop_flag() -> io::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in ENDING {
        // In this order: the first signal finds the flag clear, and sets it.
        signal_hook::flag::register_conditional_shutdown(signal, status(signal), stop.clone())
            .and_then(|_| signal_hook::flag::register_usize(signal, CAME.clone(), signal as usize))
            .and_then(|_| signal_hook::flag::register(signal, stop.clone()))
            .map_err(failed(format_args!("cannot handle signal {signal}")))?;
    }
    Ok(stop)
}

/// A signal ended a measurement. What was measured before it was reported.
#[derive(Debug, thiserror::Error)]
#[error("interrupted: the report has what was measured until then")]
pub struct Interrupted;

/// A descriptor that becomes readable at the first of the signals that end a program, for a thread
/// that sleeps in `poll`.
///
/// # Errors
///
/// A handler cannot be registered, or the process has no more descriptors.
pub fn stop_descriptor() -> io::Result<UnixStream> {
    Ok(stop_descriptors()?.0)
}

/// The same, and its other end: the first becomes readable, too, when something is written there.
///
/// # Errors
///
/// As of [`stop_descriptor`].
pub fn stop_descriptors() -> io::Result<(UnixStream, UnixStream)> {
    let (reader, writer) = UnixStream::pair().map_err(failed("cannot make a socket pair"))?;
    for signal in ENDING {
        let writer = writer.try_clone().map_err(failed("cannot duplicate a descriptor"))?;
        signal_hook::low_level::pipe::register(signal, writer)
            .map_err(failed(format_args!("cannot handle signal {signal}")))?;
    }
    writer.set_nonblocking(true).map_err(failed("cannot make a socket non-blocking"))?;
    Ok((reader, writer))
}
