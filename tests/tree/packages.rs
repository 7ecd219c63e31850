//! Each package to be published has everything that a reader of its page needs, and no path that
//! leads out of the package.

use netmem_testing::tree::TREE;
use serde_json::Value;
use std::fs::read_to_string;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

/// The packages to be published: their folders, and their metadata from cargo.
fn packages() -> Vec<(PathBuf, Value)> {
    let words = ["metadata", "--no-deps", "--offline", "--format-version", "1"];
    let output = Command::new(env!("CARGO")).args(words).current_dir(TREE).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap().iter().filter(|package| package["publish"].is_null());
    let folder = |package: &Value| Path::new(package["manifest_path"].as_str().unwrap()).parent().unwrap().to_owned();
    let packages: Vec<_> = packages.map(|package| (folder(package), package.clone())).collect();
    assert!(packages.len() > 10, "only {} packages", packages.len());
    packages
}

/// What a package lacks.
fn missing(folder: &Path, package: &Value) -> Vec<String> {
    let mut missing = Vec::new();
    let mut need = |is_there: bool, what: &str| {
        if !is_there {
            missing.push(format!("{}: {what}", package["name"]));
        }
    };
    need(package["description"].as_str().is_some_and(|text| text.len() > 20), "a description");
    need(package["license"] == "MIT OR Apache-2.0", "the licence");
    // crates.io accepts at most five.
    for list in ["keywords", "categories"] {
        need(package[list].as_array().is_some_and(|words| (1..=5).contains(&words.len())), list);
    }
    let readme = package["readme"].as_str().map(|name| read_to_string(folder.join(name)).unwrap_or_default());
    need(readme.is_some_and(|text| text.len() > 300), "a readme");
    for licence in ["LICENSE-APACHE", "LICENSE-MIT"] {
        let text = read_to_string(Path::new(TREE).join(licence)).unwrap();
        need(read_to_string(folder.join(licence)).is_ok_and(|copy| copy == text), licence);
    }
    // There is no repository yet. An address that does not exist would be worse than none.
    need(package["repository"].is_null(), "no address of a repository");
    for dependency in package["dependencies"].as_array().unwrap() {
        // A dependency by path alone is left out of the package. A package may name itself so, to
        // test with more of its features, and its tests, which are left out too, use
        // `netmem-testing`.
        let left_out = dependency["name"] == package["name"]
            || (dependency["name"] == "netmem-testing" && dependency["kind"] == "dev");
        let by_path = dependency["path"].is_string() && dependency["req"] == "*" && !left_out;
        need(!by_path, &format!("the version of {}", dependency["name"]));
    }
    missing
}

/// Whether `path`, found in a file in `folder`, leads out of `package`. Links are not followed: a
/// package has what they lead to.
fn leads_out(path: &str, folder: &Path, package: &Path) -> bool {
    let mut at = folder.to_owned();
    for part in Path::new(path).components() {
        match part {
            Component::ParentDir => _ = at.pop(),
            part => at.push(part),
        }
    }
    !at.starts_with(package)
}

/// String literals that lead out of `package`, in the Rust files and manifests under `folder`.
fn paths_out(folder: &Path, package: &Path, found: &mut Vec<String>) {
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let (path, kind) = (entry.path(), entry.file_type().unwrap());
        if kind.is_dir() && entry.file_name() != "target" {
            paths_out(&path, package, found);
        }
        if !kind.is_file() || !path.extension().is_some_and(|e| e == "rs" || e == "toml") {
            continue;
        }
        let text = read_to_string(&path).unwrap();
        for start in ["\"../", "\"/../"] {
            for (at, _) in text.match_indices(start) {
                let literal = text[at + 1..].split('"').next().unwrap().trim_start_matches('/');
                // A dev-dependency by path alone, which is left out of the package, as the tests
                // are that use it.
                if literal != "../testing" && leads_out(literal, folder, package) {
                    found.push(format!("{}: {literal}", path.display()));
                }
            }
        }
    }
}

#[test]
fn each_package_is_complete() {
    let missing: Vec<_> = packages().iter().flat_map(|(folder, package)| missing(folder, package)).collect();
    assert!(missing.is_empty(), "missing: {missing:#?}");
}

#[test]
fn no_path_leads_out_of_a_package() {
    let mut found = Vec::new();
    for (folder, _) in packages() {
        paths_out(&folder, &folder, &mut found);
    }
    assert!(found.is_empty(), "{found:#?}");
}
