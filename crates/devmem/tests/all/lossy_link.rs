//! A link that loses frames, between the kernel's tap and the tap of another program.
//!
//! ```text
//!   kernel's TCP ◄──► tap `near` ◄── thread ──► packet socket on `far` ◄──► the other program
//! ```
//!
//! Of each 64 segments with payload in a direction, four are lost, with one segment between each
//! two of them. The receiver then has up to four gaps. Its acknowledgements report as many of them
//! as there is room for beside timestamps. These are three, and make 40 bytes of options.

use netmem_virtio::device::port::{Port, Tap};
use netmem_virtio::net::VnetHdr;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// Counts of the TCP segments in a direction.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    /// Segments with payload, and how many of them were lost.
    pub(crate) segments: u64,
    pub(crate) lost: u64,
    /// Segments with 40 bytes of options that were not lost: with payload, and without.
    pub(crate) full_options: u64,
    pub(crate) full_options_alone: u64,
}

impl Counts {
    /// Counts a frame. Returns whether it is lost.
    fn loses(&mut self, frame: &[u8]) -> bool {
        let Some((options, payload)) = options_and_payload(frame) else { return false };
        if payload == 0 {
            self.full_options_alone += u64::from(options == 40);
            return false;
        }
        let lost = [40, 42, 44, 46].contains(&(self.segments % 64));
        self.segments += 1;
        self.lost += u64::from(lost);
        self.full_options += u64::from(!lost && options == 40);
        lost
    }
}

/// The bytes of options and of payload of a TCP segment. `None` for other frames.
fn options_and_payload(frame: &[u8]) -> Option<(usize, usize)> {
    let number = |at: usize| Some(usize::from(u16::from_be_bytes([*frame.get(at)?, *frame.get(at + 1)?])));
    let (protocol, begin, end) = match number(12)? {
        0x0800 => (*frame.get(23)?, 14 + 4 * usize::from(frame[14] & 15), 14 + number(16)?),
        0x86dd => (*frame.get(20)?, 14 + 40, 14 + 40 + number(18)?),
        _ => return None,
    };
    if protocol != 6 {
        return None;
    }
    let header = 4 * usize::from(frame.get(begin + 12)? >> 4);
    Some((header.checked_sub(20)?, end.checked_sub(begin + header)?))
}

/// The link's thread. It ends when this value is dropped.
pub(crate) struct LossyLink {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<[Counts; 2]>>,
}

impl LossyLink {
    /// Makes the tap `near` in this thread's network. The tap `far` must be there.
    pub(crate) fn new(near: &str, far: &str) -> Self {
        let tap = Tap::open(near, 1, true).expect("a tap").remove(0);
        let socket = packet_socket(far).expect("a packet socket");
        let stop = Arc::new(AtomicBool::new(false));
        let flag = stop.clone();
        Self { stop, thread: Some(std::thread::spawn(move || carry(tap, &socket, &flag))) }
    }

    /// Ends the link. Returns the counts of the segments from the kernel, and of those to the
    /// kernel.
    pub(crate) fn end(mut self) -> [Counts; 2] {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().expect("it is taken here").join().expect("the link has not failed")
    }
}

impl Drop for LossyLink {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let ended = self.thread.take().map_or(Ok([Counts::default(); 2]), JoinHandle::join);
        assert!(std::thread::panicking() || ended.is_ok(), "the link has failed");
    }
}

fn carry(mut tap: Tap, socket: &OwnedFd, stop: &AtomicBool) -> [Counts; 2] {
    let mut counts = [Counts::default(); 2];
    let [from_kernel, to_kernel] = &mut counts;
    let mut wire = vec![0; VnetHdr::LEN + (64 << 10)];
    wire[..VnetHdr::LEN].copy_from_slice(&VnetHdr::PLAIN.to_bytes());
    while !stop.load(Ordering::Relaxed) {
        let mut idle = true;
        while let Some(wire) = tap.peek() {
            idle = false;
            let frame = &wire[VnetHdr::LEN..];
            if !from_kernel.loses(frame) {
                // SAFETY: the pointer and the length are those of `frame`. If the tap is full, the
                // frame is lost, as on other links.
                unsafe { libc::send(socket.as_raw_fd(), frame.as_ptr().cast(), frame.len(), 0) };
            }
            tap.consume();
        }
        let room = &mut wire[VnetHdr::LEN..];
        // SAFETY: the pointer and the length are those of `room`.
        let len = unsafe { libc::recv(socket.as_raw_fd(), room.as_mut_ptr().cast(), room.len(), 0) };
        if let Ok(len) = usize::try_from(len) {
            idle = false;
            if !to_kernel.loses(&room[..len]) {
                tap.send(&wire[..VnetHdr::LEN + len]);
            }
        }
        if idle {
            std::thread::sleep(std::time::Duration::from_micros(100));
        }
    }
    counts
}

/// A socket that sends to the interface `name`, and receives what comes from there.
fn packet_socket(name: &str) -> io::Result<OwnedFd> {
    let check = |rc: libc::c_int| if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(rc) };
    let (kind, all) = (libc::SOCK_RAW | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC, (libc::ETH_P_ALL as u16).to_be());
    // SAFETY: one system call.
    let fd = check(unsafe { libc::socket(libc::AF_PACKET, kind, i32::from(all)) })?;
    // SAFETY: the descriptor is new.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let name = std::ffi::CString::new(name)?;
    // SAFETY: the name ends with a zero byte.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    // SAFETY: zeros are a valid address.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    (address.sll_family, address.sll_protocol) = (libc::AF_PACKET as u16, all);
    address.sll_ifindex = i32::try_from(index).unwrap_or(0);
    let (at, len) = (std::ptr::from_ref(&address).cast(), size_of_val(&address) as u32);
    // SAFETY: `at` and `len` are those of the address.
    check(unsafe { libc::bind(fd, at, len) })?;
    let set = |level, what, to: libc::c_int| {
        // SAFETY: the option's value is an `int`.
        check(unsafe {
            libc::setsockopt(fd, level, what, std::ptr::from_ref(&to).cast(), size_of::<libc::c_int>() as u32)
        })
    };
    // Frames that this socket sends are not received by it.
    set(libc::SOL_PACKET, libc::PACKET_IGNORE_OUTGOING, 1)?;
    set(libc::SOL_SOCKET, libc::SO_RCVBUF, 8 << 20)?;
    Ok(socket)
}
