//! Compares the public API of each published library with its list in `docs/reference/api/`.
//!
//! A public item is a promise, and a change of it should be seen in review. Without a list, a `pub`
//! that was meant for a sister crate becomes API unnoticed.
//!
//! ```text
//!   cargo run -p netmem-api              compares; fails and prints the difference
//!   cargo run -p netmem-api -- --write   writes the lists anew
//! ```
//!
//! The items come from rustdoc's JSON. Its paths of the standard library's items change between
//! compilers (`std::io::Error`, `core::io::Error`), so one version writes and compares the lists:
//! [`TOOLCHAIN`]. Where it is not installed, the program reports this and succeeds. A list has the
//! items of all features except `bench` and `compare`, which are unstable. Blanket implementations
//! and auto traits are left out.
//!
//! A list that differs from that of the last release needs a line in the changelog:
//! docs/reference/versions.md.

mod changelog;

use anyhow::{Context, bail, ensure};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The toolchain that documents the libraries. `public-api` must read the format of its JSON: they
/// are updated together, and the lists are written anew.
const TOOLCHAIN: &str = "1.95.0";

/// Features that are no part of the API.
const UNSTABLE: [&str; 3] = ["bench", "compare", "default"];

/// A published library: its package, and the features that its list has.
struct Library {
    package: String,
    features: Vec<String>,
}

fn main() -> anyhow::Result<()> {
    let write = match &std::env::args().skip(1).collect::<Vec<_>>()[..] {
        [] => false,
        [flag] if flag == "--write" => true,
        _ => bail!("usage: netmem-api [--write]"),
    };
    let compiler = Command::new("rustup").args(["run", TOOLCHAIN, "rustc", "--version"]).output();
    if !compiler.is_ok_and(|output| output.status.success()) {
        println!("skipped: no toolchain {TOOLCHAIN} (rustup toolchain install {TOOLCHAIN})");
        return Ok(());
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize()?;
    let (libraries, target) = libraries(&root)?;
    let documents = document(&root, &libraries, &target)?;
    let lists = root.join("docs/reference/api");
    let mut different = 0;
    for Library { package, .. } in &libraries {
        let json = documents.join(format!("{}.json", package.replace('-', "_")));
        let api = public_api::Builder::from_rustdoc_json(&json)
            .omit_blanket_impls(true)
            .omit_auto_trait_impls(true)
            .build()
            .with_context(|| format!("the API of {package}"))?;
        let list: String = api.items().map(|item| format!("{item}\n")).collect();
        let path = lists.join(format!("{package}.txt"));
        if write {
            fs::create_dir_all(&lists)?;
            fs::write(&path, list)?;
        } else {
            different += usize::from(!is_equal(package, &fs::read_to_string(&path).unwrap_or_default(), &list));
        }
    }
    if write {
        return remove_others(&lists, &libraries);
    }
    ensure!(
        different == 0,
        "the API of {different} libraries differs from docs/reference/api; if that is meant, write the lists anew: \
         cargo run -p netmem-api -- --write"
    );
    println!("the API of {} libraries is as listed", libraries.len());
    compare_with_the_changelog(&root, &libraries)
}

/// Fails if a list differs from that of the last release, and the changelog does not say so.
fn compare_with_the_changelog(root: &Path, libraries: &[Library]) -> anyhow::Result<()> {
    let git = |args: &[&str]| Command::new("git").args(args).current_dir(root).output();
    if !git(&["rev-parse", "HEAD"]).is_ok_and(|output| output.status.success()) {
        println!("skipped: no history, so the lists are not compared with those of the last release");
        return Ok(());
    }
    let tag = git(&["describe", "--tags", "--abbrev=0", "--match", "v*"])?;
    // Before the first release, the baseline is empty.
    let tag = tag.status.success().then(|| String::from_utf8_lossy(&tag.stdout).trim().to_owned());
    let changelog = fs::read_to_string(root.join("CHANGELOG.md"))?;
    let mut missing = Vec::new();
    for Library { package, .. } in libraries {
        let path = format!("docs/reference/api/{package}.txt");
        let before = match &tag {
            Some(tag) => String::from_utf8(git(&["show", &format!("{tag}:{path}")])?.stdout)?,
            None => String::new(),
        };
        let now = fs::read_to_string(root.join(&path))?;
        missing.extend(changelog::missing_line(package, [&before, &now], &changelog));
    }
    ensure!(missing.is_empty(), "CHANGELOG.md, section \"Unreleased\":\n  {}", missing.join("\n  "));
    println!(
        "the changelog has each library whose API has changed since {}",
        tag.as_deref().unwrap_or("the beginning")
    );
    Ok(())
}

/// The published libraries of the workspace, and the target folder.
fn libraries(root: &Path) -> anyhow::Result<(Vec<Library>, PathBuf)> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .current_dir(root)
        .output()?;
    ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout)?;
    let packages = metadata["packages"].as_array().context("no packages")?;
    let is_library = |package: &&Value| {
        let has_library = |target: &Value| target["kind"].as_array().is_some_and(|kinds| kinds.contains(&"lib".into()));
        package["publish"].is_null() && package["targets"].as_array().is_some_and(|all| all.iter().any(has_library))
    };
    let library = |package: &Value| {
        let features = package["features"].as_object().into_iter().flat_map(|features| features.keys());
        Some(Library {
            package: package["name"].as_str()?.to_owned(),
            features: features.filter(|name| !UNSTABLE.contains(&name.as_str())).cloned().collect(),
        })
    };
    let libraries = packages.iter().filter(is_library).filter_map(library).collect();
    let target = metadata["target_directory"].as_str().context("no target folder")?;
    Ok((libraries, Path::new(target).join("api")))
}

/// Runs rustdoc on the libraries. Returns the folder of its JSON files.
fn document(root: &Path, libraries: &[Library], target: &Path) -> anyhow::Result<PathBuf> {
    let mut cargo = Command::new("rustup");
    cargo.args(["run", TOOLCHAIN, "cargo", "doc", "--quiet", "--lib", "--no-deps", "--no-default-features"]);
    for Library { package, features } in libraries {
        cargo.args(["--package", package]);
        for feature in features {
            cargo.args(["--features", &format!("{package}/{feature}")]);
        }
    }
    cargo.current_dir(root).env("CARGO_TARGET_DIR", target).env_remove("RUSTFLAGS").env_remove("RUSTUP_TOOLCHAIN");
    // The output format is unstable, and a stable compiler accepts it by this variable only.
    cargo.env("RUSTC_BOOTSTRAP", "1");
    cargo.env("RUSTDOCFLAGS", "-Zunstable-options --output-format json --cap-lints allow");
    ensure!(cargo.status()?.success(), "rustdoc has failed");
    Ok(target.join("doc"))
}

/// Compares a list with the API. Prints the items that were removed and added.
fn is_equal(package: &str, list: &str, api: &str) -> bool {
    if list == api {
        return true;
    }
    let (before, now): (BTreeSet<_>, BTreeSet<_>) = (list.lines().collect(), api.lines().collect());
    println!("{package}:");
    before.difference(&now).for_each(|item| println!("  - {item}"));
    now.difference(&before).for_each(|item| println!("  + {item}"));
    if before == now {
        println!("  only the order or the number of items differs");
    }
    false
}

/// Removes the lists of libraries that are not published any more.
fn remove_others(lists: &Path, libraries: &[Library]) -> anyhow::Result<()> {
    for file in fs::read_dir(lists)? {
        let path = file?.path();
        let is_list = |library: &Library| path.file_name() == Some(format!("{}.txt", library.package).as_ref());
        if !libraries.iter().any(is_list) {
            fs::remove_file(path)?;
        }
    }
    println!("the API of {} libraries is written", libraries.len());
    Ok(())
}
