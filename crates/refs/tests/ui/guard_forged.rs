use netmem_refs::rcu::Guard;

fn main() {
    let _ = Guard { _depth: unreachable!(), guard: unreachable!() };
}
