use netmem_refs::rcu::{self, Guard};

fn main() {
    let mut kept: Option<&Guard> = None;
    rcu::read(|guard| kept = Some(guard));
    drop(kept);
}
