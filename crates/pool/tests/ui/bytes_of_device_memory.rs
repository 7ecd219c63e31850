use netmem_pool::{Device, Frag, Page, PeerShared, Region, RegionOptions};

fn page(page: &Page<Device>) -> &[u8] {
    page.as_slice()
}

fn copied(page: &Page<Device>) -> [u8; 4] {
    page.read_at(0).unwrap()
}

fn written(page: &mut Page<Device>) {
    page.copy_from(0, b"bytes").unwrap();
}

fn address(frag: &Frag<Device>) -> *const u8 {
    frag.as_ptr()
}

fn region(region: &Region<Device>) -> *mut u8 {
    region.as_ptr()
}

fn deref(frag: &Frag<Device>) -> u8 {
    frag[0]
}

fn bytes(frag: Frag<Device>) -> bytes::Bytes {
    frag.into()
}

fn bytes_of_a_peer(frag: Frag<PeerShared>) -> bytes::Bytes {
    frag.into()
}

fn mapped() -> Region<Device> {
    RegionOptions::new(1).build().unwrap()
}

fn main() {}
