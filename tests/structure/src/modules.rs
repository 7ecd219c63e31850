//! Which file of a crate imports which.
//!
//! An import is a path that begins with `crate`, `self`, `super` or the name of a child module,
//! wherever it stands. It is followed through re-exports to the file that defines the name. What
//! stands under `cfg(test)` is left out: a test module may use everything. Paths inside of a
//! macro's arguments are not seen.

use anyhow::{Context, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use syn::ext::IdentExt;
use syn::visit::Visit;

/// A module's path from the root of its crate.
type Name = Vec<String>;

/// The files of a crate, by module, and the imports between them.
pub(crate) struct Modules {
    /// The file in which each module stands, as a path from the root of the tree.
    file_of: BTreeMap<Name, String>,
    /// What a module re-exports or imports under a name: the path that it stands for.
    names: BTreeMap<Name, BTreeMap<String, Name>>,
    /// The modules of which a module imports all names.
    globs: BTreeMap<Name, Vec<Name>>,
    /// (importing file, imported file), without a file's imports of itself.
    pub(crate) imports: BTreeSet<(String, String)>,
}

/// The root files of all crates whose imports are checked.
pub(crate) fn crate_roots(root: &Path) -> Result<Vec<PathBuf>> {
    let mut folders: Vec<PathBuf> =
        ["bench/src", "tests/packetdrill/src", "tests/packetdrill/examples/netmem", "tests/structure/src"]
            .map(|folder| root.join(folder))
            .to_vec();
    for entry in std::fs::read_dir(root.join("crates"))? {
        folders.push(entry?.path().join("src"));
    }
    folders.sort();
    let roots = folders.into_iter().flat_map(|folder| ["lib.rs", "main.rs"].map(|name| folder.join(name)));
    Ok(roots.filter(|root| root.is_file()).collect())
}

/// A path that stands in a module.
struct Use {
    module: Name,
    path: Name,
}

impl Modules {
    /// Reads the crate with this root file.
    pub(crate) fn read(root: &Path, crate_root: &Path) -> Result<Self> {
        let mut this =
            Self { file_of: BTreeMap::new(), names: BTreeMap::new(), globs: BTreeMap::new(), imports: BTreeSet::new() };
        let mut uses = Vec::new();
        let folder = crate_root.parent().context("a file has a folder")?;
        this.read_file(root, crate_root, folder, Name::new(), &mut uses)?;
        for Use { module, path } in &uses {
            let Some(to) = this.resolve(module, path, 0) else { continue };
            let [from, to] = [module, &to].map(|name| this.file_of[name].clone());
            if from != to {
                this.imports.insert((from, to));
            }
        }
        Ok(this)
    }

    /// The files of the crate.
    pub(crate) fn files(&self) -> impl Iterator<Item = &str> {
        self.file_of.values().map(|file| &**file)
    }

    /// Reads a file and the modules below it. `folder` is where the files of its child modules are.
    fn read_file(&mut self, root: &Path, path: &Path, folder: &Path, name: Name, uses: &mut Vec<Use>) -> Result<()> {
        let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
        let file = syn::parse_file(&text).with_context(|| path.display().to_string())?;
        let place = path.strip_prefix(root)?.display().to_string();
        self.read_items(&file.items, &Place { root, file: path, folder, place }, name, uses)
    }

    fn read_items(&mut self, items: &[syn::Item], place: &Place, name: Name, uses: &mut Vec<Use>) -> Result<()> {
        self.file_of.insert(name.clone(), place.place.clone());
        for item in items {
            match item {
                syn::Item::Mod(module) if !is_test(&module.attrs) => {
                    let ident = module.ident.unraw().to_string();
                    let child: Name = name.iter().cloned().chain([ident.clone()]).collect();
                    match (&module.content, path_attribute(&module.attrs)) {
                        (Some((_, items)), _) => {
                            let inner =
                                Place { folder: &place.folder.join(&ident), place: place.place.clone(), ..*place };
                            self.read_items(items, &inner, child, uses)?;
                        }
                        (None, Some(path)) => {
                            let path = place.file.parent().context("a file has a folder")?.join(path);
                            let folder = path.parent().context("a file has a folder")?.to_owned();
                            self.read_file(place.root, &path, &folder, child, uses)?;
                        }
                        (None, None) => {
                            let folder = place.folder.join(&ident);
                            let alone = place.folder.join(format!("{ident}.rs"));
                            let path = if alone.is_file() { alone } else { folder.join("mod.rs") };
                            self.read_file(place.root, &path, &folder, child, uses)?;
                        }
                    }
                }
                _ => Paths { modules: self, module: &name, uses }.visit_item(item),
            }
        }
        Ok(())
    }

    /// The module that defines the last name of a path which stands in `module`, `None` if it is
    /// not of this crate.
    fn resolve(&self, module: &Name, path: &[String], depth: usize) -> Option<Name> {
        let (first, rest) = path.split_first()?;
        if depth > 16 {
            return None;
        }
        let start = match &**first {
            "crate" => Name::new(),
            "self" => module.clone(),
            "super" => module.split_last()?.1.to_vec(),
            _ => return self.resolve_in(module, path, depth, true),
        };
        if rest.is_empty() {
            Some(start)
        } else if rest[0] == "super" {
            self.resolve(&start, rest, depth + 1)
        } else {
            self.resolve_in(&start, rest, depth, false)
        }
    }

    /// As [`resolve`](Self::resolve), for a path from `module` on. A name that is `bare` may be of
    /// another crate.
    fn resolve_in(&self, module: &Name, path: &[String], depth: usize, bare: bool) -> Option<Name> {
        let (first, rest) = path.split_first()?;
        let child: Name = module.iter().chain([first]).cloned().collect();
        if self.file_of.contains_key(&child) {
            return if rest.is_empty() { Some(child) } else { self.resolve_in(&child, rest, depth, false) };
        }
        let stands_for = self.names.get(module).and_then(|names| names.get(first));
        if let Some(target) = stands_for.filter(|target| target.first() != Some(first)) {
            let whole: Name = target.iter().chain(rest).cloned().collect();
            return self.resolve(module, &whole, depth + 1);
        }
        if bare {
            return None;
        }
        let globs = self.globs.get(module).into_iter().flatten();
        let through = |glob: &Name| {
            let target = self.resolve(module, glob, depth + 1)?;
            self.names.get(&target)?.contains_key(first).then(|| self.resolve_in(&target, path, depth + 1, false))?
        };
        globs.filter_map(through).next().or_else(|| Some(module.clone()))
    }
}

/// Where the items of a module stand.
struct Place<'a> {
    root: &'a Path,
    file: &'a Path,
    folder: &'a Path,
    place: String,
}

/// Whether an item is only there for tests or models.
fn is_test(attributes: &[syn::Attribute]) -> bool {
    let only_tests = |attribute: &syn::Attribute| {
        let syn::Meta::List(list) = &attribute.meta else { return false };
        let tokens = list.tokens.to_string();
        let needs_test = tokens.contains("test") && !tokens.contains("not (test") && !tokens.starts_with("any");
        attribute.path().is_ident("cfg") && needs_test
    };
    attributes.iter().any(only_tests)
}

fn path_attribute(attributes: &[syn::Attribute]) -> Option<String> {
    attributes.iter().find_map(|attribute| match &attribute.meta {
        syn::Meta::NameValue(syn::MetaNameValue { path, value: syn::Expr::Lit(value), .. })
            if path.is_ident("path") =>
        {
            match &value.lit {
                syn::Lit::Str(text) => Some(text.value()),
                _ => None,
            }
        }
        _ => None,
    })
}

/// Collects the paths of an item.
struct Paths<'a> {
    modules: &'a mut Modules,
    module: &'a Name,
    uses: &'a mut Vec<Use>,
}

impl Paths<'_> {
    fn tree(&mut self, tree: &syn::UseTree, before: &Name) {
        let with = |name: &syn::Ident| before.iter().cloned().chain([name.unraw().to_string()]).collect::<Name>();
        match tree {
            syn::UseTree::Path(path) => self.tree(&path.tree, &with(&path.ident)),
            syn::UseTree::Group(group) => group.items.iter().for_each(|tree| self.tree(tree, before)),
            syn::UseTree::Name(name) if name.ident == "self" => {
                let alias = before.last().cloned().unwrap_or_default();
                self.add(alias, before.clone());
            }
            syn::UseTree::Name(name) => self.add(name.ident.to_string(), with(&name.ident)),
            syn::UseTree::Rename(name) => self.add(name.rename.to_string(), with(&name.ident)),
            syn::UseTree::Glob(_) => {
                self.modules.globs.entry(self.module.clone()).or_default().push(before.clone());
                self.uses.push(Use { module: self.module.clone(), path: before.clone() });
            }
        }
    }

    fn add(&mut self, alias: String, path: Name) {
        self.modules.names.entry(self.module.clone()).or_default().insert(alias, path.clone());
        self.uses.push(Use { module: self.module.clone(), path });
    }
}

impl<'ast> Visit<'ast> for Paths<'_> {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        let attributes: &[syn::Attribute] = match item {
            syn::Item::Fn(item) => &item.attrs,
            syn::Item::Impl(item) => &item.attrs,
            syn::Item::Mod(item) => &item.attrs,
            syn::Item::Use(item) => &item.attrs,
            _ => &[],
        };
        if !is_test(attributes) {
            syn::visit::visit_item(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.tree(&item.tree, &Name::new());
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none() && path.segments.len() > 1 {
            let path = path.segments.iter().map(|segment| segment.ident.unraw().to_string()).collect();
            self.uses.push(Use { module: self.module.clone(), path });
        }
        syn::visit::visit_path(self, path);
    }

    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {
        // `pub(in path)` and `pub(super)` say who may use an item, not what it uses.
    }
}
