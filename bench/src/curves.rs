//! Curves: the value of a row by the number of threads.

use crate::report::Row;
use netmem_measure::stats::Spread;

/// The section whose rows of one thread are in another section.
const EVERY_THREAD: (&str, &str) = ("every thread", "one CPU");

/// The values of a row with several numbers of threads.
#[derive(Debug)]
pub(crate) struct Curve<'a> {
    /// The row with the fewest threads.
    pub(crate) row: &'a Row,
    /// Numbers of threads, the fewest first, and the values. There are at least two.
    pub(crate) points: Vec<(usize, Spread)>,
}

/// The curves of a section, in the order of its rows. A row that was measured with one number of
/// threads has none.
pub(crate) fn curves<'a>(section: &str, rows: &'a [Row]) -> Vec<Curve<'a>> {
    let is_of = |row: &&Row| row.head.section == section;
    let alone = |row: &&Row| (section, row.head.section) == EVERY_THREAD && row.head.threads == 1;
    let mut names: Vec<&str> = Vec::new();
    for row in rows.iter().filter(is_of) {
        if !names.contains(&row.head.name.as_str()) {
            names.push(&row.head.name);
        }
    }
    let curve = |name: &str| {
        let own = rows.iter().filter(|row| row.head.name == name && (is_of(row) || alone(row)));
        let mut own: Vec<_> = own.filter_map(|row| Some((row, row.measured.as_ref()?.value))).collect();
        own.sort_by_key(|(row, _)| row.head.threads);
        let points: Vec<_> = own.iter().map(|(row, value)| (row.head.threads, *value)).collect();
        let (row, _) = *own.first()?;
        (points.len() > 1).then_some(Curve { row, points })
    };
    names.into_iter().filter_map(curve).collect()
}

/// The numbers of threads of these curves, the fewest first.
pub(crate) fn threads<'a>(curves: impl IntoIterator<Item = &'a Curve<'a>>) -> Vec<usize> {
    let mut threads: Vec<usize> =
        curves.into_iter().flat_map(|curve| curve.points.iter().map(|(threads, _)| *threads)).collect();
    threads.sort_unstable();
    threads.dedup();
    threads
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::goals::tests::row;
    use crate::report::Head;

    fn of(name: &str, section: &'static str, threads: usize, values: &[f64]) -> Row {
        row(Head { name: name.into(), section, threads, unit: "ns", ..Head::default() }, values)
    }

    fn medians(section: &str, rows: &[Row]) -> Vec<(String, Vec<(usize, f64)>)> {
        let medians = |curve: &Curve<'_>| curve.points.iter().map(|(n, value)| (*n, value.median)).collect();
        curves(section, rows).iter().map(|curve| (curve.row.head.name.clone(), medians(curve))).collect()
    }

    #[test]
    fn a_curve_has_each_measured_number_of_threads() {
        let rows = [
            of("b", "get+put", 16, &[5.0]),
            of("a", "get+put", 1, &[1.0, 2.0, 3.0]),
            of("b", "get+put", 2, &[4.0]),
            of("a", "kill", 2, &[9.0]),
            of("a", "get+put", 2, &[]),
            of("a", "get+put", 4, &[7.0]),
            of("c", "get+put", 1, &[1.0]),
        ];
        let all = curves("get+put", &rows);
        assert_eq!(
            medians("get+put", &rows),
            [("b".into(), vec![(2, 4.0), (16, 5.0)]), ("a".into(), vec![(1, 2.0), (4, 7.0)])]
        );
        assert_eq!(threads(&all), [1, 2, 4, 16]);
        assert!(medians("kill", &rows).is_empty() && threads(&[]).is_empty());
    }

    /// With one thread, the rows in which every thread does the same are those of one CPU.
    #[test]
    fn one_thread_is_in_the_section_of_one_cpu() {
        let rows = [
            of("shared", "one CPU", 1, &[1.0]),
            of("limit", "one CPU", 1, &[1.0]),
            of("shared", "every thread", 2, &[2.0]),
            of("remote", "other CPUs", 2, &[3.0]),
        ];
        assert_eq!(medians("every thread", &rows), [("shared".into(), vec![(1, 1.0), (2, 2.0)])]);
        assert!(medians("one CPU", &rows).is_empty() && medians("other CPUs", &rows).is_empty());
    }
}
