//! The theory of a count opens its file, for a reader who changes it, and its page in `docs/`, for a reader who relies on it.

use std::fs::read_to_string;
use std::path::Path;

/// The lines of prose and drawings, without what differs between a comment and a page.
fn lines(text: &str) -> impl Iterator<Item = &str> {
    let plain = |line: &&str| !line.is_empty() && !line.starts_with("```") && !line.contains("](");
    text.lines().map(|line| line.trim_start_matches(['/', '!', '#', ' ']).trim_end()).filter(plain)
}

#[test]
fn pages_say_what_the_files_say() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (file, page) in [("refcount", "refcount"), ("rcuref", "rcuref"), ("percpu_ref", "percpuref")] {
        let file = read_to_string(root.join(format!("src/{file}.rs"))).unwrap();
        let page = read_to_string(root.join(format!("../../docs/{page}.md"))).unwrap();
        let theory: String = file.lines().take_while(|line| line.starts_with("//!")).flat_map(|l| [l, "\n"]).collect();
        let mut page_lines = lines(&page);
        for line in lines(&theory) {
            assert!(page_lines.any(|other| other == line), "docs do not say, or not in this order: {line}");
        }
    }
}
