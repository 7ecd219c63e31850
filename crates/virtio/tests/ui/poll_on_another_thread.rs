use netmem_packet::RxQueue;
use netmem_virtio::driver::{VirtioRx, VirtioTx};

fn send<T: Send>(_: T) {}

fn sent(rx: &mut VirtioRx) {
    rx.poll(|poll| send(poll));
}

fn main() {
    // Queues may move.
    send::<Option<(VirtioRx, VirtioTx)>>(None);
}
