//! Charts as SVG: lines over numbers of threads, and bars. Whiskers are the range over all runs.
//!
//! The charts are narrow, so that their text can be read on a page that is 400 pixels wide. Lines
//! have no names in the chart: the page has a legend.

use crate::error::BenchError;
use netmem_measure::stats::Spread;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;

/// Width of every chart, in pixels of the SVG.
const WIDTH: u32 = 400;
/// Height of a bar and of the text above it.
const BAR: u32 = 44;

/// One quantity over numbers of threads.
pub(crate) struct Line {
    pub(crate) name: String,
    /// Each point is the index of its number of threads in the list of all numbers, and the
    /// measured value.
    pub(crate) points: Vec<(usize, Spread)>,
}

/// The colour of a chart's line, in the notation of CSS.
pub(crate) fn colour(line: usize) -> String {
    let RGBColor(r, g, b) = COLOURS[line % COLOURS.len()];
    format!("#{r:02x}{g:02x}{b:02x}")
}

/// Colours that can be progress apart with most kinds of colour blindness (Okabe and Ito).
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

/// A chart of time over numbers of threads. Each axis covers its values, and the vertical axis is
/// logarithmic.
pub(crate) fn lines(what: &str, threads: &[usize], lines: &[Line]) -> Result<String, BenchError> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (WIDTH, 300)).into_drawing_area();
        let (low, high) = decades(lines.iter().flat_map(|line| line.points.iter().map(|&(_, s)| s)));
        let last = threads.len().saturating_sub(1) as f64;
        let across = -0.3..last + 0.3;
        // The axis begins a little below the lowest decade: otherwise rounding drops the grid line
        // of that decade.
        let up = (low * 0.999..high).log_scale();
        let mut chart = ChartBuilder::on(&area)
            .margin(10)
            .x_label_area_size(40)
            .y_label_area_size(66)
            .build_cartesian_2d(across, up)
            .map_err(failed)?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .x_labels(0)
            .y_desc(what)
            .axis_desc_style(("sans-serif", 16))
            .label_style(("sans-serif", 15))
            .y_label_formatter(&|y| format!("{y}"))
            .draw()
            .map_err(failed)?;
        let style = ("sans-serif", 16).into_font();
        for (at, n) in threads.iter().enumerate() {
            let label = format!("{n} thread{}", if *n == 1 { "" } else { "s" });
            let below = chart.backend_coord(&(at as f64, low));
            area.draw_text(&label, &style.clone().into(), (below.0 - 27, below.1 + 8)).map_err(failed)?;
        }
        for (i, line) in lines.iter().enumerate() {
            let colour = COLOURS[i % COLOURS.len()];
            let path: Vec<_> = line.points.iter().map(|&(at, s)| (at as f64, s.median.max(low))).collect();
            let whiskers = line.points.iter().map(|&(at, s)| {
                let x = at as f64 + (i as f64 - (lines.len() - 1) as f64 / 2.0) * 0.008 * (last + 1.0);
                PathElement::new([(x, s.min.max(low)), (x, s.max.max(low))], colour.mix(0.4))
            });
            chart.draw_series(whiskers).map_err(failed)?;
            chart.draw_series(path.iter().map(|&at| Circle::new(at, 4, colour.filled()))).map_err(failed)?;
            chart.draw_series([PathElement::new(path, colour.stroke_width(2))]).map_err(failed)?;
        }
        area.present().map_err(failed)?;
    }
    Ok(svg)
}

/// One bar for each quantity, from zero, with its text above it.
pub(crate) fn bars(what: &str, bars: &[(String, Spread)]) -> Result<String, BenchError> {
    let mut svg = String::new();
    {
        let height = 68 + BAR * u32::try_from(bars.len()).unwrap_or(100).min(100);
        let area = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        let most = bars.iter().map(|(_, s)| s.max).fold(0.0, f64::max);
        let most = if most > 0.0 { most * 1.05 } else { 1.0 };
        let mut chart: ChartContext<'_, _, Cartesian2d<RangedCoordf64, RangedCoordf64>> = ChartBuilder::on(&area)
            .margin(8)
            .x_label_area_size(44)
            .build_cartesian_2d(0.0..most, bars.len() as f64..0.0)
            .map_err(failed)?;
        let mut mesh = chart.configure_mesh();
        mesh.disable_y_mesh().x_labels(5).y_labels(0).x_desc(what);
        mesh.axis_desc_style(("sans-serif", 16)).label_style(("sans-serif", 15)).draw().map_err(failed)?;
        for (i, (text, s)) in bars.iter().enumerate() {
            let (top, bottom, middle) = (i as f64 + 0.5, i as f64 + 0.9, i as f64 + 0.7);
            let bar = Rectangle::new([(0.0, top), (s.median, bottom)], COLOURS[4].mix(0.7).filled());
            chart.draw_series([bar]).map_err(failed)?;
            chart.draw_series([PathElement::new([(s.min, middle), (s.max, middle)], BLACK)]).map_err(failed)?;
            let left = chart.backend_coord(&(0.0, i as f64));
            let style = ("sans-serif", 16).into_font();
            area.draw_text(text, &style.into(), (left.0 + 2, left.1 + 4)).map_err(failed)?;
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
    fn charts_say_what_they_show() {
        let line = Line { name: "plain".into(), points: vec![(0, ONE)] };
        let svg = lines("ns", &[1], &[line]).unwrap();
        assert!(svg.starts_with("<svg") && svg.contains("1 thread"), "{svg}");
        let svg = bars("ns", &[("beside".into(), ONE), ("alone".into(), Spread::default())]).unwrap();
        assert!(svg.starts_with("<svg") && svg.contains("beside") && svg.contains("alone"), "{svg}");
        bars("ns", &[]).unwrap();
        lines("ns", &[], &[]).unwrap();
    }
}
