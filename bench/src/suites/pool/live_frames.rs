//! The kernel's own page pool: live XDP frames that a program drops.
//!
//! `BPF_PROG_TEST_RUN` with `BPF_F_TEST_XDP_LIVE_FRAMES` allocates frames from a page pool, runs
//! the program on each, and recycles the frames that it drops, 64 at a time. It needs Linux 5.18
//! and root (`CAP_BPF`, `CAP_NET_ADMIN`).

use crate::error::BenchError;
use crate::harness::{Harness, Timed};
use crate::timing::{BATCH, Work};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

const BPF_PROG_LOAD: libc::c_long = 5;
const BPF_PROG_TEST_RUN: libc::c_long = 10;
const BPF_PROG_TYPE_XDP: u32 = 6;
const BPF_F_TEST_XDP_LIVE_FRAMES: u32 = 2;
const XDP_DROP: i32 = 1;

/// An instruction: operation, registers, offset, immediate.
#[repr(C)]
struct Instruction(u8, u8, i16, i32);

/// `return XDP_DROP`: a 64-bit move of an immediate to register 0, exit.
static PROGRAM: [Instruction; 2] = [Instruction(0xb7, 0, 0, XDP_DROP), Instruction(0x95, 0, 0, 0)];

/// The fields of `union bpf_attr` for `BPF_PROG_LOAD` that are used here.
#[repr(C)]
#[derive(Default)]
struct Load {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
}

/// The same for `BPF_PROG_TEST_RUN`.
#[repr(C)]
#[derive(Default)]
struct TestRun {
    prog_fd: u32,
    retval: u32,
    data_size_in: u32,
    data_size_out: u32,
    data_in: u64,
    data_out: u64,
    repeat: u32,
    duration: u32,
    ctx_size_in: u32,
    ctx_size_out: u32,
    ctx_in: u64,
    ctx_out: u64,
    flags: u32,
    cpu: u32,
    batch_size: u32,
    padding: u32,
}

/// # Safety
///
/// `attributes` has the type that `command` requires, and its addresses point to the data that the
/// command expects.
unsafe fn bpf<T>(command: libc::c_long, attributes: &mut T) -> io::Result<libc::c_long> {
    // SAFETY: the caller guarantees what the command needs.
    match unsafe { libc::syscall(libc::SYS_bpf, command, &raw mut *attributes, size_of::<T>()) } {
        -1 => Err(io::Error::last_os_error()),
        done => Ok(done),
    }
}

fn address<T: ?Sized>(of: &T) -> u64 {
    (&raw const *of).cast::<u8>().addr() as u64
}

/// The loaded program.
pub(super) struct LiveFrames(OwnedFd);

impl LiveFrames {
    pub(super) fn new() -> Result<Self, BenchError> {
        let mut load = Load {
            prog_type: BPF_PROG_TYPE_XDP,
            insn_cnt: PROGRAM.len() as u32,
            insns: address(&PROGRAM),
            license: address(c"Dual MIT/GPL"),
        };
        // SAFETY: program and license are static, and the attributes are those that the command
        // takes.
        let loaded = unsafe { bpf(BPF_PROG_LOAD, &mut load) };
        let fd = loaded.map_err(|e| unavailable("an XDP program cannot be loaded", &e))?;
        // SAFETY: the kernel has just opened it for us.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd as RawFd) }))
    }

    /// Runs the program on `frames` frames. It drops each.
    fn drop_frames(&self, frames: u32) -> io::Result<()> {
        let mut frame = [0u8; 64];
        frame[..14].copy_from_slice(&[0x52, 0x54, 0, 0, 0, 1, 0x52, 0x54, 0, 0, 0, 2, 8, 0]);
        let mut run = TestRun {
            prog_fd: self.0.as_raw_fd().cast_unsigned(),
            data_size_in: frame.len() as u32,
            data_in: address(&frame),
            repeat: frames,
            flags: BPF_F_TEST_XDP_LIVE_FRAMES,
            batch_size: BATCH as u32,
            ..TestRun::default()
        };
        // SAFETY: the kernel only reads the frame, which is alive during the call.
        unsafe { bpf(BPF_PROG_TEST_RUN, &mut run) }.map(drop)
    }
}

fn unavailable(what: &str, error: &io::Error) -> BenchError {
    let root = if error.kind() == io::ErrorKind::PermissionDenied { "; it needs root" } else { "" };
    BenchError::Unavailable { what: "live frames", why: format!("{what}: {error}{root}") }
}

impl Work for LiveFrames {
    fn run(&mut self, harness: &Harness, blocks: u64) -> Result<Timed, BenchError> {
        let frames = u32::try_from(blocks * BATCH).unwrap_or(u32::MAX);
        let (timed, done) = harness.alone(|| harness.time(|| self.drop_frames(frames)))?;
        done.map_err(|e| unavailable("live frames were refused", &e))?;
        Ok(timed)
    }

    fn least(&self) -> u64 {
        // Each run first makes its pool and fills it, so it must be long.
        1_000_000 / BATCH
    }
}
