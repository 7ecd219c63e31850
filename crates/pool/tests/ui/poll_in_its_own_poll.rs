use netmem_pool::{PagePool, Private};

fn polled(pool: &mut PagePool<Private>) {
    pool.poll(|_| pool.poll(|_| ()));
}

fn allocated(pool: &mut PagePool<Private>) {
    pool.poll(|_| pool.alloc());
}

fn dropped(pool: PagePool<Private>) {
    let mut pool = pool;
    pool.poll(|_| drop(pool));
}

fn main() {}
