use netmem_pool::{Napi, PagePool, Private};

fn send<T: Send>(_: T) {}

fn sent(pool: &mut PagePool<Private>) {
    pool.poll(|napi| send(napi));
}

fn shared(napi: &Napi<'_, Private>) {
    send(napi);
}

fn main() {
    send::<Option<PagePool<Private>>>(None);
}
