use netmem_refs::{RcuCell, rcu};

fn main() {
    let cell = RcuCell::<u32>::new(None);
    let found: Option<&u32> = rcu::read(|guard| cell.load(guard).map(|found| found.get()));
    drop(found);
}
