use netmem_refs::{Owner, RefCount};
use std::cell::Cell;

fn main() {
    let owner = Owner::<_, RefCount>::new(Cell::new(1));
    let other = Owner::get(&owner);
    std::thread::spawn(move || other.set(2));
}
