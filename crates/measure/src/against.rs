//! Compares two builds of a program: both run in turns, as children with the same arguments, one
//! run at a time. Each row and quantity has a verdict, and the verdicts are corrected for their
//! number.
//!
//! ```text
//!   pair 1   this ── other        pair 2   other ── this        pair 3   this ── other ...
//! ```
//!
//! If the builds do not differ, a pair's ratio is as often below 1 as above, by as much: the builds
//! take turns in being first, so whatever favours the first run favours both. That is all that
//! [`signed_rank`] assumes.

use crate::arguments::BadArgument;
use crate::output;
use crate::report::SCHEMA;
use crate::signals::Interrupted;
use crate::stats::{Change, Spread, holm, signed_rank};
use crate::table::table;
use crate::threads::propagate;
use crate::units::show;
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How likely any of the verdicts of two equal builds is wrong.
const FAMILY_WISE: f64 = 0.01;

/// Pairs of runs if the user sets no number.
pub const PAIRS: u32 = 17;

/// Which values of a quantity are better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    /// Small ones, as of a time.
    Less,
    /// Large ones, as of a rate.
    More,
}

/// A value that a run has measured.
#[derive(Clone, Debug)]
pub struct Measured {
    /// The row. The two builds' values of equal rows and quantities are compared.
    pub row: String,
    /// What was measured of it.
    pub quantity: String,
    /// The unit of the value.
    pub unit: String,
    /// Which values are better.
    pub better: Better,
    /// The value.
    pub value: f64,
}

/// Whether two builds differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Verdict {
    /// This build is better.
    Better,
    /// This build is worse.
    Worse,
    /// The runs show no difference.
    NoDifference,
}

impl Verdict {
    fn word(self) -> &'static str {
        match self {
            Self::Better => "better",
            Self::Worse => "worse",
            Self::NoDifference => "no difference",
        }
    }
}

/// A quantity of a row, in both builds.
#[derive(Clone, Debug, Serialize)]
struct Compared {
    /// The row.
    name: String,
    /// What was measured.
    quantity: String,
    /// The unit of the values.
    unit: String,
    /// This build.
    #[serde(flatten)]
    this: Spread,
    /// The other build: the median of its runs.
    other_median: f64,
    /// Pairs of runs in which both builds have measured it.
    pairs: usize,
    /// This build against the other.
    #[serde(skip_serializing_if = "Option::is_none")]
    change: Option<Change>,
    /// How likely equal builds would differ so much in any of the rows (Holm).
    p: f64,
    /// What that means.
    verdict: Verdict,
}

/// The comparison of two builds.
#[derive(Clone, Debug, Serialize)]
struct Comparison {
    schema: u32,
    netmem: &'static str,
    command: &'static str,
    against: PathBuf,
    /// Pairs of runs.
    pairs: usize,
    /// How likely any verdict of two equal builds is wrong, in percent.
    family_wise_pct: f64,
    /// Each quantity of each row that both builds have.
    compared: Vec<Compared>,
}

/// Two builds, and how they are compared.
#[derive(Debug)]
pub struct Builds<'a> {
    this: PathBuf,
    other: &'a Path,
    stop: &'a AtomicBool,
    /// Reads the values of a child's report.
    read: fn(&Value) -> Vec<Measured>,
}

/// The reports of pairs of runs: of this build and of the other.
type Pairs = Vec<[Vec<Measured>; 2]>;

impl<'a> Builds<'a> {
    /// This build, and another one. `read` reads a report of either.
    ///
    /// # Errors
    ///
    /// [`BadArgument`]: there is no such file.
    pub fn new(other: &'a Path, stop: &'a AtomicBool, read: fn(&Value) -> Vec<Measured>) -> anyhow::Result<Self> {
        if !other.is_file() {
            let other = other.display();
            return BadArgument::new(format!("--against {other}: there is no such file; give a build of netmem"))?;
        }
        Ok(Self { this: std::env::current_exe()?, other, stop, read })
    }

    /// Runs both builds `pairs` times with the arguments of this process, and with `more`. If a
    /// signal ends that early, the pairs until then are returned with `true`.
    ///
    /// # Errors
    ///
    /// A build cannot be run, fails, or prints another report.
    pub fn run(&self, pairs: u32, more: &[String]) -> anyhow::Result<(Pairs, bool)> {
        let arguments = arguments(std::env::args().skip(1), more);
        let mut done = Vec::new();
        for pair in 0..pairs {
            eprintln!("pair {} of {pairs}", pair + 1);
            let (this, other) = (&*self.this, self.other);
            let forwards = pair.is_multiple_of(2);
            let order = if forwards { [this, other] } else { [other, this] };
            let reports = order.map(|binary| child(binary, &arguments, self.stop));
            match reports {
                [Ok(first), Ok(second)] => {
                    let [first, second] = [first, second].map(|report| (self.read)(&report));
                    done.push(if forwards { [first, second] } else { [second, first] });
                }
                [Err(error), _] | [_, Err(error)] if error.is::<Interrupted>() => return Ok((done, true)),
                [Err(error), _] | [_, Err(error)] => return Err(error),
            }
        }
        Ok((done, false))
    }

    /// Compares the values of such pairs, and prints that: a table, or one JSON object.
    ///
    /// # Errors
    ///
    /// Those of standard output; and [`Interrupted`], if the pairs ended early.
    pub fn report(
        &self,
        command: &'static str,
        pairs: &[[Vec<Measured>; 2]],
        json: bool,
        interrupted: bool,
    ) -> anyhow::Result<()> {
        let comparison = self.compare(command, pairs);
        if json {
            output::json(&comparison)?
        } else {
            output::print(&comparison.to_string())?
        }
        if interrupted { Err(Interrupted.into()) } else { Ok(()) }
    }

    fn compare(&self, command: &'static str, pairs: &[[Vec<Measured>; 2]]) -> Comparison {
        Comparison {
            schema: SCHEMA,
            netmem: env!("CARGO_PKG_VERSION"),
            command,
            against: self.other.to_owned(),
            pairs: pairs.len(),
            family_wise_pct: FAMILY_WISE * 100.0,
            compared: compare(pairs),
        }
    }
}

/// Each quantity that both builds have measured in every pair.
fn compare(pairs: &[[Vec<Measured>; 2]]) -> Vec<Compared> {
    let by_name = |report: &[Measured]| -> BTreeMap<(String, String), f64> {
        report.iter().map(|m| ((m.row.clone(), m.quantity.clone()), m.value)).collect()
    };
    let maps: Vec<[BTreeMap<_, _>; 2]> = pairs.iter().map(|pair| pair.each_ref().map(|m| by_name(m))).collect();
    let rows = pairs.first().map_or(&[][..], |[this, _]| this).iter().filter_map(|m| {
        let key = (m.row.clone(), m.quantity.clone());
        let values = maps.iter().map(|[this, other]| Some((*this.get(&key)?, *other.get(&key)?)));
        let values = values.collect::<Option<Vec<_>>>()?;
        let logs: Vec<f64> =
            values.iter().filter(|(new, old)| *new > 0.0 && *old > 0.0).map(|(new, old)| (new / old).ln()).collect();
        Some((m, values, signed_rank(&logs)))
    });
    let rows: Vec<_> = rows.collect();
    let corrected = holm(&rows.iter().map(|row| row.2).collect::<Vec<_>>());
    let compared = rows.into_iter().zip(corrected).map(|((m, values, _), p)| {
        let change = Change::of(values.iter().copied());
        let is_more = change.is_some_and(|change| change.median_pct > 0.0);
        let verdict = match p <= FAMILY_WISE {
            false => Verdict::NoDifference,
            true if is_more == (m.better == Better::More) => Verdict::Better,
            true => Verdict::Worse,
        };
        Compared {
            name: m.row.clone(),
            quantity: m.quantity.clone(),
            unit: m.unit.clone(),
            this: Spread::of(values.iter().map(|(new, _)| *new)),
            other_median: Spread::of(values.iter().map(|(_, old)| *old)).median,
            pairs: values.len(),
            change,
            p,
            verdict,
        }
    });
    compared.collect()
}

impl Comparison {
    /// Pairs with which a difference could be shown, if all of them agree.
    fn least_pairs(&self) -> usize {
        let rows = self.compared.len().max(1) as f64;
        (1..).find(|&n| rows * 2f64.powi(1 - n) <= FAMILY_WISE).map_or(usize::MAX, |n| usize::try_from(n).unwrap_or(0))
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "this build against {}, {} interleaved pairs\n", self.against.display(), self.pairs)?;
        let cells = |c: &Compared| {
            let change = c.change.map_or("-".into(), |Change { median_pct, interval: [low, high], .. }| {
                format!("{median_pct:+.1} % [{low:+.1}..{high:+.1}]")
            });
            let [this, other] = [c.this.median, c.other_median].map(|value| show(value, &c.unit));
            vec![
                c.name.clone(),
                c.quantity.clone(),
                this,
                other,
                change,
                format!("{:.3}", c.p),
                c.verdict.word().into(),
            ]
        };
        let head = ["row", "", "this", "other", "change", "p", "verdict"];
        writeln!(f, "{}\n", table(&head, self.compared.iter().map(cells), |column| (2..6).contains(&column)))?;
        let (rows, least) = (self.compared.len(), self.least_pairs());
        write!(
            f,
            "p: how likely equal builds would differ so much in any of the {rows} comparisons (Wilcoxon's signed ranks, Holm); \
             a verdict needs p <= {FAMILY_WISE}"
        )?;
        if self.pairs < least {
            write!(
                f,
                "\n{} pairs are too few to show a difference in {rows} comparisons: --runs {least} or more",
                self.pairs
            )?;
        }
        Ok(())
    }
}

/// The arguments for a child: those of this process for one run, without the arguments about
/// children and about reports.
fn arguments(ours: impl Iterator<Item = String>, more: &[String]) -> Vec<String> {
    let mut arguments: Vec<String> = Vec::new();
    let mut skip = false;
    for argument in ours {
        if std::mem::take(&mut skip) {
            continue;
        }
        match argument.as_str() {
            "--against" | "--runs" => skip = true,
            "--json" => {}
            a if a.starts_with("--against=") || a.starts_with("--runs=") => {}
            _ => arguments.push(argument),
        }
    }
    arguments.extend(["--json", "--runs", "1"].map(String::from));
    arguments.extend_from_slice(more);
    arguments
}

/// A child that is ended together with this process.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None)) {
            // The child's own handler of SIGTERM ends it, so that it cleans up too.
            if let Some(pid) = i32::try_from(self.0.id()).ok().and_then(rustix::process::Pid::from_raw) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
            }
            let _ = self.0.wait();
        }
    }
}

fn child(binary: &Path, arguments: &[String], stop: &AtomicBool) -> anyhow::Result<Value> {
    let failed = |problem: String| anyhow::anyhow!("{} {problem}", binary.display());
    let command = Command::new(binary).args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
    let mut running = Running(command.map_err(|e| failed(format!("cannot be run: {e}")))?);
    let mut out = running.0.stdout.take().ok_or_else(|| failed("has no standard output".into()))?;
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        out.read_to_string(&mut text).map(|_| text)
    });
    let status = loop {
        if stop.load(Ordering::Relaxed) {
            return Err(Interrupted.into());
        }
        match running.0.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) => std::thread::sleep(Duration::from_millis(10)),
            Err(e) => return Err(failed(format!("cannot be waited for: {e}"))),
        }
    };
    let text = propagate(reader.join());
    let text = text.map_err(|e| failed(format!("cannot be read from: {e}")))?;
    // The signal that ends this process may have ended the child first.
    if stop.load(Ordering::Relaxed) {
        return Err(Interrupted.into());
    }
    if !status.success() {
        return Err(failed(format!("failed ({status}); what it said is above")));
    }
    let report: Value =
        serde_json::from_str(&text).map_err(|e| failed(format!("does not print netmem's JSON: {e}")))?;
    match report["schema"].as_u64() {
        // Builds from before the schema do not report it.
        None => Ok(report),
        Some(schema) if schema <= SCHEMA.into() => Ok(report),
        Some(schema) => Err(failed(format!("prints JSON of schema {schema}; this build reads up to {SCHEMA}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn children_get_our_arguments_for_one_run() {
        let ours = ["perf", "--against", "x", "--size", "64", "--runs=9", "--json", "--runs", "3", "--lock"];
        let theirs = arguments(ours.into_iter().map(String::from), &["--rate".into(), "5".into()]);
        assert_eq!(theirs, ["perf", "--size", "64", "--lock", "--json", "--runs", "1", "--rate", "5"]);
    }

    fn value(row: &str, quantity: &'static str, better: Better, value: f64) -> Measured {
        Measured { row: row.into(), quantity: quantity.into(), unit: "ns".into(), better, value }
    }

    /// `n` pairs, in which this build's value of row `a` is `factor` of the other's, with noise.
    fn pairs(n: u32, better: Better, factor: f64) -> Pairs {
        let noise = |i: u32| f64::from(i * 7919 % 101) / 1000.0;
        let pair = |i: u32| {
            [
                vec![
                    value("a", "time", better, factor * (1.0 + noise(i))),
                    value("b", "time", better, 1.0 + noise(i + 3)),
                ],
                vec![value("b", "time", better, 1.0 + noise(i + 17)), value("a", "time", better, 1.0 + noise(i + 29))],
            ]
        };
        (0..n).map(pair).collect()
    }

    #[test]
    fn a_difference_is_found_in_its_row_and_has_a_direction() {
        for (better, factor, verdict) in [
            (Better::Less, 0.95, Verdict::Better),
            (Better::Less, 1.05, Verdict::Worse),
            (Better::More, 1.05, Verdict::Better),
            (Better::More, 0.95, Verdict::Worse),
            (Better::More, 1.0, Verdict::NoDifference),
        ] {
            let compared = compare(&pairs(60, better, factor));
            let verdicts: Vec<_> = compared.iter().map(|row| (row.name.as_str(), row.verdict)).collect();
            assert_eq!(verdicts, [("a", verdict), ("b", Verdict::NoDifference)], "{better:?} {factor}");
        }
        assert!(compare(&[]).is_empty());
    }

    #[test]
    fn only_what_both_have_in_every_pair_is_compared() {
        let mut pairs = pairs(3, Better::Less, 1.0);
        pairs[1][1].retain(|value| value.row == "a");
        let compared = compare(&pairs);
        assert_eq!(compared.iter().map(|row| row.name.as_str()).collect::<Vec<_>>(), ["a"]);
        assert_eq!((compared[0].pairs, compared[0].verdict), (3, Verdict::NoDifference));
    }

    #[test]
    fn too_few_pairs_are_named() {
        let stop = AtomicBool::new(false);
        let builds = Builds::new(Path::new("/proc/self/exe"), &stop, |_| Vec::new()).unwrap();
        let text = |n| builds.compare("perf", &pairs(n, Better::Less, 0.5)).to_string();
        // Two comparisons at 1 % need a probability of 1/256 for one of them: 2^(1 - 9).
        assert!(text(8).contains("--runs 9 or more") && !text(8).contains("better"), "{}", text(8));
        assert!(!text(9).contains("or more") && text(9).contains("better"), "{}", text(9));
        let error = Builds::new(Path::new("/nowhere/netmem"), &stop, |_| Vec::new()).unwrap_err();
        assert!(error.is::<BadArgument>());
    }
}
