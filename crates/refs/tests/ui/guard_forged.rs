use netmem_refs::rcu::Guard;

fn main() {
    let _ = Guard(unreachable!());
}
