//! Promiscuous mode: reception of frames for every MAC address.

use crate::sys;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use std::io;
use std::os::fd::{AsFd, OwnedFd};

/// Makes an interface receive frames for every MAC address, as long as this value lives. A program
/// needs this if hosts with addresses of their own are behind it.
///
/// The kernel counts the requests, and removes a request with its descriptor. So the mode also ends
/// if the process is killed. Needs `CAP_NET_RAW`.
#[derive(Debug)]
pub struct Promiscuous {
    socket: OwnedFd,
    ifindex: i32,
}

impl Promiscuous {
    /// Requests the mode for an interface.
    ///
    /// # Errors
    ///
    /// The kernel's errors: `EPERM`, and `ENODEV` if there is no such interface.
    pub fn new(ifindex: u32) -> io::Result<Self> {
        let ifindex = i32::try_from(ifindex).map_err(|_| io::Error::from_raw_os_error(libc::ENODEV))?;
        // The socket has no protocol, so it receives nothing itself.
        let socket = socket_with(AddressFamily::PACKET, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
        membership(&socket, libc::PACKET_ADD_MEMBERSHIP, ifindex)?;
        Ok(Self { socket, ifindex })
    }
}

impl Drop for Promiscuous {
    fn drop(&mut self) {
        // A forked child has a copy of the descriptor until it executes another program. So closing
        // our descriptor would not end the mode at once. This fails only if the interface is gone.
        let _ = membership(&self.socket, libc::PACKET_DROP_MEMBERSHIP, self.ifindex);
    }
}

/// Adds a request for promiscuous mode to a packet socket, or removes it.
fn membership(socket: &OwnedFd, option: libc::c_int, ifindex: i32) -> io::Result<()> {
    let request = libc::packet_mreq {
        mr_ifindex: ifindex,
        mr_type: libc::PACKET_MR_PROMISC as u16,
        mr_alen: 0,
        mr_address: [0; 8],
    };
    sys::set(socket.as_fd(), libc::SOL_PACKET, option, &request)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::Interface;
    use crate::testing::{command, in_namespace, ip};

    #[test]
    fn it_ends_with_the_value() {
        in_namespace(|| {
            ip("link add v0 type veth peer name v1");
            let counted = || command("ip -d link show v0").contains("promiscuity 1");
            let index = Interface::by_name("v0").unwrap().index;
            let on = Promiscuous::new(index).unwrap();
            assert!(counted());
            // As a forked child has it until it executes another program.
            let copy = on.socket.try_clone().unwrap();
            drop(on);
            assert!(!counted());
            drop(copy);
            assert_eq!(Promiscuous::new(9999).unwrap_err().raw_os_error(), Some(libc::ENODEV));
        });
    }
}
