//! Half-spoken and malformed vhost-user messages.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use netmem_testing::device::*;
use netmem_testing::vhost_user::front::{VERSION, message};
use netmem_virtio::device::port::Sink;
use netmem_virtio::device::{DeviceError, NetDevice};

#[test]
fn half_spoken_messages() {
    let _alone = crate::alone();
    let u64_body = [0u8; 8];
    let region_body = [&1u32.to_le_bytes()[..], &[0; 4], &[1; 32]].concat();
    let cases: &[(&str, Vec<u8>, usize)] = &[
        ("cut in the header", message(2, VERSION, 8, &[])[..7].to_vec(), 0),
        ("cut before the body", message(2, VERSION, 8, &[]), 0),
        ("cut in the body", message(2, VERSION, 8, &u64_body[..3]), 0),
        ("a huge size", message(2, VERSION, u32::MAX, &u64_body), 0),
        ("a size beyond a message", message(5, VERSION, 4097, &[0; 4097]), 0),
        ("the wrong size", message(2, VERSION, 4, &u64_body[..4]), 0),
        ("a request that does not exist", message(9999, VERSION, 0, &[]), 0),
        ("request zero", message(0, VERSION, 0, &[]), 0),
        ("version 2", message(1, 2, 0, &[]), 0),
        ("a reply", message(1, VERSION | 4, 0, &[]), 0),
        ("text", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(), 0),
        ("a table without a file", message(5, VERSION, 40, &region_body), 0),
        ("a table with two files", message(5, VERSION, 40, &region_body), 2),
        ("files where none belong", message(1, VERSION, 0, &[]), 3),
        ("a kick with two files", message(12, VERSION, 8, &u64_body), 2),
        ("a kick without its file", message(12, VERSION, 8, &u64_body), 0),
    ];
    for (what, bytes, fds) in cases {
        let mut device = NetDevice::new(one_pair(), |_| Ok(Sink)).unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let open = count_fds();
        let connection = device.control().serve(theirs).unwrap();
        let files: Fds = (0..*fds).map(|_| memfd(4096).into()).collect();
        let ours = Front::new(ours);
        ours.send_raw(bytes, &files.iter().map(AsFd::as_fd).collect::<Vec<_>>()).unwrap();
        drop(files);
        drop(ours);
        let e = connection.wait().unwrap_err();
        let named = matches!(e, DeviceError::Connection(_) | DeviceError::Refused { .. });
        assert!(named, "{what}: {e:?}");
        assert_eq!(device.poll(), 0);
        assert_eq!(count_fds(), open - 2, "{what}: both ends of the connection, and what came over it, are closed");
    }
}

fn count_fds() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}
