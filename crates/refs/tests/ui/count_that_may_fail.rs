use netmem_refs::{Owner, PercpuRef};

fn main() {
    let _ = Owner::<_, PercpuRef>::new(1);
}
