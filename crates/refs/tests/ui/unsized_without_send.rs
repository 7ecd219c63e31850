use netmem_refs::{Owner, RefCount, unsize};
use std::fmt::Display;

fn main() {
    let owner = unsize!(Owner::<u32, RefCount>::new(1) => dyn Display);
    std::thread::spawn(move || drop(owner));
}
