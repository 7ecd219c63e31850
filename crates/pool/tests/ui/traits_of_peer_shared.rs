use netmem_pool::{Frag, Page, PeerShared};

fn compared(one: &Frag<PeerShared>, other: &Frag<PeerShared>) -> bool {
    one == other
}

fn borrowed(frag: &Frag<PeerShared>) -> &[u8] {
    std::borrow::Borrow::<[u8]>::borrow(frag)
}

fn read(frag: Frag<PeerShared>) -> impl bytes::Buf {
    frag
}

fn written(page: Page<PeerShared>) -> impl bytes::BufMut {
    page
}

fn main() {}
