use netmem_refs::{RcuCell, RcuRef, rcu};

fn main() {
    let cell = RcuCell::<u32, RcuRef>::empty();
    let found = rcu::read(|guard| cell.load(guard));
    drop(found);
}
