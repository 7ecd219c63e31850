//! The virtio-net device of C: a back end of vhost-user, for virtual machines and other drivers.

use super::device_options::netmem_virtio_device_options;
use super::front_ends::FrontEnds;
use super::net::{path, stream};
use super::port::{Exchange, FragPort, MOST, Outgoing};
use crate::frag::{self, netmem_frag};
use crate::groups;
use crate::handle::{self, Kind};
use crate::options::{self, Versioned};
use crate::owned::{self, Owned};
use crate::queues;
use crate::region::{Kept, netmem_region};
use crate::status::{Failure, netmem_status, status, value};
use netmem_packet::Armed;
use netmem_pool::{PoolOptions, RegionProvider};
use netmem_virtio::device::port::PortError;
use netmem_virtio::device::{DropReason, NetDevice, Options, Stats};
use rustix::event::epoll;
use std::ffi::c_char;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// A virtio-net device of one queue pair, for one guest at a time.
#[derive(Debug)]
pub struct netmem_virtio_device(());

impl Kind for netmem_virtio_device {
    type Value = Device;
    const NAME: &'static str = "netmem_virtio_device";
    const NUMBER: u64 = 0x6e65_746d_656d_0013;
}

impl Owned for netmem_virtio_device {}

pub(crate) struct Device {
    // Dropped first: its threads use the others.
    front_ends: FrontEnds,
    stats: Arc<Stats>,
    device: Unique<NetDevice<FragPort>>,
    exchange: Exchange,
    provider: Arc<RegionProvider<Kept>>,
    /// An epoll descriptor of the device's two.
    wait_set: OwnedFd,
    /// Frames for the guest that were dropped because none was served.
    no_guest: u64,
    /// Frames of the guest that were dropped because they have several fragments.
    not_linear: u64,
}

/// A value that is reached by unique references alone, so that what has it can be shared.
struct Unique<T>(T);

// SAFETY: a shared reference reaches nothing.
unsafe impl<T: Send> Sync for Unique<T> {}

impl<T> Unique<T> {
    fn get(&mut self) -> &mut T {
        &mut self.0
    }
}

// A handle is made on one thread, and used by another. Threads that make a device listen and serve
// may be several at a time.
const _: () = {
    const fn sent<T: Send>() {}
    const fn shared<T: Sync>() {}
    shared::<Device>();
    shared::<super::net::Net>();
    sent::<Device>();
    sent::<crate::queues::Receive<netmem_virtio::driver::VirtioRx>>();
    sent::<super::tx::Transmit>();
    sent::<super::net::Net>();
};

/// What a device moved and lost. Set `size` to sizeof(netmem_virtio_device_stats). "Sent" and
/// "received" are meant from this side: a received frame is from the guest.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct netmem_virtio_device_stats {
    /// sizeof(netmem_virtio_device_stats)
    pub size: usize,
    /// frames received, also those that wait for the caller; large ones after they were cut
    pub received: u64,
    /// bytes in them
    pub received_bytes: u64,
    /// frames delivered to the guest
    pub sent: u64,
    /// bytes in them
    pub sent_bytes: u64,
    /// frames from the guest dropped because the region had no page; large ones after they were cut
    pub no_page: u64,
    /// frames from the guest dropped because they have several fragments, and the caller no flags
    pub not_linear: u64,
    /// frames from the guest dropped because they are shorter than an Ethernet header
    pub runts: u64,
    /// frames from the guest dropped because they are longer than any
    pub too_long: u64,
    /// frames from the guest dropped because their header is invalid
    pub bad_header: u64,
    /// frames from the guest dropped because their header has an offload that was not negotiated
    pub not_negotiated: u64,
    /// frames from the guest dropped for another reason: on a ring that was disabled, or of a kind
    /// that the device cannot cut
    pub refused: u64,
    /// frames for the guest dropped because its receive ring was not served
    pub no_guest: u64,
    /// frames for the guest dropped because it left
    pub guest_left: u64,
    /// frames for the guest dropped because they do not fit its buffers
    pub too_big: u64,
    /// times that there was a frame for the guest, and it had no buffer
    pub out_of_buffers: u64,
    /// rings that were stopped because the guest has broken a rule
    pub faults: u64,
    /// connections that ended in an error
    pub connection_errors: u64,
    /// accesses that found that a page of the guest's memory was gone; with netmem_sigbus_install
    pub memory_lost: u64,
}

// SAFETY: repr(C), `size` is first, integers.
unsafe impl Versioned for netmem_virtio_device_stats {
    const NAME: &'static str = "netmem_virtio_device_stats";
    const LEAST: usize = 152;
}

impl Device {
    /// A device that receives into pages of the region.
    fn new(provider: &Arc<RegionProvider<Kept>>, options: Options) -> Result<Self, Failure> {
        let exchange = Exchange::default();
        let pool = PoolOptions::new("c").build_shared(provider.clone(), None)?;
        let mut port = Some(FragPort::new(exchange.clone(), pool, provider.region().page_size()));
        // It has one pair.
        let device = NetDevice::new(options, |_| port.take().ok_or_else(|| PortError::Other("no port".into())))?;
        Ok(Self {
            front_ends: FrontEnds::new(device.control()),
            stats: device.stats(),
            wait_set: wait_set(&device).map_err(Failure::System)?,
            device: Unique(device),
            exchange,
            provider: provider.clone(),
            no_guest: 0,
            not_linear: 0,
        })
    }

    /// Ends the threads of front ends. Frames that wait for the guest are counted as it leaves.
    fn hang_up(&mut self) {
        self.front_ends = FrontEnds::new(self.device.get().control());
        self.device.get().poll();
    }

    fn counts(&self) -> netmem_virtio_device_stats {
        let stats = &self.stats;
        let (received, received_bytes, no_page, refused) = {
            let frames = self.exchange.lock();
            (frames.stored, frames.stored_bytes, frames.no_page, frames.refused)
        };
        netmem_virtio_device_stats {
            size: size_of::<netmem_virtio_device_stats>(),
            received,
            received_bytes,
            sent: stats.rx_frames.load(Relaxed),
            sent_bytes: stats.rx_bytes.load(Relaxed),
            no_page,
            not_linear: self.not_linear,
            runts: stats.dropped(DropReason::Runt),
            too_long: stats.dropped(DropReason::TooLong),
            bad_header: stats.dropped(DropReason::BadHeader),
            not_negotiated: stats.dropped(DropReason::NotNegotiated),
            refused: refused + stats.dropped(DropReason::Disabled) + stats.dropped(DropReason::CopyFailed),
            no_guest: self.no_guest,
            guest_left: stats.dropped(DropReason::FrontEndLeft),
            too_big: stats.dropped(DropReason::TooBig) + stats.dropped(DropReason::Uncut),
            out_of_buffers: stats.out_of_buffers.load(Relaxed),
            faults: stats.queue_errors().map(|(_, n)| n).sum(),
            connection_errors: stats.connection_errors.load(Relaxed),
            memory_lost: stats.memory_lost.load(Relaxed),
        }
    }

    /// Queues frames for the guest. What was copied is still in the variables: its release can call
    /// a function of the program, which may use the device.
    ///
    /// # Safety
    ///
    /// Fragments of the header.
    unsafe fn send(
        &mut self,
        frags: &mut [netmem_frag],
        flags: Option<&[u8]>,
        done: &mut usize,
    ) -> Result<(), Failure> {
        let Self { exchange, provider, no_guest, .. } = self;
        let mut frames = exchange.lock();
        while *done < frags.len() && frames.outgoing.len() < MOST {
            let len = groups::length(flags, *done)?;
            let frame = &mut frags[*done..*done + len];
            if frame.iter().any(netmem_frag::is_empty) {
                return Err(Failure::empty());
            }
            if !Outgoing::fits(frame) {
                return Err(Failure::Unsendable(groups::LENGTH));
            }
            match frames.served {
                // SAFETY: as the caller promises.
                true => frames.outgoing.push_back(unsafe { Outgoing::of(frame, provider.region()) }),
                false => *no_guest += 1,
            }
            *done += len;
        }
        Ok(())
    }
}

fn wait_set(device: &NetDevice<FragPort>) -> std::io::Result<OwnedFd> {
    let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    for (n, fd) in device.wait_fds().into_iter().enumerate() {
        epoll::add(&set, fd, epoll::EventData::new_u64(n as u64), epoll::EventFlags::IN)?;
    }
    Ok(set)
}

/// Makes a device. Frames of the guest are received into pages of `region`, whose handle may be
/// closed. It serves no guest yet: see netmem_virtio_device_listen.
///
/// The region needs the pages that the caller holds, and in each direction those of frames that
/// wait. Frames of the guest hold up to 256 pages, and those of one frame more: at most 256 parts,
/// if it is cut, or 17 pages of 4 KiB. The rest waits in the guest's ring. Up to 256 frames wait
/// for the guest, each in one page of the region at most.
///
/// The guest and its front end (the virtual machine monitor) are not trusted. What they write to
/// rings and headers is checked, a guest that breaks a rule stops its ring alone, and frames are
/// copied before anything reads them.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_ARGUMENT (mtu),
/// NETMEM_ERR_NO_MEMORY, NETMEM_ERR_SYSTEM (too few descriptors).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_virtio_device_create(
    region: *const netmem_region,
    options: *const netmem_virtio_device_options,
    device: *mut *mut netmem_virtio_device,
) -> netmem_status {
    status(|| {
        let out = NonNull::new(device).ok_or_else(|| Failure::null("device"))?;
        // SAFETY: as the header says.
        let (provider, given) = unsafe { (handle::get(region)?, options::read(options)?) };
        let made = Device::new(provider, given.device()?)?;
        // SAFETY: the caller has room for a pointer there.
        unsafe { out.write(handle::create(made)) };
        Ok(())
    })
}

/// Listens on a vhost-user socket, and serves one front end after another, by a thread of the
/// library, until the device is closed. That thread carries out their messages; frames are moved by
/// the calls of the caller's thread. A socket that no process listens on is replaced. Once for a
/// device.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_STATE (it listens
/// already), NETMEM_ERR_BUSY (another process listens there, or a file that is no socket has the
/// path), NETMEM_ERR_NOT_FOUND, NETMEM_ERR_PRIVILEGE, NETMEM_ERR_SYSTEM.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_virtio_device_listen(
    device: *const netmem_virtio_device,
    socket: *const c_char,
) -> netmem_status {
    status(|| {
        // SAFETY: as the header says.
        let (device, socket) = unsafe { (owned::peek(device)?, path(socket, "socket")?) };
        device.front_ends.listen(socket)
    })
}

/// Serves the front end at the other end of `fd`, a connected socket, by a thread of the library,
/// until it hangs up. For a front end that listens, and for sockets that the caller has accepted.
/// `fd` is duplicated: the caller closes it. If the device listens, too, those that connect to its
/// socket meanwhile wait.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_ARGUMENT (`fd` is no
/// stream socket), NETMEM_ERR_BUSY (another front end is connected, or has hung up a moment ago:
/// the device's descriptor is readable when the next can be served), NETMEM_ERR_SYSTEM.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_virtio_device_serve(device: *const netmem_virtio_device, fd: i32) -> netmem_status {
    status(|| {
        // SAFETY: as the header says.
        unsafe { owned::peek(device) }?.front_ends.serve(stream(fd)?)
    })
}

/// Why a front end was dropped, if one was since the last call: NETMEM_ERR_SYSTEM, with the reason
/// as the text; else NETMEM_OK. Each reason is told once; of several, the last. It is no error if a
/// front end hangs up. The device's descriptor is readable after a reason was stored, so that a
/// thread which calls this after each sleep is told each.
///
/// Errors besides: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_PANIC.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_virtio_device_check(device: *const netmem_virtio_device) -> netmem_status {
    status(|| {
        // SAFETY: as the header says.
        unsafe { owned::peek(device) }?.front_ends.check()
    })
}

/// A pass over the device's rings: delivers frames of netmem_virtio_device_send to the guest, and
/// receives up to `n` fragments of frames of the guest. It does not wait. `received` gets how many
/// fragments; 0 if there is no frame. The caller owns them. The variables are not read: what they
/// hold is to be released before.
///
/// The rules of `flags` are those of netmem_xsk_rx_receive, but that a frame which does not fit one
/// page of the region is dropped without flags, and counted. Frames have whole checksums, and are
/// no segments. Those that are longer than a page are rare: a guest with an MTU of more.
///
/// Two copies of each frame: out of the guest's memory, and into the page. No system call, unless
/// the guest waits for an interrupt.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_ARGUMENT (`n` is too
/// small for `flags`).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_virtio_device_receive(
    device: *mut netmem_virtio_device,
    frags: *mut netmem_frag,
    flags: *mut u8,
    n: usize,
    received: *mut usize,
) -> netmem_status {
    status(|| {
        let count = NonNull::new(received).ok_or_else(|| Failure::null("received"))?;
        // SAFETY: as the header says.
        let device = unsafe { owned::get_mut(device) }?;
        device.device.get().poll();
        let handed = {
            let mut frames = device.exchange.lock();
            // SAFETY: as the header says.
            let handed = unsafe { groups::hand_out(&mut frames.received, frags, flags, n) }?;
            frames.pages -= handed.pages;
            handed
        };
        device.not_linear += handed.dropped;
        // SAFETY: the caller has room for a number there.
        unsafe { count.write(handed.frags) };
        Ok(())
    })
}

/// Queues `n` fragments, of any memory, as frames for the guest, of 14 to 65553 bytes each. The
/// next netmem_virtio_device_receive delivers them. `sent`, which is always written, gets how many
/// were queued: whole frames, in order. Their variables are empty. The other fragments stay with
/// the caller. With NETMEM_OK they are fewer than `n` if 256 frames wait:
/// netmem_virtio_device_receive delivers them, then send the rest. If the guest posts no buffers,
/// send it later or release it. With an error, the first of them is of the frame that caused it.
///
/// Without `flags` (null) each fragment is a frame. With `flags`, NETMEM_FRAG_MORE in the flags of
/// a fragment says that the frame goes on in the next one. Frames have whole checksums.
///
/// While no guest is there whose receive ring is served, frames are dropped and counted, as on a
/// link without a partner.
///
/// A frame of one fragment of the device's region, with 12 bytes in front of it and no other
/// holder, is copied once, into the guest's buffers; another one twice. Fragments that
/// netmem_virtio_device_receive returned are so.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_ARGUMENT (an empty
/// fragment, wrong flags), NETMEM_ERR_UNSENDABLE (length).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_virtio_device_send(
    device: *mut netmem_virtio_device,
    frags: *mut netmem_frag,
    flags: *const u8,
    n: usize,
    sent: *mut usize,
) -> netmem_status {
    let each = |done: &mut usize| {
        // SAFETY: as the header says.
        let device = unsafe { owned::get_mut(device) }?;
        if n == 0 {
            return Ok(());
        }
        // SAFETY: as the header says.
        let (frags, flags) = unsafe { groups::arrays(frags, flags, n) }?;
        // SAFETY: as the header says.
        unsafe { device.send(frags, flags, done) }
    };
    status(|| {
        let mut copied = 0;
        let counting = |done: &mut usize| {
            let outcome = each(done);
            copied = *done;
            outcome
        };
        // SAFETY: as the header says. The device is not borrowed when fragments are released.
        unsafe {
            let outcome = queues::counted(sent, counting);
            frag::release_all(frags, copied);
            outcome
        }
    })
}

/// The descriptor on which to wait for work, with poll, select or epoll, for POLLIN: readable after
/// netmem_virtio_device_arm when the guest has sent frames, or has posted buffers for those that
/// wait, and when a front end comes, goes, or changes something. It is the device's, and the same
/// until it is closed. Never read, write or close it. -1 with a text for misuse.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_virtio_device_fd(device: *const netmem_virtio_device) -> i32 {
    // SAFETY: as the header says.
    value(|| Ok(unsafe { owned::peek(device) }?.wait_set.as_raw_fd())).unwrap_or(-1)
}

/// Makes a pass over the rings, asks the guest for notifications, and writes to `waits` whether to
/// sleep: false if there is work already. A thread that was woken calls
/// netmem_virtio_device_disarm and netmem_virtio_device_receive.
///
/// Note: a front end that shares no kick descriptor for a ring sends no notifications. While it is
/// served, `waits` is false. A program that must not spin for such a guest sleeps for a time.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_virtio_device_arm(
    device: *mut netmem_virtio_device,
    waits: *mut bool,
) -> netmem_status {
    status(|| {
        let out = NonNull::new(waits).ok_or_else(|| Failure::null("waits"))?;
        // SAFETY: as the header says.
        let device = unsafe { owned::get_mut(device) }?;
        let idle = device.device.get().poll() == 0 && device.exchange.lock().received.is_empty();
        let waits = idle && device.device.get().arm() == Armed::Waits;
        // SAFETY: the caller has room for it there.
        unsafe { out.write(waits) };
        Ok(())
    })
}

/// Forgets the events until now, so that the descriptor is readable again with the next. Two system
/// calls. Misuse leaves a text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_virtio_device_disarm(device: *mut netmem_virtio_device) {
    status(|| {
        // SAFETY: as the header says.
        unsafe { owned::get_mut(device) }?.device.get().disarm();
        Ok(())
    });
}

/// Counts of the device, for all its guests together.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_virtio_device_get_stats(
    device: *mut netmem_virtio_device,
    stats: *mut netmem_virtio_device_stats,
) -> netmem_status {
    status(|| {
        // SAFETY: as the header says.
        let device = unsafe { owned::get_mut(device) }?;
        // SAFETY: as the header says.
        unsafe { options::write(stats, &device.counts()) }
    })
}

/// Closes the device: hangs up, and waits for the library's threads of it. Frames that wait in
/// either direction are dropped. The socket's path is removed. Fragments that the caller holds stay
/// valid. `stats` gets the final counts, unless it is null. If it has a wrong size, the device
/// stays.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_virtio_device_close(
    device: *mut netmem_virtio_device,
    stats: *mut netmem_virtio_device_stats,
) -> netmem_status {
    let end = |mut device: Device| {
        device.hang_up();
        device.counts()
    };
    // SAFETY: as the header says.
    status(|| unsafe { owned::close_counted(device, stats, end) })
}

/// Installs a handler of SIGBUS for the process, once. A front end that shortens its memory then
/// stops its rings; without the handler, or netmem_virtio_device_options.require_sealed, the
/// process ends. Other faults get the action that was there before. A program that sets its own
/// handler later calls, for other faults, the one that sigaction returned to it.
///
/// Errors: NETMEM_ERR_SYSTEM.
#[unsafe(no_mangle)]
pub extern "C" fn netmem_sigbus_install() -> netmem_status {
    status(|| netmem_pool::sigbus::install().map_err(Failure::System))
}

#[cfg(test)]
mod tests {
    use super::*;
    use netmem_packet::{Checksum, Gso, GsoKind, Meta, Packet, TxQueue};
    use netmem_pool::RegionOptions;
    use netmem_testing::driver::tcp::tcp;
    use netmem_virtio::driver::{NetOptions, Offload, RxMode};

    /// Frames that were cut, some of whose parts have no page, and one that cannot be cut: each
    /// counts under its cause.
    #[test]
    fn refused_frames_are_no_lack_of_pages() {
        let region = RegionOptions::new(3).build::<Kept>().expect("a region");
        let mut device = Device::new(&RegionProvider::new(region), Options::default()).expect("a device");
        let options = NetOptions::new(RxMode::Small).offloads(Offload::All).tx_pages(16);
        let mut driver = device.device.get().control().connect(options).expect("a driver");
        let pool = driver.net.tx_pool(PoolOptions::new("guest")).expect("a pool");
        let frame = tcp(false, 1, 0, &[], &[7; 1000]);
        let headers = (frame.len() - 1000) as u16;
        // The second is no frame of IPv6.
        for kind in [GsoKind::TcpV4, GsoKind::TcpV6] {
            let mut page = pool.alloc().expect("a page");
            page.copy_from(64, &frame).expect("room");
            let mut packet = Packet::new(page.freeze_range(64..64 + frame.len()));
            let gso = Some(Gso { kind, size: 200, headers, ecn: false });
            packet.meta = Meta { checksum: Checksum::Partial { start: 34, offset: 16 }, gso };
            driver.pairs[0].tx.send(packet).expect("room");
        }
        driver.pairs[0].tx.flush();
        while device.device.get().poll() > 0 {}
        let counts = device.counts();
        assert_eq!((counts.received, counts.no_page, counts.refused), (3, 2, 1));
        let bytes = 3 * (u64::from(headers) + 200);
        assert_eq!((counts.received_bytes, counts.bad_header, counts.not_negotiated), (bytes, 0, 0));
    }

    /// The sum of a header or segment with its checksum: all ones.
    fn sum(parts: &[&[u8]]) -> u16 {
        let words = parts.iter().flat_map(|part| part.chunks(2)).map(|word| match *word {
            [high, low] => u16::from_be_bytes([high, low]),
            _ => u16::from(word[0]) << 8,
        });
        let sum: u32 = words.map(u32::from).sum();
        let folded = (sum >> 16) + (sum & 0xffff);
        ((folded >> 16) + folded) as u16
    }

    /// A segment that a guest left to be cut: each part has its length, its place in the stream and
    /// whole checksums.
    #[test]
    fn segments_of_a_guest_are_whole() {
        let region = RegionOptions::new(8).build::<Kept>().expect("a region");
        let mut device = Device::new(&RegionProvider::new(region), Options::default()).expect("a device");
        let options = NetOptions::new(RxMode::Small).offloads(Offload::All).tx_pages(1);
        let mut driver = device.device.get().control().connect(options).expect("a driver");
        let payload: Vec<u8> = (0..3500_u32).map(|n| n as u8).collect();
        let frame = tcp(false, 1, 7, &[], &payload);
        let headers = frame.len() - payload.len();
        let mut page = driver.net.tx_pool(PoolOptions::new("guest")).expect("a pool").alloc().expect("a page");
        page.copy_from(64, &frame).expect("room");
        let mut packet = Packet::new(page.freeze_range(64..64 + frame.len()));
        let gso = Some(Gso { kind: GsoKind::TcpV4, size: 1000, headers: headers as u16, ecn: false });
        packet.meta = Meta { checksum: Checksum::Partial { start: 34, offset: 16 }, gso };
        driver.pairs[0].tx.send(packet).expect("room");
        driver.pairs[0].tx.flush();
        device.device.get().poll();
        let frames = device.exchange.lock();
        assert_eq!(frames.received.len(), 4);
        for (part, bytes) in frames.received.iter().zip(payload.chunks(1000)) {
            let part = part.head().as_slice();
            let (ip, tcp) = (&part[14..34], &part[34..]);
            assert_eq!(&part[headers..], bytes);
            assert_eq!(usize::from(u16::from_be_bytes([ip[2], ip[3]])), part.len() - 14);
            let place = bytes.as_ptr().addr() - payload.as_ptr().addr();
            assert_eq!(tcp[4..8], (7 + place as u32).to_be_bytes());
            let length = (tcp.len() as u16).to_be_bytes();
            assert_eq!((sum(&[ip]), sum(&[&ip[12..20], &[0, 6], &length, tcp])), (0xffff, 0xffff));
        }
    }
}
