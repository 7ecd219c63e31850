//! The table `scaling`: what structures would cost on more CPUs than were measured, computed from
//! what was measured. docs/design/scaling.md has the assumptions.

use super::record::Record;
use netmem_measure::units::{digits, show};
use std::fmt::Write;

/// CPUs for which costs are computed.
const CPUS: [usize; 3] = [32, 64, 128];
/// The fewest CPUs that say something about more: half of them must be in contention, too.
const LEAST: usize = 4;
/// The CPUs of the published measurement of retries, and what it found.
const PUBLISHED: (usize, f64) = (112, 8.0);

/// How a cost grows with the CPUs that use a structure at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Growth {
    /// In proportion: each waits until all others have had the line.
    Line,
    /// Not at all: a CPU has its own lines.
    Own,
    /// By the same for each further CPU.
    Each,
}

/// A structure: how readers know it, and the row that measures it.
struct Structure {
    what: &'static str,
    suite: &'static str,
    section: &'static str,
    row: &'static str,
    growth: Growth,
}

const fn structure(what: &'static str, [suite, section, row]: [&'static str; 3], growth: Growth) -> Structure {
    Structure { what, suite, section, row, growth }
}

const STRUCTURES: [Structure; 9] = [
    structure("`RefCount`: get and put", ["refs", "get+put", "refcount"], Growth::Line),
    structure("`RcuRef`, a batch a section: get and put", ["refs", "get+put", "rcuref_batched"], Growth::Line),
    structure("`Arc`: clone and drop", ["refs", "get+put", "arc"], Growth::Line),
    structure("`PercpuRef`: get and put", ["refs", "get+put", "percpuref"], Growth::Own),
    structure("`PercpuRef`: kill", ["refs", "kill", "kill_64"], Growth::Each),
    structure("`SharedPool`: a page allocated and dropped", ["pool", "every thread", "shared"], Growth::Own),
    structure("one `ArrayQueue` for all: the same", ["pool", "every thread", "array_queue"], Growth::Line),
    structure("one `Mutex` for all: the same", ["pool", "every thread", "mutex_vec"], Growth::Line),
    structure("`PagePool`: a page dropped elsewhere", ["pool", "other CPUs", "remote"], Growth::Own),
];

impl Growth {
    fn words(self) -> &'static str {
        match self {
            Self::Line => "with the CPUs",
            Self::Own => "not",
            Self::Each => "by the same for each CPU",
        }
    }

    /// The cost on `n` CPUs, of two measured ones: (CPUs, cost), the one on more CPUs last.
    fn cost(self, [few, many]: [(usize, f64); 2], n: usize) -> f64 {
        match self {
            Self::Line => many.1 * n as f64 / many.0 as f64,
            Self::Own => many.1,
            Self::Each => many.1 + (many.1 - few.1) / (many.0 - few.0) as f64 * (n as f64 - many.0 as f64),
        }
    }
}

/// The table of a machine with enough CPUs: measured costs, the model's cost for the most CPUs of
/// the costs on half of them, and computed ones.
pub(super) fn table(record: &Record) -> String {
    let cost = |s: &Structure, n| Some((n, record.row(s.suite, s.section, s.row, n)?.value?.median));
    let rows = record.suites.iter().flat_map(|suite| &suite.variants);
    let most = rows.filter(|row| row.section == "get+put").map(|row| row.threads).max().unwrap_or(0);
    if most < LEAST {
        return String::new();
    }
    let computed = CPUS.map(|n| format!(" {n} |")).concat();
    let mut out = format!(
        "| | grows | 1 CPU | {most}, from {} | {most}, measured |{computed}\n| --- | --- | ---: | ---: | ---: |{}\n",
        most / 2,
        " ---: |".repeat(CPUS.len())
    );
    for s in &STRUCTURES {
        let Some(many) = cost(s, most) else { continue };
        let one = cost(s, 1);
        let few = one.unwrap_or((0, 0.0));
        let ns = |value: f64| show(value, "ns");
        let checked = cost(s, most / 2).map(|half| ns(s.growth.cost([few, half], most)));
        let cells = CPUS.map(|n| format!(" {} |", ns(s.growth.cost([few, many], n)))).concat();
        let (one, checked) = (one.map(|one| ns(one.1)).unwrap_or_default(), checked.unwrap_or_default());
        let _ = writeln!(out, "| {} | {} | {one} | {checked} | {} |{cells}", s.what, s.growth.words(), ns(many.1));
    }
    let retries = record.row("refs", "retries", "refcount_retries", most).and_then(|row| row.value);
    if let Some(retries) = retries {
        let (cpus, published) = PUBLISHED;
        let computed = retries.median * (cpus - 1) as f64 / (most - 1) as f64;
        let _ = writeln!(
            out,
            "\nRetries of a get by compare-and-swap: {} on {most} CPUs; {} computed for {cpus}, where {published} were published.",
            digits(retries.median),
            digits(computed)
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_grow_as_they_say() {
        let measured = [(1, 10.0), (4, 40.0)];
        assert_eq!(Growth::Line.cost(measured, 128), 1280.0);
        assert_eq!(Growth::Own.cost(measured, 128), 40.0);
        // 10 for each CPU.
        assert_eq!(Growth::Each.cost(measured, 8), 80.0);
        assert_eq!(Growth::Each.cost(measured, 4), 40.0);
    }

    #[test]
    fn a_table_checks_itself_by_half_of_the_cpus() {
        let row = |name: &str, section: &str, threads: usize, median: f64| {
            serde_json::json!({
                "name": name, "section": section, "threads": threads, "unit": "ns", "per": "get+put",
                "median": median, "min": median, "max": median
            })
        };
        let costs = [(1, 10.0), (2, 50.0), (4, 120.0)].map(|(n, cost)| row("refcount", "get+put", n, cost));
        let mut variants = costs.to_vec();
        variants.push(row("refcount_retries", "retries", 4, 0.3));
        let record = serde_json::from_value(serde_json::json!({ "suites": [{
            "suite": "refs", "date": "2026-11-25", "machine": { "cpu": "A CPU", "cpus": 4, "kernel": "6.18" },
            "variants": variants, "goals": []
        }]}));
        let text = table(&record.unwrap());
        assert!(text.contains("| 4, from 2 | 4, measured | 32 | 64 | 128 |"), "{text}");
        let line = "| `RefCount`: get and put | with the CPUs | 10.00 ns | 100.0 ns | 120.0 ns | 960.0 ns | 1.92 us | 3.84 us |";
        assert!(text.contains(line), "{text}");
        assert!(text.contains("0.30 on 4 CPUs; 11.10 computed for 112, where 8 were published"), "{text}");
        assert_eq!(text.lines().filter(|line| line.starts_with("| `")).count(), 1, "{text}");
    }
}
