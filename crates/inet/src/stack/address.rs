//! Addresses of users, in the one form that is compared with those of packets.
//!
//! Why: one address has several forms, by scope, flow label and the IPv6 form of an IPv4 address,
//! and tables compare all of it.

use std::net::{SocketAddr, SocketAddrV6};

/// The same address without scope, flow label and the IPv6 form of an IPv4 address. A host has one
/// interface, so that the scope of a link-local address has no meaning (RFC 4007), and packets have
/// no scope.
pub(crate) fn canonical(addr: SocketAddr) -> SocketAddr {
    match addr {
        SocketAddr::V4(_) => addr,
        SocketAddr::V6(v6) => match v6.ip().to_ipv4_mapped() {
            Some(v4) => SocketAddr::new(v4.into(), v6.port()),
            None => SocketAddrV6::new(*v6.ip(), v6.port(), 0, 0).into(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scope_flow_label_and_form_do_not_count() {
        let with = |text: &str| canonical(text.parse().unwrap()).to_string();
        assert_eq!(with("[fe80::1%2]:80"), "[fe80::1]:80");
        assert_eq!(with("[::ffff:10.0.0.1]:80"), "10.0.0.1:80");
        assert_eq!((with("[::]:80"), with("0.0.0.0:80")), ("[::]:80".to_owned(), "0.0.0.0:80".to_owned()));
        let labelled = SocketAddrV6::new("fd00::1".parse().unwrap(), 80, 5, 0);
        assert_eq!(canonical(labelled.into()), SocketAddr::from(([0xfd00, 0, 0, 0, 0, 0, 0, 1], 80)));
    }
}
