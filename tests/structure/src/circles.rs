//! Circles of imports in a crate: between its folders, and of more than three files.

use crate::Finding;
use crate::modules::Modules;
use std::collections::{BTreeMap, BTreeSet};

/// A parent that calls its children, which share its types, is no tangle. More than that cannot be
/// read alone.
const CIRCLE_OF_FILES: usize = 3;

type Edges<'a> = BTreeSet<(&'a str, &'a str)>;

/// The circles of one crate.
pub(crate) fn check(modules: &Modules) -> Vec<Finding> {
    let edges: Edges = modules.imports.iter().map(|(from, to)| (&**from, &**to)).collect();
    let files = circles(&edges).into_iter().filter(|circle| circle.len() > CIRCLE_OF_FILES);
    let mut findings: Vec<Finding> = files.map(|circle| finding("files", &circle, &edges)).collect();
    let folders: BTreeSet<&str> = modules.files().flat_map(ancestors).collect();
    for folder in folders {
        // Imports between what lies directly in this folder: files, and folders as a whole.
        let child = |file: &'_ str| child_of(folder, file, modules);
        let lifted = |&(from, to): &(&str, &str)| Some((child(from)?, child(to)?));
        let edges: BTreeSet<(String, String)> =
            edges.iter().filter_map(lifted).filter(|(from, to)| from != to).collect();
        let edges: Edges = edges.iter().map(|(from, to)| (&**from, &**to)).collect();
        for circle in circles(&edges) {
            if circle.iter().filter(|child| child.ends_with('/')).count() > 1 {
                findings.push(finding("folders", &circle, &edges));
            }
        }
    }
    findings
}

fn finding(of: &str, circle: &[&str], edges: &Edges) -> Finding {
    let inside = |&&(from, to): &&(&str, &str)| circle.contains(&from) && circle.contains(&to);
    let mut what = format!("a circle of {} {of}", circle.len());
    let arrows: BTreeMap<&str, Vec<&str>> =
        edges.iter().filter(inside).fold(BTreeMap::new(), |mut all, &(from, to)| {
            all.entry(from).or_insert_with(Vec::new).push(to);
            all
        });
    for (from, to) in arrows {
        what += &format!("\n    {from} -> {}", to.join(", "));
    }
    Finding { place: circle[0].to_owned(), what }
}

/// The strongly connected components of more than one place, each sorted: places that lead to each
/// other.
fn circles<'a>(edges: &Edges<'a>) -> Vec<Vec<&'a str>> {
    let places: BTreeSet<&str> = edges.iter().map(|&(from, _)| from).collect();
    let reached: BTreeMap<&str, BTreeSet<&str>> = places.iter().map(|&from| (from, reach(edges, from))).collect();
    let leads = |from: &str, to: &str| reached.get(from).is_some_and(|reached| reached.contains(to));
    let circle = |&from: &&'a str| places.iter().copied().filter(|to| leads(from, to) && leads(to, from)).collect();
    let circles: BTreeSet<Vec<&str>> = places.iter().map(circle).filter(|circle: &Vec<_>| circle.len() > 1).collect();
    circles.into_iter().collect()
}

/// All places that imports lead to from one, which is among them only if it is in a circle.
fn reach<'a>(edges: &Edges<'a>, from: &str) -> BTreeSet<&'a str> {
    let (mut reached, mut next) = (BTreeSet::new(), vec![from.to_owned()]);
    while let Some(place) = next.pop() {
        let direct = edges.iter().filter(|&&(from, _)| from == place).map(|&(_, to)| to);
        next.extend(direct.filter(|to| reached.insert(*to)).map(str::to_owned));
    }
    reached
}

/// All folders that a file lies in, each with a slash at its end.
fn ancestors(file: &str) -> impl Iterator<Item = &str> {
    file.match_indices('/').map(|(at, _)| &file[..=at])
}

/// The file or folder directly in `folder` that has this file. `rx.rs` with a folder `rx/` counts
/// as in that folder.
fn child_of(folder: &str, file: &str, modules: &Modules) -> Option<String> {
    let rest = file.strip_prefix(folder)?;
    match rest.split_once('/') {
        Some((child, _)) => Some(format!("{folder}{child}/")),
        None => {
            let own = format!("{folder}{}/", rest.strip_suffix(".rs")?);
            Some(if modules.files().any(|other| other.starts_with(&own)) { own } else { file.to_owned() })
        }
    }
}
