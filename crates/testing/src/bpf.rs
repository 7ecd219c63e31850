//! `bpf(2)` for programs and maps that are not ours.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

/// A command of `bpf(2)`, with the first words of its argument.
fn bpf(command: u32, words: &[u32]) -> io::Result<i32> {
    let mut argument = [0u32; 36];
    argument[..words.len()].copy_from_slice(words);
    // SAFETY: an argument of integers; addresses in it are of buffers that the callers keep.
    let rc = unsafe { libc::syscall(libc::SYS_bpf, command, argument.as_mut_ptr(), size_of_val(&argument)) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(rc as i32) }
}

fn open(command: u32, words: &[u32]) -> OwnedFd {
    let fd = bpf(command, words).unwrap();
    // SAFETY: the command has made it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// An address, as two words of an argument.
fn halves<T>(of: *const T) -> [u32; 2] {
    let address = of.addr() as u64;
    [address as u32, (address >> 32) as u32]
}

/// Pins a program or map in a BPF file system.
pub fn pin(fd: &OwnedFd, at: &Path) {
    let at = CString::new(at.to_str().unwrap()).unwrap();
    let [low, high] = halves(at.as_ptr());
    bpf(6, &[low, high, fd.as_raw_fd() as u32]).unwrap();
}

/// An instruction: operation, destination and source, offset, constant.
pub fn insn(op: u8, dst: u8, src: u8, offset: i16, constant: i32) -> u64 {
    let low = u64::from(op) | u64::from(dst | src << 4) << 8 | u64::from(offset as u16) << 16;
    low | u64::from(constant as u32) << 32
}

/// Loads an XDP program for frames of several buffers, with a name of at most 15 bytes.
pub fn load(code: &[u64], name: &str) -> OwnedFd {
    load_for((6, 1 << 5, XDP), code, name)
}

/// Loads a program of a type, with flags, for a place of attachment.
fn load_for((kind, flags, place): (u32, u32, u32), code: &[u64], name: &str) -> OwnedFd {
    let license = c"MIT";
    let mut log = vec![0u8; 1 << 16];
    let ([code_low, code_high], [license_low, license_high]) = (halves(code.as_ptr()), halves(license.as_ptr()));
    let [log_low, log_high] = halves(log.as_mut_ptr());
    let mut words = [0; 18];
    words[..6].copy_from_slice(&[kind, code.len() as u32, code_low, code_high, license_low, license_high]);
    words[6..10].copy_from_slice(&[1, log.len() as u32, log_low, log_high]);
    for (word, bytes) in words[12..16].iter_mut().zip(name.as_bytes().chunks(4)) {
        let mut padded = [0; 4];
        padded[..bytes.len()].copy_from_slice(bytes);
        *word = u32::from_ne_bytes(padded);
    }
    (words[11], words[17]) = (flags, place);
    let fd = bpf(5, &words).unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&log)));
    // SAFETY: the command has made it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// A map of words, of this type.
pub fn map(kind: u32, entries: u32) -> OwnedFd {
    open(0, &[kind, 4, 4, entries])
}

/// The type of a map of AF_XDP sockets.
pub const XSKMAP: u32 = 17;
/// The type of an array.
pub const ARRAY: u32 = 2;

/// A program that redirects each frame to the socket of its queue, or passes it.
pub fn redirect(map: &OwnedFd) -> OwnedFd {
    let code = [
        insn(0x61, 2, 1, 16, 0),
        insn(0x18, 1, 1, 0, map.as_raw_fd()),
        0,
        insn(0xb7, 3, 0, 0, 2),
        insn(0x85, 0, 0, 0, 51),
        insn(0x95, 0, 0, 0, 0),
    ];
    load(&code, "theirs")
}

/// A program that drops each frame, and counts it in the first word of an array. Frames of one
/// queue only are counted exactly: the addition is not atomic.
pub fn count_and_drop(array: &OwnedFd) -> OwnedFd {
    let code = [
        insn(0x18, 1, 2, 0, array.as_raw_fd()), // r1 = the address of the word
        0,
        insn(0x61, 2, 1, 0, 0),
        insn(0x07, 2, 0, 0, 1),
        insn(0x63, 1, 2, 0, 0),
        insn(0xb7, 0, 0, 0, 1), // drop
        insn(0x95, 0, 0, 0, 0),
    ];
    load(&code, "count_and_drop")
}

/// The first word of an array.
pub fn first_word(array: &OwnedFd) -> u32 {
    let (key, mut word) = (0u32, 0u32);
    let ([key_low, key_high], [low, high]) = (halves(&raw const key), halves(&raw mut word));
    bpf(1, &[array.as_raw_fd() as u32, 0, key_low, key_high, low, high]).unwrap();
    word
}

/// The places where programs are attached: of XDP, and behind the network stack that sends (tcx).
const XDP: u32 = 37;
const TCX_EGRESS: u32 = 47;

/// Attaches a program to an interface in driver mode, by a link.
pub fn attach(program: &OwnedFd, ifindex: u32) -> OwnedFd {
    open(28, &[program.as_raw_fd() as u32, ifindex, XDP, 1 << 2])
}

/// Has the kernel add a VLAN tag to each frame that it sends by an interface (tcx: Linux 6.6),
/// until the descriptor is closed. The kernel keeps the tag beside the frame, and the interface
/// writes it into the frame if it has no offload for that.
pub fn push_vlan(ifindex: u32, tci: u16) -> OwnedFd {
    let code = [
        insn(0xb7, 2, 0, 0, u16::from_ne_bytes([0x81, 0]).into()), // skb_vlan_push(context, 802.1Q, tci)
        insn(0xb7, 3, 0, 0, tci.into()),
        insn(0x85, 0, 0, 0, 18),
        insn(0xb7, 0, 0, 0, 0), // the next step
        insn(0x95, 0, 0, 0, 0),
    ];
    let program = load_for((3, 0, TCX_EGRESS), &code, "push_vlan");
    open(28, &[program.as_raw_fd() as u32, ifindex, TCX_EGRESS])
}
