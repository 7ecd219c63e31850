//! The frame by which a host announces that it is the new place of a MAC address: a reverse ARP
//! request (RFC 903).

use crate::net::{MIN_FRAME, VnetHdr};

/// Bytes of the frame in wire form.
const WIRE: usize = VnetHdr::LEN + MIN_FRAME;

/// A broadcast from `mac` that asks for its own address, in wire form. Switches learn the guest's
/// new place from its source address.
pub(super) fn request(mac: [u8; 6]) -> [u8; WIRE] {
    let fields: [&[u8]; 8] = [
        &VnetHdr::PLAIN.to_bytes(),
        &[0xff; 6],
        &mac,
        // Ethertype; hardware type Ethernet; protocol type IPv4; lengths of both addresses;
        // operation 3.
        &[0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3],
        &mac,
        &[0; 4],
        &mac,
        &[0; 4],
    ];
    let mut wire = [0; WIRE];
    let mut at = 0;
    for field in fields {
        wire[at..at + field.len()].copy_from_slice(field);
        at += field.len();
    }
    wire
}
