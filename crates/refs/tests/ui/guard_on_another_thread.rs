use netmem_refs::{RcuRef, rcu};

fn main() {
    let refs = RcuRef::new(1);
    rcu::read(|guard| {
        std::thread::scope(|scope| {
            scope.spawn(|| refs.try_get(guard));
        });
    });
}
