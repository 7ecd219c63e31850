//! A machine with a compiler and a Rust toolchain builds the tree, and runs its tests. Each other
//! program that a test starts is looked for first, by `installed` of `netmem-testing`.
//! `tests/minimal/run.sh` runs the tests on such a machine.

use netmem_testing::tree::TREE;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Programs of the shell and of coreutils, which every build of a Rust program has around it.
const EVERYWHERE: [&str; 5] = ["cat", "env", "id", "install", "sh"];

/// A file with tests and the files whose code it may call: what it includes by `mod`, its program's
/// modules that it names by `crate` or `super`, and the modules of `netmem-testing` that it names.
fn modules(file: &Path, found: &mut BTreeSet<PathBuf>) {
    if !found.insert(file.canonicalize().unwrap()) {
        return;
    }
    let text = std::fs::read_to_string(file).unwrap();
    let folder = file.parent().unwrap();
    let own =
        if file.ends_with("main.rs") || file.ends_with("mod.rs") { folder.to_owned() } else { file.with_extension("") };
    let mut path = None;
    for line in text.lines().map(str::trim) {
        if let Some(named) = line.strip_prefix("#[path = \"").and_then(|rest| rest.strip_suffix("\"]")) {
            path = Some(folder.join(named));
        } else if let Some((_, name)) = line.strip_suffix(';').and_then(|line| line.split_once("mod ")) {
            let module = path.take().or_else(|| module(&own, name)).or_else(|| module(folder, name));
            module.iter().for_each(|file| modules(file, found));
        }
    }
    let is_root = |folder: &&Path| ["main.rs", "lib.rs"].iter().any(|root| folder.join(root).is_file());
    let program = folder.ancestors().find(is_root);
    let roots = [
        ("crate::", program.unwrap_or(folder)),
        ("super::", folder),
        ("netmem_testing::", &Path::new(TREE).join("crates/testing/src")),
    ];
    for (root, folder) in roots {
        for path in text.split(root).skip(1) {
            let names = path.split(';').next().unwrap().split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            names.filter_map(|name| module(folder, name)).for_each(|file| modules(&file, found));
        }
    }
}

/// The file of a module, if `folder` has it.
fn module(folder: &Path, name: &str) -> Option<PathBuf> {
    let places = [format!("{name}.rs"), format!("{name}/mod.rs")].map(|place| folder.join(place));
    places.into_iter().find(|place| place.is_file())
}

/// The files with tests under a folder.
fn test_files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.is_dir() {
            test_files(&entry, found);
        } else if entry.extension().is_some_and(|extension| extension == "rs")
            && std::fs::read_to_string(&entry).unwrap().contains("#[test]")
        {
            found.push(entry);
        }
    }
}

/// The string literals that come directly after `before` in a text, up to the first space.
fn words_after<'a>(text: &'a str, before: &'a str) -> impl Iterator<Item = &'a str> {
    text.split(before).skip(1).filter_map(|rest| rest.strip_prefix('"')?.split(['"', ' ']).next())
}

/// Programs that a test starts, and programs that it searches for.
fn programs(files: &BTreeSet<PathBuf>) -> (BTreeSet<String>, BTreeSet<String>) {
    let (mut started, mut looked_for) = (BTreeSet::new(), BTreeSet::new());
    for file in files {
        let text = std::fs::read_to_string(file).unwrap();
        for before in ["Command::new(", "command(", "command(&format!("] {
            // What has a folder is of the tree, or of a root that a script has unpacked.
            let plain = |name: &&str| name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-') && !name.is_empty();
            let names = words_after(&text, before).filter(plain);
            started.extend(names.map(str::to_owned));
        }
        for list in text.split("installed(&[").skip(1).filter_map(|rest| rest.split_once(']')) {
            looked_for.extend(list.0.split(',').map(|name| name.trim().trim_matches('"').to_owned()));
        }
    }
    (started, looked_for)
}

#[test]
fn each_program_that_a_test_starts_is_looked_for() {
    let mut files = Vec::new();
    test_files(&Path::new(TREE).join("tests"), &mut files);
    for package in std::fs::read_dir(Path::new(TREE).join("crates")).unwrap() {
        let tests = package.unwrap().path().join("tests");
        if tests.is_dir() {
            test_files(&tests, &mut files);
        }
    }
    let (mut missing, mut all) = (Vec::new(), BTreeSet::new());
    for file in files {
        let mut reached = BTreeSet::new();
        modules(&file, &mut reached);
        let (started, looked_for) = programs(&reached);
        let unasked = started.iter().filter(|name| !looked_for.contains(*name) && !EVERYWHERE.contains(&name.as_str()));
        missing.extend(unasked.map(|name| format!("{}: {name}", file.display())));
        all.extend(started);
    }
    assert!(missing.is_empty(), "tests that start programs without `installed`: {missing:#?}");
    assert!(["curl", "ip", "iperf3", "ping", "python3"].iter().all(|name| all.contains(*name)), "{all:?}");
}

/// `tests/compare/run.py` builds the command with a delay in its receive loop, an hour into CI.
#[test]
fn the_delayed_build_has_a_place() {
    let read = |file: &str| std::fs::read_to_string(Path::new(TREE).join(file)).unwrap();
    let script = read("tests/compare/run.py");
    let place = script.lines().find_map(|line| line.strip_prefix("PLACE = \"")?.strip_suffix('"')).unwrap();
    assert_eq!(read("crates/cli/src/perf/driver.rs").matches(place).count(), 1, "{place}");
}
