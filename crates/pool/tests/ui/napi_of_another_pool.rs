use netmem_pool::{PagePool, Private};

fn swapped(a: &mut PagePool<Private>, b: &mut PagePool<Private>) {
    a.poll(|in_a| b.poll(|in_b| std::mem::swap(in_a, in_b)));
}

fn main() {}
