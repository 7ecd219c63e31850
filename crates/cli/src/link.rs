//! The bad link of the option `--link`, the capture of `--pcap`, and `netmem link`, which puts the
//! same link between two taps.

use crate::args::{LinkArgs, PortArg};
use crate::metrics::Page;
use anyhow::Context;
use netmem::device::port::{LinkCapture, LinkStats, Linked, Port, PortError, Tap};
use netmem_measure::arguments::BadArgument;
use netmem_measure::{output, signals};
use netmem_netem::LinkOptions;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// The most frames that are taken from one tap before frames of the other one are taken.
const BATCH: usize = 256;

/// Hands out ports, one for each queue pair.
pub(crate) fn one_each<P>(ports: Vec<P>) -> impl FnMut(usize) -> Result<P, PortError> {
    let mut ports = ports.into_iter();
    move |_| ports.next().ok_or_else(|| PortError::Other("no queue is left".into()))
}

/// What the user asked for before the port: a bad link, its counters, and a capture. A capture
/// without a bad link is of a perfect one.
#[derive(Clone, Debug)]
pub(crate) struct AskedLink {
    options: Option<LinkOptions>,
    stats: Arc<LinkStats>,
    capture: Option<(Arc<LinkCapture>, PathBuf)>,
}

impl AskedLink {
    /// `None` if the user asked for neither. Makes the file of `--pcap`.
    pub(crate) fn open(options: Option<LinkOptions>, pcap: Option<&Path>) -> Result<Option<Self>, PortError> {
        let create = |path: &Path| {
            let file = LinkCapture::create(path).map_err(|error| uncaptured(path, &error))?;
            Ok((Arc::new(file), path.to_owned()))
        };
        let capture = pcap.map(create).transpose()?;
        let asked = options.is_some() || capture.is_some();
        Ok(asked.then(|| Self { options, stats: Arc::default(), capture }))
    }

    /// Puts the link in front of the port of queue pair `pair`.
    pub(crate) fn over<P: Port>(&self, port: P, pair: usize) -> Linked<P> {
        let link = Linked::new(port, self.options.unwrap_or_default(), pair, Arc::clone(&self.stats));
        match &self.capture {
            Some((file, _)) => link.captured(Arc::clone(file)),
            None => link,
        }
    }

    /// The counters of a bad link so far.
    pub(crate) fn report(&self) -> Option<LinkReport> {
        Some(LinkReport::new(self.options?, &self.stats))
    }

    /// Writes what the capture has buffered.
    ///
    /// # Errors
    ///
    /// The file could not be written, now or earlier.
    pub(crate) fn finish(&self) -> Result<(), PortError> {
        let Some((file, path)) = &self.capture else { return Ok(()) };
        file.flush().map_err(|error| uncaptured(path, &error))
    }

    /// Fills in an answer of `--metrics`.
    pub(crate) fn figures(&self, page: &Page) {
        if self.options.is_none() {
            return;
        }
        let (help, stats) = ("Packets on the link, by what happened to them.", &self.stats);
        let add = |direction, event, packets| {
            page.counter("netmem_link_packets_total", help, &[("direction", direction), ("event", event)], packets);
        };
        stats.to_driver().for_each(|(event, packets)| add("to_driver", event, packets));
        stats.from_driver().for_each(|(event, packets)| add("from_driver", event, packets));
        add("from_driver", "refused", stats.refused());
    }
}

fn uncaptured(path: &Path, error: &io::Error) -> PortError {
    PortError::Other(format!("--pcap {}: {error}", path.display()).into())
}

/// A link's counters, as JSON and, by [`fmt::Display`], in two lines.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct LinkReport {
    options: String,
    to_driver: BTreeMap<&'static str, u64>,
    from_driver: BTreeMap<&'static str, u64>,
    /// Frames from the driver that crossed the link, and that the port refused.
    refused: u64,
}

impl LinkReport {
    fn new(options: LinkOptions, stats: &LinkStats) -> Self {
        let (to_driver, from_driver) = (stats.to_driver().collect(), stats.from_driver().collect());
        Self { options: options.to_string(), to_driver, from_driver, refused: stats.refused() }
    }
}

fn counts(counts: &BTreeMap<&'static str, u64>) -> String {
    let named = |name| format!("{} {name}", counts.get(name).copied().unwrap_or(0));
    ["sent", "received", "lost", "overflowed", "duplicated", "reordered", "corrupted"].map(named).join(", ")
}

impl fmt::Display for LinkReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "link to the driver: {}", counts(&self.to_driver))?;
        write!(f, "link from the driver: {}, {} refused by the port", counts(&self.from_driver), self.refused)
    }
}

/// Forwards frames between two taps, over a link, until a signal comes.
pub(crate) fn run(args: &LinkArgs) -> anyhow::Result<()> {
    let [first, second] = [&args.first, &args.second].map(|port| match port {
        PortArg::Tap(name) => Ok(name),
        other => BadArgument::new(format!("{other}: a link is between two taps; use tap:NAME")),
    });
    let (first, second) = (first?, second?);
    let stop = signals::stop_flag()?;
    let signal = signals::stop_descriptor()?;
    let open = |name: &str| -> anyhow::Result<Tap> {
        let mut taps = Tap::open(name, 1, true)?;
        taps.pop().with_context(|| format!("tap {name} has no queue"))
    };
    let stats = Arc::<LinkStats>::default();
    let (mut near, mut far) = (Linked::new(open(first)?, args.link, 0, Arc::clone(&stats)), open(second)?);
    let mut refused = 0;
    eprintln!("tap:{first} and tap:{second}, link {}", args.link);
    while !stop.load(Ordering::Relaxed) {
        near.served(true);
        far.served(true);
        if forward(&mut near, &mut far, &mut refused) + forward(&mut far, &mut near, &mut 0) > 0 {
            continue;
        }
        let failed = [near.take_error(), far.take_error()].into_iter().flatten().next();
        failed.map_or(Ok(()), |e: PortError| Err(e))?;
        let timeout = near.deadline(true).map(|at| at.saturating_duration_since(Instant::now()));
        let timeout = timeout.and_then(|left| Timespec::try_from(left).ok());
        let mut fds = vec![PollFd::new(&signal, PollFlags::IN)];
        fds.extend([near.fd(), far.fd()].into_iter().flatten().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(io::Error::from(e)).context("waiting for frames"),
        }
    }
    let report = LinkReport::new(args.link, &stats);
    output::print(&format!("tap:{first} to tap:{second}: {}, {refused} refused", counts(&report.to_driver)))?;
    let back = counts(&report.from_driver);
    output::print(&format!("tap:{second} to tap:{first}: {back}, {} refused", report.refused))?;
    Ok(())
}

/// Moves at most [`BATCH`] frames, and returns how many.
fn forward(from: &mut impl Port, to: &mut impl Port, refused: &mut u64) -> usize {
    for n in 0..BATCH {
        let Some(wire) = from.peek() else { return n };
        if !to.send(wire) {
            *refused += 1;
        }
        from.consume();
    }
    BATCH
}
