use netmem_packet::{Poll, RxQueue};
use netmem_virtio::driver::VirtioRx;

fn swapped(a: &mut VirtioRx, b: &mut VirtioRx) {
    a.poll(|in_a| b.poll(|in_b| std::mem::swap(in_a, in_b)));
}

fn contexts_swapped(a: &mut VirtioRx, b: &mut VirtioRx) {
    a.poll(|in_a| b.poll(|in_b| in_a.with_napi(|x| in_b.with_napi(|y| std::mem::swap(x, y)))));
}

fn in_its_own_poll(a: &mut VirtioRx) {
    a.poll(|_| a.poll(|_| {}));
}

fn main() {}
