//! What can go wrong in a suite.

use std::path::PathBuf;

/// Why a suite failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BenchError {
    #[error("a thread: {0}")]
    Thread(std::io::Error),
    /// The machine or the user's rights do not offer what a variant needs. The suite goes on
    /// without the variant.
    #[error("{what}: {why}")]
    Unavailable { what: &'static str, why: String },
    #[error("{0}: gets and puts do not balance; this is a bug of netmem, please report it with the command line")]
    Unbalanced(String),
    /// A measurement allocates no more pages than its pool was made for, so the pool must never be
    /// empty.
    #[error(
        "{0}: a pool had no page where it should have; this is a bug of netmem, please report it with the command line"
    )]
    NoPage(&'static str),
    #[error(
        "{way}: {received} fragments were received and {freed} returned; this is a bug of netmem, please report it with the \
         command line"
    )]
    Tokens { way: &'static str, received: u64, freed: u64 },
    /// Frames or pages that no counter accounts for.
    #[error(
        "{variant}: of {sent} datagrams {arrived} were accounted for, and of {held} tokens {freed} freed; this is a bug of \
         netmem, please report it with the command line"
    )]
    Devmem { variant: String, sent: u64, arrived: u64, held: u64, freed: u64 },
    /// Streams wait for nothing but the other end, which is in this process.
    #[error("{0} did not come within 20 s; this is a bug of netmem, please report it with the command line")]
    Late(&'static str),
    #[error("{variant}")]
    Stream { variant: String, source: anyhow::Error },
    #[error("interrupted")]
    Interrupted,
    #[error("--html {}", path.display())]
    Html { path: PathBuf, source: std::io::Error },
}
