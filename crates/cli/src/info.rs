//! Stub.
use crate::args::InfoArgs;
pub(crate) fn run(_: &InfoArgs) -> anyhow::Result<()> {
    anyhow::bail!("not yet")
}
