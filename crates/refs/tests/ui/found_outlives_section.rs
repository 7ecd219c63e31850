use netmem_refs::{RcuCell, rcu};

fn main() {
    let cell = RcuCell::<u32>::new(None);
    let found = rcu::read(|guard| cell.load(guard));
    drop(found);
}
