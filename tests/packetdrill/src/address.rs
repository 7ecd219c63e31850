//! Addresses of sockets, as the C library has them.
//!
//! A socket of IPv6 reaches IPv4 by addresses that are mapped into IPv6. Inside of the object they
//! are those of IPv4, because the packets are.
//!
//! Pointers are as in [`calls`](crate::calls). Each `SAFETY` comment of this file refers to this.

use crate::errno::Errno;
use libc::{c_int, sockaddr, socklen_t};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Reads an address. One that is mapped into IPv6 is read as that of IPv4.
pub(crate) fn address(at: *const sockaddr, len: socklen_t) -> Result<SocketAddr, Errno> {
    let len = len as usize;
    if at.is_null() || len < size_of::<libc::sockaddr_in>() {
        return Err(libc::EINVAL);
    }
    // SAFETY: see above; it has the length of the family.
    match c_int::from(unsafe { (*at).sa_family }) {
        libc::AF_INET => {
            // SAFETY: as above.
            let v4 = unsafe { at.cast::<libc::sockaddr_in>().read_unaligned() };
            Ok(SocketAddr::new(Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr)).into(), u16::from_be(v4.sin_port)))
        }
        libc::AF_INET6 if len >= size_of::<libc::sockaddr_in6>() => {
            // SAFETY: as above.
            let v6 = unsafe { at.cast::<libc::sockaddr_in6>().read_unaligned() };
            let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
            let ip = ip.to_ipv4_mapped().map_or(ip.into(), IpAddr::from);
            Ok(SocketAddr::new(ip, u16::from_be(v6.sin6_port)))
        }
        _ => Err(libc::EAFNOSUPPORT),
    }
}

/// Writes the address of a peer, for a socket of IPv4 if `as_v4`, and otherwise for one of IPv6.
pub(crate) fn put_address(address: SocketAddr, as_v4: bool, at: *mut sockaddr, len: *mut socklen_t) {
    if at.is_null() || len.is_null() {
        return;
    }
    // SAFETY: all fields of both may be zero.
    let (mut v4, mut v6): (libc::sockaddr_in, libc::sockaddr_in6) = unsafe { std::mem::zeroed() };
    let ip = match address.ip() {
        IpAddr::V4(ip) if !as_v4 => ip.to_ipv6_mapped().into(),
        ip => ip,
    };
    let (from, size) = match ip {
        IpAddr::V4(ip) => {
            v4.sin_family = libc::AF_INET as libc::sa_family_t;
            v4.sin_port = address.port().to_be();
            v4.sin_addr.s_addr = u32::from(ip).to_be();
            ((&raw const v4).cast::<u8>(), size_of_val(&v4))
        }
        IpAddr::V6(ip) => {
            v6.sin6_family = libc::AF_INET6 as libc::sa_family_t;
            v6.sin6_port = address.port().to_be();
            v6.sin6_addr.s6_addr = ip.octets();
            ((&raw const v6).cast::<u8>(), size_of_val(&v6))
        }
    };
    // SAFETY: see above; no more than there is room for.
    unsafe {
        std::ptr::copy_nonoverlapping(from, at.cast::<u8>(), size.min(*len as usize));
        *len = size as socklen_t;
    }
}
