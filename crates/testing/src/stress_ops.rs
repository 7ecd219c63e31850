//! How long a stress test is.

/// The smallest number of operations: `NETMEM_STRESS_OPS`, or else a number that an unoptimised
/// build does in reasonable time.
pub fn stress_ops(bearable: u64) -> u64 {
    let ops = std::env::var("NETMEM_STRESS_OPS");
    ops.map_or(bearable, |ops| ops.parse().expect("NETMEM_STRESS_OPS: not a number"))
}
