//! Stub.
use super::plan::Plan;
use std::path::Path;
use std::sync::atomic::AtomicBool;
pub(crate) fn run(_: &Path, _: &Plan, _: &AtomicBool) -> anyhow::Result<()> {
    Ok(())
}
