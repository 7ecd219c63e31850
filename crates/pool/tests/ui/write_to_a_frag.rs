use netmem_pool::{Frag, Private};

fn written(frag: &mut Frag<Private>) {
    frag[0] = 1;
}

fn main() {}
