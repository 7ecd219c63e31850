//! The path of passed packets to the application: another thread, or a later turn of the driver's
//! thread.

use super::plan::{Consumer as Where, Variant};
use netmem::net::Packet;
use netmem::pool::PeerShared;
use rtrb::{Consumer, Producer, RingBuffer};
use std::sync::atomic::{AtomicBool, Ordering};

/// The largest number of packets in flight to the application's CPU.
pub(super) const MAILBOX: usize = 512;

/// The receiving end of a mailbox.
pub(super) type Mail = Consumer<Packet<PeerShared>>;

/// The destination of passed packets: none, another thread, or a later turn of this thread.
#[derive(Default)]
pub(super) struct Mailbox {
    pub(super) out: Option<Producer<Packet<PeerShared>>>,
    pub(super) own: Option<Mail>,
}

/// Drops the packets that were passed here, up to a limit. Returns how many.
pub(super) fn drain(mail: &mut Mail) -> usize {
    let n = mail.slots().min(256);
    mail.read_chunk(n).map_or(0, |chunk| chunk.into_iter().map(drop).count())
}

/// The two ends of the path to the application: the driver's end, and the end that another thread
/// empties.
pub(super) fn mailbox(v: &Variant, own: bool) -> (Mailbox, Option<Mail>) {
    if v.consumer == Where::Same {
        return (Mailbox::default(), None);
    }
    let (out, mail) = RingBuffer::new(MAILBOX);
    let (own, mail) = if own { (Some(mail), None) } else { (None, Some(mail)) };
    (Mailbox { out: Some(out), own }, mail)
}

/// The action of the loop when it has found no packets.
#[inline]
pub(super) fn idle(yields: bool) {
    if yields { std::thread::yield_now() } else { std::hint::spin_loop() }
}

/// Empties the receiving end of a mailbox until `halt` is set.
pub(super) fn consume(mut mail: Mail, halt: &AtomicBool, yields: bool) {
    loop {
        let halted = halt.load(Ordering::Acquire);
        if drain(&mut mail) == 0 {
            if halted {
                return;
            }
            idle(yields);
        }
    }
}

/// Ends the other workers when their scope is left, also in a panic.
pub(super) struct Halt<'a>(pub(super) &'a AtomicBool);

impl Drop for Halt<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}
