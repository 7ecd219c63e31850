//! `netmem-bench render`: the tables of the documents, rendered from the committed results.
//!
//! Why: a table that is written by hand is of another run than the text around it, sooner or later.
//! A document names a table between two marks, and everything between them is written by this
//! program:
//!
//! ```text
//! <!-- results: targets -->
//! ...
//! <!-- end -->
//! ```
//!
//! [`record`] reads the results, [`tables`] makes a table of them by its name, [`scaling`] the
//! one that is computed, and [`kperf`] those of changes.

mod kperf;
mod record;
mod scaling;
mod tables;

use crate::args::RenderArgs;
use anyhow::{Context, bail, ensure};
use netmem_measure::output;
use record::Record;
use std::path::Path;

/// The documents, from the top of the tree.
const DOCUMENTS: [&str; 6] = [
    "README.md",
    "docs/performance.md",
    "docs/design/scaling.md",
    "crates/refs/README.md",
    "crates/pool/README.md",
    "crates/inet/README.md",
];
const BEGIN: &str = "<!-- results: ";
const BEGIN_END: &str = " -->\n";
const END: &str = "<!-- end -->";

/// Renders the tables of all documents, or checks that they agree with the results.
pub(crate) fn run(args: &RenderArgs) -> anyhow::Result<()> {
    let tree = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let records = Record::read_all(&tree.join("bench/results"))?;
    let mut stale = Vec::new();
    for name in DOCUMENTS {
        let path = tree.join(name);
        let text = std::fs::read_to_string(&path).context(name)?;
        let rendered = render(&text, &records).context(name)?;
        if rendered == text {
            continue;
        }
        stale.push(name);
        if !args.check {
            output::Target::new(&path).and_then(|file| file.write(rendered.as_bytes())).context(name)?;
        }
    }
    match &stale[..] {
        [] => Ok(output::print("the tables are as the results say")?),
        stale if args.check => bail!("{} differs from bench/results: run `netmem-bench render`", stale.join(", ")),
        stale => Ok(output::print(&format!("rendered: {}", stale.join(", ")))?),
    }
}

/// The text with its tables rendered.
fn render(text: &str, records: &[Record]) -> anyhow::Result<String> {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, marked)) = rest.split_once(BEGIN) {
        let (name, marked) = marked.split_once(BEGIN_END).context("a mark without its end")?;
        let (old, after) = marked.split_once(END).with_context(|| format!("{name}: no `{END}`"))?;
        ensure!(!old.contains(BEGIN), "{name}: another table begins before `{END}`");
        out += &format!("{before}{BEGIN}{name}{BEGIN_END}{}{END}", tables::table(name, records)?);
        rest = after;
    }
    Ok(out + rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_between_the_marks_changes() {
        let text = "a\n<!-- results: targets -->\nold\n<!-- end -->\nb\n<!-- results: open-goals -->\n<!-- end -->\n";
        let rendered = render(text, &[]).unwrap();
        assert!(
            rendered.starts_with("a\n<!-- results: targets -->\n") && rendered.ends_with("<!-- end -->\n"),
            "{rendered}"
        );
        assert!(!rendered.contains("old") && rendered.contains("<!-- end -->\nb\n"), "{rendered}");
        assert_eq!(render(&rendered, &[]).unwrap(), rendered, "a second time changes nothing");
        for wrong in ["<!-- results: x -->\n", "<!-- results: none -->\n<!-- end -->", "<!-- results: targets"] {
            assert!(render(wrong, &[]).is_err(), "{wrong}");
        }
    }
}
