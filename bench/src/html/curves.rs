//! The curves of a section: a panel for each row, with its value by the number of threads.
//!
//! Panels next to each other have one scale, so that their slopes compare, and no curve hides
//! another.

use super::axis::Axis;
use super::chart::{colour, percent, title};
use crate::curves::{Curve, threads};
use maud::{Markup, html};
use netmem_measure::units;

/// Percent of a panel's width on each side of the points.
const MARGIN: f64 = 6.0;

/// The panels: a figure for each quantity and number of counters. `all` are the numbers of threads
/// of the suite, which have their colours.
pub(super) fn curves(all: &[usize], curves: &[Curve<'_>]) -> Markup {
    let mut groups: Vec<Vec<&Curve<'_>>> = Vec::new();
    for curve in curves {
        let of = |curve: &Curve<'_>| (curve.row.head.per, curve.row.head.unit, curve.row.head.counters);
        match groups.iter_mut().find(|group| group.first().is_some_and(|first| of(first) == of(curve))) {
            Some(group) => group.push(curve),
            None => groups.push(vec![curve]),
        }
    }
    html! { @for group in &groups { (figure(all, group)) } }
}

fn figure(all: &[usize], group: &[&Curve<'_>]) -> Markup {
    let Some(first) = group.first() else { return Markup::default() };
    let columns = threads(group.iter().copied());
    let values = group.iter().flat_map(|curve| &curve.points);
    let axis = Axis::of(values.flat_map(|(_, value)| [value.min, value.median, value.max]));
    html! {
        figure.curves {
            figcaption {
                b { (title(first.row)) ", by threads" }
                " " span.hint { "one scale for all" @if axis.logarithmic { ", logarithmic" } @else { ", from 0" } }
            }
            div.panels { @for curve in group { (panel(all, &columns, &axis, curve)) } }
        }
    }
}

fn panel(all: &[usize], columns: &[usize], axis: &Axis, curve: &Curve<'_>) -> Markup {
    let step = (100.0 - 2.0 * MARGIN) / columns.len().saturating_sub(1).max(1) as f64;
    let x = |n: usize| {
        let at = columns.iter().position(|&column| column == n).unwrap_or_default();
        percent(MARGIN + step * at as f64)
    };
    let y = |value: f64| percent(100.0 - axis.at(value));
    let ends = [curve.points.first(), curve.points.last()].map(|point| {
        let value = point.map_or(0.0, |(_, value)| value.median);
        units::show(value, curve.row.head.unit)
    });
    html! {
        div.panel {
            p.panel-name { (curve.row.head.name) }
            p.ends { (ends.join(" → ")) }
            svg.track.curve aria-hidden="true" {
                @for pair in curve.points.windows(2) { @if let [(n, from), (m, to)] = pair {
                    line.step x1=(x(*n)) y1=(y(from.median)) x2=(x(*m)) y2=(y(to.median)) {}
                } }
                @for (n, value) in &curve.points { g class={ "mark " (colour(all, *n)) } {
                    line.range x1=(x(*n)) x2=(x(*n)) y1=(y(value.min)) y2=(y(value.max)) {}
                    circle.point.none[value.median <= 0.0] cx=(x(*n)) cy=(y(value.median)) r="4" {}
                } }
            }
            svg.columns aria-hidden="true" {
                @for (n, _) in &curve.points { text x=(x(*n)) y="13" text-anchor="middle" { (n) } }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::goals::tests::row;
    use crate::report::{Head, Row};

    /// Each panel has its columns where all others have them, and the same scale.
    #[test]
    fn panels_have_one_scale() {
        let of = |name: &str, threads, value| {
            row(
                Head { name: name.into(), section: "get+put", threads, unit: "ns", per: "get", ..Head::default() },
                &[value],
            )
        };
        let mut rows: Vec<Row> = [1, 2, 4, 8, 16].into_iter().map(|n| of("flat", n, 10.0)).collect();
        rows.extend([of("grows", 1, 10.0), of("grows", 16, 20.0)]);
        let curves = crate::curves::curves("get+put", &rows);
        let page = super::curves(&[1, 2, 4, 8, 16], &curves).into_string();
        assert_eq!(page.matches("<figure").count(), 1);
        let panels: Vec<&str> = page.split("<div class=\"panel\">").skip(1).collect();
        let of = |panel: &str, name: &str| -> Vec<String> {
            let values = panel.split("<circle").skip(1).map(|circle| circle.split_once(name).unwrap().1);
            values.map(|value| value.split_once('%').unwrap().0.to_owned()).collect()
        };
        assert_eq!(of(panels[0], "cx=\""), ["6.00", "28.00", "50.00", "72.00", "94.00"]);
        assert_eq!(of(panels[1], "cx=\""), ["6.00", "94.00"]);
        let (flat, grows) = (of(panels[0], "cy=\""), of(panels[1], "cy=\""));
        assert!(flat.iter().all(|y| *y == grows[0]) && grows[1].parse::<f64>().unwrap() < 10.0, "{flat:?} {grows:?}");
        assert!(page.contains("10.00 ns → 20.00 ns") && page.contains("<g class=\"mark c4\">"), "{page}");
    }
}
