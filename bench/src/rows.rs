//! The choice of the rows of a suite that are measured: all rows, or those that `--rows` names.

use crate::report::Head;

/// Names of rows or of sections, in which `*` stands for any characters. An empty list chooses all
/// rows.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rows(Vec<String>);

impl Rows {
    pub(crate) fn new(patterns: &[String]) -> Self {
        Self(patterns.to_vec())
    }

    pub(crate) fn patterns(&self) -> &[String] {
        &self.0
    }

    /// Whether a row is chosen.
    pub(crate) fn choose(&self, head: &Head) -> bool {
        self.0.is_empty() || self.0.iter().any(|pattern| names(pattern, head))
    }

    /// Whether a row is chosen by a name, and not only because all rows are.
    pub(crate) fn name(&self, head: &Head) -> bool {
        self.0.iter().filter(|pattern| pattern.contains(|c| c != '*')).any(|pattern| names(pattern, head))
    }

    /// The patterns that match one of these rows.
    pub(crate) fn with_row(&self, heads: &[Head]) -> Vec<&str> {
        let known = |pattern: &&String| heads.iter().any(|head| names(pattern, head));
        self.0.iter().filter(known).map(String::as_str).collect()
    }

    /// The patterns that match none of these rows.
    pub(crate) fn without_row(&self, heads: &[Head]) -> Vec<&str> {
        let unknown = |pattern: &&String| !heads.iter().any(|head| names(pattern, head));
        self.0.iter().filter(unknown).map(String::as_str).collect()
    }
}

fn names(pattern: &str, head: &Head) -> bool {
    matches(pattern, &head.name) || matches(pattern, head.section)
}

/// Whether the pattern matches the whole text.
fn matches(pattern: &str, text: &str) -> bool {
    let Some((front, rest)) = pattern.split_once('*') else { return pattern == text };
    let Some(text) = text.strip_prefix(front) else { return false };
    // The characters that the star stands for can end at each character boundary.
    (0..=text.len()).filter(|&at| text.is_char_boundary(at)).any(|at| matches(rest, &text[at..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_is_any_text() {
        for (pattern, text) in [("", ""), ("*", ""), ("a*c", "ac"), ("a*c", "abbc"), ("*b*", "abc"), ("a**", "a")] {
            assert!(matches(pattern, text), "{pattern} {text}");
        }
        for (pattern, text) in [("", "a"), ("a", "ab"), ("a*c", "acb"), ("*b", "abc"), ("a*a", "a")] {
            assert!(!matches(pattern, text), "{pattern} {text}");
        }
    }

    #[test]
    fn rows_are_chosen_by_name_and_by_section() {
        let head = |name: &str, section| Head { name: name.into(), section, ..Head::default() };
        let heads = [head("remote", "other CPUs"), head("remote_bulk", "other CPUs"), head("malloc", "one CPU")];
        let chosen = |patterns: &[&str]| -> Vec<bool> {
            let rows = Rows::new(&patterns.iter().map(ToString::to_string).collect::<Vec<_>>());
            heads.iter().map(|head| rows.choose(head)).collect()
        };
        assert_eq!(chosen(&[]), [true; 3]);
        assert_eq!(chosen(&["remote"]), [true, false, false]);
        assert_eq!(chosen(&["remote*", "one CPU"]), [true; 3]);
        assert_eq!(chosen(&["other*"]), [true, true, false]);
        let rows = Rows::new(&["remote".into(), "remot".into(), "x*".into()]);
        assert_eq!((rows.with_row(&heads), rows.without_row(&heads)), (vec!["remote"], vec!["remot", "x*"]));
        // A star alone chooses a row and names none.
        let named = |pattern: &str| Rows::new(&[pattern.into()]).name(&heads[0]);
        assert_eq!(
            ["remote", "other*", "*mote", "*", "**", "malloc"].map(named),
            [true, true, true, false, false, false]
        );
    }
}
