use netmem_pool::{Device, Frag, Mapped, PeerShared, Readable};

fn parse<M: Readable>(_: &Frag<M>) {}

fn copy<M: Mapped>(_: &Frag<M>) {}

fn of_a_peer(frag: &Frag<PeerShared>) {
    parse(frag);
}

fn of_a_device(frag: &Frag<Device>) {
    parse(frag);
    copy(frag);
}

fn main() {}
