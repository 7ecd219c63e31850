//! A virtio-net device in use: the driver's connection, and the memory of its queues.

use super::front_ends;
use super::rx::netmem_virtio_rx;
use super::tx::{Transmit, netmem_virtio_tx};
use crate::frag::{self, netmem_frag};
use crate::handle::{self, Kind};
use crate::options::{self, Versioned};
use crate::queues::Receive;
use crate::status::{Failure, netmem_status, status, value};
use netmem_pool::{PeerShared, PoolOptions, RegionOptions, RegionProvider, SharedPool};
use netmem_virtio::VhostUser;
use netmem_virtio::driver::{NetOptions, Offload, RxMode, VirtioNet};
use rustix::net::{SocketType, sockopt};
use std::ffi::{CStr, OsStr, c_char};
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

/// A virtio-net device that the driver is connected to.
#[derive(Debug)]
pub struct netmem_virtio_net(());

impl Kind for netmem_virtio_net {
    type Value = Net;
    const NAME: &'static str = "netmem_virtio_net";
    const NUMBER: u64 = 0x6e65_746d_656d_0010;
}

/// The device, and the pool of pages to send from.
pub(crate) struct Net {
    net: Mutex<VirtioNet>,
    pool: Option<SharedPool<PeerShared>>,
    memory: Arc<RegionProvider<PeerShared>>,
}

/// In netmem_virtio_options.mode: a frame in one fragment, up to 1518 bytes.
pub const NETMEM_VIRTIO_SMALL: u8 = 1;
/// In netmem_virtio_options.mode: a frame in as many fragments as it needs. For frames of more than
/// 1518 bytes.
pub const NETMEM_VIRTIO_MERGEABLE: u8 = 2;

/// The most queue pairs: two rings each, and vhost-user numbers 256.
const MAX_PAIRS: u16 = 127;

/// Bytes in front of each fragment of netmem_virtio_net_alloc, for the device's header.
const ROOM: usize = 64;

/// How the driver uses a device. Set `size` to sizeof(netmem_virtio_options), and the rest to zero
/// where the default will do.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct netmem_virtio_options {
    /// sizeof(netmem_virtio_options)
    pub size: usize,
    /// The path of the vhost-user socket on which the device listens. Null if there is an `fd`.
    pub socket: *const c_char,
    /// Pages to receive into, for all queues together; 0: for each queue pair, four times the ring
    /// and 512 more.
    pub pages: usize,
    /// Pages for netmem_virtio_net_alloc besides; 0: none.
    pub tx_pages: usize,
    /// A socket that is connected to the device, for a device that connects to the driver. It is
    /// duplicated: the caller closes it. Zero if there is a `socket`: descriptor 0 cannot be used.
    pub fd: i32,
    /// The longest frame in bytes, of at most 65549; 0: 1518. More than 1518 needs
    /// NETMEM_VIRTIO_MERGEABLE.
    pub max_frame: u32,
    /// Queue pairs, of at most 127; 0: 1.
    pub pairs: u16,
    /// Entries of each ring: a power of two; 0: 256.
    pub ring: u16,
    /// NETMEM_VIRTIO_SMALL, NETMEM_VIRTIO_MERGEABLE, or 0: small.
    pub mode: u8,
    /// Not zero: the memory is locked (mlock).
    pub lock: u8,
    /// Zero.
    pub reserved: [u8; 2],
    /// A driver whose memory this one uses, too: each sends what the other has received, without a
    /// copy. Its `pages` are for the queues of both, and `pages` and `lock` are 0 here. Null:
    /// memory of its own. Warning: both devices then have the memory of both drivers. Each can read
    /// and change the frames of the other.
    pub share: *const netmem_virtio_net,
}

// SAFETY: repr(C), `size` is first, integers and pointers.
unsafe impl Versioned for netmem_virtio_options {
    const NAME: &'static str = "netmem_virtio_options";
    const LEAST: usize = 56;
}

/// A path of the header.
///
/// # Safety
///
/// Null, or a string that ends with a zero byte.
pub(crate) unsafe fn path<'a>(from: *const c_char, name: &'static str) -> Result<&'a Path, Failure> {
    if from.is_null() {
        return Err(Failure::null(name));
    }
    // SAFETY: as the caller promises.
    Ok(Path::new(OsStr::from_bytes(unsafe { CStr::from_ptr(from) }.to_bytes())))
}

/// A duplicate of a socket of the caller's.
pub(crate) fn stream(fd: RawFd) -> Result<UnixStream, Failure> {
    if fd < 0 {
        return Err(Failure::Argument(format!("{fd} is no descriptor")));
    }
    // SAFETY: the caller has it open during the call; if not, the calls fail.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    match sockopt::socket_type(fd) {
        Ok(SocketType::STREAM) => Ok(UnixStream::from(fd.try_clone_to_owned().map_err(Failure::System)?)),
        Ok(_) => Err(Failure::Argument(format!("descriptor {} is no stream socket", fd.as_raw_fd()))),
        Err(error) => Err(Failure::Argument(format!("descriptor {} is no stream socket: {error}", fd.as_raw_fd()))),
    }
}

type Memory = Arc<RegionProvider<PeerShared>>;

impl netmem_virtio_options {
    /// # Safety
    ///
    /// As the header says of `share`.
    unsafe fn driver(&self) -> Result<(NetOptions, Memory), Failure> {
        if self.reserved != [0; 2] {
            return Err(Failure::Argument("netmem_virtio_options.reserved is not zero".into()));
        }
        let mode = match self.mode {
            0 | NETMEM_VIRTIO_SMALL => RxMode::Small,
            NETMEM_VIRTIO_MERGEABLE => RxMode::Mergeable,
            other => return Err(Failure::Argument(format!("netmem_virtio_options.mode is {other}"))),
        };
        let pairs = self.pairs.max(1);
        let ring = if self.ring > 0 { self.ring } else { 256 };
        // Before memory is allocated for them.
        if pairs > MAX_PAIRS {
            return Err(Failure::Argument(format!("netmem_virtio_options.pairs is {pairs}: {MAX_PAIRS} is the most")));
        }
        if !ring.is_power_of_two() {
            return Err(Failure::Argument(format!("netmem_virtio_options.ring is {ring}, no power of two")));
        }
        // Fragments have no place for what is left to the other side.
        let mut options =
            NetOptions::new(mode).offloads(Offload::None).pairs(pairs).ring_size(ring).tx_pages(self.tx_pages);
        if self.max_frame > 0 {
            options = options.max_frame(self.max_frame as usize);
        }
        let memory = if self.share.is_null() {
            let pages = if self.pages > 0 { self.pages } else { usize::from(pairs) * (4 * usize::from(ring) + 512) };
            let all = pages.saturating_add(self.tx_pages);
            RegionProvider::new(RegionOptions::new(all).lock(self.lock != 0).build::<PeerShared>()?)
        } else if self.pages > 0 || self.lock > 0 {
            return Err(Failure::Argument(
                "netmem_virtio_options.pages or lock with share: the memory is the other's".into(),
            ));
        } else {
            // SAFETY: as the caller promises.
            let other = unsafe { handle::get(self.share) }?;
            // In one domain, what the other has received is not mapped again.
            if let Some(domain) = other.lock().domain().cloned() {
                options = options.domain(move |_| domain);
            }
            other.memory.clone()
        };
        Ok((options.memory(memory.region().clone(), memory.clone()), memory))
    }
}

/// Connects the driver to a virtio-net device behind a vhost-user socket: netmem_virtio_device, the
/// command `netmem device`, DPDK, Open vSwitch. Writes as many receive and transmit queues to `rx`
/// and `tx` as `pairs` says, all of which are in use. Each may be used by a thread of its own.
/// Close `net` and all queues, in any order.
///
/// The device is another process, and has the memory of all fragments mapped as long as a queue is
/// open. Warning: it can change bytes of a received frame at any time. Copy what is checked and
/// then used, such as lengths of headers. What the device writes to its rings is checked by the
/// library.
///
/// No offload is negotiated: received frames have whole checksums and are no segments, and frames
/// that are sent need to be so.
///
/// Waits for the device, for 3 s at each message. If the device is of the same process, another
/// thread runs it.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE (share), NETMEM_ERR_ARGUMENT
/// (mode, ring, pairs, max_frame, fd, pages, lock), NETMEM_ERR_NOT_FOUND (no process listens, or
/// the device has fewer queue pairs), NETMEM_ERR_BUSY (the device refuses another front end),
/// NETMEM_ERR_UNSUPPORTED (the device lacks a feature), NETMEM_ERR_NO_MEMORY, NETMEM_ERR_NO_PAGES
/// (`tx_pages`), NETMEM_ERR_PRIVILEGE, NETMEM_ERR_SYSTEM (the device does not answer, or not as a
/// device does; also after 3 s if it serves one front end after another, as
/// netmem_virtio_device_listen does, and has one). Nothing is open then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_virtio_connect(
    options: *const netmem_virtio_options,
    net: *mut *mut netmem_virtio_net,
    rx: *mut *mut netmem_virtio_rx,
    tx: *mut *mut netmem_virtio_tx,
) -> netmem_status {
    status(|| {
        let net_out = NonNull::new(net).ok_or_else(|| Failure::null("net"))?;
        let rx_out = NonNull::new(rx).ok_or_else(|| Failure::null("rx"))?;
        let tx_out = NonNull::new(tx).ok_or_else(|| Failure::null("tx"))?;
        // SAFETY: as the header says.
        let given = unsafe { options::read(options) }?;
        if given.fd != 0 && !given.socket.is_null() {
            return Err(Failure::Argument("netmem_virtio_options.socket and fd: the device is behind one".into()));
        }
        // SAFETY: as the header says.
        let (options, memory) = unsafe { given.driver() }?;
        let backend = if given.fd == 0 {
            // SAFETY: as the header says.
            VhostUser::connect(unsafe { path(given.socket, "socket") }?)?
        } else {
            VhostUser::from_stream(stream(given.fd)?)?
        };
        let (net, pairs) = VirtioNet::probe(backend, options)?;
        let pool = (given.tx_pages > 0).then(|| net.tx_pool(PoolOptions::new("c"))).transpose()?;
        for (i, pair) in pairs.into_iter().enumerate() {
            // SAFETY: the caller has room for as many pointers as there are pairs.
            unsafe {
                rx_out.add(i).write(handle::create(Receive::new(memory.region().clone(), pair.rx)));
                tx_out.add(i).write(handle::create(Transmit::new(pair.tx, memory.region().clone())));
            }
        }
        // SAFETY: the caller has room for a pointer there.
        unsafe { net_out.write(handle::create(Net { net: Mutex::new(net), pool, memory })) };
        Ok(())
    })
}

impl Net {
    fn lock(&self) -> std::sync::MutexGuard<'_, VirtioNet> {
        front_ends::lock(&self.net)
    }
}

/// Allocates up to `n` pages to send from, of `tx_pages`, and returns how many: fewer only if there
/// are no more. A fragment is a page but its first 64 bytes, where the header for the device will
/// be: truncate it to the frame. Its bytes are what the last user left. Any thread, several at a
/// time. Returns 0 with a text for misuse, and if there are no `tx_pages`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_virtio_net_alloc(
    net: *const netmem_virtio_net,
    frags: *mut netmem_frag,
    n: usize,
) -> usize {
    value(|| {
        // SAFETY: as the header says.
        let (net, out) = unsafe { (handle::get(net)?, frag::room(frags, n)?) };
        let pool = net.pool.as_ref().ok_or_else(|| Failure::Argument("netmem_virtio_options.tx_pages was 0".into()))?;
        let mut done = 0;
        for room in out {
            let Some(page) = pool.alloc() else { break };
            let mut frag = page.freeze();
            frag.advance(ROOM);
            room.write(netmem_frag::of(frag));
            done += 1;
        }
        Ok(done)
    })
    .unwrap_or(0)
}

/// Whether the device still has its end of the connection. False for misuse. A system call. Waits
/// while another thread reconnects or closes a queue: for a device that does not answer, 3 s at
/// each message.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_virtio_net_is_connected(net: *const netmem_virtio_net) -> bool {
    // SAFETY: as the header says.
    value(|| Ok(unsafe { handle::get(net) }?.lock().is_connected())).unwrap_or(false)
}

/// Connects the queues to another device, which listens on `socket`, when the first has gone:
/// NETMEM_ERR_STOPPED. The queues stay on their threads, and go on with their next call. Frames
/// that were not received, or not confirmed as sent, are lost, and counted. End the process of the
/// first device before: it may still write to pages that it had. Waits as netmem_virtio_connect
/// does. Any thread.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, and those of netmem_virtio_connect. The queues are
/// as they were then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_virtio_net_reconnect(
    net: *const netmem_virtio_net,
    socket: *const c_char,
) -> netmem_status {
    status(|| {
        // SAFETY: as the header says.
        let (net, socket) = unsafe { (handle::get(net)?, path(socket, "socket")?) };
        Ok(net.lock().reconnect(VhostUser::connect(socket)?)?)
    })
}

/// Gives up the handle. The queues stay open, and the connection is closed with the last of them.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_virtio_net_close(net: *mut netmem_virtio_net) -> netmem_status {
    // SAFETY: as the header says.
    status(|| unsafe { handle::close(net) }.map(drop))
}
