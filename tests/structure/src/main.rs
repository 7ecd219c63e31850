//! Checks the shape of the tree, so that it stays readable: `cargo run -p netmem-structure`.
//!
//! Why a program: circles of imports and long functions grow by a line at a time, and no review
//! sees the line that is too many. [`modules`] reads which file of a crate imports which,
//! [`circles`] finds the circles, [`sizes`] measures files and functions. A finding that is
//! accepted stands in `exceptions.txt`, with its reason.

mod circles;
mod modules;
mod sizes;

use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::path::Path;

/// What is wrong in one place of the tree.
struct Finding {
    /// The place, as `exceptions.txt` names it: a path from the root, or a path and a function.
    place: String,
    what: String,
}

fn main() -> Result<()> {
    // As cargo sets it now, not as it was when this program was built: a target folder can be moved
    // to another tree.
    let here = std::env::var_os("CARGO_MANIFEST_DIR").context("run it by `cargo run -p netmem-structure`")?;
    let root = Path::new(&here).join("../..");
    let root = root.canonicalize()?;
    let mut findings = sizes::check(&root)?;
    for crate_root in modules::crate_roots(&root)? {
        let modules = modules::Modules::read(&root, &crate_root)?;
        findings.extend(circles::check(&modules));
    }
    let mut excepted = exceptions(&root.join("tests/structure/exceptions.txt"))?;
    // A place can have several findings: a function that is long, and has many parameters.
    let (accepted, findings): (Vec<_>, Vec<_>) =
        findings.into_iter().partition(|finding| excepted.contains_key(&finding.place));
    excepted.retain(|place, _| !accepted.iter().any(|finding| finding.place == *place));
    for Finding { place, what } in &findings {
        println!("{place}: {what}");
    }
    for place in excepted.keys() {
        println!("tests/structure/exceptions.txt: {place}: nothing is wrong there any more, so the exception goes");
    }
    match findings.len() + excepted.len() {
        0 => Ok(()),
        wrong => bail!("{wrong} findings; tests/structure/src/main.rs says what is checked"),
    }
}

/// The accepted findings: a place and its reason in each line, separated by ` - `.
fn exceptions(path: &Path) -> Result<BTreeMap<String, String>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("{} cannot be read", path.display()))?;
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let parse = |line: &str| {
        let (place, reason) = line.split_once(" - ").with_context(|| format!("{line}: no reason (` - `)"))?;
        Ok((place.to_owned(), reason.to_owned()))
    };
    lines.map(parse).collect()
}
