use netmem_refs::{Owner, RcuRef};

fn main() {
    // It may be dropped on any thread.
    let _ = Owner::<_, RcuRef>::new(std::rc::Rc::new(1));
}
