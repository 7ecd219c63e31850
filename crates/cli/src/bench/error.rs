//! What can go wrong in a suite.

use std::path::PathBuf;

/// Why a suite failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BenchError {
    #[error("a thread: {0}")]
    Thread(#[source] std::io::Error),
    /// What a variant needs is not to be had; the suite goes on without it.
    #[error("{what}: {why}")]
    Unavailable { what: &'static str, why: String },
    #[error("{0}: gets and puts do not balance; this is a bug of netmem, please report it with the command line")]
    Unbalanced(String),
    /// Whoever measures takes no more pages than the pool was made for.
    #[error(
        "{0}: a pool had no page where it should have; this is a bug of netmem, please report it with the command line"
    )]
    NoPage(&'static str),
    #[error(
        "{way}: {received} fragments were received and {freed} given back; this is a bug of netmem, please report it with the \
         command line"
    )]
    Tokens { way: &'static str, received: u64, freed: u64 },
    /// Frames or pages that are neither here nor there.
    #[error(
        "{variant}: of {sent} datagrams {arrived} were accounted for, and of {held} tokens {freed} freed; this is a bug of \
         netmem, please report it with the command line"
    )]
    Devmem { variant: String, sent: u64, arrived: u64, held: u64, freed: u64 },
    #[error("interrupted")]
    Interrupted,
    #[error("a chart: {0}")]
    Chart(String),
    #[error("--html {}: {source}", path.display())]
    Html { path: PathBuf, source: std::io::Error },
}
