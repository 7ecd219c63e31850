//! The results of a run as a file, for `results/`: the report without its samples, of which the
//! tables of the documents are made.
//!
//! Why without samples: the file is committed, and each sample of each row would make it ten times
//! as long.

use crate::report::Report;
use netmem_measure::arguments::BadArgument;
use netmem_measure::output::Target;
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

/// A file of results that is going to be written.
pub(crate) struct Results(Target);

impl Results {
    /// Checks that the file can be written, and changes nothing.
    pub(crate) fn new(path: &Path) -> Result<Self, BadArgument> {
        Target::new(path).map(Self).or_else(|error| {
            let path = path.display();
            BadArgument::new(format!("--results {path}: {error}; give a file in a directory that can be written to"))
        })
    }

    /// Writes the reports, without the samples of their rows.
    pub(crate) fn write(self, reports: &[Report]) -> std::io::Result<()> {
        let mut suites = serde_json::to_value(reports)?;
        let rows = suites.as_array_mut().into_iter().flatten().filter_map(|suite| suite["variants"].as_array_mut());
        for row in rows.flatten().filter_map(Value::as_object_mut) {
            row.remove("samples");
        }
        let text = serde_json::to_string_pretty(&serde_json::json!({ "suites": suites }))? + "\n";
        self.0.write(text.as_bytes())
    }
}

/// The commit of the sources, with `-dirty` if they were changed since. `None` where git does not
/// know it.
pub(crate) fn commit() -> Option<String> {
    let describe = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"];
    let git = Command::new("git").args(["-C", env!("CARGO_MANIFEST_DIR")]).args(describe).stdin(Stdio::null()).output();
    let git = git.ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&git.stdout).trim().to_owned())
}

/// Today's date (UTC), as `2026-11-25`.
pub(crate) fn date() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    date_of(since.as_secs() / 86_400)
}

/// The date of a day, counted from 1 January 1970. The years of this calculation begin in March, so
/// that a leap day is the last of its year; 400 of them have 146,097 days.
fn date_of(day: u64) -> String {
    let day = day + 719_468;
    let (era, day) = (day / 146_097, day % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (year, month) = (era * 400 + year + month / 10, if month < 10 { month + 3 } else { month - 9 });
    format!("{year}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_have_dates() {
        for (day, date) in [(0, "1970-01-01"), (11_016, "2000-02-29"), (11_017, "2000-03-01"), (20_782, "2026-11-25")] {
            assert_eq!(date_of(day), date);
        }
    }
}
