//! Sends the same frame into one end of a veth pair, as fast as one CPU can, until it is stopped:
//! what `bench/peers/xsk.sh` measures receivers with.
//!
//!     cargo run --release -p netmem-bench --example xdp_flood -- IFACE DESTINATION
//!
//! The kernel runs an XDP program over a frame and obeys the verdict of the program:
//! `BPF_PROG_TEST_RUN` with live frames. The program is two instructions and returns `XDP_TX`, so
//! each frame leaves by the interface as if the interface had received it. No system call and no
//! socket buffer is made for a frame, and a CPU sends several times as many as by a socket. The
//! other end of the pair receives them on the same CPU, in the same system call.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

const PROG_LOAD: u32 = 5;
const TEST_RUN: u32 = 10;
const TYPE_XDP: u32 = 6;
const LIVE_FRAMES: u32 = 1 << 1;
/// Frames that the kernel hands over together: what NAPI processes at a time.
const BATCH: u32 = 64;
/// Frames in a system call, which a signal ends early. To begin and to end a call takes tens of
/// milliseconds.
const CALL: u32 = 1 << 30;

/// `r0 = XDP_TX; exit`.
const PROGRAM: [u64; 2] = [0x0000_0003_0000_00b7, 0x0000_0000_0000_0095];

/// The kernel's argument of `BPF_PROG_LOAD`, as far as it is used.
#[repr(C)]
#[derive(Default)]
struct ProgLoad {
    kind: u32,
    instructions: u32,
    code: u64,
    license: u64,
    _unused: [u64; 3],
}

/// The kernel's argument of `BPF_PROG_TEST_RUN`.
#[repr(C)]
#[derive(Default)]
struct TestRun {
    program: u32,
    answer: u32,
    data_in_len: u32,
    data_out_len: u32,
    data_in: u64,
    data_out: u64,
    repeat: u32,
    duration: u32,
    context_in_len: u32,
    context_out_len: u32,
    context_in: u64,
    context_out: u64,
    flags: u32,
    cpu: u32,
    batch: u32,
    _padding: u32,
}

/// `struct xdp_md`: where the frame is, as offsets, and the interface that it came from.
#[repr(C)]
#[derive(Default)]
struct Context {
    data: u32,
    data_end: u32,
    data_meta: u32,
    ingress_ifindex: u32,
    rx_queue: u32,
    egress_ifindex: u32,
}

fn bpf<T>(command: u32, argument: &mut T) -> io::Result<i32> {
    // SAFETY: both arguments are `repr(C)` and made of integers, begin as the kernel's do, and
    // point to memory that their makers keep.
    let rc = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(argument), size_of::<T>()) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(rc as i32) }
}

fn load() -> io::Result<OwnedFd> {
    let mut argument = ProgLoad {
        kind: TYPE_XDP,
        instructions: PROGRAM.len() as u32,
        code: PROGRAM.as_ptr().addr() as u64,
        license: c"MIT".as_ptr().addr() as u64,
        ..ProgLoad::default()
    };
    let fd = bpf(PROG_LOAD, &mut argument)?;
    // SAFETY: the command has made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// An Ethernet frame of 60 bytes to `destination`: UDP on IPv4, without a checksum.
fn frame(destination: [u8; 6]) -> [u8; 60] {
    let mut frame = [0; 60];
    frame[..6].copy_from_slice(&destination);
    frame[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 9]);
    let headers = [
        0x08, 0x00, // IPv4
        0x45, 0, 0, 46, 0, 0, 0, 0, 64, 17, 0x66, 0xbd, 10, 0, 0, 1, 10, 0, 0,
        2, // 26 bytes from 10.0.0.1 to 10.0.0.2
        0, 9, 0, 9, 0, 26, 0, 0, // UDP from port 9 to port 9
    ];
    frame[12..12 + headers.len()].copy_from_slice(&headers);
    frame
}

/// A sender.
struct Flood {
    program: OwnedFd,
    frame: [u8; 60],
    context: Context,
}

impl Flood {
    /// Sends by `interface` to the address `destination`, which is written as `ip` writes it.
    fn new(interface: &str, destination: &str) -> io::Result<Self> {
        let bytes = destination.split(':').map(|byte| u8::from_str_radix(byte, 16).ok()).collect::<Option<Vec<u8>>>();
        let destination = bytes.and_then(|bytes| bytes.try_into().ok()).ok_or(io::ErrorKind::InvalidInput)?;
        let name = CString::new(interface)?;
        // SAFETY: a string that ends.
        let ingress_ifindex = unsafe { libc::if_nametoindex(name.as_ptr()) };
        if ingress_ifindex == 0 {
            return Err(io::Error::last_os_error());
        }
        let frame = frame(destination);
        let context = Context { data_end: frame.len() as u32, ingress_ifindex, ..Context::default() };
        Ok(Self { program: load()?, frame, context })
    }

    /// Sends so many frames. The receiver may have had no room for some: the kernel counts them.
    fn send(&self, frames: u32) -> io::Result<()> {
        let mut run = TestRun {
            program: self.program.as_raw_fd() as u32,
            data_in_len: self.frame.len() as u32,
            data_in: self.frame.as_ptr().addr() as u64,
            repeat: frames,
            context_in_len: size_of::<Context>() as u32,
            context_in: (&raw const self.context).addr() as u64,
            flags: LIVE_FRAMES,
            batch: BATCH,
            ..TestRun::default()
        };
        match bpf(TEST_RUN, &mut run) {
            Err(e) if e.raw_os_error() != Some(libc::EINTR) => Err(e),
            _ => Ok(()),
        }
    }
}

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [interface, destination] = &arguments[..] else { anyhow::bail!("usage: xdp_flood IFACE DESTINATION") };
    let flood = Flood::new(interface, destination)?;
    loop {
        flood.send(CALL)?;
    }
}
