use netmem_refs::{Owner, RefCount};

// `get_mut` could write a value that borrows from `_local`, and the release callback would get it.
fn shorten<'a>(owner: Owner<&'static str, RefCount>, _local: &'a str) -> Owner<&'a str, RefCount> {
    owner
}

fn main() {}
