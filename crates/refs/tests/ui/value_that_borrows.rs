use netmem_refs::{Owner, RcuRef};

fn main() {
    let local = String::new();
    // It may be dropped much later.
    let _ = Owner::<_, RcuRef>::new(&local);
}
