//! How long a stress test is. Shared by the crates' integration tests (`#[path]`).

/// Operations to do at least: `NETMEM_STRESS_OPS`, or else what is bearable without optimisation.
pub(crate) fn stress_ops(bearable: u64) -> u64 {
    let ops = std::env::var("NETMEM_STRESS_OPS");
    ops.map_or(bearable, |ops| ops.parse().expect("NETMEM_STRESS_OPS: not a number"))
}
