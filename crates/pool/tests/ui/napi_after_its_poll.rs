use netmem_pool::{PagePool, Private};

fn kept(pool: &mut PagePool<Private>) {
    let mut kept = None;
    pool.poll(|napi| kept = Some(napi));
    kept.unwrap().alloc();
}

fn returned(pool: &mut PagePool<Private>) {
    pool.poll(|napi| napi).alloc();
}

fn main() {}
