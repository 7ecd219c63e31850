//! The table of MUSTs names each requirement once, and files and tests that exist.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

/// The names of functions that follow `#[test]`.
fn tests(folder: &Path) -> HashSet<String> {
    let mut names = HashSet::new();
    for file in files(folder) {
        let text = std::fs::read_to_string(file).expect("UTF-8");
        for after in text.split("#[test]").skip(1) {
            let name = after.split_once("fn ").and_then(|(_, rest)| rest.split_once('(')).map(|(name, _)| name);
            names.extend(name.map(str::to_owned));
        }
    }
    names
}

#[test]
fn the_table_of_musts_is_complete_and_names_tests_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let table = std::fs::read_to_string(root.join("../../docs/rfc9293.md")).unwrap();
    let known = tests(&root.join("src"));
    let mut numbers = Vec::new();
    for row in table.lines().filter_map(|line| line.strip_prefix("| ")) {
        let cells: Vec<_> = row.trim_end_matches(" |").split(" | ").collect();
        let Ok(number) = cells[0].parse::<u32>() else { continue };
        let [_, _, _, code, test] = cells[..] else { panic!("{row}") };
        numbers.push(number);
        assert!(code == "–" || root.join("src").join(code.trim_matches('`')).exists(), "{row}");
        assert!(test == "–" || known.contains(test.trim_matches('`')), "{row}");
    }
    assert_eq!(numbers, (1..=69).collect::<Vec<_>>());
}
