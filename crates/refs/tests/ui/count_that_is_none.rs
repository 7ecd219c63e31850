use netmem_refs::Owner;
use std::sync::atomic::AtomicUsize;

fn main() {
    let _ = Owner::<_, AtomicUsize>::new(1);
}
