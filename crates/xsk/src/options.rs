//! The options of a UMEM and of a queue.

use crate::device_info::DeviceInfo;
use crate::watch::Watch;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// The options of a [`Umem`](crate::Umem). Start with [`UmemOptions::new`].
#[derive(Clone, Debug, Default)]
pub struct UmemOptions {
    pub(crate) chunk: Option<usize>,
    pub(crate) headroom: u32,
    pub(crate) tx_metadata: bool,
    pub(crate) software_checksums: bool,
}

impl UmemOptions {
    /// The defaults: chunks of a page, or of 4096 bytes if pages are larger, and no headroom
    /// besides the kernel's 256 bytes.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Bytes in a chunk, into which the kernel writes one frame or a part of one: 2048 or 4096.
    /// Several chunks can share a page. The kernel supports no larger chunks. A longer frame is in
    /// several chunks.
    #[must_use]
    pub fn chunk(mut self, bytes: usize) -> Self {
        self.chunk = Some(bytes);
        self
    }

    /// Bytes that are left free in front of each received frame, for headers that the program adds.
    /// The kernel always leaves 256 more bytes in front of them, into which a frame can also be
    /// extended.
    #[must_use]
    pub fn headroom(mut self, bytes: u16) -> Self {
        self.headroom = u32::from(bytes).next_multiple_of(64);
        self
    }

    /// Whether frames are sent with metadata (Linux 6.11): requests for checksums that the device
    /// computes, for launch times, and for timestamps of the transmission. The metadata occupies 24
    /// bytes in front of the frame, in the frame's own page.
    #[must_use]
    pub fn tx_metadata(mut self, metadata: bool) -> Self {
        self.tx_metadata = metadata;
        self
    }

    /// Whether the kernel computes the checksums that [metadata](Self::tx_metadata) requests on the
    /// CPU, in copy mode. This is for tests: [`SoftwareTx`](netmem_packet::SoftwareTx) does the
    /// same without a system call.
    #[must_use]
    pub fn software_checksums(mut self, software: bool) -> Self {
        self.software_checksums = software;
        self
    }
}

/// How frames are transferred between the kernel and the UMEM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The kernel copies each frame. Works on every interface.
    Copy,
    /// The device reads and writes the UMEM. This needs support by the driver.
    ZeroCopy,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Copy => "copy",
            Self::ZeroCopy => "zero-copy",
        })
    }
}

/// Busy polling: the driver's receive and transmit work is done in the system calls of the thread
/// that polls the queue, instead of in interrupts. It needs Linux 5.11 and CAP_NET_ADMIN.
///
/// The socket gets the option to prefer busy polling. To avoid interrupts, the interface must also
/// defer them: `napi_defer_hard_irqs` (the number of empty polls) and `gro_flush_timeout`
/// (nanoseconds until the driver polls by itself) in `/sys/class/net/IFACE/`.
/// [`defer_interrupts`](crate::defer_interrupts) writes both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BusyPoll {
    /// The longest time that a call polls, in microseconds; not 0. A call that does not wait, as
    /// those of this crate, polls once.
    pub microseconds: u32,
    /// The largest number of frames that a call handles. More than 64 also needs CAP_NET_ADMIN.
    pub budget: u16,
}

impl Default for BusyPoll {
    fn default() -> Self {
        Self { microseconds: 20, budget: 64 }
    }
}

/// The options of a socket and its two queues. Start with [`QueueOptions::new`].
#[derive(Debug)]
pub struct QueueOptions {
    pub(crate) name: Option<String>,
    pub(crate) rx: u32,
    pub(crate) tx: u32,
    pub(crate) fill: Option<u32>,
    pub(crate) cache: usize,
    pub(crate) mode: Option<Mode>,
    pub(crate) need_wakeup: bool,
    pub(crate) multi_buffer: Option<bool>,
    pub(crate) busy_poll: Option<BusyPoll>,
    pub(crate) quirks: bool,
    /// Whether no chunks are posted, which requires copy mode: see
    /// [`Umem::open_tx`](crate::Umem::open_tx).
    pub(crate) transmit_only: bool,
    pub(crate) socket: Option<OwnedFd>,
    /// The properties of the device, if a helper has sent them.
    pub(crate) device: Option<DeviceInfo>,
    /// Reports the end of the interface, if a helper has sent it.
    pub(crate) watch: Option<Arc<Watch>>,
}

impl Default for QueueOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl QueueOptions {
    /// The defaults: RX and TX rings of 2048 entries, need-wakeup, and the best mode of the driver,
    /// with frames of several buffers where that mode has them or frames need them.
    #[must_use]
    pub fn new() -> Self {
        Self {
            name: None,
            rx: 2048,
            tx: 2048,
            fill: None,
            cache: 512,
            mode: None,
            need_wakeup: true,
            multi_buffer: None,
            busy_poll: None,
            quirks: true,
            transmit_only: false,
            socket: None,
            device: None,
            watch: None,
        }
    }

    /// The name of the receive queue's pool in reports. The default is the interface's name and the
    /// queue's number.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Entries of the RX ring, which holds received frames until the program polls. A power of two.
    #[must_use]
    pub fn rx_ring(mut self, entries: u32) -> Self {
        self.rx = entries;
        self
    }

    /// Entries of the TX ring and of the completion ring: a power of two. This is also the largest
    /// number of descriptors that are out.
    #[must_use]
    pub fn tx_ring(mut self, entries: u32) -> Self {
        self.tx = entries;
        self
    }

    /// The number of chunks that the kernel has to receive into at any time, if there are pages.
    /// The default is 1024. The least value is the size of the device's receive ring and a quarter
    /// more: a device whose ring is not full drops frames, and some devices then do not even send.
    /// With more chunks, longer bursts are received. With fewer chunks, more of them stay in the
    /// CPU's cache.
    #[must_use]
    pub fn fill(mut self, chunks: u32) -> Self {
        self.fill = Some(chunks);
        self
    }

    /// Pages in the array cache of the receive queue's pool.
    #[must_use]
    pub fn cache(mut self, pages: usize) -> Self {
        self.cache = pages;
        self
    }

    /// Requires a mode. Without this option the kernel uses zero-copy if the driver supports it,
    /// unless a [known quirk](crate::quirks) requires copy mode. All sockets of a UMEM have the
    /// mode of the first one: if the first one has another mode, opening is an error
    /// ([`XskError::Mode`](crate::XskError::Mode)).
    #[must_use]
    pub fn mode(mut self, mode: Mode) -> Self {
        self.mode = Some(mode);
        self
    }

    /// The mode that a socket with these options must have.
    pub(crate) fn required_mode(&self) -> Option<Mode> {
        self.mode.or(self.transmit_only.then_some(Mode::Copy))
    }

    /// Whether the kernel reports when it needs a wake-up (the default), so that no system call is
    /// made while the driver is working. Without this option each flush is a system call, and a
    /// driver in zero-copy mode polls for new chunks by itself.
    #[must_use]
    pub fn need_wakeup(mut self, need_wakeup: bool) -> Self {
        self.need_wakeup = need_wakeup;
        self
    }

    /// Whether a frame may be in several buffers (Linux 6.6). Frames that are longer than a chunk,
    /// and packets of several fragments, need it. In zero-copy mode the driver must support it; if
    /// a driver does not, copy mode is used ([`CopyReason::Fragments`](crate::CopyReason)).
    ///
    /// Without this option the interface decides when the socket is bound: frames may be in several
    /// buffers, unless the driver has zero-copy for frames of one buffer only and a frame of the
    /// MTU fits into a chunk, or the kernel does not know such frames.
    #[must_use]
    pub fn multi_buffer(mut self, multi_buffer: bool) -> Self {
        self.multi_buffer = Some(multi_buffer);
        self
    }

    /// Busy polling: the thread that polls the queue runs the driver.
    #[must_use]
    pub fn busy_poll(mut self, busy_poll: BusyPoll) -> Self {
        self.busy_poll = Some(busy_poll);
        self
    }

    /// Ignores the [known](crate::quirks) quirks of the driver: the options are those for a driver
    /// without quirks. The warnings are still logged.
    #[must_use]
    pub fn ignore_quirks(mut self) -> Self {
        self.quirks = false;
        self
    }

    /// Uses an AF_XDP socket that was made elsewhere: by a privileged helper, for a process that
    /// may not make one. It must not be bound, and must have neither UMEM nor rings. The helper
    /// sets the options that need privileges: busy polling, and a large send buffer
    /// (`SO_SNDBUFFORCE`).
    ///
    /// If the socket is of another network namespace than the calling thread, the size of the
    /// driver's ring cannot be read. In this case set [`fill`](Self::fill).
    /// [`Grant`](crate::helper::Grant) passes the size with the socket.
    #[must_use]
    pub fn socket(mut self, socket: OwnedFd) -> Self {
        self.socket = Some(socket);
        self
    }
}
