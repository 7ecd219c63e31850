//! Whether the changelog has what the lists of the API show.

use std::collections::BTreeSet;

/// What the changelog lacks about a library whose list was `before` at the last release.
pub(crate) fn missing_line(package: &str, [before, now]: [&str; 2], changelog: &str) -> Option<String> {
    if before == now {
        return None;
    }
    let section = changelog.split("\n## ").find(|section| section.starts_with("Unreleased")).unwrap_or_default();
    let start = format!("- `{}`", package.strip_prefix("netmem-").unwrap_or(package));
    let entries = section.split("\n- ").map(|entry| format!("- {entry}")).filter(|entry| entry.starts_with(&start));
    let entries: Vec<_> = entries.collect();
    let kept: BTreeSet<_> = now.lines().collect();
    let removed = before.lines().find(|item| !kept.contains(item));
    match removed {
        _ if entries.is_empty() => Some(format!("the API of {package} has changed, and no line begins with {start}")),
        Some(item) if !entries.iter().any(|entry| entry.contains("**Breaking**")) => {
            Some(format!("`{item}` was removed or changed, and no line that begins with {start} has **Breaking**"))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::missing_line;

    /// A change needs a line of its library in the open section, and a removal one that says so.
    #[test]
    fn a_change_of_the_api_is_in_the_changelog() {
        let log = |line: &str| {
            format!("# Changelog\n\n## Unreleased\n\n{line}\n\n## 0.1.0 - 2026-01-01\n\n- `pool`: **Breaking**: all.\n")
        };
        let lacks = |lists, line| missing_line("netmem-pool", lists, &log(line)).is_some();
        let (same, added, removed) = (["a\n", "a\n"], ["a\n", "a\nb\n"], ["a\nb\n", "a\n"]);
        assert!(!lacks(same, ""));
        assert!(lacks(added, "") && lacks(added, "- `refs`: a."));
        assert!(!lacks(added, "- `pool`: b."));
        assert!(lacks(removed, "- `pool`: b.") && lacks(removed, "- `pool`: b.\n- `refs`: **Breaking**: c."));
        assert!(!lacks(removed, "- `pool`: b.\n- `pool`: **Breaking**: b has\n  gone."));
    }
}
