//! Standard output, which somebody may have closed: `netmem | head` is no failure.

use anyhow::Context;
use std::io::{ErrorKind, Write};

/// Prints `text` and the end of its line.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    match writeln!(std::io::stdout(), "{}", text.trim_end()) {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => Err(e).context("cannot write to standard output"),
        _ => Ok(()),
    }
}

/// Prints one JSON object.
pub(crate) fn json(object: &impl serde::Serialize) -> anyhow::Result<()> {
    print(&serde_json::to_string_pretty(object)?)
}
