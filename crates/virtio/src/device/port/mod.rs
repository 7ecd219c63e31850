//! What a queue pair is plugged into.
//!
//! Ports speak frames in *wire form*: the 12 bytes of a [`VnetHdr`] and right behind them the frame, so that both reach
//! a buffer in one copy. In frames towards the driver `num_buffers` is 1; the device changes it where a frame takes
//! more.

mod cross;
mod echo;
mod r#gen;
mod linked;
mod pcap;
mod reader;
mod sink;
mod steering;
mod store;
mod tap;

use std::os::fd::BorrowedFd;
use std::time::Instant;

pub use self::cross::Cross;
pub use self::echo::Echo;
pub use self::r#gen::Gen;
pub use self::linked::{LinkStats, Linked};
pub use self::pcap::{CaptureError, Pcap, Play};
pub use self::reader::Posted;
pub use self::sink::Sink;
pub use self::steering::{Steered, Steering};
pub use self::tap::{Tap, TapError};
use crate::net::{OFFLOAD_FRAME, Offloads, VnetHdr, feature};

/// The longest frame in wire form: one from segmentation offload, with a VLAN tag.
pub const MAX_WIRE: usize = VnetHdr::LEN + OFFLOAD_FRAME + 4;

/// All offloads that a device offers. Those that the port of a frame, or the driver that is to receive it, lacks are done in
/// software.
pub const ALL_OFFLOADS: u64 = feature::GUEST_OFFLOADS | feature::HOST_OFFLOADS & !feature::HOST_UFO;

/// What one queue pair receives from and sends to. Used by one thread; no method blocks.
pub trait Port: Send {
    /// Whether [`Self::send`] looks at the bytes. If not, frames from the driver are checked and counted, not copied.
    const WANTS_BYTES: bool;
    /// The offload features that the port has by itself: of [`feature::HOST_OFFLOADS`], which frames [`Self::send`] takes as
    /// they are, and of [`feature::GUEST_OFFLOADS`], which frames [`Self::peek`] may show. The device does the others in
    /// software, and offers [`ALL_OFFLOADS`] whatever is said here.
    const FEATURES: u64;
    /// Whether [`Self::read`] does anything.
    const READS: bool = false;

    /// The next frame towards the driver, in wire form, or none for now. The same one until [`Self::consume`].
    fn peek(&mut self) -> Option<&[u8]>;

    /// How many bytes of buffers to post for [`Self::read`], header included: a guess. None if a frame is to be taken from
    /// [`Self::peek`] first.
    #[inline(always)]
    fn expects(&self) -> Option<usize> {
        None
    }

    /// Reads the next frame into `posted`, if the driver accepts its offloads. Returns its header, which is not written there, and its
    /// length without the header. None: there is no frame, or [`Self::peek`] shows it; [`Self::expects`] tells which.
    ///
    /// This spares a copy where the kernel writes the frames. All other ports leave it out.
    fn read(&mut self, _accepts: Offloads, _posted: Posted<'_>) -> Option<(VnetHdr, usize)> {
        None
    }

    /// The frame that [`Self::peek`] showed was delivered, or cannot be.
    fn consume(&mut self);

    /// Takes a frame from the driver, in wire form and checked ([`Offloads::check`]; at least an Ethernet header; at
    /// most [`MAX_WIRE`] bytes), with no offloads but those that the port [takes](Self::takes). False: it could not be
    /// taken, and is lost.
    fn send(&mut self, wire: &[u8]) -> bool;

    /// Which frames [`Self::send`] takes at present, if they are not those of [`Self::FEATURES`]. Asked for frames with offloads
    /// only.
    fn takes(&self) -> Offloads {
        Offloads::sent(Self::FEATURES)
    }

    /// Whether [`Self::send`] can take a frame of any length now. If not, the driver's frames wait in its ring until
    /// [`Self::consume`] has made room: only a port whose frames come from the same queue may answer so.
    #[inline(always)]
    fn room(&self) -> bool {
        true
    }

    /// Whether the queue's ring takes frames at present: told in every pass, before any frame is asked for.
    #[inline(always)]
    fn served(&mut self, _served: bool) {}

    /// The driver has accepted `features`: which offloads frames towards it may use.
    ///
    /// # Errors
    ///
    /// Where the kernel refuses them.
    fn negotiated(&mut self, _features: u64) -> Result<(), PortError> {
        Ok(())
    }

    /// The front end has left, or another one is there now: drops the frames that wait towards the driver, and says how
    /// many there were. Bounded, also where new ones come all the time. Called before any frame is asked for or sent for
    /// the next front end.
    fn left(&mut self) -> u64 {
        0
    }

    /// The thread is about to sleep. Returns whether there is a frame. If there is none, the thread sleeps until [`Self::fd`] or
    /// [`Self::left_frames`] is readable, and then peeks.
    fn arm(&mut self) -> bool {
        self.peek().is_some()
    }

    /// What becomes readable when a frame comes, and when the port fails; none where frames do not come by themselves. A thread
    /// that sleeps is woken by this, by [`Self::left_frames`] and by its [deadline](Self::deadline), and by nothing else of the port.
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// What becomes readable when another thread leaves a frame for this port, after [`Self::arm`]; none where the port's frames come
    /// from [`Self::fd`] alone.
    fn left_frames(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// When the port has work although its descriptor stays silent: a thread that sleeps is woken by then. `receives` says whether a
    /// frame towards the driver is such work, as the driver's ring takes frames.
    fn deadline(&self, _receives: bool) -> Option<Instant> {
        None
    }

    /// Why no more frames come, if that is so.
    fn take_error(&mut self) -> Option<PortError> {
        None
    }
}

/// Why a port cannot be had, or no longer works.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PortError {
    /// A frame size out of range.
    #[error("frames of {size} bytes: {min} to {max} are possible")]
    FrameSize {
        /// The size asked for.
        size: usize,
        /// The least.
        min: usize,
        /// The most.
        max: usize,
    },
    /// A capture file that cannot be played.
    #[error("{}", path.display())]
    Capture {
        /// The file.
        path: std::path::PathBuf,
        /// What is wrong with it.
        #[source]
        source: CaptureError,
    },
    /// A tap device that cannot be had, or is gone.
    #[error("tap {name:?}")]
    Tap {
        /// The interface's name.
        name: String,
        /// Why.
        #[source]
        source: TapError,
    },
}
