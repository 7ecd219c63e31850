//! The page of promises and the code agree: each id that the tree cites is on the page, once, and
//! each test that the page names exists.

use netmem_testing::tree::TREE;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

const AREAS: [&str; 9] = ["CAPI", "INET", "MEM", "NET", "PERF", "POOL", "REF", "SERVE", "XSK"];

/// The ids of promises in a text, such as `POOL-4`.
fn ids(text: &str) -> impl Iterator<Item = &str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '-');
    words.filter(|word| {
        word.split_once('-').is_some_and(|(area, number)| AREAS.contains(&area) && number.parse::<u32>().is_ok())
    })
}

/// Files under `folder` that people read and write: code and pages.
fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let path = entry.path();
        let name = entry.file_name();
        if entry.file_type().unwrap().is_dir() {
            if name != "target" && !name.as_encoded_bytes().starts_with(b".") {
                files(&path, found);
            }
        } else if ["rs", "md"].map(OsStr::new).contains(&path.extension().unwrap_or_default()) {
            found.push(path);
        }
    }
}

#[test]
fn each_promise_is_on_the_page_and_has_a_test() {
    let page = std::fs::read_to_string(Path::new(TREE).join("docs/reference/promises.md")).unwrap();
    let mut promised = BTreeSet::new();
    for row in page.lines().filter_map(|line| line.strip_prefix("| ")) {
        let [id, _, tests, _] = row.trim_end_matches('|').splitn(4, '|').map(str::trim).collect::<Vec<_>>()[..] else {
            panic!("a row has four cells: {row}");
        };
        if ids(id).next() != Some(id) {
            continue;
        }
        assert!(promised.insert(id), "{id} is there twice");
        let mut named = tests.split('`').skip(1).step_by(2).peekable();
        assert!(named.peek().is_some(), "{id} names no test");
        for test in named {
            let (file, name) = test.split_once("::").unwrap_or_else(|| panic!("{id}: {test} is not file::test"));
            let code =
                std::fs::read_to_string(Path::new(TREE).join(file)).unwrap_or_else(|e| panic!("{id}: {file}: {e}"));
            assert!(code.contains(&format!("fn {name}(")), "{id}: {file} has no {name}");
        }
    }
    // A promise that ended keeps its number. Pages may cite it, code may not.
    let ended: BTreeSet<_> = page.lines().filter(|line| line.starts_with("Ended: ")).flat_map(ids).collect();
    assert!(ended.is_disjoint(&promised), "{ended:?}");
    let mut all = Vec::new();
    files(Path::new(TREE), &mut all);
    for file in all {
        let text = std::fs::read_to_string(&file).unwrap();
        let is_page = file.extension().is_some_and(|extension| extension == "md");
        let known = |id: &str| promised.contains(id) || is_page && ended.contains(id);
        let unknown: BTreeSet<_> = ids(&text).filter(|id| !known(id)).collect();
        assert!(unknown.is_empty(), "{}: not in docs/reference/promises.md: {unknown:?}", file.display());
    }
}
