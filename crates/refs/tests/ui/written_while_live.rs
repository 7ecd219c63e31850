use netmem_refs::{Owner, PercpuRef};

fn main() {
    let mut owner: Owner<u32, PercpuRef> = Owner::try_new(1).unwrap();
    let _ = Owner::get_mut(&mut owner);
}
