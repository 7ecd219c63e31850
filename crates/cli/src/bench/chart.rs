//! Charts as SVG: lines over numbers of threads, and bars. Whiskers are the range over all runs.

use super::error::BenchError;
use crate::stats::Spread;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;

/// Width of every chart, in pixels of its own.
const WIDTH: u32 = 900;

/// One quantity over numbers of threads.
pub(crate) struct Line {
    pub(crate) name: String,
    /// Number of threads, as its place in the list of all numbers, and what was measured.
    pub(crate) points: Vec<(usize, Spread)>,
}

/// Colours that tell apart for most eyes (Okabe and Ito).
const COLOURS: [RGBColor; 7] = [
    RGBColor(0x55, 0x55, 0x55),
    RGBColor(0xe6, 0x9f, 0x00),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0x56, 0xb4, 0xe9),
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0xcc, 0x79, 0xa7),
];

fn failed(error: impl std::fmt::Display) -> BenchError {
    BenchError::Chart(error.to_string())
}

/// Powers of ten around all values: a logarithmic axis begins above zero.
fn decades(spreads: impl Iterator<Item = Spread> + Clone) -> (f64, f64) {
    let low = spreads.clone().map(|s| s.min).filter(|&min| min > 0.0).fold(f64::INFINITY, f64::min);
    let high = spreads.map(|s| s.max).fold(0.0, f64::max);
    if !low.is_finite() || high <= 0.0 {
        return (1.0, 10.0);
    }
    let (low, high) = (10f64.powf(low.log10().floor()), 10f64.powf(high.log10().ceil()));
    (low, if high > low { high } else { low * 10.0 })
}

/// Time over threads, both axes as wide as they need to be; the vertical one is logarithmic.
pub(crate) fn lines(what: &str, threads: &[usize], lines: &[Line]) -> Result<String, BenchError> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (WIDTH, 420)).into_drawing_area();
        let (low, high) = decades(lines.iter().flat_map(|line| line.points.iter().map(|&(_, s)| s)));
        let last = threads.len().saturating_sub(1) as f64;
        // Room for the names, behind the last point.
        let across = -0.15..last + (last + 1.0) * 0.35;
        // A little lower, or rounding loses the lowest decade's grid.
        let up = (low * 0.999..high).log_scale();
        let mut chart = ChartBuilder::on(&area)
            .margin(10)
            .x_label_area_size(40)
            .y_label_area_size(60)
            .build_cartesian_2d(across, up)
            .map_err(failed)?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .x_labels(0)
            .y_desc(what)
            .y_label_formatter(&|y| format!("{y}"))
            .draw()
            .map_err(failed)?;
        let style = ("sans-serif", 14).into_font();
        for (at, n) in threads.iter().enumerate() {
            let label = format!("{n} thread{}", if *n == 1 { "" } else { "s" });
            let below = chart.backend_coord(&(at as f64, low));
            area.draw_text(&label, &style.clone().into(), (below.0 - 25, below.1 + 8)).map_err(failed)?;
        }
        // Names stand at their line's end, and never on each other.
        let mut ends: Vec<(usize, (i32, i32))> = Vec::new();
        for (i, line) in lines.iter().enumerate() {
            let colour = COLOURS[i % COLOURS.len()];
            let path: Vec<_> = line.points.iter().map(|&(at, s)| (at as f64, s.median.max(low))).collect();
            if let Some(&end) = path.last() {
                ends.push((i, chart.backend_coord(&end)));
            }
            let whiskers = line.points.iter().map(|&(at, s)| {
                let x = at as f64 + (i as f64 - (lines.len() - 1) as f64 / 2.0) * 0.008 * (last + 1.0);
                PathElement::new([(x, s.min.max(low)), (x, s.max.max(low))], colour.mix(0.4))
            });
            chart.draw_series(whiskers).map_err(failed)?;
            chart.draw_series(path.iter().map(|&at| Circle::new(at, 4, colour.filled()))).map_err(failed)?;
            chart.draw_series([PathElement::new(path, colour.stroke_width(2))]).map_err(failed)?;
        }
        ends.sort_by_key(|&(_, (_, y))| y);
        let mut free = i32::MIN;
        for (i, (x, y)) in ends {
            let y = (y - 8).max(free);
            free = y + 16;
            let style = style.clone().color(&COLOURS[i % COLOURS.len()]);
            area.draw_text(&lines[i].name, &style, (x + 14, y)).map_err(failed)?;
        }
        area.present().map_err(failed)?;
    }
    Ok(svg)
}

/// One bar for each quantity, from zero.
pub(crate) fn bars(what: &str, bars: &[(String, Spread)]) -> Result<String, BenchError> {
    let mut svg = String::new();
    {
        let height = 70 + 26 * u32::try_from(bars.len()).unwrap_or(100).min(100);
        let area = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        let most = bars.iter().map(|(_, s)| s.max).fold(0.0, f64::max);
        let most = if most > 0.0 { most * 1.15 } else { 1.0 };
        let mut chart: ChartContext<'_, _, Cartesian2d<RangedCoordf64, RangedCoordf64>> = ChartBuilder::on(&area)
            .margin(10)
            .x_label_area_size(40)
            .y_label_area_size(270)
            .build_cartesian_2d(0.0..most, bars.len() as f64..0.0)
            .map_err(failed)?;
        chart.configure_mesh().disable_y_mesh().y_labels(0).x_desc(what).draw().map_err(failed)?;
        let style = ("sans-serif", 14).into_font();
        for (i, (name, s)) in bars.iter().enumerate() {
            let (top, bottom, middle) = (i as f64 + 0.2, i as f64 + 0.8, i as f64 + 0.5);
            let bar = Rectangle::new([(0.0, top), (s.median, bottom)], COLOURS[4].mix(0.7).filled());
            chart.draw_series([bar]).map_err(failed)?;
            chart.draw_series([PathElement::new([(s.min, middle), (s.max, middle)], BLACK)]).map_err(failed)?;
            let left = chart.backend_coord(&(0.0, middle));
            area.draw_text(name, &style.clone().into(), (12, left.1 - 7)).map_err(failed)?;
        }
        area.present().map_err(failed)?;
    }
    Ok(svg)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Spread = Spread { median: 3.0, min: 2.0, max: 40.0 };

    #[test]
    fn axes_hold_every_value() {
        assert_eq!(decades([ONE].into_iter()), (1.0, 100.0));
        assert_eq!(decades([Spread { median: 1.0, min: 1.0, max: 1.0 }].into_iter()), (1.0, 10.0));
        assert_eq!(decades([Spread::default()].into_iter()), (1.0, 10.0));
        assert_eq!(decades(std::iter::empty()), (1.0, 10.0));
    }

    #[test]
    fn charts_name_what_they_show() {
        let line = Line { name: "plain".into(), points: vec![(0, ONE)] };
        let svg = lines("ns", &[1], &[line]).unwrap();
        assert!(svg.starts_with("<svg") && svg.contains("plain") && svg.contains("1 thread"), "{svg}");
        let svg = bars("ns", &[("beside".into(), ONE), ("alone".into(), Spread::default())]).unwrap();
        assert!(svg.starts_with("<svg") && svg.contains("beside") && svg.contains("alone"), "{svg}");
        bars("ns", &[]).unwrap();
        lines("ns", &[], &[]).unwrap();
    }
}
