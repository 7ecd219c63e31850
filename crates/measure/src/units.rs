//! Quantities in units that are easy to read. JSON has base units (`ns`, `b/s`, `B`, `packets/s`,
//! `requests`); tables and charts have the unit in which the number is short.

use crate::stats::Spread;

/// The units for values of a base unit, the smallest first. Empty for a base unit that has no
/// larger units.
fn scales(base: &str) -> &'static [(f64, &'static str)] {
    match base {
        "ns" => &[(1.0, "ns"), (1e3, "us"), (1e6, "ms"), (1e9, "s")],
        "b/s" => &[(1.0, "b/s"), (1e3, "kb/s"), (1e6, "Mb/s"), (1e9, "Gb/s")],
        "B" => &[(1.0, "B"), (1e3, "kB"), (1e6, "MB"), (1e9, "GB")],
        "packets/s" | "packets" | "requests/s" | "requests" | "frames" | "messages" => {
            &[(1.0, ""), (1e3, "k"), (1e6, "M")]
        }
        _ => &[],
    }
}

/// The unit for a value in a base unit, and how many base units are in it: the largest unit of
/// which the value has at least one.
pub fn scale(value: f64, base: &str) -> (f64, &str) {
    let scales = scales(base);
    let fits = |&&(factor, _): &&(f64, &str)| value.abs() >= factor;
    scales.iter().rev().find(fits).or(scales.first()).copied().unwrap_or((1.0, base))
}

/// A number with two decimals; with fewer if it is 100 or more, with two digits behind the zeros if
/// it is less than 0.1, and with an exponent if it is a million or more, or less than 0.0001: seven
/// characters at most, so that a table or a chart has place for each.
pub fn digits(x: f64) -> String {
    match x.abs() {
        a if a >= 999_999.5 => format!("{x:.2e}"),
        a if a > 0.0 && a < 0.0001 => format!("{x:.1e}"),
        a if a > 0.0 && a < 0.0995 => {
            let decimals = (1.0 - a.log10().floor()) as usize;
            format!("{x:.decimals$}")
        }
        a if a >= 1000.0 => format!("{x:.0}"),
        a if a >= 100.0 => format!("{x:.1}"),
        _ => format!("{x:.2}"),
    }
}

/// A number and its unit.
fn with(number: String, unit: &str) -> String {
    if unit.is_empty() { number } else { format!("{number} {unit}") }
}

/// A value in the unit that suits it: `12.3 us`.
pub fn show(value: f64, base: &str) -> String {
    let (factor, unit) = scale(value, base);
    with(digits(value / factor), unit)
}

/// Median and range, in the unit that suits the median: `12.3 us (11.0..20.1)`.
pub fn show_spread(s: &Spread, base: &str) -> String {
    let (factor, unit) = scale(s.median, base);
    let [median, min, max] = [s.median, s.min, s.max].map(|x| digits(x / factor));
    format!("{} ({min}..{max})", with(median, unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_digits_or_so() {
        assert_eq!(digits(0.0), "0.00");
        assert_eq!(digits(3.456), "3.46");
        assert_eq!(
            [0.1, 0.0996, 0.099, 0.05, 0.00013, 1.27e-5, -2e-6].map(digits),
            ["0.10", "0.10", "0.099", "0.050", "0.00013", "1.3e-5", "-2.0e-6"]
        );
        assert_eq!(digits(345.67), "345.7");
        assert_eq!(digits(34567.8), "34568");
        assert_eq!([999_999.4, 999_999.5, 1_029_239.0, 1e300].map(digits), ["999999", "1.00e6", "1.03e6", "1.00e300"]);
    }

    #[test]
    fn numbers_are_short_in_the_unit_that_suits_them() {
        for (value, base, shown) in [
            (0.0, "ns", "0.00 ns"),
            (0.5, "ns", "0.50 ns"),
            (999.0, "ns", "999.0 ns"),
            (1500.0, "ns", "1.50 us"),
            (2.5e6, "ns", "2.50 ms"),
            (72e9, "ns", "72.00 s"),
            (9.97e9, "b/s", "9.97 Gb/s"),
            (120.0, "b/s", "120.0 b/s"),
            (4096.0, "B", "4.10 kB"),
            (17.2e6, "packets/s", "17.20 M"),
            (12_345.0, "requests", "12.35 k"),
            (20.0, "packets/s", "20.00"),
            (12_345.0, "x", "12345 x"),
            (1.5, "%", "1.50 %"),
        ] {
            assert_eq!(show(value, base), shown);
        }
        let spread = Spread { median: 2000.0, min: 900.0, max: 123_400.0 };
        assert_eq!(show_spread(&spread, "ns"), "2.00 us (0.90..123.4)");
        assert_eq!(show_spread(&spread, "packets/s"), "2.00 k (0.90..123.4)");
    }
}
