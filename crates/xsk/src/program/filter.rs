//! Filters: which frames a program redirects, and the instructions that decide it.
//!
//! ```text
//!   Ethernet ─ up to two VLAN tags ─┬─ IPv4 ─ protocol, destination address, port ─┐
//!                                   ├─ IPv6 ─ the same ────────────────────────────┼─ rule? ─ redirect
//!                                   ├─ ARP ── target address ──────────────────────┘    └──── pass
//!                                   └─ others ─ pass
//! ```
//!
//! Every header is compared with the end of the frame before it is read. A frame that is truncated
//! or has the wrong version is passed to the kernel. In a frame of several buffers, the headers
//! must be in the first one.

use super::asm::{Asm, Cond, Helper, Label, Reg, Width};
use super::metadata::Metadata;
use std::net::IpAddr;

/// The largest number of rules of a filter.
pub const MAX_RULES: usize = 64;

/// The frames that are redirected to sockets. All other frames continue to the kernel's network
/// stack.
///
/// The default has no rules, and redirects every frame.
///
/// ```
/// use netmem_xsk::{Filter, Rule};
///
/// // An echo server next to the kernel: UDP port 7, on any address.
/// let echo = Filter::new([Rule { protocol: Some(17), port: Some(7), ..Rule::default() }])?;
/// // A host of its own on a shared interface: everything to this address, ARP for it included.
/// let host = Filter::new([Rule { address: Some([10, 0, 0, 2].into()), ..Rule::default() }])?;
/// # Ok::<(), netmem_xsk::TooManyRules>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    rules: Vec<Rule>,
}

/// A kind of frames. All fields that are not `None` must match.
///
/// A rule is applied behind up to two VLAN tags (802.1Q and 802.1ad) with any numbers. A rule in
/// which all fields are `None` matches every frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Rule {
    /// The transport protocol's number: 6 for TCP, 17 for UDP. Extension headers of IPv6 are not
    /// parsed. If a packet has any, its protocol is that of the first one.
    pub protocol: Option<u8>,
    /// The destination port of TCP, UDP, UDP-Lite, DCCP or SCTP. Fragments of an IP packet never
    /// match. Only the first fragment has a port, and without it the kernel could not reassemble
    /// the packet.
    pub port: Option<u16>,
    /// The destination address. A rule with only an address is for a host: it also matches ARP
    /// packets with this target address, and ICMPv6 packets to its solicited-node multicast
    /// address, which neighbours use to ask for its MAC address.
    pub address: Option<IpAddr>,
}

/// A filter has more than [`MAX_RULES`] rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{asked} rules: a filter has at most {MAX_RULES}")]
pub struct TooManyRules {
    /// The number of rules in the request.
    pub asked: usize,
}

impl Filter {
    /// Makes a filter of these rules. A frame that matches one of them is redirected.
    ///
    /// # Errors
    ///
    /// [`TooManyRules`].
    pub fn new(rules: impl IntoIterator<Item = Rule>) -> Result<Self, TooManyRules> {
        let rules: Vec<_> = rules.into_iter().collect();
        if rules.len() > MAX_RULES {
            return Err(TooManyRules { asked: rules.len() });
        }
        Ok(Self { rules })
    }

    /// The rules. If there are none, every frame is redirected.
    #[must_use]
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    pub(crate) fn matches_all(&self) -> bool {
        self.rules.is_empty() || self.rules.contains(&Rule::default())
    }

    fn matters(&self, is_family: impl Fn(&IpAddr) -> bool) -> Vec<Rule> {
        self.rules.iter().copied().filter(|rule| rule.address.as_ref().is_none_or(&is_family)).collect()
    }
}

impl Rule {
    fn is_host(&self) -> bool {
        self.address.is_some() && self.protocol.is_none() && self.port.is_none()
    }
}

/// Offsets in the context of an XDP program.
pub(super) mod context {
    pub(in super::super) const DATA: i16 = 0;
    pub(super) const DATA_END: i16 = 4;
    pub(in super::super) const DATA_META: i16 = 8;
    pub(super) const RX_QUEUE_INDEX: i16 = 16;
}

/// The result of a program for a frame that continues to the kernel.
pub(super) const XDP_PASS: i32 = 2;

const VLAN: [u8; 2] = [0x81, 0x00];
const SERVICE_VLAN: [u8; 2] = [0x88, 0xa8];
const IPV4: [u8; 2] = [0x08, 0x00];
const IPV6: [u8; 2] = [0x86, 0xdd];
const ARP: [u8; 2] = [0x08, 0x06];
/// Ethernet and IPv4, with addresses of 6 and 4 bytes.
const ARP_IPV4: [u8; 6] = [0, 1, 0x08, 0x00, 6, 4];
const ICMPV6: u8 = 58;
/// Protocols whose header begins with the two ports.
const WITH_PORTS: [u8; 5] = [6, 17, 33, 132, 136];
/// The beginning of a solicited-node multicast address, which neighbours use to ask for a host.
/// Three bytes of the host's address follow.
const SOLICITED_NODE: [u8; 13] = [0xff, 0x02, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff];

/// The value of the register for a packet without a port. No port has this number.
const NO_PORT: i32 = 0x1_0000;

/// The value that a load of two bytes leaves in a register.
fn half(bytes: [u8; 2]) -> u32 {
    u16::from_ne_bytes(bytes).into()
}

fn word(bytes: [u8; 4]) -> u32 {
    u32::from_ne_bytes(bytes)
}

// The contents of registers in the whole program.
pub(super) const CONTEXT: Reg = Reg::R6;
const END: Reg = Reg::R3;
/// The network header.
const NETWORK: Reg = Reg::R8;
const PROTOCOL: Reg = Reg::R7;
const PORT: Reg = Reg::R9;
/// An IPv4 address.
const ADDRESS: Reg = Reg::R0;
const SCRATCH: Reg = Reg::R4;
const OTHER: Reg = Reg::R5;

/// The program of a filter: it redirects to the entry of the map `map` that has the number of the
/// receive queue, behind the metadata if there is any to write. Returns `None` if the program
/// cannot be assembled, which no filter causes.
pub(super) fn program(filter: &Filter, map: i32, metadata: Option<&Metadata>) -> Option<Vec<u64>> {
    let mut asm = Asm::default();
    let (redirect, pass) = (asm.label(), asm.label());
    asm.copy(CONTEXT, Reg::R1);
    if !filter.matches_all() {
        decide(&mut asm, filter, redirect, pass);
    }
    asm.place(redirect);
    if let Some(metadata) = metadata {
        metadata.write(&mut asm, pass);
    }
    asm.load_map(Reg::R1, map)
        .load(Width::Word, Reg::R2, CONTEXT, context::RX_QUEUE_INDEX)
        .set(Reg::R3, XDP_PASS)
        .call(Helper::RedirectMap)
        .exit();
    // The verifier refuses instructions that are never reached.
    if !filter.matches_all() || metadata.is_some() {
        asm.place(pass).set(Reg::R0, XDP_PASS).exit();
    }
    asm.finish()
}

/// Jumps to `pass` unless the frame has `bytes` bytes from `start` on.
fn need(asm: &mut Asm, start: Reg, bytes: i32, pass: Label) {
    asm.copy(SCRATCH, start).add(SCRATCH, bytes).jump_if_register(SCRATCH, Cond::Above, END, pass);
}

fn decide(asm: &mut Asm, filter: &Filter, redirect: Label, pass: Label) {
    asm.load(Width::Word, NETWORK, CONTEXT, context::DATA).load(Width::Word, END, CONTEXT, context::DATA_END);
    need(asm, NETWORK, 14, pass);
    asm.load(Width::Half, OTHER, NETWORK, 12).add(NETWORK, 14);
    let untagged = asm.label();
    for _ in 0..2 {
        let tag = asm.label();
        asm.jump_if(OTHER, Cond::Equal, half(VLAN), tag).jump_if(OTHER, Cond::NotEqual, half(SERVICE_VLAN), untagged);
        asm.place(tag);
        need(asm, NETWORK, 4, pass);
        asm.load(Width::Half, OTHER, NETWORK, 2).add(NETWORK, 4);
    }
    asm.place(untagged);
    let (ipv4, ipv6, arp) = (asm.label(), asm.label(), asm.label());
    asm.jump_if(OTHER, Cond::Equal, half(IPV4), ipv4)
        .jump_if(OTHER, Cond::Equal, half(IPV6), ipv6)
        .jump_if(OTHER, Cond::Equal, half(ARP), arp)
        .jump(pass);
    decide_ipv4(asm.place(ipv4), &filter.matters(IpAddr::is_ipv4), redirect, pass);
    decide_ipv6(asm.place(ipv6), &filter.matters(IpAddr::is_ipv6), redirect, pass);
    decide_arp(asm.place(arp), &filter.matters(IpAddr::is_ipv4), redirect, pass);
}

/// Jumps to `pass` unless the first byte of the network header has this version. Leaves the byte in
/// `OTHER`.
fn need_version(asm: &mut Asm, version: u32, pass: Label) {
    asm.load(Width::Byte, OTHER, NETWORK, 0).copy(SCRATCH, OTHER).shift_right(SCRATCH, 4).jump_if(
        SCRATCH,
        Cond::NotEqual,
        version,
        pass,
    );
}

/// Jumps to `rules` unless the protocol has ports.
fn need_ports(asm: &mut Asm, rules: Label) {
    let ports = asm.label();
    for protocol in WITH_PORTS {
        asm.jump_if(PROTOCOL, Cond::Equal, protocol.into(), ports);
    }
    asm.jump(rules).place(ports);
}

/// Jumps to `next` unless protocol and port are those of the rule.
fn need_transport(asm: &mut Asm, rule: &Rule, next: Label) {
    if let Some(protocol) = rule.protocol {
        asm.jump_if(PROTOCOL, Cond::NotEqual, protocol.into(), next);
    }
    if let Some(port) = rule.port {
        asm.jump_if(PORT, Cond::NotEqual, half(port.to_be_bytes()), next);
    }
}

fn decide_ipv4(asm: &mut Asm, rules: &[Rule], redirect: Label, pass: Label) {
    need(asm, NETWORK, 20, pass);
    need_version(asm, 4, pass);
    // The length field of the header counts words of 4 bytes.
    asm.and(OTHER, 0xf).shift_left(OTHER, 2).jump_if(OTHER, Cond::Below, 20, pass);
    asm.load(Width::Byte, PROTOCOL, NETWORK, 9).load(Width::Word, ADDRESS, NETWORK, 16).set(PORT, NO_PORT);
    let look = asm.label();
    // The packet is a fragment: more fragments follow, or this one is not the first.
    asm.load(Width::Half, SCRATCH, NETWORK, 6).jump_if(SCRATCH, Cond::AnyBit, half([0x3f, 0xff]), look);
    need_ports(asm, look);
    asm.add_register(NETWORK, OTHER);
    need(asm, NETWORK, 4, look);
    asm.load(Width::Half, PORT, NETWORK, 2).place(look);
    for rule in rules {
        let next = asm.label();
        need_transport(asm, rule, next);
        if let Some(IpAddr::V4(address)) = rule.address {
            asm.jump_if(ADDRESS, Cond::NotEqual, word(address.octets()), next);
        }
        asm.jump(redirect).place(next);
    }
    asm.jump(pass);
}

fn decide_ipv6(asm: &mut Asm, rules: &[Rule], redirect: Label, pass: Label) {
    need(asm, NETWORK, 40, pass);
    need_version(asm, 6, pass);
    asm.load(Width::Byte, PROTOCOL, NETWORK, 6).set(PORT, NO_PORT);
    let look = asm.label();
    need_ports(asm, look);
    need(asm, NETWORK, 44, look);
    asm.load(Width::Half, PORT, NETWORK, 42).place(look);
    for rule in rules {
        let next = asm.label();
        need_transport(asm, rule, next);
        if let Some(IpAddr::V6(address)) = rule.address {
            need_destination(asm, address.octets(), next);
        }
        asm.jump(redirect).place(next);
        if let (true, Some(IpAddr::V6(address))) = (rule.is_host(), rule.address) {
            let next = asm.label();
            let mut group = address.octets();
            group[..13].copy_from_slice(&SOLICITED_NODE);
            asm.jump_if(PROTOCOL, Cond::NotEqual, ICMPV6.into(), next);
            need_destination(asm, group, next);
            asm.jump(redirect).place(next);
        }
    }
    asm.jump(pass);
}

/// Jumps to `next` unless the IPv6 packet is for `address`.
fn need_destination(asm: &mut Asm, address: [u8; 16], next: Label) {
    for (at, bytes) in address.as_chunks::<4>().0.iter().enumerate() {
        asm.load(Width::Word, SCRATCH, NETWORK, 24 + 4 * at as i16).jump_if(
            SCRATCH,
            Cond::NotEqual,
            word(*bytes),
            next,
        );
    }
}

fn decide_arp(asm: &mut Asm, rules: &[Rule], redirect: Label, pass: Label) {
    need(asm, NETWORK, 28, pass);
    let [a, b, c, d, e, f] = ARP_IPV4;
    asm.load(Width::Word, SCRATCH, NETWORK, 0)
        .jump_if(SCRATCH, Cond::NotEqual, word([a, b, c, d]), pass)
        .load(Width::Half, SCRATCH, NETWORK, 4)
        .jump_if(SCRATCH, Cond::NotEqual, half([e, f]), pass)
        .load(Width::Word, ADDRESS, NETWORK, 24);
    for rule in rules.iter().filter(|rule| rule.is_host()) {
        if let Some(IpAddr::V4(address)) = rule.address {
            asm.jump_if(ADDRESS, Cond::Equal, word(address.octets()), redirect);
        }
    }
    asm.jump(pass);
}
