use netmem_refs::{Owner, RcuRef, Ref};

fn main() {
    let owner = Owner::<_, RcuRef>::new(1);
    let _ = Ref::<u32, RcuRef> { shared: owner.shared, _owns: std::marker::PhantomData };
}
