//! A vhost-user back end that is just big enough to deliver frames and to break one rule. It offers
//! no protocol features, so two messages have an answer: GET_FEATURES and GET_VRING_BASE.

use netmem_virtio::virtqueue::SplitRing;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::io::{IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

/// What it does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lie {
    /// Nothing.
    None,
    /// The used index of the transmit ring runs ahead of what was sent.
    TransmitIndex,
    /// It hangs up when a ring is to be stopped.
    NoStop,
}

/// A region of the front end, mapped until the process ends.
struct Region {
    user: u64,
    len: u64,
    base: *mut u8,
}

#[derive(Clone, Copy, Default)]
struct Ring {
    size: u16,
    /// Descriptor table, used ring, available ring.
    parts: [u64; 3],
    started: bool,
}

/// Serves one front end until it hangs up, and delivers frames to its first queue as fast as it
/// accepts them.
pub(crate) fn serve(stream: &UnixStream, lie: Lie) {
    let (mut regions, mut rings) = (Vec::new(), [Ring::default(); 2]);
    let mut receive: Option<(SplitRing, u16)> = None;
    loop {
        // Until the receive ring runs, the next message is waited for.
        let Some((request, body, fds)) = message(stream, receive.is_none()) else { return };
        let u32_at = |at: usize| u32::from_le_bytes(body[at..at + 4].try_into().unwrap());
        let u64_at = |at: usize| u64::from_le_bytes(body[at..at + 8].try_into().unwrap());
        match request {
            // VIRTIO_F_VERSION_1
            1 => reply(stream, 1, &(1u64 << 32).to_le_bytes()),
            5 => {
                for (i, fd) in fds.iter().enumerate() {
                    let at = 8 + 32 * i;
                    let (len, user, offset) = (u64_at(at + 8), u64_at(at + 16), u64_at(at + 24));
                    let prot = ProtFlags::READ | ProtFlags::WRITE;
                    // SAFETY: a new mapping.
                    let base = unsafe { mmap(std::ptr::null_mut(), len as usize, prot, MapFlags::SHARED, fd, offset) };
                    regions.push(Region { user, len, base: base.unwrap().cast() });
                }
            }
            8 => rings[u32_at(0) as usize].size = u32_at(4) as u16,
            9 => rings[u32_at(0) as usize].parts = [u64_at(8), u64_at(16), u64_at(24)],
            11 if lie == Lie::NoStop => return,
            11 => {
                if u32_at(0) == 0 {
                    receive = None;
                }
                reply(stream, 11, &body);
            }
            12 => {
                let index = u32_at(0) as usize & 0xff;
                rings[index].started = true;
                let ring = map(&regions, rings[index]);
                match (index, lie) {
                    (0, _) => receive = Some((ring, 0)),
                    (1, Lie::TransmitIndex) => ring.set_used_idx(7),
                    _ => {}
                }
            }
            // Nothing came.
            u32::MAX => {
                let Some((ring, used)) = &mut receive else { continue };
                for _ in 0..ring.avail_idx().wrapping_sub(*used) {
                    ring.set_used_entry(*used, u32::from(ring.avail_entry(*used)), 12 + 60);
                    *used = used.wrapping_add(1);
                }
                ring.set_used_idx(*used);
                std::thread::yield_now();
            }
            _ => {}
        }
    }
}

fn map(regions: &[Region], ring: Ring) -> SplitRing {
    let at = |addr: u64| {
        let r = regions.iter().find(|r| (r.user..r.user + r.len).contains(&addr)).unwrap();
        r.base.wrapping_add((addr - r.user) as usize)
    };
    let [desc, used, avail] = ring.parts.map(at);
    // SAFETY: the driver laid the ring out in memory that is mapped for good.
    unsafe { SplitRing::from_parts(desc, avail, used, ring.size) }
}

fn reply(mut stream: &UnixStream, request: u32, body: &[u8]) {
    let header: Vec<u8> = [request, 5, body.len() as u32].into_iter().flat_map(u32::to_le_bytes).collect();
    // The front end may have hung up.
    let _ = stream.write_all(&[&header, body].concat());
}

/// The next message: number, body, descriptors. `u32::MAX` if there is none and none is to be
/// waited for; `None` at the end.
fn message(stream: &UnixStream, wait: bool) -> Option<(u32, Vec<u8>, Vec<OwnedFd>)> {
    let mut fds = Vec::new();
    let mut read = |bytes: &mut [u8], flags| {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let got = recvmsg(stream, &mut [IoSliceMut::new(bytes)], &mut control, flags);
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        got.map(|got| got.bytes)
    };
    let mut header = [0; 12];
    let flags = if wait { RecvFlags::empty() } else { RecvFlags::DONTWAIT };
    match read(&mut header, flags) {
        Err(Errno::AGAIN) => return Some((u32::MAX, Vec::new(), fds)),
        Ok(12) => {}
        _ => return None,
    }
    let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
    let mut body = vec![0; word(8) as usize];
    if !body.is_empty() && read(&mut body, RecvFlags::WAITALL).ok()? != body.len() {
        return None;
    }
    Some((word(0), body, fds))
}
