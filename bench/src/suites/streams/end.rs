//! The operations of one end of a connection, the same for every stack, and the four programs that
//! use them.

use super::memory::PIECE;
use hdrhistogram::Histogram;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bytes of a request, and of its response.
pub(super) const MESSAGE: usize = 64;

/// The longest time of a request that the histogram distinguishes, in nanoseconds.
const LONGEST: u64 = 60_000_000_000;

/// What threads of a stack do when they have no work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Idle {
    Sleeps,
    Polls,
}

/// One end of a connection. Used by one thread.
pub(super) trait End {
    /// Writes the next part of the sender's working set and sends it, at most a piece and as much
    /// as there is room for. Returns how many bytes were sent.
    fn produce(&mut self) -> anyhow::Result<usize>;

    /// Receives into the receiver's working set and reads what was received, about a piece at most.
    /// Returns how many bytes, or `None` at the end.
    fn consume(&mut self) -> anyhow::Result<Option<usize>>;

    /// Sends as much of a message as there is room for. Returns how many bytes.
    fn write(&mut self, bytes: &[u8]) -> anyhow::Result<usize>;

    /// Receives the bytes that are there. Returns how many, or `None` at the end.
    fn read(&mut self, into: &mut [u8]) -> anyhow::Result<Option<usize>>;

    /// Lets the stack work. `worked`: whether the program has done something since the last call.
    /// If it has not, the call may sleep, but no longer than [`LOOK`].
    fn turn(&mut self, worked: bool) -> anyhow::Result<()>;
}

/// How often threads check whether the run is over.
pub(super) const LOOK: Duration = Duration::from_millis(20);

/// What the threads of a run share.
#[derive(Debug, Default)]
pub(super) struct Watch {
    over: AtomicBool,
    /// Set when the measurement begins.
    counts: AtomicBool,
    /// Bytes that were received.
    bytes: AtomicU64,
    /// Responses that were received.
    responses: AtomicU64,
}

impl Watch {
    pub(super) fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    pub(super) fn end(&self) {
        self.over.store(true, Ordering::Relaxed);
    }

    pub(super) fn count_from_now(&self) {
        self.counts.store(true, Ordering::Relaxed);
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Counts responses that were received.
    pub(super) fn add_responses(&self, responses: usize) {
        self.responses.fetch_add(responses as u64, Ordering::Relaxed);
    }

    pub(super) fn responses(&self) -> u64 {
        self.responses.load(Ordering::Relaxed)
    }
}

/// Sends until the run is over.
pub(super) fn source(mut end: impl End, watch: &Watch) -> anyhow::Result<()> {
    while !watch.is_over() {
        let sent = end.produce()?;
        end.turn(sent > 0)?;
    }
    Ok(())
}

/// Receives until the run is over.
pub(super) fn sink(mut end: impl End, watch: &Watch) -> anyhow::Result<()> {
    while !watch.is_over() {
        let Some(received) = end.consume()? else { return Ok(()) };
        watch.bytes.fetch_add(received as u64, Ordering::Relaxed);
        end.turn(received > 0)?;
    }
    Ok(())
}

/// Sends a request, waits for the response, and repeats that. Returns the times of the requests, in
/// nanoseconds.
pub(super) fn client(mut end: impl End, watch: &Watch) -> anyhow::Result<Histogram<u64>> {
    let mut times = Histogram::new_with_bounds(1, LONGEST, 3)?;
    let (request, mut response) = ([0x5a; MESSAGE], [0; MESSAGE]);
    while !watch.is_over() {
        let begin = Instant::now();
        let (mut sent, mut received) = (0, 0);
        while received < MESSAGE && !watch.is_over() {
            let mut moved = 0;
            if sent < MESSAGE {
                moved = end.write(&request[sent..])?;
                sent += moved;
            } else {
                moved += end.read(&mut response[received..])?.unwrap_or(0);
                received += moved;
            }
            if received < MESSAGE {
                end.turn(moved > 0)?;
            }
        }
        std::hint::black_box(&response);
        if watch.counts.load(Ordering::Relaxed) && received == MESSAGE {
            times.saturating_record(u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX));
        }
        watch.responses.fetch_add(1, Ordering::Relaxed);
    }
    Ok(times)
}

/// Answers requests until the run is over.
pub(super) fn server(mut end: impl End, watch: &Watch) -> anyhow::Result<()> {
    let (mut bytes, mut waits) = ([0; PIECE], 0);
    while !watch.is_over() {
        let mut moved = 0;
        if waits == 0 {
            let Some(received) = end.read(&mut bytes)? else { return Ok(()) };
            (moved, waits) = (received, received);
        }
        if waits > 0 {
            let sent = end.write(&bytes[..waits])?;
            (moved, waits) = (moved + sent, waits - sent);
        }
        end.turn(moved > 0)?;
    }
    Ok(())
}
