//! What happens to a frame in every mode: its header is put into words of our own, the program decides, the handler takes
//! it.

use super::stats::RxStats;
use crate::net::{HeaderFault, Offloads, VnetHdr};
use netmem_packet::{Checksum, Gso, GsoKind, Handler, Meta, Verdict, XdpFrame};
use netmem_pool::{Napi, Page, PeerMemory};

/// Frames between two publications of new buffers.
pub(super) const BATCH: u16 = 64;
/// The shortest frame that is looked at: an Ethernet header.
pub(super) const ETHERNET: usize = 14;

/// Notes the offloads that a header speaks of. If the header speaks nonsense, or of what was not negotiated, it counts that
/// and returns false: the frame is to be dropped.
#[cold]
pub(super) fn annotate<M: PeerMemory>(
    stats: &mut RxStats,
    frame: &mut XdpFrame<M>,
    header: VnetHdr,
    offloads: Offloads,
) -> bool {
    match offloads.check(header, frame.len()) {
        Ok(header) => frame.meta = meta(header),
        Err(fault) => {
            refused(stats, fault);
            return false;
        }
    }
    true
}

/// Counts a frame that is dropped for its header.
#[cold]
pub(super) fn refused(stats: &mut RxStats, fault: HeaderFault) {
    match fault {
        HeaderFault::NotNegotiated => stats.not_negotiated += 1,
        HeaderFault::Nonsense => stats.bad_header += 1,
    }
}

/// Runs the program on a frame and does what it decides. Returns the head's page if the frame was dropped.
#[inline(always)]
pub(super) fn deliver<M: PeerMemory, H: Handler<M>>(
    stats: &mut RxStats,
    napi: &mut Napi<'_, M>,
    mut frame: XdpFrame<M>,
    handler: &mut H,
) -> Option<Page<M>> {
    if H::LINEAR && frame.linearise(napi).is_err() {
        stats.not_linear += 1;
        return Some(frame.into_page());
    }
    stats.frames += 1;
    stats.bytes += frame.len() as u64;
    // Compared one by one, in the order of how much it matters: five arms would be a table, and the jump a guess.
    let verdict = handler.run(&mut frame);
    if verdict == Verdict::Pass {
        stats.passed += 1;
        handler.pass(frame.into_packet());
        return None;
    }
    if verdict == Verdict::Drop {
        stats.dropped += 1;
        return Some(frame.into_page());
    }
    if verdict == Verdict::Tx {
        stats.transmitted += 1;
        handler.tx(frame.into_packet());
        return None;
    }
    if verdict == Verdict::Redirect {
        stats.redirected += 1;
        redirect(handler, frame);
        return None;
    }
    stats.aborted += 1;
    Some(frame.into_page())
}

/// Out of the line of the others.
#[inline(never)]
fn redirect<M: PeerMemory, H: Handler<M>>(handler: &mut H, frame: XdpFrame<M>) {
    handler.redirect(frame.into_packet());
}

/// What a header that was [checked](Offloads::check) says, in words of our own.
pub(super) fn meta(h: VnetHdr) -> Meta {
    let checksum = if h.flags & VnetHdr::NEEDS_CSUM != 0 {
        Checksum::Partial { start: h.csum_start, offset: h.csum_offset }
    } else if h.flags & VnetHdr::DATA_VALID != 0 {
        Checksum::Vouched
    } else {
        Checksum::Unknown
    };
    let kind = match h.gso_type & !VnetHdr::GSO_ECN {
        VnetHdr::GSO_TCPV4 => Some(GsoKind::TcpV4),
        VnetHdr::GSO_TCPV6 => Some(GsoKind::TcpV6),
        VnetHdr::GSO_UDP => Some(GsoKind::UdpFragment),
        VnetHdr::GSO_UDP_L4 => Some(GsoKind::UdpSegment),
        _ => None,
    };
    let ecn = h.gso_type & VnetHdr::GSO_ECN != 0;
    let gso = kind.map(|kind| Gso { kind, size: h.gso_size, headers: h.hdr_len, ecn });
    Meta { checksum, gso }
}

/// Asks for the cache line at `addr`. No access: any address will do.
#[inline]
pub(super) fn prefetch(addr: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch does not fault.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(std::ptr::without_provenance(addr));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = addr;
}
