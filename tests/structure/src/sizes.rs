//! The sizes of files and functions, and the numbers of parameters.

use crate::Finding;
use anyhow::{Context, Result};
use std::path::{Component, Path};
use syn::spanned::Spanned;
use syn::visit::Visit;
use walkdir::WalkDir;

const FILE_LINES: usize = 600;
const TEST_FILE_LINES: usize = 800;
const FUNCTION_LINES: usize = 80;
const PARAMETERS: usize = 6;

/// What is too large in the Rust files below `root`.
pub(crate) fn check(root: &Path) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for folder in ["crates", "bench", "tests", "fuzz"] {
        let source = |name: &str| name != "target" && !name.starts_with('.');
        let entries = WalkDir::new(root.join(folder)).sort_by_file_name().into_iter();
        for entry in entries.filter_entry(|entry| entry.file_name().to_str().is_some_and(source)) {
            let entry = entry?;
            if entry.file_type().is_file() && entry.path().extension().is_some_and(|ending| ending == "rs") {
                check_file(root, entry.path(), &mut findings)?;
            }
        }
    }
    Ok(findings)
}

fn check_file(root: &Path, path: &Path, findings: &mut Vec<Finding>) -> Result<()> {
    let place = path.strip_prefix(root)?.display().to_string();
    let text = std::fs::read_to_string(path)?;
    let lines = text.lines().count();
    let most = if is_test(path.strip_prefix(root)?) { TEST_FILE_LINES } else { FILE_LINES };
    if lines > most {
        findings.push(Finding { place: place.clone(), what: format!("{lines} lines, more than {most}") });
    }
    let file = syn::parse_file(&text).with_context(|| place.clone())?;
    Functions { place: &place, findings }.visit_file(&file);
    Ok(())
}

/// Whether a file has only tests: it lies in a folder of tests, or is the module `tests` or `model`
/// of another file.
fn is_test(path: &Path) -> bool {
    let in_tests = path.components().any(|part| part == Component::Normal("tests".as_ref()));
    let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
    in_tests || stem == "tests" || stem.starts_with("model") || stem.ends_with("_tests")
}

struct Functions<'a> {
    place: &'a str,
    findings: &'a mut Vec<Finding>,
}

impl Functions<'_> {
    fn check(&mut self, signature: &syn::Signature, block: &syn::Block) {
        let lines = block.span().end().line - signature.span().start().line + 1;
        let parameters = signature.inputs.iter().filter(|input| matches!(input, syn::FnArg::Typed(_))).count();
        let place = || format!("{}:{}", self.place, signature.ident);
        if lines > FUNCTION_LINES {
            let what = format!("{lines} lines, more than {FUNCTION_LINES}");
            self.findings.push(Finding { place: place(), what });
        }
        if parameters > PARAMETERS {
            let what = format!("{parameters} parameters, more than {PARAMETERS}");
            self.findings.push(Finding { place: place(), what });
        }
    }
}

impl<'ast> Visit<'ast> for Functions<'_> {
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.check(&item.sig, &item.block);
        syn::visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.check(&item.sig, &item.block);
        syn::visit::visit_impl_item_fn(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        if let Some(block) = &item.default {
            self.check(&item.sig, block);
        }
        syn::visit::visit_trait_item_fn(self, item);
    }
}
