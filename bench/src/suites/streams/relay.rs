//! A thread that carries frames between two taps, unchanged.

use super::end::{Idle, LOOK};
use super::rig::{Link, Offloads};
use netmem::device::port::{Port, Tap};
use netmem::virtio::feature;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::sync::atomic::{AtomicBool, Ordering};

/// Frames that are carried in one direction before the other direction has its turn.
const TURN: usize = 64;

/// Carries frames until the flag is set.
pub(super) fn relay(taps: &mut [Tap; 2], link: Link, idle: Idle, stop: &AtomicBool) -> anyhow::Result<()> {
    let features = match link.offloads {
        Offloads::None => 0,
        Offloads::Checksums => feature::GUEST_CSUM,
        Offloads::All => feature::GUEST_CSUM | feature::GUEST_TSO4 | feature::GUEST_ECN,
    };
    for tap in &mut *taps {
        tap.negotiated(features)?;
    }
    while !stop.load(Ordering::Relaxed) {
        let [a, b] = taps;
        if carry(a, b) + carry(b, a) > 0 || idle == Idle::Polls {
            continue;
        }
        let fds = taps.each_ref().map(Port::fd);
        let mut fds: Vec<_> = fds.iter().flatten().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        let timeout = Timespec { tv_sec: 0, tv_nsec: LOOK.subsec_nanos().into() };
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

fn carry(from: &mut Tap, to: &mut Tap) -> usize {
    for n in 0..TURN {
        let Some(wire) = from.peek() else { return n };
        to.send(wire);
        from.consume();
    }
    TURN
}
