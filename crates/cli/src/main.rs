//! The command `netmem`.
fn main() {}
