//! Charts: a lane for each value, with its name, its point, the range of its runs and its number.
//!
//! Why lanes: no point hides another, whatever the values are, and each point has its name next to
//! it instead of a colour in a key. Names and numbers are text of the page, which wraps and keeps
//! its size on each screen. Only the tracks, the lines of the axis and its labels are SVG, placed
//! in percent of their width, and coloured by the style sheet.

use super::axis::{Axis, is_word};
use crate::report::Row;
use maud::{Markup, html};
use netmem_measure::stats::Spread;
use netmem_measure::units;

/// Colours of the style sheet for numbers of threads.
const COLOURS: usize = 5;

/// A row, and its value.
type Figure<'a> = (&'a Row, Spread);

/// Percent as an attribute of SVG.
pub(super) fn percent(at: f64) -> String {
    format!("{at:.2}%")
}

/// The point of a value and the range of its runs, in a colour or kind that the style sheet has.
pub(super) fn track(axis: &Axis, value: &Spread, class: &str) -> Markup {
    let [least, median, most] = [value.min, value.median, value.max].map(|value| percent(axis.at(value)));
    html! {
        svg class={ "track " (class) } aria-hidden="true" {
            @if !axis.logarithmic { rect.bar y="5" height="10" width=(median) {} }
            line.range x1=(least) x2=(most) y1="10" y2="10" {}
            line.range x1=(least) x2=(least) y1="6" y2="14" {}
            line.range x1=(most) x2=(most) y1="6" y2="14" {}
            circle.point.none[value.median <= 0.0] cx=(median) cy="10" r="4.5" {}
        }
    }
}

/// A chart: lanes, the lines of the axis behind them, and its labels below. `kind` is a class of
/// the style sheet, and `bound` a value with a line of its own.
pub(super) fn figure(
    axis: &Axis,
    unit: &str,
    kind: &str,
    bound: Option<f64>,
    caption: Markup,
    lanes: Markup,
) -> Markup {
    let labels = axis.labels(unit);
    html! {
        figure class={ "chart " (kind) } {
            figcaption { (caption) }
            div.plot {
                svg.grid aria-hidden="true" {
                    @for at in labels.iter().map(|label| percent(label.at)) { line x1=(at) x2=(at) y1="0" y2="100%" {} }
                    @if let Some(at) = bound.map(|bound| percent(axis.at(bound))) {
                        rect.short width=(at) height="100%" {}
                        line.bound x1=(at) x2=(at) y1="0" y2="100%" {}
                    }
                }
                (lanes)
            }
            div.lane.axis aria-hidden="true" {
                svg.track {  @for label in &labels {
                    text x=(percent(label.at)) y="13" text-anchor=(label.anchor) { (label.text) }
                } }
            }
        }
    }
}

/// The charts of a section: one for each quantity and number of counters.
pub(super) fn charts(threads: &[usize], rows: &[&Row]) -> Markup {
    let measured = rows.iter().filter_map(|&row| Some((row, row.measured.as_ref()?.value)));
    let mut groups: Vec<Vec<Figure<'_>>> = Vec::new();
    for (row, value) in measured {
        let of = |row: &Row| (row.head.per, row.head.unit, row.head.counters);
        match groups.iter_mut().find(|group| group.first().is_some_and(|(first, _)| of(first) == of(row))) {
            Some(group) => group.push((row, value)),
            None => groups.push(vec![(row, value)]),
        }
    }
    html! { @for group in &groups { (chart(threads, group)) } }
}

/// One quantity. Rows of one name are neighbours, with the least threads first.
fn chart(threads: &[usize], rows: &[Figure<'_>]) -> Markup {
    let Some((first, _)) = rows.first() else { return Markup::default() };
    let axis = Axis::of(rows.iter().flat_map(|(_, value)| [value.min, value.median, value.max]));
    let differ = rows.iter().any(|(row, _)| row.head.threads != first.head.threads);
    let mut groups: Vec<Vec<&Figure<'_>>> = Vec::new();
    for row in rows {
        match groups.iter_mut().find(|group| group.first().is_some_and(|(own, _)| own.head.name == row.0.head.name)) {
            Some(group) => group.push(row),
            None => groups.push(vec![row]),
        }
    }
    let colour = |n: usize| if differ { colour(threads, n) } else { "c0".into() };
    let lanes = html! {
        @for group in &groups {
            @for (n, (row, value)) in group.iter().enumerate() {
                @let shown = units::show_spread(value, row.head.unit);
                @let (number, range) = shown.split_once(" (").unwrap_or((&shown, ""));
                // The caption has a unit that is a word.
                @let number = number.strip_suffix(row.head.unit).filter(|_| is_word(row.head.unit)).unwrap_or(number).trim_end();
                div.lane.first[n == 0] {
                    span.label {
                        span.name { (row.head.name) }
                        @if differ { " " span.threads { (super::threads(row.head.threads)) } }
                    }
                    (track(&axis, value, &colour(row.head.threads)))
                    span.value { b { (number) } @if value.min < value.max { " " span { (range.trim_end_matches(')')) } } }
                }
            }
        }
    };
    figure(&axis, first.head.unit, if differ { "grouped" } else { "" }, None, caption(first, &axis), lanes)
}

/// The class of the style sheet with the colour of this number of threads.
pub(super) fn colour(threads: &[usize], n: usize) -> String {
    let at = threads.iter().position(|&threads| threads == n).unwrap_or(threads.len());
    format!("c{}", at % COLOURS)
}

/// What the values of a row are.
pub(super) fn title(row: &Row) -> String {
    let (per, unit) = (row.head.per, row.head.unit);
    let of = if per.starts_with(|c: char| c.is_ascii_digit()) { "of" } else { "of a" };
    let what = match unit {
        "ns" => format!("Time per {per}"),
        "B" => format!("Memory per {per}"),
        "b/s" => format!("Throughput {of} {per}"),
        "%" => format!("Percent of {per}"),
        unit => format!("{} per {per}", super::capital(unit)),
    };
    let counters = match row.head.counters {
        Some(1) => ", on one counter".into(),
        Some(n) => format!(", rotating over {n} counters"),
        None => String::new(),
    };
    what + &counters
}

/// What the chart shows, and which end of it is better.
fn caption(row: &Row, axis: &Axis) -> Markup {
    let more = matches!(row.head.unit, "b/s" | "requests");
    html! {
        b { (title(row)) }
        " " span.hint { @if more { "more is better →" } @else { "← less is better" } }
        @if axis.logarithmic { " " span.hint { "logarithmic axis" } }
    }
}
