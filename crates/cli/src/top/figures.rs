//! Figures as Prometheus text: how they are fetched and read, and what changed from one answer to
//! the next. The server may be any program, so nothing in its answer is believed.

use crate::args::SortArg;
use crate::fetch;
use anyhow::{Context, ensure};
use serde::Serialize;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// An answer: its figures by name and labels, and when it came.
#[derive(Debug)]
pub(super) struct Answer {
    at: Instant,
    figures: BTreeMap<Key, f64>,
}

/// A figure's name, and its labels in the order of the text.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    name: String,
    labels: Vec<(String, String)>,
}

/// A figure, and by how much it grows.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Row {
    pub(super) name: String,
    pub(super) labels: BTreeMap<String, String>,
    pub(super) value: f64,
    /// Of a counter, if it was there in the answer before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) per_s: Option<f64>,
}

impl Row {
    /// The labels as text. Characters that would confuse a terminal are escaped.
    pub(super) fn labels(&self) -> String {
        let label = |(name, value): (&String, &String)| format!("{name}={}", value.escape_debug());
        self.labels.iter().map(label).collect::<Vec<_>>().join(" ")
    }
}

impl Answer {
    /// Asks for the figures at this address.
    pub(super) fn fetch(at: SocketAddr) -> anyhow::Result<Self> {
        let body = fetch::get(at, "/metrics").with_context(|| format!("the figures of {at}"))?;
        let figures = parse(&body).with_context(|| format!("{at} does not answer with Prometheus text"))?;
        Ok(Self { at: Instant::now(), figures })
    }

    /// The time since another answer.
    pub(super) fn since(&self, before: &Self) -> Duration {
        self.at.saturating_duration_since(before.at)
    }

    /// The figures, in this order, with their growth since the answer before.
    pub(super) fn rows(&self, before: Option<&Self>, sort: SortArg) -> Vec<Row> {
        let row = |(key, value): (&Key, &f64)| {
            let grown = before.and_then(|before| {
                let grown = value - before.figures.get(key)?;
                // A counter that has fallen began anew.
                let seconds = self.since(before).as_secs_f64().max(1e-9);
                Some(if grown >= 0.0 { grown } else { *value } / seconds)
            });
            let per_s = grown.filter(|_| key.name.ends_with("_total"));
            Row { name: key.name.clone(), labels: key.labels.iter().cloned().collect(), value: *value, per_s }
        };
        let mut rows: Vec<Row> = self.figures.iter().map(row).collect();
        match sort {
            SortArg::Name => {}
            SortArg::Value => rows.sort_by(|a, b| b.value.total_cmp(&a.value)),
            SortArg::Rate => rows.sort_by(|a, b| {
                let rate = |row: &Row| row.per_s.unwrap_or(0.0);
                rate(b).total_cmp(&rate(a)).then(b.value.total_cmp(&a.value))
            }),
        }
        rows
    }
}

/// Reads the figures of a text. Comments are left out.
fn parse(text: &str) -> anyhow::Result<BTreeMap<Key, f64>> {
    let mut figures = BTreeMap::new();
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let figure = figure(line).with_context(|| format!("`{}`", line.escape_debug()))?;
        figures.insert(figure.0, figure.1);
    }
    Ok(figures)
}

/// Reads a line: `name value`, or `name{label="value",...} value`; a time may follow.
fn figure(line: &str) -> anyhow::Result<(Key, f64)> {
    let end = line.find(['{', ' ']).context("no value")?;
    let (name, mut rest) = line.split_at(end);
    ensure!(is_name(name), "a name that Prometheus does not allow");
    let mut labels = Vec::new();
    if let Some(inner) = rest.strip_prefix('{') {
        rest = inner;
        loop {
            rest = rest.trim_start_matches([',', ' ']);
            if let Some(behind) = rest.strip_prefix('}') {
                rest = behind;
                break;
            }
            let (label, quoted) = rest.split_once("=\"").context("a label without a value")?;
            let (value, behind) = unquote(quoted).context("a label's value without an end")?;
            ensure!(is_name(label), "a label that Prometheus does not allow");
            labels.push((label.to_owned(), value));
            rest = behind;
        }
    }
    let value = rest.split_whitespace().next().context("no value")?;
    Ok((Key { name: name.to_owned(), labels }, value.parse().context("a value that is no number")?))
}

/// Whether this can be the name of a figure or a label. A terminal can show it, too.
fn is_name(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b':'))
}

/// The text up to the quote that ends it, and what is behind the quote.
fn unquote(text: &str) -> Option<(String, &str)> {
    let (mut value, mut chars) = (String::new(), text.char_indices());
    loop {
        match chars.next()? {
            (at, '"') => return Some((value, &text[at + 1..])),
            (_, '\\') => match chars.next()?.1 {
                'n' => value.push('\n'),
                other => value.push(other),
            },
            (_, other) => value.push(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(at: Instant, text: &str) -> Answer {
        Answer { at, figures: parse(text).unwrap() }
    }

    #[test]
    fn text_of_prometheus() {
        let text = "# HELP a_total As.\n# TYPE a_total counter\na_total{x=\"1\",y=\"a\\\"b\\\\c\\n}\"} 5\na_total{x=\"2\"} 1e3 99\n\nb NaN\n";
        let figures = parse(text).unwrap();
        let keys: Vec<_> = figures.keys().map(|key| (key.name.as_str(), key.labels.len())).collect();
        assert_eq!(keys, [("a_total", 2), ("a_total", 1), ("b", 0)]);
        assert_eq!(figures.keys().next().unwrap().labels[1], ("y".into(), "a\"b\\c\n}".into()));
        for bad in [
            "a",
            "a{",
            "a{x",
            "a{x=\"",
            "a{x=\"1\"",
            "a{x=\"1\"}",
            "a x",
            "a{x=\"1\\",
            "\u{1b}[2J 1",
            "a{\u{1b}c=\"1\"} 1",
            "{} 1",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn counters_have_rates_and_gauges_have_none() {
        let begin = Instant::now();
        let before = answer(begin, "a_total 10\nb_total 100\ng 5\n");
        let now = answer(begin + Duration::from_secs(2), "a_total 110\nb_total 20\nc_total 7\ng 9\n");
        let rows = |sort| -> Vec<_> {
            let rows = now.rows(Some(&before), sort).into_iter();
            rows.map(|row| (row.name, row.value, row.per_s)).collect()
        };
        // b began anew, and c was not there.
        let [a, b] = [("a_total".to_owned(), 110.0, Some(50.0)), ("b_total".to_owned(), 20.0, Some(10.0))];
        let [c, g] = [("c_total".to_owned(), 7.0, None), ("g".to_owned(), 9.0, None)];
        assert_eq!(rows(SortArg::Name), [a.clone(), b.clone(), c.clone(), g.clone()]);
        assert_eq!(rows(SortArg::Value), [a.clone(), b.clone(), g.clone(), c.clone()]);
        assert_eq!(rows(SortArg::Rate), [a, b, g, c]);
        assert!(now.rows(None, SortArg::Name).iter().all(|row| row.per_s.is_none()));
        let labels = answer(begin, "a{x=\"\u{1b}[2J\"} 1").rows(None, SortArg::Name)[0].labels();
        assert_eq!(labels, "x=\\u{1b}[2J");
    }
}
