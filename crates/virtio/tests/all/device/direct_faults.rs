//! Chains that break a rule, on either side of a direct copy.

use netmem_testing::device::rings::*;
use netmem_testing::device::*;
use netmem_virtio::net::VnetHdr;
use netmem_virtio::virtqueue::{DESC_NEXT, Desc};

use super::direct::{Guest, delivered, linked, wire};

/// A chain that breaks a rule.
type Breach = (&'static str, fn(&mut Guest, bool));

/// Posts a chain of these descriptors, on the receive ring or on the transmit ring.
fn post_raw(guest: &mut Guest, receive: bool, parts: &[(u64, u32, u16)]) {
    let queue = if receive { &mut guest.rx } else { &mut guest.tx };
    let id = queue.vacant(parts.len()).unwrap();
    queue.post_as_is(id, parts);
}

/// The flag of a buffer of the right direction, and of the wrong one.
fn flags(receive: bool) -> (u16, u16) {
    if receive { (WRITE, 0) } else { (0, WRITE) }
}

const BREACHES: [Breach; 6] = [
    ("direction", |guest, receive| {
        let at = guest.rx.buffer(60);
        post_raw(guest, receive, &[(at, 2048, flags(receive).1)]);
    }),
    ("outside", |guest, receive| post_raw(guest, receive, &[(0x1000, 2048, flags(receive).0)])),
    ("beyond the end", |guest, receive| {
        post_raw(guest, receive, &[(GUEST + MEMORY as u64 - 100, 2048, flags(receive).0)]);
    }),
    ("a part outside", |guest, receive| {
        let at = guest.rx.buffer(60);
        post_raw(guest, receive, &[(at, 20, flags(receive).0), (7, 2048, flags(receive).0)]);
    }),
    ("a loop", |guest, receive| {
        let at = guest.rx.buffer(60);
        post_raw(guest, receive, &[(at, 20, flags(receive).0)]);
        let queue = if receive { &guest.rx } else { &guest.tx };
        let ring = queue.split();
        let id = ring.avail_entry(ring.avail_idx().wrapping_sub(1));
        ring.set_desc(id, Desc { addr: at, len: 20, flags: flags(receive).0 | DESC_NEXT, next: id });
    }),
    ("a head out of range", |guest, receive| {
        let at = guest.rx.buffer(60);
        post_raw(guest, receive, &[(at, 2048, flags(receive).0)]);
        let ring = if receive { guest.rx.split() } else { guest.tx.split() };
        ring.set_avail_entry(ring.avail_idx().wrapping_sub(1), 5000);
    }),
];

/// A guest that breaks a rule, in each place of a group, loses its own ring. What was copied before
/// has arrived, and the other guest's rings run.
#[test]
fn a_broken_chain_stops_the_ring_of_its_guest() {
    for (what, breach) in BREACHES {
        let places = [false, true].into_iter().flat_map(|side| [0, 1, 7, 20].map(|n| (side, n)));
        // The frames before are in one buffer each, or in two.
        for ((receiver_breaks, before), parts) in places.flat_map(|place| [(place, &[][..]), (place, &[66])]) {
            let [mut a, mut b] = linked([PLAIN, PLAIN]);
            b.post(before, 2048);
            if receiver_breaks {
                breach(&mut b, true);
            }
            b.post(8, 2048);
            (0..before).for_each(|n| _ = a.send_in(&wire(VnetHdr::PLAIN, n, 100), parts));
            if !receiver_breaks {
                breach(&mut a, false);
            }
            (0..4).for_each(|n| _ = a.send(&wire(VnetHdr::PLAIN, before + n, 100)));
            for _ in 0..4 {
                a.device.poll();
            }
            // A loop of the receiver is longer than what is walked for another guest.
            if what == "a loop" {
                b.device.poll();
            }
            let got = b.received();
            let want: Vec<_> = (0..before).map(|n| delivered(wire(VnetHdr::PLAIN, n, 100))).collect();
            assert!(got == want, "{what}, {receiver_breaks}: {} of {before} arrived", got.len());
            let errors = [&a, &b].map(|guest| guest.driver.queue_errors().len());
            assert_eq!(errors, [!receiver_breaks, receiver_breaks].map(usize::from), "{what}");
            let stopped = if receiver_breaks { &b.rx } else { &a.tx };
            assert_eq!(stopped.err.read().unwrap(), 1, "{what}");
            // Of the sender, what has arrived is completed, and nothing else was reported as
            // copied.
            assert_eq!(a.sent().0, before as u64);
            let completed = a.tx.take().len();
            assert!(if receiver_breaks { completed >= before } else { completed == before }, "{what}");
            // The other direction.
            a.post(8, 2048);
            b.send(&wire(VnetHdr::PLAIN, 5, 300));
            for _ in 0..3 {
                b.device.poll();
                a.device.poll();
            }
            assert_eq!(a.received(), [delivered(wire(VnetHdr::PLAIN, 5, 300))], "{what}");
            assert_eq!(b.tx.take().len(), 1);
        }
    }
}
