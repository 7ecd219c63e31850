//! Per-CPU data for user space.
