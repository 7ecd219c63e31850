//! Capture files, pcap and pcapng: whatever a file holds, it is refused with an error, or its
//! frames can be played.
#![no_main]

use libfuzzer_sys::fuzz_target;
use netmem_fuzz::{file, next_descriptor};
use netmem_virtio::device::port::{MAX_WIRE, Pcap, Play, Port};
use netmem_virtio::net::VnetHdr;
use rustix::fd::AsRawFd;
use std::path::Path;

fuzz_target!(|data: &[u8]| {
    let before = next_descriptor();
    let fd = file(0);
    assert_eq!(rustix::io::write(&fd, data), Ok(data.len()));
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    if let Ok(mut pcap) = Pcap::open(Path::new(&path), Play::Once) {
        assert!(!pcap.is_empty() && pcap.len() <= data.len());
        let mut bytes = 0;
        for i in 0..pcap.len() {
            let wire = pcap.peek().expect("a frame for each of them").to_vec();
            assert!((VnetHdr::LEN + 14..=MAX_WIRE).contains(&wire.len()));
            assert_eq!(wire[..VnetHdr::LEN], VnetHdr::PLAIN.to_bytes());
            assert_eq!(pcap.frame(i), Some(&wire[VnetHdr::LEN..]));
            bytes += wire.len() - VnetHdr::LEN;
            pcap.consume();
        }
        assert!(pcap.is_done() && pcap.peek().is_none());
        assert!(bytes <= data.len(), "more bytes than the file has");
    }
    drop(fd);
    assert_eq!(next_descriptor(), before, "a descriptor was left open");
});
