//! The interface of a port: what the device calls, and what a port promises.
//!
//! A port is polled. None of its methods blocks, because a pass over its pair waits for it with the
//! pair locked.

use std::os::fd::BorrowedFd;
use std::time::Instant;

use super::error::PortError;
use super::in_place::{Posted, Rest};
use crate::device::pair_handle::PairHandle;
use crate::device::stats::DropReason;
use crate::net::{OFFLOAD_FRAME, Offloads, VnetHdr};

/// The longest frame in wire form: one from segmentation offload, with a VLAN tag.
pub const MAX_WIRE: usize = VnetHdr::LEN + OFFLOAD_FRAME + 4;

/// The source and the target of one queue pair's frames. One thread uses it; no method blocks.
pub trait Port: Send {
    /// Whether [`Self::send`] reads the bytes of frames. If not, frames from the driver are checked
    /// and counted, but not copied.
    const WANTS_BYTES: bool;
    /// The offload features that the port has by itself. Of
    /// [`HOST_OFFLOADS`](crate::net::feature::HOST_OFFLOADS): which frames [`Self::send`] accepts
    /// as they are. Of [`GUEST_OFFLOADS`](crate::net::feature::GUEST_OFFLOADS): which frames
    /// [`Self::peek`] may show. The device does the others in software, and always offers
    /// [`ALL_OFFLOADS`](super::ALL_OFFLOADS).
    const FEATURES: u64;
    /// Whether [`Self::read`] does anything.
    const READS: bool = false;
    /// Whether [`Self::send_in_place`] does anything.
    const SENDS_IN_PLACE: bool = false;
    /// Whether [`Self::send_with`] does anything. Only for a port that accepts frames with all of
    /// [`ALL_OFFLOADS`](super::ALL_OFFLOADS).
    const STORES: bool = false;

    /// The next frame towards the driver, in wire form, or `None` if there is none at present. It
    /// is the same frame until [`Self::consume`].
    fn peek(&mut self) -> Option<&[u8]>;

    /// How many bytes of buffers to post for [`Self::read`], header included: a guess. `None` if a
    /// frame must be delivered from [`Self::peek`] first.
    #[inline(always)]
    fn expects(&self) -> Option<usize> {
        None
    }

    /// Reads the next frame into `posted`, if the driver accepts its offloads. Returns its header,
    /// which is not written there, and its length without the header. Returns `None` if there is no
    /// frame, or if [`Self::peek`] shows it; [`Self::expects`] distinguishes the two.
    ///
    /// This saves a copy if the kernel writes the frames. Other ports do not implement it.
    fn read(&mut self, _accepts: Offloads, _posted: Posted<'_>) -> Option<(VnetHdr, usize)> {
        None
    }

    /// Removes the frame that [`Self::peek`] showed: it was delivered. [`Self::discard`] is called
    /// if it cannot be.
    fn consume(&mut self);

    /// Removes the frame that [`Self::peek`] showed, because it cannot be delivered.
    #[inline(always)]
    fn discard(&mut self, why: DropReason) {
        let _ = why;
        self.consume();
    }

    /// The device has dropped a frame from the driver, which [`Self::send`] is not called with.
    /// `wire` is what the driver wrote, up to [`MAX_WIRE`] bytes: nothing in it is checked, and it
    /// may be shorter than a header. Not called for a frame that could not be copied, and only of
    /// a port that wants bytes and does not [store](Self::STORES) them.
    #[inline(always)]
    fn dropped(&mut self, _wire: &[u8], _why: DropReason) {}

    /// Sends a frame from the driver, in wire form and checked ([`Offloads::check`]; at least an
    /// Ethernet header; at most [`MAX_WIRE`] bytes), and with no offloads except those that the
    /// port [accepts](Self::accepted_offloads). Returns false if the port could not send it; the
    /// frame is then lost.
    fn send(&mut self, wire: &[u8]) -> bool;

    /// Sends a large frame from the driver, of which only `head` was copied out and checked: the
    /// virtio header, and at least the headers up to that of the transport. `rest` is in the
    /// driver's buffers. Returns whether the port could send it; `None` if the device must call
    /// [`Self::send`] instead.
    ///
    /// This saves a copy if the kernel reads the frames. Other ports do not implement it.
    fn send_in_place(&mut self, _head: &[u8], _rest: Rest<'_>) -> Option<bool> {
        None
    }

    /// The same as [`Self::send`] for a frame of `len` bytes that is not in memory yet: the port
    /// calls `fill` with the place of the frame, and keeps the frame if `fill` returns true.
    /// Returns whether the port has kept it. If it has no place, it does not call `fill`.
    ///
    /// This saves a copy if the port stores frames. Called only if [`Self::STORES`] is set.
    fn send_with(&mut self, _len: usize, _fill: impl FnOnce(&mut [u8]) -> bool) -> bool {
        false
    }

    /// The pair at the other end of the port, into whose buffers the device may copy frames of
    /// this pair itself, if [nothing waits](Self::waits) for it. `None` if frames go elsewhere.
    #[inline(always)]
    fn peer(&self) -> Option<&PairHandle> {
        None
    }

    /// Whether frames that were sent wait for the [peer](Self::peer). Called while neither pair is
    /// in another pass. Frames must not overtake each other, so the next one goes through the port
    /// then.
    #[inline(always)]
    fn waits(&self) -> bool {
        false
    }

    /// Which offloads [`Self::send`] accepts at present, if not those of [`Self::FEATURES`]. Called
    /// only for frames with offloads.
    fn accepted_offloads(&self) -> Offloads {
        Offloads::sent(Self::FEATURES)
    }

    /// Whether [`Self::send`] can accept a frame of any length now. If not, the driver's frames
    /// wait in its ring. Only a port may return false whose frames come from the same queue, so
    /// that [`Self::consume`] makes room, or which wakes the thread, see [`Self::arm_room`].
    #[inline(always)]
    fn room(&self) -> bool {
        true
    }

    /// The same when the thread is about to sleep, and the driver's frames wait. If this returns
    /// false, the port ends the sleep when there is room.
    #[inline(always)]
    fn arm_room(&mut self) -> bool {
        self.room()
    }

    /// Reports to the port which pair it is the port of: in the first pass, and `None` and then
    /// the pair of its place if the worker has [lent](crate::device::Worker::ports) its ports. A
    /// port that wraps another one must not forward this: frames for the inner port's pair could
    /// then be copied past the wrapper, see [`Self::peer`].
    fn attach(&mut self, _pair: Option<PairHandle>) {}

    /// Reports to the port whether the queue's receive ring is served at present. Called in every
    /// pass, before any frame is delivered.
    #[inline(always)]
    fn served(&mut self, _served: bool) {}

    /// Reports to the port that the driver has accepted `features`: the offloads that frames
    /// towards it may use.
    ///
    /// # Errors
    ///
    /// The kernel refuses them.
    fn negotiated(&mut self, _features: u64) -> Result<(), PortError> {
        Ok(())
    }

    /// Drops the frames that wait towards the driver, because the front end has disconnected or
    /// another one has connected. Returns how many there were. The work is bounded, also if new
    /// frames arrive all the time. Called before any frame is delivered or sent for the next front
    /// end.
    fn drop_waiting(&mut self) -> u64 {
        0
    }

    /// Called when the thread is about to sleep. Returns whether there is a frame. If there is
    /// none, the thread sleeps until [`Self::fd`] or [`Self::backlog_fd`] is readable, and then
    /// peeks.
    fn arm(&mut self) -> bool {
        self.peek().is_some()
    }

    /// A descriptor that becomes readable when a frame arrives, and when the port fails. `None` if
    /// frames do not arrive by themselves. Only this descriptor, [`Self::backlog_fd`] and the
    /// [deadline](Self::deadline) wake a thread that sleeps.
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// A descriptor that becomes readable when another thread has put a frame into this port's
    /// backlog, after [`Self::arm`]. `None` if the port's frames come only from [`Self::fd`].
    fn backlog_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// A descriptor that becomes readable when the port fails, for a thread that sleeps and awaits
    /// no frames. `None` if [`Self::fd`] then reports priority data (`POLLPRI`) or an error, as a
    /// deleted tap does.
    fn failure(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// The time at which the port will have work without an event of its descriptor. A thread that
    /// sleeps is woken then. `receives`: the driver's receive ring is served, so that a frame
    /// towards the driver is such work.
    fn deadline(&self, _receives: bool) -> Option<Instant> {
        None
    }

    /// The error because of which no more frames arrive, if there is one.
    fn take_error(&mut self) -> Option<PortError> {
        None
    }
}
