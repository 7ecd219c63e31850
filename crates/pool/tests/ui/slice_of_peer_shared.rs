use netmem_pool::{Frag, Page, PeerShared};

fn page(page: &Page<PeerShared>) -> &[u8] {
    page.as_slice()
}

fn page_mut(page: &mut Page<PeerShared>) -> &mut [u8] {
    page.as_mut_slice()
}

fn deref(frag: &Frag<PeerShared>) -> &[u8] {
    &**frag
}

fn index(frag: &Frag<PeerShared>) -> u8 {
    frag[0]
}

fn main() {}
