use netmem_refs::{Owner, RefCount};
use std::cell::Cell;

fn main() {
    let owner = Owner::new(Cell::new(1), RefCount::new(1));
    let other = owner.try_get();
    std::thread::spawn(move || other.map(|cell| cell.set(2)));
}
