//! Stub.
use crate::args::DeviceArgs;
pub(crate) fn run(_: &DeviceArgs) -> anyhow::Result<()> {
    anyhow::bail!("not yet")
}
