use netmem_refs::{RcuCell, RcuRef, rcu};

fn main() {
    let cell = RcuCell::<u32, RcuRef>::empty();
    let found: Option<&u32> = rcu::read(|guard| cell.load(guard).map(|found| found.value()));
    drop(found);
}
