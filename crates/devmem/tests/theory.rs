//! The theory opens its file, for who changes it, and its page in `docs/`, for who wants to trust it.

use std::fs::read_to_string;
use std::path::Path;

/// The lines of prose and drawings, without what differs between a comment and a page.
fn lines(text: &str) -> impl Iterator<Item = &str> {
    let plain = |line: &&str| !line.is_empty() && !line.starts_with("```");
    text.lines().map(|line| line.trim_start_matches(['/', '!', '#', ' ']).trim_end()).filter(plain)
}

#[test]
fn the_page_says_what_the_file_says() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let file = read_to_string(root.join("src/table.rs")).unwrap();
    let page = read_to_string(root.join("../../docs/tokens.md")).unwrap();
    let theory: String = file.lines().take_while(|line| line.starts_with("//!")).flat_map(|l| [l, "\n"]).collect();
    let mut page_lines = lines(&page);
    for line in lines(&theory) {
        assert!(page_lines.any(|other| other == line), "docs do not say, or not in this order: {line}");
    }
}
