//! Pages in `docs/` and the code agree: theories that are in both, requirements and their tests,
//! and names of tests.

use netmem_testing::tree::TREE;
use std::collections::HashSet;
use std::fs::read_to_string;
use std::path::Path;

fn tree() -> &'static Path {
    Path::new(TREE)
}

/// All Rust files under a folder of the tree, symbolic links left out.
fn sources(folder: &Path) -> Vec<String> {
    let mut texts = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let (path, kind) = (entry.path(), entry.file_type().unwrap());
        if kind.is_dir() {
            texts.extend(sources(&path));
        } else if kind.is_file() && path.extension().is_some_and(|e| e == "rs") {
            texts.push(read_to_string(path).unwrap());
        }
    }
    texts
}

/// The names of functions that follow `#[test]`.
fn tests(folder: &Path) -> HashSet<String> {
    let mut names = HashSet::new();
    for text in sources(folder) {
        for after in text.split("#[test]").skip(1) {
            let name = after.split_once("fn ").and_then(|(_, rest)| rest.split_once('(')).map(|(name, _)| name);
            names.extend(name.map(str::to_owned));
        }
    }
    names
}

/// The lines of prose and drawings, without what differs between a comment and a page.
fn lines(text: &str) -> impl Iterator<Item = &str> {
    let plain = |line: &&str| !line.is_empty() && !line.starts_with("```") && !line.contains("](");
    text.lines().map(|line| line.trim_start_matches(['/', '!', '#', ' ']).trim_end()).filter(plain)
}

/// An error's text has the text of its source, or `Error::source` returns it: not both. Otherwise a
/// program that prints an error with its causes prints a cause twice. (A field `r#source` is none
/// for `thiserror`.)
#[test]
fn no_error_repeats_its_source() {
    let mut seen = 0;
    for text in sources(&tree().join("crates")) {
        for (format, rest) in text.split("#[error(").skip(1).filter_map(|error| error.split_once(")]\n")) {
            seen += 1;
            let mut declared = rest.lines().map(str::trim).filter(|line| !line.starts_with("//"));
            let first = declared.next().unwrap();
            let of_tuple = first.contains("#[source]") || first.contains("#[from]");
            assert!(!(of_tuple && format.contains("{0}")), "{format}: {first}");
            let named = first.contains(" source: ")
                || declared.take_while(|line| !line.starts_with('}')).any(|line| line.starts_with("source: "));
            assert!(!(named && (format.contains("{source}") || format.contains("{source:"))), "{format}: {first}");
        }
    }
    assert!(seen > 100, "{seen} errors");
}

/// An example that fails prints its error by `Display`, with its causes: `anyhow` does so at the
/// end of `main`. Another error type would be printed by `Debug`, for example as
/// `NoInterface("eth7")`.
#[test]
fn examples_print_errors_for_users() {
    let folders = std::fs::read_dir(tree().join("crates")).unwrap().map(|entry| entry.unwrap().path());
    let folders = folders.chain([tree().join("bench")]).map(|part| part.join("examples"));
    let mut seen = 0;
    for text in folders.filter(|folder| folder.exists()).flat_map(|folder| sources(&folder)) {
        let Some((_, main)) = text.split_once("\nfn main()") else { continue };
        let returns = main.lines().next().unwrap();
        assert!([" {", " -> anyhow::Result<()> {"].contains(&returns), "fn main(){returns}");
        seen += 1;
    }
    assert!(seen > 10, "{seen} examples");
}

/// The theory at the top of a file is also on the file's page, in the same words.
#[test]
fn pages_say_what_the_files_say() {
    for (file, page) in [
        ("refs/src/refcount", "refcount"),
        ("refs/src/rcuref", "rcuref"),
        ("refs/src/percpu_ref", "percpuref"),
        ("devmem/src/tokens/table", "tokens"),
    ] {
        let file = read_to_string(tree().join(format!("crates/{file}.rs"))).unwrap();
        let page = read_to_string(tree().join(format!("docs/design/{page}.md"))).unwrap();
        let theory: String = file.lines().take_while(|line| line.starts_with("//!")).flat_map(|l| [l, "\n"]).collect();
        let mut page_lines = lines(&page);
        for line in lines(&theory) {
            assert!(page_lines.any(|other| other == line), "docs do not say, or not in this order: {line}");
        }
    }
}

/// The table of MUSTs names each requirement once, and files and tests that exist.
#[test]
fn the_table_of_musts_is_complete_and_names_tests_that_exist() {
    let table = read_to_string(tree().join("docs/reference/rfc9293.md")).unwrap();
    let code = tree().join("crates/inet/src");
    let known = tests(&tree().join("crates/inet"));
    let mut numbers = Vec::new();
    for row in table.lines().filter_map(|line| line.strip_prefix("| ")) {
        let cells: Vec<_> = row.trim_end_matches(" |").split(" | ").collect();
        let Ok(number) = cells[0].parse::<u32>() else { continue };
        let [_, _, _, file, test] = cells[..] else { panic!("{row}") };
        numbers.push(number);
        assert!(file == "–" || code.join(file.trim_matches('`')).exists(), "{row}");
        assert!(test == "–" || known.contains(test.trim_matches('`')), "{row}");
    }
    assert_eq!(numbers, (1..=69).collect::<Vec<_>>());
}

/// The names in backticks in the last column of a table. The row that begins with `head` is the
/// table's first.
fn named(page: &str, head: &str) -> Vec<String> {
    let page = read_to_string(tree().join("docs/design").join(page)).unwrap();
    let rows = page.lines().skip_while(|line| !line.starts_with(head)).skip(2).take_while(|line| line.starts_with('|'));
    let cells = rows.filter_map(|row| row.trim_matches('|').rsplit('|').next());
    // Every second piece was between backticks.
    cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).map(str::to_owned).collect()
}

/// The tests that the pages about virtio-net and vhost-user name exist.
#[test]
fn tests_that_are_named_exist() {
    let known: HashSet<_> =
        ["tests", "crates/virtio", "crates/packet", "crates/cli"].iter().flat_map(|f| tests(&tree().join(f))).collect();
    let named = [named("virtio.md", "| bit |"), named("vhost-user.md", "| message |")].concat();
    for test in &named {
        assert!(known.contains(test), "{test}");
    }
    assert!(named.len() > 80, "only {} tests are named", named.len());
}
