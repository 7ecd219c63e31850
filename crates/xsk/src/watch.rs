//! The end of an interface, as an event.
//!
//! When an interface is deleted, or moved to another network namespace, the kernel unbinds its
//! AF_XDP sockets, and wakes no thread that waits for one: such a socket is never readable. The
//! kernel also announces the end to netlink sockets of the namespace, after it has unbound the
//! AF_XDP sockets. So each queue has a netlink socket, too.

use crate::sys;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with, sockopt};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The group of messages about links, as a bit (`RTMGRP_LINK`).
const LINKS: u32 = 1;
/// Where a message has its type, and the address family and the index of the interface.
const TYPE: u32 = 4;
const FAMILY: u32 = 16;
const INDEX: u32 = 20;

/// A socket that becomes readable, and stays so, when an interface ends. Nothing reads the message.
#[derive(Debug)]
pub(crate) struct Watch(OwnedFd);

impl Watch {
    /// Watches an interface of the network namespace of this thread. Needs no privilege.
    pub(crate) fn new(ifindex: u32) -> io::Result<Self> {
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
        // Before it is in the group, so that no other message is ever queued.
        filter(socket.as_fd(), ifindex)?;
        bind(&socket, &SocketAddrNetlink::new(0, LINKS))?;
        Ok(Self(socket))
    }

    /// A socket that a helper has made.
    pub(crate) fn from_helper(socket: OwnedFd) -> Option<Self> {
        (sockopt::socket_domain(&socket) == Ok(AddressFamily::NETLINK)).then_some(Self(socket))
    }
}

impl AsFd for Watch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Lets the socket receive one message: that the interface is gone. Bridges send messages of the
/// same type about their ports, with another address family.
fn filter(socket: BorrowedFd<'_>, ifindex: u32) -> io::Result<()> {
    let instruction =
        |code: u32, k: u32, otherwise: u8| libc::sock_filter { code: code as u16, jt: 0, jf: otherwise, k };
    let load = |size: u32, at: u32| instruction(libc::BPF_LD | size | libc::BPF_ABS, at, 0);
    // The filter loads numbers in the order of the network. Those of the message are in the order
    // of this machine.
    let is = |value: u32, otherwise: u8| instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, value, otherwise);
    let take = |bytes: u32| instruction(libc::BPF_RET | libc::BPF_K, bytes, 0);
    let mut program = [
        load(libc::BPF_H, TYPE),
        is(u16::from_be_bytes(libc::RTM_DELLINK.to_ne_bytes()).into(), 5),
        load(libc::BPF_B, FAMILY),
        is(libc::AF_UNSPEC as u32, 3),
        load(libc::BPF_W, INDEX),
        is(u32::from_be_bytes(ifindex.to_ne_bytes()), 1),
        take(u32::MAX),
        take(0),
    ];
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    sys::set(socket, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &program)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::Interface;
    use crate::testing::{in_namespace, ip};
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    fn ended(watch: &Watch, patience: Option<&Timespec>) -> bool {
        poll(&mut [PollFd::from_borrowed_fd(watch.as_fd(), PollFlags::IN)], patience).unwrap() == 1
    }

    /// Changes of the interface, its membership in a bridge, and the end of another interface are
    /// no events. Its own end is one, for good.
    #[test]
    fn the_end_of_the_interface_is_the_only_event() {
        in_namespace(|| {
            ip("link add v0 type veth peer name v1");
            ip("link add other type veth peer name end");
            ip("link add b0 type bridge");
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            let index = |name| Interface::by_name(name).unwrap().index;
            let (watch, peer) = (Watch::new(index("v0")).unwrap(), Watch::new(index("v1")).unwrap());
            for change in
                ["set v0 up", "set v0 mtu 1400", "set v0 master b0", "set v0 nomaster", "del other", "set v0 down"]
            {
                ip(&format!("link {change}"));
                assert!(!ended(&watch, Some(&now)), "{change}");
            }
            ip("link del v0");
            for watch in [&watch, &peer, &watch] {
                assert!(ended(watch, None));
            }
        });
    }
}
