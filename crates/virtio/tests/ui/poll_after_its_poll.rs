use netmem_packet::{Poll, RxQueue};
use netmem_virtio::driver::VirtioRx;

fn kept(rx: &mut VirtioRx) {
    let mut kept = None;
    rx.poll(|poll| kept = Some(poll));
    kept.unwrap().with_napi(|_| {});
}

fn returned(rx: &mut VirtioRx) {
    rx.poll(|poll| poll).with_napi(|_| {});
}

fn napi_kept(rx: &mut VirtioRx) {
    let mut kept = None;
    rx.poll(|poll| poll.with_napi(|napi| kept = Some(napi)));
}

fn main() {}
