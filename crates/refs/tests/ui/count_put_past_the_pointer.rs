use netmem_refs::{Count, Owner, RefCount};

fn main() {
    let owner = Owner::<_, RefCount>::new(1);
    let _ = owner.count().put();
}
