use netmem_pool::{PeerShared, TrustedPeer};
use netmem_virtio::driver::{NetOptions, RxMode, VirtioRx};

fn without_unsafe() -> NetOptions<TrustedPeer> {
    NetOptions::trust_peer(RxMode::Small)
}

fn of_any_peer() -> NetOptions<TrustedPeer> {
    NetOptions::new(RxMode::Small)
}

fn queue_of_any_peer(rx: VirtioRx<PeerShared>) -> VirtioRx<TrustedPeer> {
    rx
}

fn main() {}
