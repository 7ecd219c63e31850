//! The committed results: the last full run of each machine.

use anyhow::Context;
use netmem_measure::stats::Spread;
use serde::Deserialize;
use std::path::Path;

/// A file of results.
#[derive(Debug, Deserialize)]
pub(super) struct Record {
    pub(super) suites: Vec<Suite>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Suite {
    pub(super) suite: String,
    pub(super) date: String,
    #[serde(default)]
    pub(super) commit: Option<String>,
    pub(super) machine: Machine,
    pub(super) variants: Vec<Row>,
    pub(super) goals: Vec<Goal>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Machine {
    pub(super) cpu: String,
    pub(super) cpus: usize,
    pub(super) kernel: String,
}

#[derive(Debug, Deserialize)]
pub(super) struct Row {
    pub(super) name: String,
    pub(super) section: String,
    pub(super) threads: usize,
    pub(super) unit: String,
    pub(super) per: String,
    #[serde(default)]
    pub(super) skipped: Option<String>,
    #[serde(flatten)]
    pub(super) value: Option<Spread>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Goal {
    pub(super) goal: String,
    pub(super) threads: usize,
    pub(super) unit: String,
    pub(super) kind: String,
    pub(super) verdict: String,
    #[serde(default)]
    pub(super) value: Option<Spread>,
    #[serde(default)]
    pub(super) why: Option<String>,
    #[serde(default)]
    pub(super) reason: Option<String>,
}

impl Record {
    /// Reads all files of a folder, by their names. None, if there is no such folder.
    pub(super) fn read_all(folder: &Path) -> anyhow::Result<Vec<Self>> {
        let Ok(entries) = std::fs::read_dir(folder) else { return Ok(Vec::new()) };
        let paths: std::io::Result<Vec<_>> = entries.map(|entry| Ok(entry?.path())).collect();
        let mut paths = paths.with_context(|| folder.display().to_string())?;
        paths.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
        paths.sort();
        let read = |path: &Path| anyhow::Ok(serde_json::from_str(&std::fs::read_to_string(path)?)?);
        paths.iter().map(|path| read(path).with_context(|| path.display().to_string())).collect()
    }

    /// The row of a suite with this name in this section, with this number of threads.
    pub(super) fn row(&self, suite: &str, section: &str, name: &str, threads: usize) -> Option<&Row> {
        let rows = self.suites.iter().filter(|of| of.suite == suite).flat_map(|suite| &suite.variants);
        rows.into_iter().find(|row| row.section == section && row.name == name && row.threads == threads)
    }
}
