use netmem_refs::{Owner, RcuRef};

fn main() {
    // It may be dropped on any thread.
    let _ = Owner::new(std::rc::Rc::new(1), RcuRef::new(1));
}
