//! Groups of frames between a queue and C's arrays of fragments.

use crate::frag::{self, netmem_frag};
use crate::status::Failure;
use netmem_packet::{Handler, Packet, Poll, RxQueue, Sendable, TxQueue, Wait};
use netmem_pool::Memory;
use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::ptr::NonNull;

/// In the flags of a fragment: the frame goes on in the next fragment of the array.
pub const NETMEM_FRAG_MORE: u8 = 1;

/// The most fragments that a frame has.
pub const NETMEM_FRAME_FRAGS: usize = 18;

const _: () = assert!(NETMEM_FRAME_FRAGS == netmem_packet::MAX_FRAGS + 1);

/// Frames that a queue has received and for which the caller had no room.
pub(crate) type Waiting<M> = VecDeque<Packet<M>>;

/// The fragments of a frame, each of which holds a page.
#[inline]
pub(crate) fn fragments<M: Memory>(packet: &Packet<M>) -> usize {
    1 + packet.frags().len()
}

/// Receives up to `n` fragments of frames. Returns how many.
///
/// # Safety
///
/// `frags` has room for `n` fragments; `flags` is null, or has room for as many.
#[inline]
pub(crate) unsafe fn receive<Q: RxQueue>(
    queue: &mut Q,
    waiting: &mut Waiting<Q::Mem>,
    frags: *mut netmem_frag,
    flags: *mut u8,
    n: usize,
) -> Result<usize, Failure> {
    // SAFETY: as the caller promises.
    let out = unsafe { frag::room(frags, n) }?;
    match NonNull::new(flags) {
        None => receive_single(queue, waiting, out),
        Some(_) if n < NETMEM_FRAME_FRAGS => Err(Failure::Argument(format!("room for {n} fragments with flags"))),
        Some(flags) => {
            // SAFETY: the caller has room for as many flags as fragments.
            let flags = unsafe { std::slice::from_raw_parts_mut(flags.as_ptr().cast(), n) };
            Ok(receive_parts(queue, waiting, out, flags))
        }
    }
}

/// What [`hand_out`] has removed from the frames that wait.
#[derive(Default)]
pub(crate) struct HandedOut {
    /// Fragments that the caller has.
    pub(crate) frags: usize,
    /// Frames that were dropped because they have several fragments, and the caller no flags.
    pub(crate) dropped: u64,
    /// Fragments of both.
    pub(crate) pages: usize,
}

/// Moves frames that wait to the caller's room for `n` fragments.
///
/// # Safety
///
/// As for [`receive`].
pub(crate) unsafe fn hand_out<M: Memory>(
    waiting: &mut Waiting<M>,
    frags: *mut netmem_frag,
    flags: *mut u8,
    n: usize,
) -> Result<HandedOut, Failure> {
    // SAFETY: as the caller promises.
    let out = unsafe { frag::room(frags, n) }?;
    let Some(flags) = NonNull::new(flags) else {
        let (mut single, mut handed) = (Single { out, done: 0 }, HandedOut::default());
        while single.done < n
            && let Some(packet) = waiting.pop_front()
        {
            handed.dropped += u64::from(!packet.frags().is_empty());
            handed.pages += fragments(&packet);
            single.pass(packet);
        }
        return Ok(HandedOut { frags: single.done, ..handed });
    };
    if n < NETMEM_FRAME_FRAGS {
        return Err(Failure::Argument(format!("room for {n} fragments with flags")));
    }
    // SAFETY: the caller has room for as many flags as fragments.
    let flags = unsafe { std::slice::from_raw_parts_mut(flags.as_ptr().cast(), n) };
    let mut parts = FrameParts { out, flags, done: 0, waiting: Waiting::new() };
    parts.write_waiting(waiting);
    Ok(HandedOut { frags: parts.done, pages: parts.done, dropped: 0 })
}

/// Fills the room for frames of one fragment.
fn receive_single<Q: RxQueue>(
    queue: &mut Q,
    waiting: &Waiting<Q::Mem>,
    out: &mut [MaybeUninit<netmem_frag>],
) -> Result<usize, Failure> {
    if !waiting.is_empty() {
        return Err(Failure::Argument("a frame of several fragments waits: pass flags".into()));
    }
    let budget = out.len();
    let mut single = Single { out, done: 0 };
    queue.poll(|poll| poll.receive(budget, &mut single));
    Ok(single.done)
}

/// Fills the room for frames of one or several fragments.
fn receive_parts<Q: RxQueue>(
    queue: &mut Q,
    waiting: &mut Waiting<Q::Mem>,
    out: &mut [MaybeUninit<netmem_frag>],
    flags: &mut [MaybeUninit<u8>],
) -> usize {
    let mut parts = FrameParts { out, flags, done: 0, waiting: VecDeque::new() };
    if !parts.write_waiting(waiting) {
        return parts.done;
    }
    let budget = parts.out.len() - parts.done;
    queue.poll(|poll| poll.receive(budget, &mut parts));
    *waiting = parts.waiting;
    parts.done
}

/// Writes frames of one fragment. The queue copies others into one page, if they fit.
struct Single<'r> {
    out: &'r mut [MaybeUninit<netmem_frag>],
    done: usize,
}

impl<M: Memory> Handler<M> for Single<'_> {
    const LINEAR: bool = true;

    #[inline(always)]
    fn pass(&mut self, packet: Packet<M>) {
        // The queue delivers no more frames than there is room for, each in one fragment.
        if let (Ok(frag), Some(room)) = (packet.into_head(), self.out.get_mut(self.done)) {
            room.write(netmem_frag::of(frag));
            self.done += 1;
        }
    }
}

/// Writes frames with their fragments, and keeps those for which there is no room.
struct FrameParts<'r, M: Memory> {
    out: &'r mut [MaybeUninit<netmem_frag>],
    flags: &'r mut [MaybeUninit<u8>],
    done: usize,
    waiting: Waiting<M>,
}

impl<M: Memory> FrameParts<'_, M> {
    /// Writes frames that have waited. False if there is no room for the next.
    fn write_waiting(&mut self, waiting: &mut Waiting<M>) -> bool {
        while let Some(packet) = waiting.pop_front() {
            if let Err(packet) = self.write(packet) {
                waiting.push_front(packet);
                return false;
            }
        }
        true
    }

    fn write(&mut self, packet: Packet<M>) -> Result<(), Packet<M>> {
        let n = fragments(&packet);
        if self.out.len() - self.done < n {
            return Err(packet);
        }
        let (head, frags) = packet.into_fragments();
        for (i, frag) in std::iter::once(head).chain(frags).enumerate() {
            self.out[self.done].write(netmem_frag::of(frag));
            self.flags[self.done].write(if i + 1 < n { NETMEM_FRAG_MORE } else { 0 });
            self.done += 1;
        }
        Ok(())
    }
}

impl<M: Memory> Handler<M> for FrameParts<'_, M> {
    #[inline]
    fn pass(&mut self, packet: Packet<M>) {
        // The order of frames is kept.
        let refused = if self.waiting.is_empty() { self.write(packet) } else { Err(packet) };
        if let Err(packet) = refused {
            self.waiting.push_back(packet);
        }
    }
}

/// A transmit queue of the header.
pub(crate) trait Sends: TxQueue + Wait {
    /// Why a frame is refused that is in memory which the queue cannot send.
    const UNREACHABLE: &'static str;

    /// Whether the queue can send the fragment, as far as its memory goes.
    fn reaches(&mut self, frag: &netmem_frag) -> bool;

    /// Whether a frame can be as long as these fragments together. The queue may refuse more.
    #[inline]
    fn fits(_: &[netmem_frag]) -> bool {
        true
    }
}

/// Why a frame is refused that is not as long as a frame is.
pub(crate) const LENGTH: &str = "it is shorter than an Ethernet header, or longer than any frame";

/// Sends `n` fragments, and notifies the peer. `sent`, which is not null, gets how many were sent.
///
/// # Safety
///
/// `frags` is null with `n` of 0, or `n` fragments of the header; `flags` is null, or has as many.
pub(crate) unsafe fn send<Q: Sends>(
    queue: &mut Q,
    frags: *mut netmem_frag,
    flags: *const u8,
    n: usize,
    sent: &mut usize,
) -> Result<(), Failure> {
    // SAFETY: as the caller promises, for all fragments.
    let frame = |queue: &mut Q, frags: &mut [netmem_frag], _| unsafe { send_frame(queue, frags) };
    // SAFETY: as the caller promises.
    unsafe { send_each(queue, (frags, flags, n), sent, frame) }
}

/// The same, by a function that queues the fragments of a frame, the first of which has the number
/// that it gets. It returns false if the queue is full.
///
/// # Safety
///
/// As for [`send`].
#[inline]
pub(crate) unsafe fn send_each<Q: Sends>(
    queue: &mut Q,
    (frags, flags, n): (*mut netmem_frag, *const u8, usize),
    sent: &mut usize,
    mut frame: impl FnMut(&mut Q, &mut [netmem_frag], usize) -> Result<bool, Failure>,
) -> Result<(), Failure> {
    queue.check().map_err(Failure::Queue)?;
    if n == 0 {
        return Ok(());
    }
    // SAFETY: as the caller promises.
    let (frags, flags) = unsafe { arrays(frags, flags, n) }?;
    let mut outcome = Ok(());
    while *sent < n {
        let queued = length(flags, *sent)
            .and_then(|len| frame(queue, &mut frags[*sent..*sent + len], *sent).map(|sent| if sent { len } else { 0 }));
        match queued {
            Ok(0) => break,
            Ok(len) => *sent += len,
            Err(error) => {
                outcome = Err(error);
                break;
            }
        }
    }
    queue.flush();
    outcome
}

/// The `n` fragments and their flags, if there are any.
///
/// # Safety
///
/// `frags` is null, or `n` fragments of the header, and `flags` is null, or has as many, during
/// `'a`.
#[inline]
pub(crate) unsafe fn arrays<'a>(
    frags: *mut netmem_frag,
    flags: *const u8,
    n: usize,
) -> Result<(&'a mut [netmem_frag], Option<&'a [u8]>), Failure> {
    let frags = NonNull::new(frags).ok_or_else(|| Failure::null("frags"))?;
    // SAFETY: as the caller promises.
    let frags = unsafe { std::slice::from_raw_parts_mut(frags.as_ptr(), n) };
    // SAFETY: as the caller promises.
    let flags = (!flags.is_null()).then(|| unsafe { std::slice::from_raw_parts(flags, n) });
    Ok((frags, flags))
}

/// The number of fragments of the frame that begins at `from`.
#[inline]
pub(crate) fn length(flags: Option<&[u8]>, from: usize) -> Result<usize, Failure> {
    let Some(flags) = flags else { return Ok(1) };
    for (i, &flags) in flags[from..].iter().enumerate() {
        match flags {
            0 => return Ok(i + 1),
            NETMEM_FRAG_MORE => {}
            other => return Err(Failure::Argument(format!("flags of a fragment are {other:#x}"))),
        }
    }
    Err(Failure::Argument("the last fragment of the group has NETMEM_FRAG_MORE".into()))
}

/// Fragments back into their variables.
pub(crate) fn put_back<M: Memory>(packet: Packet<M>, frags: &mut [netmem_frag]) {
    let (head, rest) = packet.into_fragments();
    for (variable, frag) in frags.iter_mut().zip(std::iter::once(head).chain(rest)) {
        *variable = netmem_frag::of(frag);
    }
}

/// The frame that the variables own, which are empty then.
///
/// # Safety
///
/// Fragments of the header. Whatever reads or writes the bytes first compares the region.
pub(crate) unsafe fn packet<M: Memory>(frags: &mut [netmem_frag]) -> Result<Packet<M>, Failure> {
    if frags.len() > NETMEM_FRAME_FRAGS {
        return Err(Failure::Unsendable("it has more fragments than a frame can have"));
    }
    if frags.iter().any(netmem_frag::is_empty) {
        return Err(Failure::empty());
    }
    // SAFETY: as the caller promises.
    let mut owned = frags.iter_mut().filter_map(|frag| unsafe { frag.take_of() });
    let mut packet = Packet::new(owned.next().ok_or_else(Failure::empty)?);
    for frag in owned {
        // At most as many as a frame has.
        let _ = packet.push(frag);
    }
    Ok(packet)
}

/// Queues a frame. False if the queue is full: the variables have their fragments again.
///
/// # Safety
///
/// Fragments of the header.
#[inline]
pub(crate) unsafe fn send_frame<Q: Sends>(queue: &mut Q, frags: &mut [netmem_frag]) -> Result<bool, Failure> {
    if !frags.iter().all(|frag| frag.is_empty() || queue.reaches(frag)) {
        return Err(Failure::Unsendable(Q::UNREACHABLE));
    }
    if !Q::fits(frags) && !frags.iter().any(netmem_frag::is_empty) {
        return Err(Failure::Unsendable(LENGTH));
    }
    // SAFETY: as the caller promises; the regions were compared, or the queue does so.
    match queue.send(unsafe { packet(frags) }?) {
        Ok(()) => Ok(true),
        Err(packet) => refused(queue, packet, frags, Q::send),
    }
}

/// Why a frame was refused; it is tried again after completions, by `send`.
#[cold]
pub(crate) fn refused<Q: Sends>(
    queue: &mut Q,
    packet: Packet<Q::Mem>,
    frags: &mut [netmem_frag],
    send: impl FnOnce(&mut Q, Packet<Q::Mem>) -> Result<(), Packet<Q::Mem>>,
) -> Result<bool, Failure> {
    if let Err(stopped) = queue.check() {
        put_back(packet, frags);
        return Err(Failure::Queue(stopped));
    }
    if queue.sendable(&packet) == Sendable::Never {
        let reachable = packet.fragments().all(|frag| queue.reach(frag) != netmem_packet::Reach::Never);
        put_back(packet, frags);
        return Err(Failure::Unsendable(match reachable {
            false => Q::UNREACHABLE,
            true => "it has no bytes, or too many fragments for the queue",
        }));
    }
    queue.flush();
    queue.complete();
    send(queue, packet).map(|()| true).or_else(|packet| {
        put_back(packet, frags);
        Ok(false)
    })
}
