//! The codec as a back end uses it: any message of a front end, with any number of descriptors.
//!
//! What is decoded and encoded again decodes to the same, and no descriptor is left open, whatever
//! came.
#![no_main]

use libfuzzer_sys::fuzz_target;
use netmem_fuzz::{Input, file, next_descriptor};
use netmem_virtio::fuzz::request;

fuzz_target!(|data: &[u8]| {
    let before = next_descriptor();
    let mut input = Input(data);
    // Numbers that have a message, and some that have none.
    let number = match input.u8() {
        n @ 0..248 => u32::from(n % 48),
        _ => input.u32(),
    };
    let flags = match input.u8() {
        n @ 0..240 => [1, 9, 5][usize::from(n) % 3],
        _ => input.u32(),
    };
    let fds = (0..input.below(10)).map(|_| file(0)).collect();
    request(number, flags, input.0, fds);
    assert_eq!(next_descriptor(), before, "a descriptor was left open");
});
