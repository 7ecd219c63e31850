//! Taps for tests, and packet sockets that make the kernel send frames through them.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use netmem_virtio::device::port::Tap;

use crate::skip;

/// A name that no other test run uses.
pub fn tap_name() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("nm{}x{}", std::process::id(), NEXT.fetch_add(1, Relaxed))
}

/// Whether taps can be made here. If not, the running test is reported as skipped.
pub fn taps() -> bool {
    let Err(e) = Tap::open(&tap_name(), 1, false) else { return true };
    skip(&format!("no tap devices here: {e}: {}", std::error::Error::source(&e).unwrap()));
    false
}

/// A packet socket on an interface, through which the kernel sends frames. No address, no neighbour
/// and no IPv6 is needed.
#[derive(Debug)]
pub struct Wire {
    socket: OwnedFd,
    to: libc::sockaddr_ll,
}

impl Wire {
    pub fn new(interface: &str) -> std::io::Result<Self> {
        let index = std::fs::read_to_string(format!("/sys/class/net/{interface}/ifindex"))?;
        // SAFETY: a call without pointers, and then a descriptor that is only here.
        let socket = unsafe {
            match libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) {
                -1 => return Err(std::io::Error::last_os_error()),
                fd => OwnedFd::from_raw_fd(fd),
            }
        };
        // SAFETY: all zero is a valid address.
        let mut to: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        to.sll_family = libc::AF_PACKET as u16;
        to.sll_ifindex = index.trim().parse().unwrap();
        Ok(Self { socket, to })
    }

    /// Receives the frames of the protocol for experiments that the kernel gets from the interface,
    /// from now on.
    pub fn listen(&self) {
        let mut at = self.to;
        at.sll_protocol = 0x88b5_u16.to_be();
        // SAFETY: the address with its length.
        let bound =
            unsafe { libc::bind(self.socket.as_raw_fd(), (&raw const at).cast(), size_of_val(&at) as libc::socklen_t) };
        assert_eq!(bound, 0, "{}", std::io::Error::last_os_error());
    }

    /// The next frame that has come, if there is one.
    pub fn receive(&self) -> Option<Vec<u8>> {
        let mut frame = vec![0; 1 << 17];
        // SAFETY: the buffer with its length.
        let len = unsafe {
            let (fd, at) = (self.socket.as_raw_fd(), frame.as_mut_ptr().cast());
            libc::recv(fd, at, frame.len(), libc::MSG_DONTWAIT)
        };
        frame.truncate(usize::try_from(len).ok()?);
        Some(frame)
    }

    /// A broadcast of a protocol for experiments.
    pub fn send(&self, payload: &[u8]) {
        self.send_frame(&[&[0xff; 6][..], &[2, 0, 0, 0, 0, 7], &[0x88, 0xb5], payload].concat());
    }

    pub fn send_frame(&self, frame: &[u8]) {
        // SAFETY: the frame and the address, each with its length.
        let sent = unsafe {
            let len = size_of_val(&self.to) as u32;
            libc::sendto(
                self.socket.as_raw_fd(),
                frame.as_ptr().cast(),
                frame.len(),
                0,
                (&raw const self.to).cast(),
                len,
            )
        };
        assert_eq!(sent, frame.len() as isize, "{}", std::io::Error::last_os_error());
    }
}
