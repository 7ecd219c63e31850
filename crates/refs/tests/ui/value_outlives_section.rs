use netmem_refs::{Borrowed, RcuCell, RcuRef, rcu};

fn main() {
    let cell = RcuCell::<u32, RcuRef>::empty();
    let found: Option<&u32> = rcu::read(|guard| cell.load(guard).map(Borrowed::value));
    drop(found);
}
